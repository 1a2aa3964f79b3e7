"""`wb.runs()`: a frame of all runs, each with its settings, last metrics, data and code."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from html import escape
from typing import Annotated, Any, Literal

import numpy as np
import pandas as pd
from pydantic import Field

from workbench.checks.compare_evaluations import interval
from workbench.comparisons.run_folder import RunFolder, X, readable, run_folders
from workbench.display.curves import STROKES, Chart, Charted, Curve, smoothed, summary, tables
from workbench.display.headlines import HEADLINES, looked_at
from workbench.display.html import table
from workbench.errors import BadInput, NotFound
from workbench.support.checked_calls import checked_call, checks_calls
from workbench.support.files import path_of
from workbench.support.named_fields import remedy_for
from workbench.support.validation import Number, Rule

Over = Literal["iterations", "samples", "tokens", "seconds"]
Band = Literal["interval", "range"]


@dataclass(frozen=True)
class RunCurves(Charted):
    """df: a row a metric, arm and x: `mean` over the arm's runs, `low` and `high` of its band (NaN for one run),
    `runs`. over: the unit of x. notes: what was left out."""

    df: pd.DataFrame
    over: Over
    notes: tuple[str, ...] = ()

    def charts(self) -> list[Chart]:
        strokes = {arm: STROKES[n % len(STROKES)] for n, arm in enumerate(dict.fromkeys(self.df["arm"]))}
        made = []
        for metric, found in self.df.groupby("metric", sort=False):
            curves = []
            for arm, one in found.groupby("arm", sort=False):
                x, name, stroke = one["x"].tolist(), str(arm), strokes[str(arm)]
                if one["low"].notna().any():
                    y, low = one["high"].tolist(), one["low"].tolist()
                    curves.append(Curve(name=name, x=x, y=y, low=low, kind="band", stroke=stroke))
                curves.append(Curve(name=name, x=x, y=one["mean"].tolist(), stroke=stroke))
            made.append(Chart(title=str(metric), curves=tuple(curves), x=self.over.removesuffix("s")))
        return made

    def __repr__(self) -> str:
        return "\n".join([*(summary(chart) for chart in self.charts()), *self.notes])

    def _repr_html_(self) -> str:
        return "".join(f"<div>{escape(note)}</div>" for note in self.notes) + tables(self.charts())


def _mixed(folders: Mapping[str, RunFolder], arms: Sequence[str]) -> list[str]:
    """A note for each arm whose runs have several commits."""
    commits: dict[str, set[str]] = {}
    for run, arm in zip(folders.values(), arms, strict=True):
        commits.setdefault(arm, set()).add(str(run.record.code.get("commit")))
    return [f"{arm}: runs of {len(found)} commits" for arm, found in commits.items() if len(found) > 1]


def _column(metric: str, frame: pd.DataFrame) -> str | None:
    return looked_at(frame.columns).get(metric) if metric in HEADLINES else metric if metric in frame.columns else None


def _unknown(metric: str, series: Mapping[str, pd.DataFrame]) -> NotFound:
    known = list(dict.fromkeys(name for frame in series.values() for name in frame.columns if name not in X))
    labels = [label for label in HEADLINES if any(label in looked_at(frame.columns) for frame in series.values())]
    near = remedy_for(metric, [*labels, *known], repr)
    rule = f"they have the headlines {', '.join(labels) or 'none'}, and {len(known)} metrics as 'stage/metric'"
    return NotFound(f"no metric {metric!r} in {len(series)} runs", rule, near or "see the columns of wb.runs()")


def _curve(frame: pd.DataFrame, column: str, over: Over, smooth: float) -> pd.Series[float]:
    """The metric of one run over x, without values that are missing or not finite."""
    found = frame[column].astype(float)
    kept = np.isfinite(found.to_numpy())
    x = frame.index.to_numpy(dtype=float) if over == "iterations" else frame[over].to_numpy(dtype=float)
    kept &= np.isfinite(x)
    return pd.Series(smoothed(found.to_numpy()[kept].tolist(), smooth), index=x[kept], dtype=float)


def _together(curves: Sequence[pd.Series[float]]) -> tuple[np.ndarray, np.ndarray]:
    """x [points], and the values of all runs there [runs, points]. The points are those of the first run up to the x
    that all runs reach; other runs are interpolated linearly."""
    curves = [curve for curve in curves if len(curve)]
    if not curves:
        return np.empty(0), np.empty((0, 0))
    first, last = max(curve.index[0] for curve in curves), min(curve.index[-1] for curve in curves)
    x = curves[0].index.to_numpy()
    x = x[(x >= first) & (x <= last)]
    return x, np.stack([np.interp(x, curve.index.to_numpy(), curve.to_numpy()) for curve in curves])


def _point(values: np.ndarray, band: Band) -> dict[str, float]:
    low, high = math.nan, math.nan
    if len(values) > 1:
        low, high = interval(values) if band == "interval" else (float(values.min()), float(values.max()))
        low, high = (low, high) if math.isfinite(high - low) else (math.nan, math.nan)
    return {"mean": float(values.mean()), "low": low, "high": high, "runs": len(values)}


FIRST = ("opened", "algorithm", "iterations")
DESCRIBED = ("settings/", "data/", "code/")
NOT_AN_ARM = ("settings/seed", "data/prompts/seed", "code/commit")  # runs that differ in these alone are one arm
MOST_ROWS, MOST_SETTINGS, LONGEST_ARM = 40, 6, 80
Smooth = Annotated[Number, Field(ge=0, lt=1)]
Names = Annotated[str | Sequence[str], Rule("must be one name or several", 'write "reward", or ["reward", "KL"]')]


@checks_calls("wb.runs()")
class Runs(pd.DataFrame):
    """One row a run, named "NAME/DATE"; slices have the same methods.

    Columns: opened, algorithm, iterations; metrics of the last iteration and the newest evaluation as "stage/metric",
    as in the frame of `ppo.run()`; "settings/NAME" of the opening and the algorithm, such as
    "settings/actor/training/learning_rate" and "settings/PPO/clip"; "data/NAME"; "code/NAME"; folder. A notebook shows
    the headline metrics and the settings that differ.
    """

    @property
    def _constructor(self) -> Any:
        return Runs

    def arms(self, by: str | Sequence[str] | None = None) -> pd.Series[Any]:
        """The arm of each run in words: its algorithm and those settings that differ, without the seed. by: columns
        that replace these."""
        names = [by] if isinstance(by, str) else by
        if names is None:
            names = [name for name in self.differing() if name not in NOT_AN_ARM]
        for name in names:
            if name not in self.columns:
                rule = f"the runs differ in {', '.join(self.differing()) or 'none'}"
                raise BadInput(f"by={name!r}", rule, "name a column of the frame")
        short, numbers = _short(names), dict[str, int]()
        said = []
        for _, row in self.iterrows():
            parts = [f"{short[name]}={_text(row[name])}" for name in names if not _is_missing(row[name])]
            arm = ", ".join(parts) or "all runs"
            number = numbers.setdefault(arm, len(numbers) + 1)
            said.append(arm if len(arm) <= LONGEST_ARM else f"{number}: {arm[:LONGEST_ARM]}...")
        return pd.Series(said, index=self.index, name="arm")

    def differing(self) -> list[str]:
        """The columns in which these runs differ, among algorithm, settings, data and code. A setting that only some
        runs have, because the others use another algorithm, does not count."""
        found = []
        for name in map(str, self.columns):
            values = {repr(value) for value in self[name].tolist() if not _is_missing(value)}
            if len(values) > 1 and (name == "algorithm" or name.startswith(DESCRIBED)):
                found.append(name)
        return found

    def curves(
        self, metrics: Names = "reward", over: Over = "iterations", *, smooth: Smooth = 0.0,
        band: Band = "interval", by: Names | None = None,
    ) -> RunCurves:  # fmt: skip
        """Curves of these runs: `wb.runs().curves(["reward", "KL"], over="tokens", smooth=0.8)`.

        Runs that differ only in their seed form one arm: its mean, with a band. metrics: a headline ("reward", "KL",
        "loss", "gradient norm", "clip fraction", "response tokens", "accuracy", "cost"), or "stage/metric", such as
        "evaluate/arithmetic/reward_mean". over: "iterations"; generated "samples" or "tokens"; "seconds" of training,
        without evaluations and pauses. Unless x is iterations, the runs of an arm are interpolated to the x of its
        first run. smooth: the factor of an exponential mean, 0 to below 1, applied to each run before the mean over
        runs. band: "interval", the 95 % interval of Student's t of the mean over seeds; "range", from the smallest to
        the largest run. A single run has none. by: columns whose values define an arm, such as "settings/PPO/clip".
        """
        if "folder" not in self.columns or not len(self):
            raise BadInput(f"curves of {len(self)} runs", "needs runs and their column 'folder'", "keep both")
        folders = {str(name): RunFolder(path_of(folder, "folder")) for name, folder in self["folder"].items()}
        arms, series = self.arms(by).tolist(), {name: run.series() for name, run in folders.items()}
        rows, notes = [], _mixed(folders, arms)
        for metric in [metrics] if isinstance(metrics, str) else metrics:
            of_arm: dict[str, list[pd.Series[float]]] = {}
            without = []
            for (name, frame), arm in zip(series.items(), arms, strict=True):
                column = _column(metric, frame)
                if column is None:
                    without.append(name)
                else:
                    of_arm.setdefault(arm, []).append(_curve(frame, column, over, smooth))
            if not of_arm:
                raise _unknown(metric, series)
            if without:
                notes.append(f"{metric}: not in {', '.join(without)}")
            for arm, curves in of_arm.items():
                x, values = _together(curves)
                if len({curve.index[-1] for curve in curves}) > 1 and over == "iterations":
                    notes.append(f"{metric}, {arm}: up to the end of the shortest of {len(curves)} runs")
                points = [_point(values[:, n], band) for n in range(len(x))]
                rows += [{"metric": metric, "arm": arm, "x": at, **one} for at, one in zip(x, points, strict=True)]
        columns = ["metric", "arm", "x", "mean", "low", "high", "runs"]
        return RunCurves(pd.DataFrame(rows, columns=columns), over, tuple(notes))

    def _shown(self) -> list[dict[str, Any]]:
        metrics = looked_at(name for name in self.columns if not _is_described(str(name)))
        settings = [name for name in self.differing() if name not in FIRST][:MOST_SETTINGS]
        short = _short(settings)
        rows = []
        for name, row in self.iloc[-MOST_ROWS:].iterrows():
            first = {column: row[column] for column in FIRST[1:] if column in self.columns}
            said = {label: _text(row[column]) for label, column in metrics.items() if not _is_missing(row[column])}
            chosen = {short[one]: "" if _is_missing(row[one]) else _text(row[one]) for one in settings}
            rows.append({"run": str(name), **first, **said, **chosen})
        return rows

    def _about(self) -> str:
        earlier = f"the last {MOST_ROWS} of " if len(self) > MOST_ROWS else ""
        more = len(self.differing()) - MOST_SETTINGS
        differ = f"; they differ in {more} more settings, see .differing()" if more > 0 else ""
        return f"{earlier}{len(self)} runs with {len(self.columns)} columns{differ}; .curves('reward') draws them"

    def __repr__(self) -> str:
        if not len(self):
            return "no runs"
        with pd.option_context("display.width", 200, "display.max_columns", 40, "display.max_colwidth", 40):
            shown = pd.DataFrame(self._shown()).fillna("").to_string(index=False)
        return f"{shown}\n{self._about()}"

    def _repr_html_(self) -> str:
        return table(self._shown(), caption=self._about(), max_rows=MOST_ROWS) if len(self) else "<p>no runs</p>"


@checked_call("wb.runs")
def runs(folder: str = "runs", *, name: str | None = None) -> Runs:
    """All runs under a folder, oldest first, each with its settings, last metrics, data and code: `wb.runs()`.

    Every `wb.open` makes a run folder, which counts whether the workbench is still open or not. `wb.runs().curves()`
    draws runs, `wb.diff(a, b)` compares two. folder: as given to `wb.open(runs=)`. name: only runs of this workbench.
    Run folders are read as data; a folder that belongs to another user, or that cannot be read, is left out with a
    warning; damaged lines are skipped. Raises `NotFound` if the folder does not exist.
    """
    found = [run for run in run_folders(folder) if name in (None, run.folder.parent.name) and readable(run)]
    rows = {run.name: _row(run) for run in found}
    frame = pd.DataFrame.from_dict(rows, orient="index") if rows else pd.DataFrame(columns=[*FIRST, "folder"])
    described = [column for column in frame.columns if _is_described(str(column))]
    metrics = [column for column in frame.columns if column not in (*FIRST, *described)]
    first = list(looked_at(metrics).values())
    others = [column for column in metrics if column not in first]
    return Runs(frame[[*FIRST, *first, *others, *described]].rename_axis("run"))


def _row(run: RunFolder) -> dict[str, Any]:
    iterations, metrics = run.last_metrics()
    record = run.record
    code = {"commit": record.code.get("commit"), **run.code("versions")}
    code |= {role: function.get("digest") for role, function in run.code("functions").items()}
    return {
        "opened": datetime.fromtimestamp(record.opened_s) if record.opened_s else None,
        "algorithm": ", ".join(run.algorithms), "iterations": iterations, **metrics,
        **{f"settings/{name}": _cell(value) for name, value in run.settings.items()},
        **{f"data/{name}": _cell(value) for name, value in record.data.items()},
        **{f"code/{name}": _cell(value) for name, value in code.items()},
        "folder": str(run.folder),
    }  # fmt: skip


def _cell(value: Any) -> Any:
    return value if value is None or isinstance(value, bool | int | float | str) else str(value)


def _is_described(column: str) -> bool:
    return column == "folder" or column.startswith(DESCRIBED)


def _is_missing(value: Any) -> bool:
    return value is None or value is pd.NaT or (isinstance(value, float) and value != value) or value == ""


def _short(names: Sequence[str]) -> dict[str, str]:
    """The shortest endings of names that distinguish them."""
    found = {}
    for name in names:
        parts = name.split("/")
        ends = ["/".join(parts[-n:]) for n in range(1, len(parts) + 1)]
        found[name] = next(end for end in ends if sum(f"/{other}".endswith(f"/{end}") for other in names) == 1)
    return found


def _text(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)[:40]
