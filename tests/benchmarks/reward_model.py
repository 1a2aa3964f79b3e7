"""Trains a reward model on real preference pairs and measures its accuracy on held-out ones, with a 95 % interval.

    python tests/benchmarks/reward_model.py PAIRS.jsonl [--pairs 1500] [--held-out 250] [--seeds 1] [--max-tokens 384]

PAIRS.jsonl: a pair a line, such as HH-RLHF's {"chosen": dialogue, "rejected": dialogue}. Every seed draws its own
pairs, split, order and head. Half of all pairs are right by chance: a model that cannot be told from chance has an
interval that holds 0.5. Writes curves.csv (a row an evaluation or an update) and result.json under runs/.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from datetime import datetime
from pathlib import Path
from typing import Any

import pandas as pd

import workbench as wb
from workbench.algorithms.preference import binomial_interval
from workbench.dataflow.sources import read_rows
from workbench.models import bf16_is_fast


def train(arguments: argparse.Namespace, seed: int, folder: Path) -> tuple[pd.DataFrame, dict[str, Any]]:
    """One seed: the curves, and what came of it."""
    rows = read_rows(arguments.source)
    chosen = random.Random(seed).sample(rows, min(len(rows), arguments.pairs + arguments.held_out))
    updates = arguments.epochs * (arguments.pairs // arguments.rows)
    training = wb.Training(
        engine="torch",
        learning_rate=arguments.learning_rate,
        schedule="linear",
        warmup_steps=max(1, updates // 10),
        total_steps=updates,
        micro_batch_tokens=2048,
    )
    dtype = arguments.dtype or ("bfloat16" if bf16_is_fast() else "float32")
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
        pairs = lab.pairs(chosen, held_out=arguments.held_out, max_tokens=arguments.max_tokens, overlong="cut")
        updates = arguments.epochs * max(1, len(pairs) // arguments.rows)
        print(f"seed {seed}: {pairs}; {updates} updates of {arguments.rows} pairs, {dtype}", flush=True)
        curves: list[dict[str, Any]] = []
        began = time.perf_counter()

        def tell(step: int, split: str, metrics: dict[str, float]) -> None:
            shown = ("accuracy", "accuracy/low", "accuracy/high", "margin", "preference_loss", "grad_norm")
            found = {name: metrics[name] for name in shown if name in metrics}
            curves.append({"seed": seed, "step": step, "split": split, "s": time.perf_counter() - began, **found})
            text = ", ".join(f"{name} {value:.3f}" for name, value in found.items())
            print(f"seed {seed}, step {step}/{updates}, {split}: {text}, {curves[-1]['s']:.0f} s", flush=True)

        def evaluate(step: int) -> dict[str, float]:
            lab.reward.compute_pair_rewards(pairs.held_out)
            metrics = dict(lab.last_metrics["compute_pair_rewards"])
            tell(step, "held out", metrics)
            return metrics

        before = evaluate(0)
        algorithm = wb.RewardModeling(lab, pairs, rows=arguments.rows)
        for step in range(1, updates + 1):
            algorithm.iterate()
            tell(step, "training", dict(lab.last_metrics["update_reward"]))
            if step % max(1, updates // arguments.evaluations) == 0 and step < updates:
                evaluate(step)
        after = evaluate(updates)
        centred = lab.reward.center(pairs.held_out, answers="chosen_ids")
        saved = lab.reward.save_model(str(folder / f"reward_model_{seed}"))[0]
    frame = pd.DataFrame(curves)
    return frame, {
        "seed": seed,
        "pairs": len(pairs),
        "held_out": pairs.held_out.rows,
        "updates": updates,
        "before": before,
        "after": after,
        "shift": centred["shift"],
        "s": float(frame["s"].iloc[-1]),
        "model": saved,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=Path)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--pairs", type=int, default=1500, help="for training, a seed")
    parser.add_argument("--held-out", type=int, default=250)
    parser.add_argument("--max-tokens", type=int, default=384, help="of a prompt with its longer answer")
    parser.add_argument("--rows", type=int, default=16, help="pairs an optimizer step")
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--learning-rate", type=float, default=2e-5)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), help="default: bfloat16 where it is fast")
    parser.add_argument("--evaluations", type=int, default=4, help="on the held-out pairs, while training")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--runs", type=Path, default=Path("runs"))
    arguments = parser.parse_args()
    folder = arguments.runs.resolve() / "reward_model" / datetime.now().strftime("%Y%m%d-%H%M%S")
    folder.mkdir(parents=True)
    frames, results = [], []
    for seed in range(arguments.seeds):
        frame, result = train(arguments, seed, folder)
        frames.append(frame)
        results.append(result)
        pd.concat(frames).to_csv(folder / "curves.csv", index=False)
        (folder / "result.json").write_text(json.dumps(results, indent=2))
    right = sum(round(result["after"]["accuracy"] * result["held_out"]) for result in results)
    total = sum(result["held_out"] for result in results)
    low, high = binomial_interval(right, total)
    print(f"held-out accuracy: {right / total:.3f} ({low:.3f} to {high:.3f}), {total} pairs, {len(results)} seed(s)")
    print(f"written to {folder}")


if __name__ == "__main__":
    main()
