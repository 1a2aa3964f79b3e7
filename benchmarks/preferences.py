"""Trains a policy on real preference pairs: the margin between the answers' implicit rewards has to rise.

    python benchmarks/preferences.py PAIRS.jsonl|arithmetic [--objective dpo|ipo|orpo|kto] [--pairs 128] [--held-out 64]
                                                 [--seeds 0 1 2] [--beta 0.1]

The margin is beta times how much likelier than under the reference the chosen answer has become than the rejected one.
Every seed draws its own pairs and order. In the first epoch DPO measures each pair before it is trained on: so the
means of its first and last third are of pairs that had not been seen, too. KTO learns from both answers of a pair as
answers by themselves. Writes curves.csv and result.json under runs/.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import workbench as wb  # noqa: E402
from benchmarks.curves import Curve, drawn_pairs, each_seed, new_folder, pairs_parser  # noqa: E402

SHOWN = ("preference_loss", "accuracy", "accuracy/low", "accuracy/high", "margin", "grad_norm")


def train(arguments: argparse.Namespace, seed: int, folder: Path) -> tuple[Curve, dict[str, Any]]:
    """One seed: the curve, and what came of it."""
    lab = wb.open(
        "preferences-benchmark",
        models={"actor": arguments.model, "reference": arguments.model},
        training=wb.Training(engine="torch", learning_rate=arguments.learning_rate),
        generation=wb.Generation(engine="transformers"),
        dtype=arguments.dtype,
        backend="inline",
        seed=seed,
        if_exists="replace",
        runs=folder,
    )
    with lab:
        pairs = lab.pairs(
            drawn_pairs(arguments, seed), held_out=arguments.held_out, max_tokens=arguments.max_tokens, overlong="cut"
        )
        updates = arguments.epochs * max(1, len(pairs) // arguments.rows)
        print(f"seed {seed}: {pairs}; {updates} updates of {arguments.rows} pairs", flush=True)
        curve = Curve(seed, updates, SHOWN)
        held_out = lab.reference.compute_ref_pair_log_prob(pairs.held_out)

        def evaluate(step: int) -> None:
            lab.actor.compute_pair_log_prob(held_out, beta=arguments.beta)
            curve.tell(step, "held out", dict(lab.last_metrics["compute_pair_log_prob"]))

        evaluate(0)
        algorithm = made(arguments, lab, pairs)
        for step in range(1, updates + 1):
            algorithm.iterate()
            curve.tell(step, "training", dict(lab.last_metrics[f"update_{arguments.objective}"]))
        evaluate(updates)
    held, steps = curve.of("held out"), curve.of("training")
    unseen = [row["margin"] for row in steps[: len(steps) // arguments.epochs] if arguments.objective == "dpo"]
    thirds = (
        {}
        if not unseen
        else {
            "unseen_first_third": mean(unseen[: len(unseen) // 3]),
            "unseen_last_third": mean(unseen[-len(unseen) // 3 :]),
        }
    )
    return curve, {"seed": seed, "first": steps[0], "before": held[0], "after": held[-1], **thirds}


def made(arguments: argparse.Namespace, lab: wb.Workbench, pairs: Any) -> Any:
    """The algorithm on the pairs."""
    options: dict[str, Any] = {"rows": arguments.rows, "beta": arguments.beta}
    if arguments.objective != "kto":
        return {"dpo": wb.DPO, "ipo": wb.IPO, "orpo": wb.ORPO}[arguments.objective](lab, pairs, **options)
    rated = [
        {"prompt": row.example.prompt, "response": answer, "label": good}
        for row in pairs.examples.training
        for answer, good in zip(row.example.answers, (True, False), strict=True)
    ]
    return wb.KTO(lab, lab.feedback(rated, max_tokens=arguments.max_tokens, overlong="cut"), **options)


def mean(margins: list[float]) -> tuple[float, float]:
    """The mean, and half the width of its 95 % interval."""
    half = 1.96 * statistics.stdev(margins) / math.sqrt(len(margins)) if len(margins) > 1 else math.inf
    return statistics.fmean(margins), half


def main() -> None:
    parser = pairs_parser(__doc__, pairs=128, held_out=64, learning_rate=5e-6)
    parser.add_argument("--objective", choices=("dpo", "ipo", "orpo", "kto"), default="dpo")
    parser.add_argument("--beta", type=float, default=0.1)
    # in bfloat16 the frozen reference rounds otherwise than the actor, so that the first loss is only near log 2
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    arguments = parser.parse_args()
    folder = new_folder(arguments.runs, arguments.objective)
    for _, result in each_seed(arguments, folder, train):
        seed = result["seed"]
        before, after = result["before"]["margin"], result["after"]["margin"]
        if arguments.objective == "dpo":
            print(f"seed {seed}: first loss {result['first']['preference_loss']:.4f} (log 2 is {math.log(2):.4f})")
        print(f"  held-out margin {before:.3f} -> {after:.3f}, accuracy {result['after']['accuracy']:.3f}", flush=True)
        if arguments.objective != "dpo":
            continue
        (first, a), (last, b) = result["unseen_first_third"], result["unseen_last_third"]
        print(f"  training pairs before their update: margin {first:.3f} +- {a:.3f} in the first third of steps,")
        print(f"  {last:.3f} +- {b:.3f} in the last", flush=True)
    print(f"written to {folder}")


if __name__ == "__main__":
    main()
