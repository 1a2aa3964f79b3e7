"""What goes between the controller and a host for one stage, and what a worker sees of it."""

from __future__ import annotations

import numbers
import pickle
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from workbench.algorithms.correction import effective_sample_size
from workbench.dataflow.columns import Column, Ragged, Table
from workbench.dataflow.location import Pull
from workbench.dataflow.row_numbers import pack
from workbench.engines.settings import ShareMemory
from workbench.errors import BadInput, StageError, WorkbenchError
from workbench.failures import Frame, Raised, chain_of, is_users
from workbench.placement import host_name


@dataclass(frozen=True, kw_only=True)
class HostInfo:
    """Who a host is: one process on one device, rank `rank` of its pool's process group.

    lab: the workbench's id. share_memory: see `workbench.open`. again: how many pools of that name the workbench had
    before this one, since `lab.move` made and ended pools. idle_s: see `workbench.workers.idle`.
    """

    lab: str
    pool: str
    rank: int
    world_size: int
    device: str
    threads: int
    log_path: str | None
    share_memory: ShareMemory = False
    again: int = 0
    idle_s: float | None = None

    @property
    def name(self) -> str:
        """Unique in its workbench, for all its life: batches are known by the hosts that made them."""
        return host_name(self.pool, self.rank, self.again)

    @property
    def peers(self) -> tuple[str, ...]:
        """The names of its pool's hosts, by rank."""
        return tuple(replace(self, rank=rank).name for rank in range(self.world_size))

    @property
    def offloads(self) -> bool:
        """Whether roles that are not at work leave the device's memory."""
        return self.share_memory == "always" or (bool(self.share_memory) and self.device.startswith("cuda"))


@dataclass(frozen=True, kw_only=True)
class Call:
    """One rank's part of a stage.

    key: name of the shard that its output becomes. keep: whether the output is part of the stage's result; what other
    ranks return is dropped. updates, begun: whether it updates the role, and what it goes on from. pulls: for each set
    of columns, which rows to pull from which shard.

    Pickled, it takes few bytes a row at most, so that the controller's messages stay small however many rows there are.
    """

    run: int
    key: str
    stage: str
    role: str
    method: str
    keep: bool = True
    batch: str = ""
    pulls: tuple[tuple[tuple[str, ...], tuple[Pull, ...]], ...] = ()
    rows: np.ndarray | None = None
    minibatch_sizes: tuple[int, ...] = ()
    sample: np.ndarray | None = None
    meta: Mapping[str, Any] = field(default_factory=dict)
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    submitted_s: float = 0.0
    updates: bool = False
    begun: UpdatePart | None = None

    def __getstate__(self) -> dict[str, Any]:
        pulls = tuple(
            (names, tuple((p.shard, pack(p.positions), pack(p.destinations), p.name) for p in parts))
            for names, parts in self.pulls
        )
        rows, sample = (None if numbers is None else pack(numbers) for numbers in (self.rows, self.sample))
        return {**self.__dict__, "pulls": pulls, "rows": rows, "sample": sample}

    def __setstate__(self, state: dict[str, Any]) -> None:
        pulls = tuple(
            (names, tuple(Pull(shard, rows.unpack(), there.unpack(), name) for shard, rows, there, name in parts))
            for names, parts in state["pulls"]
        )
        rows, sample = (None if packed is None else packed.unpack() for packed in (state["rows"], state["sample"]))
        self.__dict__.update(state, pulls=pulls, rows=rows, sample=sample)


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
        """A token column; `BadInput` where the column of that name is another kind."""
        column = self.columns[name]
        if not isinstance(column, Ragged):
            raise BadInput(
                f"column {name!r} is {_kind(column)}",
                "it must be a Ragged, with one number a token of each row",
                "for one number a row x: mask = batch.fetch(['response_mask'])['response_mask']; "
                "mask.like(torch.repeat_interleave(x, mask.lengths))",
            )
        return column

    def numbers(self, name: str) -> Tensor:
        """A column of one number a row; `BadInput` where the column of that name is another kind."""
        column = self.columns[name]
        if not isinstance(column, Tensor) or column.ndim != 1:
            raise BadInput(f"column {name!r} is {_kind(column)}", "it must be a Tensor [rows], one number a row")
        return column


def _kind(column: Column) -> str:
    """What a column is, for messages."""
    if isinstance(column, Ragged):
        return "a Ragged, with one number a token"
    if isinstance(column, Tensor):
        return f"a Tensor [{', '.join(('rows', *map(str, column.shape[1:])))}]"
    return f"a list of {', '.join(sorted({type(value).__name__ for value in column})) or 'Python objects'}"


@dataclass(frozen=True, kw_only=True)
class Mean:
    """A metric that is a mean: totals and counts add up over micro-batches and ranks."""

    total: float
    count: float

    def merge(self, other: Mean) -> Mean:
        """The mean over the samples of both."""
        return Mean(total=self.total + other.total, count=self.count + other.count)

    @property
    def value(self) -> float:
        """The mean; NaN over nothing."""
        return self.total / self.count if self.count else float("nan")


@dataclass(frozen=True, kw_only=True)
class Max:
    """A metric that is a maximum."""

    value: float

    def merge(self, other: Max) -> Max:
        """The larger of both."""
        return Max(value=max(self.value, other.value))


@dataclass(frozen=True, kw_only=True)
class SampleSize:
    """A metric that is an effective sample size, as a share of the samples; of their weights the sums of w and w^2."""

    total: float
    squares: float
    count: float

    def merge(self, other: SampleSize) -> SampleSize:
        """The sums over the samples of both."""
        return SampleSize(
            total=self.total + other.total, squares=self.squares + other.squares, count=self.count + other.count
        )

    @property
    def value(self) -> float:
        """The effective sample size over the number of samples."""
        return effective_sample_size(self.total, self.squares, self.count)


Metric = Mean | Max | SampleSize
Metrics = dict[str, Metric]


@dataclass(frozen=True)
class OnDevice:
    """A metric of that kind some of whose numbers, by field, are still on the device that computes them: to look at
    them one by one would wait for it each time. `on_host` brings many at once."""

    kind: type[Mean] | type[Max]
    numbers: Mapping[str, Tensor | float]


DeviceMetrics = Mapping[str, Metric | OnDevice]


def on_host(told: Sequence[DeviceMetrics]) -> list[Metrics]:
    """The same metrics with all their numbers on the host, in one transfer."""
    waiting = [metric for metrics in told for metric in metrics.values() if isinstance(metric, OnDevice)]
    tensors = [n.detach().double() for metric in waiting for n in metric.numbers.values() if isinstance(n, Tensor)]
    values = iter(torch.stack(tensors).tolist() if tensors else ())

    def brought(metric: Metric | OnDevice) -> Metric:
        if not isinstance(metric, OnDevice):
            return metric
        return metric.kind(**{k: next(values) if isinstance(n, Tensor) else n for k, n in metric.numbers.items()})

    return [{name: brought(metric) for name, metric in metrics.items()} for metrics in told]


def merge_metrics(into: Metrics, more: Mapping[str, Metric]) -> Metrics:
    """Merge `more` into `into`, and return it."""
    for name, metric in more.items():
        into[name] = into[name].merge(metric) if name in into else metric  # type: ignore[arg-type]
    return into


def reported(metrics: Mapping[str, Metric]) -> dict[str, float]:
    """Their values by name; a mean of nothing, as of an update all of whose rows were skipped, is not a number and is
    left out."""
    return {name: metric.value for name, metric in metrics.items() if not isinstance(metric, Mean) or metric.count}


def as_metrics(given: Mapping[str, Metric | float]) -> Metrics:
    """Metrics of an operation, a plain number as the mean over ranks; `StageError` naming a value that is none."""
    if not isinstance(given, Mapping):
        raise StageError(f"its metrics are a {type(given).__name__}", "metrics are a dict", 'metrics={"name": 1.0}')
    metrics: Metrics = {}
    for name, value in given.items():
        if isinstance(value, numbers.Real):
            metrics[name] = Mean(total=float(value), count=1)
        elif isinstance(value, Metric):
            metrics[name] = value
        else:
            raise StageError(
                f"metric {name!r} is {value!r:.60}, a {type(value).__name__}",
                "a metric is a number, a Mean, a Max or a SampleSize",
                "turn a tensor into a number with float(tensor)",
            )
    return metrics


@dataclass(frozen=True, kw_only=True)
class Output:
    """What an operation gives on one rank: new columns (rows as in its shard), metrics, meta for the batch, a value.

    metrics: by name; a plain number is a `Mean` that counts once for each rank. notes: what is to be said in the cell,
    such as why an optimizer step was skipped.
    """

    columns: Table = field(default_factory=dict)
    metrics: Mapping[str, Metric | float] = field(default_factory=dict)
    meta: Mapping[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    value: Any = None


@dataclass(frozen=True, kw_only=True)
class UpdatePart:
    """How far a rank came with an update before it left: optimizer steps taken, of how many, its metrics of them."""

    steps: int
    of: int
    metrics: Mapping[str, Metric]


@dataclass(frozen=True, kw_only=True)
class ColumnSummary:
    """dtype, shape of a row and bytes of one rank's part of a column."""

    dtype: str
    row_shape: tuple[int | str, ...]
    nbytes: int

    def __str__(self) -> str:
        return f"{self.dtype} [{', '.join(('rows', *map(str, self.row_shape)))}]"


@dataclass(frozen=True, kw_only=True)
class Reply:
    """What the controller hears of one rank: never a tensor. stopped: where it left the stage, which was to stop."""

    rank: int
    columns: dict[str, ColumnSummary]
    metrics: Metrics
    meta: Mapping[str, Any]
    value: Any
    spans: list[Any]
    transfers: list[Any]
    syncs: list[Any]
    notes: tuple[str, ...] = ()
    failure: Failure | None = None
    stopped: UpdatePart | None = None


@dataclass(frozen=True, kw_only=True)
class Failure:
    """A rank's error: its class's name, message, frames (see `chain_of`), and the exception itself.

    remedy: what the host knows that would help. says_all: it is an error of ours, and none of the user's code led to
    it: its message needs no frames.
    Inline the exception keeps its traceback, so that `%debug` enters the frames of the worker and of the user's own
    functions (`exceptions` lists the chain there). Sent from another process it arrives without, or not at all where it
    does not pickle.
    """

    kind: str
    message: str
    chain: tuple[Raised, ...]
    error: BaseException | None
    remedy: str = ""
    says_all: bool = False

    @classmethod
    def of(cls, error: BaseException, remedy: str = "") -> Failure:
        """From an exception that was just caught."""
        chain = chain_of(error)
        if isinstance(error, WorkbenchError) and len(chain) > 1 and not _of_user(chain[-1]):
            chain = chain[:-1]  # its message is the whole error's, and how a function was called is no news
        says_all = isinstance(error, WorkbenchError) and not any(map(_of_user, chain))
        return cls(
            kind=type(error).__name__, message=str(error), chain=chain, error=error, remedy=remedy, says_all=says_all
        )

    @property
    def traceback(self) -> str:
        """Its frames as text."""
        return "\n".join(line for raised in self.chain for line in raised.lines({}))

    @property
    def likeness(self) -> tuple[Any, ...]:
        """Equal for failures of ranks that are told as one: raised at the same lines, or where none is known in the
        same words."""
        if not self.chain:
            return self.kind, self.message
        return self.kind, tuple((raised.kind, raised.frames) for raised in self.chain)

    def __getstate__(self) -> dict[str, Any]:
        state = dict(self.__dict__)
        try:
            pickle.loads(pickle.dumps(self.error))
        except Exception:
            state["error"] = None
        if self.error is not None:  # its frames hold on to this process's tensors
            self.error.__traceback__ = None
        return state


def _of_user(raised: Raised) -> bool:
    return any(isinstance(frame, Frame) and is_users(frame.file) for frame in raised.frames)


def column_summary(column: Column) -> ColumnSummary:
    """Describe one rank's part of a column."""
    from workbench.dataflow.columns import describe, nbytes

    dtype, row_shape = describe(column)
    return ColumnSummary(dtype=dtype, row_shape=row_shape, nbytes=nbytes(column))


def agreed_columns(replies: Sequence[Reply], writes: Sequence[str], where: str) -> dict[str, ColumnSummary]:
    """The columns of the ranks that make a stage's result, by name; bytes of all of them.

    Raises `StageError` naming operation, rank and column where ranks returned different columns, or not what the
    operation is registered to write. where: the operation, as "actor.compute_log_prob".
    """
    first = replies[0]
    expected = list(dict.fromkeys((*writes, *first.columns)))
    for reply in replies:
        missing = [name for name in expected if name not in reply.columns]
        if missing:
            raise StageError(
                f"{where} returned no column {missing[0]!r} on rank {reply.rank}",
                f"it is registered with writes={tuple(writes)!r}" if missing[0] in writes else f"rank {first.rank} did",
                "every rank returns Output(columns={...}) with the same names",
            )
        more = [name for name in reply.columns if name not in expected]
        if more:
            raise StageError(
                f"{where} returned column {more[0]!r} on rank {reply.rank}",
                f"rank {first.rank} did not",
                "every rank returns Output(columns={...}) with the same names",
            )
        for name, column in reply.columns.items():
            if (column.dtype, column.row_shape) != (first.columns[name].dtype, first.columns[name].row_shape):
                raise StageError(
                    f"{where} returned column {name!r} as {column} on rank {reply.rank}, "
                    f"as {first.columns[name]} on rank {first.rank}",
                    "a column has one dtype and one shape of a row",
                )
    return {
        name: replace(column, nbytes=sum(reply.columns[name].nbytes for reply in replies))
        for name, column in first.columns.items()
    }
