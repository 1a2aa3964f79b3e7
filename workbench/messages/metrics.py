"""Metrics of a stage, which can be merged over micro-batches and ranks."""

from __future__ import annotations

import math
import numbers
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import chain

from workbench.display.html import table
from workbench.errors import StageError
from workbench.errors.plain_text import shown
from workbench.support.intervals import clustered_half_width


@dataclass(frozen=True, kw_only=True)
class Mean:
    """A metric that is a mean: totals and counts add up over micro-batches and ranks."""

    total: float
    count: float

    def merge(self, other: Mean) -> Mean:
        """Return the mean over the samples of both metrics."""
        return Mean(total=self.total + other.total, count=self.count + other.count)

    @property
    def value(self) -> float:
        """The mean; NaN without samples."""
        return self.total / self.count if self.count else float("nan")


@dataclass(frozen=True, kw_only=True)
class Max:
    """A metric that is a maximum."""

    value: float

    def merge(self, other: Max) -> Max:
        """Return the larger of both maxima."""
        return Max(value=max(self.value, other.value))


@dataclass(frozen=True, kw_only=True)
class SampleSize:
    """An effective sample size, as a share of the samples. total, squares: the sums of their weights w, and of w^2."""

    total: float
    squares: float
    count: float

    def merge(self, other: SampleSize) -> SampleSize:
        """Return the effective sample size over the samples of both metrics."""
        return SampleSize(
            total=self.total + other.total, squares=self.squares + other.squares, count=self.count + other.count
        )

    @property
    def value(self) -> float:
        """The effective sample size over the number of samples."""
        return self.total**2 / (self.count * self.squares) if self.squares > 0 else 0.0


@dataclass(frozen=True, kw_only=True)
class Interval:
    """A metric that is half the width of the 95 % interval of a mean over samples in clusters. clusters: (sum, count)
    of the samples of each cluster, by the cluster's number."""

    clusters: Mapping[int, tuple[float, float]]

    def merge(self, other: Interval) -> Interval:
        """Return the interval over the samples of both metrics."""
        found = dict(self.clusters)
        for name, (total, count) in other.clusters.items():
            total_before, count_before = found.get(name, (0.0, 0.0))
            found[name] = (total_before + total, count_before + count)
        return Interval(clusters=found)

    @property
    def value(self) -> float:
        """See `clustered_half_width`; NaN for fewer than two clusters."""
        totals = [total for total, _ in self.clusters.values()]
        return clustered_half_width(totals, [count for _, count in self.clusters.values()])


Metric = Mean | Max | SampleSize | Interval
Metrics = dict[str, Metric]


def merge_metrics(into: Metrics, *more: Mapping[str, Metric]) -> Metrics:
    """Merge all of `more` into `into`, and return it."""
    for name, metric in chain.from_iterable(one.items() for one in more):
        into[name] = into[name].merge(metric) if name in into else metric  # type: ignore[arg-type]
    return into


def reported(metrics: Mapping[str, Metric]) -> dict[str, float]:
    """Return the metrics' values by name. Leaves out values that are NaN: a mean without samples, as after an update
    that skipped all its rows, and the interval of fewer than two clusters."""
    values = {name: metric.value for name, metric in metrics.items() if not isinstance(metric, Mean) or metric.count}
    return {name: v for name, v in values.items() if not (isinstance(metrics[name], Interval) and math.isnan(v))}


def as_metrics(given: Mapping[str, Metric | float]) -> Metrics:
    """Return an operation's metrics, plain numbers as a `Mean` over ranks. Raises `StageError` for other values."""
    if not isinstance(given, Mapping):
        raise StageError(f"its metrics are a {type(given).__name__}", "metrics must be a dict", 'metrics={"name": 1.0}')
    metrics: Metrics = {}
    for name, value in given.items():
        if isinstance(value, numbers.Real):
            metrics[name] = Mean(total=float(value), count=1)
        elif isinstance(value, Metric):
            metrics[name] = value
        else:
            raise StageError(
                f"metric {name!r} is {shown(value)}, a {type(value).__name__}",
                "a metric is a number, a Mean, a Max or a SampleSize",
                "turn a tensor into a number with float(tensor)",
            )
    return metrics


class MetricValues(dict[str, float]):
    """Metrics by name, shown as a table."""

    def _repr_html_(self) -> str:
        return table(self.rows(), max_rows=60)

    def rows(self) -> list[dict[str, str]]:
        return [{"metric": name, "value": f"{value:.6g}"} for name, value in self.items()]


class StageMetrics(dict[str, MetricValues]):
    """Metrics by stage and name, shown as a table."""

    def _repr_html_(self) -> str:
        return table([{"stage": stage, **row} for stage, one in self.items() for row in one.rows()], max_rows=200)
