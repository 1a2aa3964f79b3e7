"""What goes between the controller and a host for one stage, and what a worker sees of it."""

from __future__ import annotations

import pickle
import traceback
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from workbench.dataflow.columns import Column, Ragged, Table
from workbench.dataflow.location import Pull


@dataclass(frozen=True, kw_only=True)
class HostInfo:
    """Who a host is: one process on one device, rank `rank` of its pool's process group. lab: the workbench's id."""

    lab: str
    pool: str
    rank: int
    world_size: int
    device: str
    threads: int
    log_path: str | None

    @property
    def name(self) -> str:
        """Unique in its workbench."""
        return f"{self.pool}-{self.rank}"


@dataclass(frozen=True, kw_only=True)
class Call:
    """One rank's part of a stage.

    key: name of the shard that its output becomes. pulls: for each set of columns, which rows to pull from which shard.
    """

    run: int
    key: str
    stage: str
    role: str
    method: str
    batch: str = ""
    pulls: tuple[tuple[tuple[str, ...], tuple[Pull, ...]], ...] = ()
    rows: np.ndarray | None = None
    minibatch_sizes: tuple[int, ...] = ()
    sample: np.ndarray | None = None
    meta: Mapping[str, Any] = field(default_factory=dict)
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    submitted_s: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Shard:
    """What a worker gets of a batch: its columns' rows, and their numbers in the whole batch.

    minibatch_sizes: rows of each minibatch, in order; they add up to len(rows).
    sample: for operations that draw samples, how many equal rows come before each in the whole batch [rows].
    meta: what the batch carries along, and this stage's `seed` (a tuple of integers).
    """

    columns: Table
    rows: np.ndarray
    minibatch_sizes: tuple[int, ...]
    meta: Mapping[str, Any]
    sample: np.ndarray | None = None

    def __len__(self) -> int:
        return len(self.rows)

    def ragged(self, name: str) -> Ragged:
        """A token column."""
        column = self.columns[name]
        assert isinstance(column, Ragged), name
        return column


@dataclass(frozen=True, kw_only=True)
class Mean:
    """A metric that is a mean: totals and counts add up over micro-batches and ranks."""

    total: float
    count: float

    def merge(self, other: Mean) -> Mean:
        return Mean(total=self.total + other.total, count=self.count + other.count)

    @property
    def value(self) -> float:
        return self.total / self.count if self.count else float("nan")


@dataclass(frozen=True, kw_only=True)
class Max:
    """A metric that is a maximum."""

    value: float

    def merge(self, other: Max) -> Max:
        return Max(value=max(self.value, other.value))


Metrics = dict[str, Mean | Max]


def merge_metrics(into: Metrics, more: Mapping[str, Mean | Max]) -> Metrics:
    """Merge `more` into `into`, and return it."""
    for name, metric in more.items():
        into[name] = into[name].merge(metric) if name in into else metric  # type: ignore[arg-type]
    return into


@dataclass(frozen=True, kw_only=True)
class Output:
    """What an operation gives on one rank: new columns (rows as in its shard), metrics, meta for the batch, a value."""

    columns: Table = field(default_factory=dict)
    metrics: Metrics = field(default_factory=dict)
    meta: Mapping[str, Any] = field(default_factory=dict)
    value: Any = None


@dataclass(frozen=True, kw_only=True)
class ColumnSummary:
    """dtype, shape of a row and bytes of one rank's part of a column."""

    dtype: str
    row_shape: tuple[int | str, ...]
    nbytes: int


@dataclass(frozen=True, kw_only=True)
class Reply:
    """What the controller hears of one rank: never a tensor."""

    rank: int
    columns: dict[str, ColumnSummary]
    metrics: Metrics
    meta: Mapping[str, Any]
    value: Any
    spans: list[Any]
    transfers: list[Any]
    failure: Failure | None = None


@dataclass(frozen=True, kw_only=True)
class Failure:
    """A rank's error: its class's name, message, formatted traceback, and the exception itself.

    Inline the exception keeps its traceback, so that a notebook shows the frames of the worker and of the user's own
    functions, and `%debug` enters them (`exceptions` lists the chain there). Sent from another process it arrives
    without, or not at all where it does not pickle.
    """

    kind: str
    message: str
    traceback: str
    error: BaseException | None

    @classmethod
    def of(cls, error: BaseException) -> Failure:
        """From an exception that was just caught; our own frames of dispatch are left out."""
        frames = traceback.extract_tb(error.__traceback__)[1:]
        text = "".join(traceback.format_list(frames)) + "".join(traceback.format_exception_only(error))
        return cls(kind=type(error).__name__, message=str(error), traceback=text, error=error)

    def __getstate__(self) -> dict[str, Any]:
        state = dict(self.__dict__)
        try:
            pickle.loads(pickle.dumps(self.error))
        except Exception:
            state["error"] = None
        if self.error is not None:  # its frames hold on to this process's tensors
            self.error.__traceback__ = None
        return state


def column_summary(column: Column) -> ColumnSummary:
    """Describe one rank's part of a column."""
    from workbench.dataflow.columns import describe, nbytes

    dtype, row_shape = describe(column)
    return ColumnSummary(dtype=dtype, row_shape=row_shape, nbytes=nbytes(column))
