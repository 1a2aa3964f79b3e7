"""Trains a policy on real preference pairs by DPO: the margin between the answers' implicit rewards has to rise.

    python tests/benchmarks/dpo.py PAIRS.jsonl [--pairs 128] [--held-out 64] [--beta 0.1] [--max-tokens 256]

Writes curves.csv and result.json under runs/.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import time
from datetime import datetime
from pathlib import Path
from typing import Any

import pandas as pd

import workbench as wb
from workbench.dataflow.sources import read_rows

SHOWN = ("preference_loss", "accuracy", "accuracy/low", "accuracy/high", "margin", "grad_norm")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=Path)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--pairs", type=int, default=128)
    parser.add_argument("--held-out", type=int, default=64)
    parser.add_argument("--max-tokens", type=int, default=256)
    parser.add_argument("--rows", type=int, default=16, help="pairs an optimizer step")
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--beta", type=float, default=0.1)
    parser.add_argument("--learning-rate", type=float, default=5e-6)
    # in bfloat16 the frozen reference rounds otherwise than the actor, so that the first loss is only near log 2
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--runs", type=Path, default=Path("runs"))
    arguments = parser.parse_args()
    folder = arguments.runs.resolve() / "dpo" / datetime.now().strftime("%Y%m%d-%H%M%S")
    folder.mkdir(parents=True)
    rows = read_rows(arguments.source)
    chosen = random.Random(arguments.seed).sample(rows, min(len(rows), arguments.pairs + arguments.held_out))
    lab = wb.open(
        "dpo-benchmark",
        models={"actor": arguments.model, "reference": arguments.model},
        training=wb.Training(engine="torch", learning_rate=arguments.learning_rate),
        generation=wb.Generation(engine="transformers"),
        dtype=arguments.dtype,
        backend="inline",
        seed=arguments.seed,
        if_exists="replace",
        runs=folder,
    )
    with lab:
        pairs = lab.pairs(chosen, held_out=arguments.held_out, max_tokens=arguments.max_tokens, overlong="cut")
        updates = arguments.epochs * max(1, len(pairs) // arguments.rows)
        print(f"{pairs}; {updates} updates of {arguments.rows} pairs", flush=True)
        curves: list[dict[str, Any]] = []
        began = time.perf_counter()

        def tell(step: int, split: str, metrics: dict[str, float]) -> None:
            found = {name: metrics[name] for name in SHOWN if name in metrics}
            curves.append({"step": step, "split": split, "s": time.perf_counter() - began, **found})
            text = ", ".join(f"{name} {value:.3f}" for name, value in found.items())
            print(f"step {step}/{updates}, {split}: {text}, {curves[-1]['s']:.0f} s", flush=True)

        held_out = lab.reference.compute_ref_pair_log_prob(pairs.held_out)

        def evaluate(step: int) -> None:
            lab.actor.compute_pair_log_prob(held_out, beta=arguments.beta)
            tell(step, "held out", dict(lab.last_metrics["compute_pair_log_prob"]))

        evaluate(0)
        algorithm = wb.DPO(lab, pairs, rows=arguments.rows, beta=arguments.beta)
        for step in range(1, updates + 1):
            algorithm.iterate()
            tell(step, "training", dict(lab.last_metrics["update_dpo"]))
        evaluate(updates)
    frame = pd.DataFrame(curves)
    frame.to_csv(folder / "curves.csv", index=False)
    held = frame[frame["split"] == "held out"].to_dict("records")
    (folder / "result.json").write_text(json.dumps({"before": held[0], "after": held[-1]}, indent=2))
    print(f"first loss {frame['preference_loss'].iloc[1]:.4f} (log 2 is {math.log(2):.4f})")
    print(f"held-out margin {held[0]['margin']:.3f} -> {held[-1]['margin']:.3f}; written to {folder}")


if __name__ == "__main__":
    main()
