"""What a training benchmark shows while it runs, and keeps: a row a step, a folder a run."""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import pandas as pd

from workbench.data.sources import read_rows

ARITHMETIC = Path(__file__).resolve().parents[1] / "datasets" / "arithmetic" / "train.jsonl"


def new_folder(runs: Path, name: str) -> Path:
    """An empty folder runs/name/<time>."""
    folder = runs.resolve() / name / datetime.now().strftime("%Y%m%d-%H%M%S")
    folder.mkdir(parents=True)
    return folder


class Curve:
    """Rows of one seed; each is printed as it is told."""

    def __init__(self, seed: int, updates: int, shown: Sequence[str]) -> None:
        self._seed, self._updates, self._shown = seed, updates, shown
        self._began = time.perf_counter()
        self.rows: list[dict[str, Any]] = []

    def tell(self, step: int, split: str, metrics: Mapping[str, float]) -> None:
        """Keep and print those of `metrics` that are shown."""
        seconds = time.perf_counter() - self._began
        found = {name: metrics[name] for name in self._shown if name in metrics}
        self.rows.append({"seed": self._seed, "step": step, "split": split, "s": seconds, **found})
        text = ", ".join(f"{name} {value:.3f}" for name, value in found.items())
        print(f"seed {self._seed}, step {step}/{self._updates}, {split}: {text}, {seconds:.0f} s", flush=True)

    def of(self, split: str) -> list[dict[str, Any]]:
        """The rows of one split."""
        return [row for row in self.rows if row["split"] == split]


def pairs_parser(text: str, *, pairs: int, held_out: int, learning_rate: float) -> argparse.ArgumentParser:
    """The options of a benchmark that trains on preference pairs. text: its docstring."""
    parser = argparse.ArgumentParser(description=text, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=Path, help="a file of pairs, or arithmetic: right and wrong answers")
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--pairs", type=int, default=pairs, help="pairs for training, per seed")
    parser.add_argument("--held-out", type=int, default=held_out)
    parser.add_argument("--max-tokens", type=int, default=256, help="limit of a prompt with its longer answer")
    parser.add_argument("--rows", type=int, default=16, help="pairs per optimizer step")
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--learning-rate", type=float, default=learning_rate)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--runs", type=Path, default=Path("runs"))
    return parser


def drawn_pairs(arguments: argparse.Namespace, seed: int) -> list[dict[str, Any]]:
    """The rows of a seed, for training and held out."""
    made = str(arguments.source) == "arithmetic"
    rows = right_and_wrong(seed) if made else read_rows(arguments.source)
    return random.Random(seed).sample(rows, min(len(rows), arguments.pairs + arguments.held_out))


def right_and_wrong(seed: int) -> list[dict[str, Any]]:
    """Pairs of the bundled problems: the right number, and one that is at most 9 away from it."""
    draws, rows = random.Random(seed), read_rows(ARITHMETIC)
    offsets = [n for n in range(-9, 10) if n]
    return [
        {"prompt": row["prompt"], "chosen": row["answer"], "rejected": str(int(row["answer"]) + draws.choice(offsets))}
        for row in rows
    ]


def each_seed(
    arguments: argparse.Namespace, folder: Path, train: Callable[..., tuple[Curve, dict[str, Any]]]
) -> Iterator[tuple[Curve, dict[str, Any]]]:
    """`train(arguments, seed, folder)` of each seed; all results so far are written before it is yielded."""
    curves, results = [], []
    for seed in arguments.seeds:
        curve, result = train(arguments, seed, folder)
        curves.append(curve)
        results.append(result)
        write(folder, curves, results)
        yield curve, result


def write(folder: Path, curves: Sequence[Curve], results: Sequence[Mapping[str, Any]]) -> None:
    """curves.csv and result.json, over those of earlier seeds."""
    pd.DataFrame([row for curve in curves for row in curve.rows]).to_csv(folder / "curves.csv", index=False)
    (folder / "result.json").write_text(json.dumps(list(results), indent=2))
