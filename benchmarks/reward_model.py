"""Trains a reward model on real preference pairs and measures its accuracy on held-out ones, with a 95 % interval.

    python benchmarks/reward_model.py PAIRS.jsonl [--pairs 1500] [--held-out 300] [--seeds 0 1 2]

PAIRS.jsonl: a pair a line, such as HH-RLHF's {"chosen": dialogue, "rejected": dialogue}. Every seed draws its own
pairs, split, order and head. Half of all pairs are right by chance: a model that cannot be told from chance has an
interval that holds 0.5. Writes curves.csv (a row an evaluation or an update) and result.json under runs/.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import workbench as wb  # noqa: E402
from benchmarks.curves import Curve, drawn_pairs, each_seed, new_folder, pairs_parser  # noqa: E402
from workbench.launch.doctor import bf16_is_fast  # noqa: E402
from workbench.support.machine import read_gpus  # noqa: E402

SHOWN = ("accuracy", "accuracy/low", "accuracy/high", "margin", "preference_loss", "grad_norm")


def train(arguments: argparse.Namespace, seed: int, folder: Path) -> tuple[Curve, dict[str, Any]]:
    """One seed: the curve, and what came of it."""
    updates = arguments.epochs * (arguments.pairs // arguments.rows)
    training = wb.Training(
        engine="torch",
        learning_rate=arguments.learning_rate,
        schedule="linear",
        warmup_steps=max(1, updates // 10),
        total_steps=updates,  # a pair that is too long is dropped later: the rate may end a little above 0
        micro_batch_tokens=2048,
    )
    dtype: Any = arguments.dtype or ("bfloat16" if bf16_is_fast(read_gpus()) else "float32")
    lab = wb.open(
        "reward-model-benchmark",
        models={"reward": wb.Model(arguments.model, training=training, dtype=dtype, seed=seed)},
        backend="inline",
        seed=seed,
        if_exists="replace",
        runs=folder,
    )
    with lab:
        # an over-long dialogue loses its beginning, its last turns and both answers stay
        pairs = lab.pairs(
            drawn_pairs(arguments, seed), held_out=arguments.held_out, max_tokens=arguments.max_tokens, overlong="cut"
        )
        updates = arguments.epochs * max(1, len(pairs) // arguments.rows)
        print(f"seed {seed}: {pairs}; {updates} updates of {arguments.rows} pairs, {dtype}", flush=True)
        curve = Curve(seed, updates, SHOWN)

        def evaluate(step: int) -> dict[str, float]:
            lab.reward.compute_pair_rewards(pairs.held_out)
            metrics = dict(lab.last_metrics["compute_pair_rewards"])
            curve.tell(step, "held out", metrics)
            return metrics

        before = evaluate(0)
        algorithm = wb.RewardModeling(lab, pairs, rows=arguments.rows)
        for step in range(1, updates + 1):
            algorithm.iterate()
            curve.tell(step, "training", dict(lab.last_metrics["update_reward"]))
            if step % max(1, updates // arguments.evaluations) == 0 and step < updates:
                evaluate(step)
        after = evaluate(updates)
        centred = lab.reward.center(pairs.held_out, answers="chosen_ids")
        saved = lab.reward.save_model(str(folder / f"reward_model_{seed}"))[0]
    return curve, {
        "seed": seed,
        "pairs": len(pairs),
        "held_out": pairs.held_out.rows,
        "updates": updates,
        "before": before,
        "after": after,
        "shift": centred["shift"],
        "s": curve.rows[-1]["s"],
        "model": saved,
    }


def main() -> None:
    parser = pairs_parser(__doc__, pairs=1500, held_out=300, learning_rate=2e-5)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), help="default: bfloat16 where it is fast")
    parser.add_argument("--evaluations", type=int, default=2, help="on the held-out pairs, while training")
    arguments = parser.parse_args()
    folder = new_folder(arguments.runs, "reward_model")
    results = [result for _, result in each_seed(arguments, folder, train)]
    for result in results:
        low, high = result["after"]["accuracy/low"], result["after"]["accuracy/high"]
        told = f"{result['after']['accuracy']:.3f} (95 %: {low:.3f} to {high:.3f}) on {result['held_out']} pairs"
        print(f"seed {result['seed']}: held-out accuracy {told}, trained on {result['pairs']}")
    # the seeds' held-out pairs overlap: their mean has no interval of its own
    print(f"mean of {len(results)} seed(s): {sum(r['after']['accuracy'] for r in results) / len(results):.3f}")
    print(f"written to {folder}")


if __name__ == "__main__":
    main()
