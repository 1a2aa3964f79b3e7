"""What a training benchmark shows while it runs, and keeps: a row a step, a folder a run."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import pandas as pd


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


def write(folder: Path, curves: Sequence[Curve], results: Sequence[Mapping[str, Any]]) -> None:
    """curves.csv and result.json, over those of earlier seeds."""
    pd.DataFrame([row for curve in curves for row in curve.rows]).to_csv(folder / "curves.csv", index=False)
    (folder / "result.json").write_text(json.dumps(list(results), indent=2))
