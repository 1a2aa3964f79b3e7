"""Curves of several runs, with bands over seeds."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING, Literal

import numpy as np

from workbench.checks.compare_evaluations import interval
from workbench.comparisons.run_folder import RunFolder, X
from workbench.display.curves import STROKES, Chart, Charted, Curve, smoothed, summary, tables
from workbench.display.headlines import HEADLINES, looked_at
from workbench.errors import NotFound
from workbench.support.named_fields import meant

if TYPE_CHECKING:
    import pandas as pd

Over = Literal["iterations", "samples", "tokens", "seconds"]
Band = Literal["interval", "range"]


@dataclass(frozen=True)
class RunCurves(Charted):
    """df: a row a metric, arm and x: `mean` over the arm's runs, `low` and `high` of its band (NaN for one run),
    `runs`. over: what x counts. notes: what was left out."""

    df: pd.DataFrame
    over: Over
    notes: tuple[str, ...] = ()

    def charts(self) -> list[Chart]:
        """A chart for each metric."""
        arms = list(dict.fromkeys(self.df["arm"]))
        strokes = {arm: STROKES[n % len(STROKES)] for n, arm in enumerate(arms)}
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


def curves_of(
    folders: Mapping[str, RunFolder], arms: Sequence[str], metrics: Sequence[str], over: Over, smooth: float, band: Band
) -> RunCurves:
    """See `Runs.curves`. arms: of each run."""
    import pandas as pd

    series = {name: run.series() for name, run in folders.items()}
    rows, notes = [], _mixed(folders, arms)
    for metric in metrics:
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
            rows += [{"metric": metric, "arm": arm, "x": at, **_point(values[:, n], band)} for n, at in enumerate(x)]
    columns = ["metric", "arm", "x", "mean", "low", "high", "runs"]
    return RunCurves(pd.DataFrame(rows, columns=columns), over, tuple(notes))


def _mixed(folders: Mapping[str, RunFolder], arms: Sequence[str]) -> list[str]:
    """What is said of arms whose runs are of several commits."""
    commits: dict[str, set[str]] = {}
    for run, arm in zip(folders.values(), arms, strict=True):
        commits.setdefault(arm, set()).add(str(run.record.code.get("commit")))
    return [f"{arm}: runs of {len(found)} commits" for arm, found in commits.items() if len(found) > 1]


def _column(metric: str, frame: pd.DataFrame) -> str | None:
    """The column of a headline, or of a metric by name."""
    return looked_at(frame.columns).get(metric) if metric in HEADLINES else metric if metric in frame.columns else None


def _unknown(metric: str, series: Mapping[str, pd.DataFrame]) -> NotFound:
    known = list(dict.fromkeys(name for frame in series.values() for name in frame.columns if name not in X))
    labels = [label for label in HEADLINES if any(label in looked_at(frame.columns) for frame in series.values())]
    near = meant(metric, [*labels, *known], repr)
    rule = f"they have the headlines {', '.join(labels) or 'none'}, and {len(known)} metrics as 'stage/metric'"
    return NotFound(f"metric {metric!r} in {len(series)} runs", rule, near or "see the columns of wb.runs()")


def _curve(frame: pd.DataFrame, column: str, over: Over, smooth: float) -> pd.Series[float]:
    """The metric of one run over x, where it has one, without points that are not finite."""
    import pandas as pd

    found = frame[column].astype(float)
    kept = np.isfinite(found.to_numpy())
    x = frame.index.to_numpy(dtype=float) if over == "iterations" else frame[over].to_numpy(dtype=float)
    kept &= np.isfinite(x)
    return pd.Series(smoothed(found.to_numpy()[kept].tolist(), smooth), index=x[kept], dtype=float)


def _together(curves: Sequence[pd.Series[float]]) -> tuple[np.ndarray, np.ndarray]:
    """x [points], and the values of all runs at these [runs, points]: at the x of the first run that all runs reach,
    between their own points on straight lines."""
    curves = [curve for curve in curves if len(curve)]
    if not curves:
        return np.empty(0), np.empty((0, 0))
    first, last = max(curve.index[0] for curve in curves), min(curve.index[-1] for curve in curves)
    x = curves[0].index.to_numpy()
    x = x[(x >= first) & (x <= last)]
    return x, np.stack([np.interp(x, curve.index.to_numpy(), curve.to_numpy()) for curve in curves])


def _point(values: np.ndarray, band: Band) -> dict[str, float]:
    """Of the runs of an arm at one x."""
    low, high = math.nan, math.nan
    if len(values) > 1:
        low, high = interval(values) if band == "interval" else (float(values.min()), float(values.max()))
        low, high = (low, high) if math.isfinite(high - low) else (math.nan, math.nan)
    return {"mean": float(values.mean()), "low": low, "high": high, "runs": len(values)}
