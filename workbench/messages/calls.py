"""The call that the controller sends to a host for one stage, each rank's reply, and how replies are merged."""

from __future__ import annotations

import pickle
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from workbench.batches.columns import ColumnValues, Table, describe, nbytes
from workbench.batches.location import Pull, ShardId, packed, unpacked
from workbench.batches.schema import ScoredRows
from workbench.errors import StageError, WorkbenchError
from workbench.errors.frames import Frame, Raised, chain_of, is_users
from workbench.errors.plain_text import said
from workbench.messages.metrics import Metric, Metrics
from workbench.placement import host_name
from workbench.settings.engines import ShareMemory
from workbench.settings.training import Training


@dataclass(frozen=True, kw_only=True)
class FailedRows:
    """The rows of a rank for which a user's function failed. not_asked: how many of them were never given to it. row,
    first: the first failed row's number in the batch, and its error. most: the share of rows that may fail."""

    count: int
    not_asked: int
    row: int
    most: float
    first: Failure


@dataclass(frozen=True, kw_only=True)
class Output:
    """An operation's result on one rank: new columns (rows as in its shard), metrics, meta for the batch, a value.

    metrics: by name; a plain number is a `Mean` that counts once for each rank. notes: messages for the cell's output,
    such as why an optimizer step was skipped. failed: failed rows, still in the columns. scored: for rewards.
    """

    columns: Table = field(default_factory=dict)
    metrics: Mapping[str, Metric | float] = field(default_factory=dict)
    meta: Mapping[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    value: Any = None
    failed: FailedRows | None = None
    scored: ScoredRows | None = None


@dataclass(frozen=True, kw_only=True)
class UpdatePart:
    """A rank's progress with an update when it stopped or failed: optimizer steps taken, steps in all, and metrics."""

    steps: int
    of: int
    metrics: Mapping[str, Metric]


@dataclass(frozen=True, kw_only=True)
class ColumnSummary:
    """The dtype, row shape and size in bytes of one rank's part of a column."""

    dtype: str
    row_shape: tuple[int | str, ...]
    nbytes: int

    def __str__(self) -> str:
        return f"{self.dtype} [{', '.join(('rows', *map(str, self.row_shape)))}]"


class PeerFailed(StageError):
    """This rank did not fail itself; it stopped because another rank of the stage failed."""


@dataclass(frozen=True, kw_only=True)
class Reply:
    """The reply of one rank to the controller, without tensors. stopped: the progress of an update that was stopped."""

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
    failed: FailedRows | None = None
    scored: ScoredRows | None = None


@dataclass(frozen=True, kw_only=True)
class Failure:
    """A rank's error: its class name, message, frames (see `chain_of`), and the exception itself.

    remedy: a remedy that the host knows. says_all: whether the message is enough: an error of ours without user frames.
    With the inline backend the exception keeps its traceback, so that `%debug` enters the frames of the worker and of
    the user's functions (`exceptions` lists the chain there). An exception from another process arrives without its
    traceback; one that cannot be pickled does not arrive.
    """

    kind: str
    message: str
    chain: tuple[Raised, ...]
    error: BaseException | None
    remedy: str = ""
    says_all: bool = False

    @classmethod
    def of(cls, error: BaseException, remedy: str = "") -> Failure:
        """Return the failure for a just caught exception."""
        chain = chain_of(error)
        if isinstance(error, WorkbenchError) and len(chain) > 1 and not _has_user_frames(chain[-1]):
            chain = chain[:-1]  # its message is the error's, and its frames only show how we called the user's function
        says_all = isinstance(error, WorkbenchError) and not any(map(_has_user_frames, chain))
        return cls(
            kind=type(error).__name__, message=said(error), chain=chain, error=error, remedy=remedy, says_all=says_all
        )

    @property
    def merge_key(self) -> tuple[Any, ...]:
        """A key that is equal for failures that are reported as one: raised at the same lines, or, where no lines are
        known, with the same message."""
        if not self.chain:
            return self.kind, self.message
        return self.kind, tuple((raised.kind, raised.frames) for raised in self.chain)

    def __getstate__(self) -> dict[str, Any]:
        state = dict(self.__dict__)
        try:
            pickle.loads(pickle.dumps(self.error))
        except BaseException:  # a user's class may raise anything
            state["error"] = None
        if self.error is not None:  # its traceback keeps this process's tensors alive
            self.error.__traceback__ = None
        return state


def _has_user_frames(raised: Raised) -> bool:
    return any(isinstance(frame, Frame) and is_users(frame.file) for frame in raised.frames)


def column_summary(column: ColumnValues) -> ColumnSummary:
    """Describe one rank's part of a column."""
    dtype, row_shape = describe(column)
    return ColumnSummary(dtype=dtype, row_shape=row_shape, nbytes=nbytes(column))


def agreed_columns(replies: Sequence[Reply], writes: Sequence[str], where: str) -> dict[str, ColumnSummary]:
    """Return the columns of a stage's result by name, with the bytes of all ranks added up.

    Raises `StageError` naming operation, rank and column if ranks returned different columns, or columns other than the
    operation is registered to write. where: the operation, as "actor.compute_log_prob".
    """
    first = replies[0]
    expected = dict.fromkeys((*writes, *first.columns))
    for reply in replies:
        for name in (*expected, *reply.columns):
            here, there = name in reply.columns, name in expected
            if here != there:
                raise StageError(
                    f"{where} returned {'column' if here else 'no column'} {name!r} on rank {reply.rank}",
                    f"it is registered with writes={tuple(writes)!r}" if name in writes
                    else f"rank {first.rank} did{' not' if here else ''}",
                    "every rank must return Output(columns={...}) with the same names",
                )  # fmt: skip
        for name, column in reply.columns.items():
            if (column.dtype, column.row_shape) != (first.columns[name].dtype, first.columns[name].row_shape):
                raise StageError(
                    f"{where} returned column {name!r} as {column} on rank {reply.rank}, "
                    f"as {first.columns[name]} on rank {first.rank}",
                    "a column must have the same dtype and row shape on all ranks",
                )
    return {
        name: replace(column, nbytes=sum(reply.columns[name].nbytes for reply in replies))
        for name, column in first.columns.items()
    }


@dataclass(frozen=True, kw_only=True)
class HostInfo:
    """The identity of a host: one process on one device, rank `rank` of its pool's process group.

    lab: the workbench's id. share_memory: see `workbench.open`. again: how many earlier pools of that name `lab.move`
    has ended. tensor_ranks: the number of adjacent ranks that exchange activations in each layer of a role. gpus: GPUs
    of its device: 1, a share of a GPU, or 0.
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
    tensor_ranks: int = 1
    gpus: float = 0.0

    @property
    def name(self) -> str:
        """The host's name; unique over the workbench's lifetime, because batches refer to hosts that made them."""
        return host_name(self.pool, self.rank, self.again)

    @property
    def peers(self) -> tuple[str, ...]:
        """The names of all hosts of this pool, by rank."""
        return tuple(replace(self, rank=rank).name for rank in range(self.world_size))

    @property
    def offloads(self) -> bool:
        """Whether roles that do not compute are moved to host memory."""
        return self.share_memory == "always" or (bool(self.share_memory) and self.device.startswith("cuda"))


@dataclass(frozen=True, kw_only=True)
class Call:
    """One rank's part of a stage.

    kept: the shard that the output becomes, on this host or another; None: the output is dropped, because this rank is
    not part of the result. released: keys of shards to forget first. updates, resume_from: whether the call updates the
    role, and where an interrupted update continues. training: the settings of the update. all_valid: whether invalid
    rows are refused. pulls: for each set of columns, which rows to pull from which shard.

    A pickled call takes a few bytes per row at most, so that the controller's messages stay small.
    """

    run: int
    stage: str
    role: str
    method: str
    kept: ShardId | None = None
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
    resume_from: UpdatePart | None = None
    training: Training | None = None
    all_valid: bool = False
    released: Sequence[str] = ()

    def parts(self) -> tuple[dict[str, Any], bytes]:
        """Return the fields that all ranks share, and this rank's own fields pickled (they contain no user code)."""
        common = self.__getstate__()
        own = ("kept", "pulls", "rows", "minibatch_sizes", "sample", "resume_from", "released")
        return common, pickle.dumps({name: common.pop(name) for name in own})

    @classmethod
    def of_parts(cls, common: Mapping[str, Any], own: bytes) -> Call:
        """Return the call from the result of `parts`."""
        call = cls.__new__(cls)
        call.__setstate__({**common, **pickle.loads(own)})
        return call

    def __getstate__(self) -> dict[str, Any]:
        pulls = tuple(
            (names, tuple((p.shard, packed(p.positions), packed(p.destinations), p.name) for p in parts))
            for names, parts in self.pulls
        )
        rows, sample = (None if numbers is None else packed(numbers) for numbers in (self.rows, self.sample))
        return {**self.__dict__, "pulls": pulls, "rows": rows, "sample": sample}

    def __setstate__(self, state: dict[str, Any]) -> None:
        pulls = tuple(
            (names, tuple(Pull(shard, unpacked(rows), unpacked(there), name) for shard, rows, there, name in parts))
            for names, parts in state["pulls"]
        )
        rows, sample = (None if numbers is None else unpacked(numbers) for numbers in (state["rows"], state["sample"]))
        self.__dict__.update(state, pulls=pulls, rows=rows, sample=sample)
