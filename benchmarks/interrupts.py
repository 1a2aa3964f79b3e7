"""Interrupts at random moments of every stage, in a real kernel: none may hang, and the same cell again must be right.

    python benchmarks/interrupts.py                  # 200 of them, on two ranks under Ray
    python benchmarks/interrupts.py --backend inline --trials 50 --seed 3

A trial runs a stage in a cell, presses stop at a moment drawn evenly over the time that the stage takes, waits for the
cell, runs it again, and compares columns, metrics and weights, bit by bit, with those of a run without interrupts.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
from pathlib import Path

import pandas as pd

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.kernel.interrupting import STAGES, Interrupting
from tests.kernel.kernels import LOST

OPENING = {
    "ray": 'tiny_lab("interrupts", Path("runs"), placement=wb.Placement.colocate(devices=2), if_exists="replace")',
    "inline": 'tiny_lab("interrupts", Path("runs"), backend="inline", if_exists="replace")',
}


def main() -> int:
    """Print the table; 1 where a trial was wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=200)
    parser.add_argument("--backend", choices=tuple(OPENING), default="ray")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    dice, rows = random.Random(arguments.seed), []
    with tempfile.TemporaryDirectory() as folder:
        kernel = Interrupting(Path(folder), OPENING[arguments.backend])
        try:
            for number in range(arguments.trials):
                trial = kernel.random_trial(list(STAGES)[number % len(STAGES)], dice)
                said = trial.said
                rows.append(
                    {
                        "stage": trial.stage,
                        "trials": 1,
                        "stopped": "done before" not in said and said != LOST,
                        "lost by the kernel": said == LOST,
                        "after a step": "after optimizer step" in said,
                        "longest_s": 0.0 if said == LOST else trial.ended_s,
                        "wrong": not trial.right,
                    }
                )
                if not trial.right:
                    print(f"wrong: {trial}", flush=True)
        finally:
            kernel.close()
    frame = pd.DataFrame(rows)
    sums = dict.fromkeys(("trials", "stopped", "after a step", "lost by the kernel", "wrong"), "sum")
    table = frame.groupby("stage", sort=False).agg({**sums, "longest_s": "max"}).round(2)
    print(table.to_string())
    print(
        f"{len(frame)} interrupts, {int(frame['stopped'].sum())} of a cell at work, {int(frame['wrong'].sum())} wrong"
    )
    return int(frame["wrong"].any())


if __name__ == "__main__":
    raise SystemExit(main())
