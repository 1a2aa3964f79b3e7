"""What the controller sends to a host for one stage, what each rank answers, and how the answers are joined."""

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
    """Rows of a rank for which a function of the user's failed: how many, the number in the batch of the first, and
    its error. not_asked: of these, those that were not asked any more. most: the share of rows that may fail."""

    count: int
    not_asked: int
    row: int
    most: float
    first: Failure


@dataclass(frozen=True, kw_only=True)
class Output:
    """What an operation gives on one rank: new columns (rows as in its shard), metrics, meta for the batch, a value.

    metrics: by name; a plain number is a `Mean` that counts once for each rank. notes: what is to be said in the cell,
    such as why an optimizer step was skipped. failed: rows that are in the columns, and failed. scored: of rewards.
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
    """How far a rank came with an update before it stopped or failed: optimizer steps taken, of how many, and their
    metrics."""

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


class PeerFailed(StageError):
    """On this rank nothing went wrong: it did not go on, because another rank of the stage failed."""


@dataclass(frozen=True, kw_only=True)
class Reply:
    """The answer of one rank to the controller, without tensors. stopped: where a stopped rank left the stage."""

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
    """A rank's error: its class's name, message, frames (see `chain_of`), and the exception itself.

    remedy: a remedy that the host knows. says_all: an error of ours without frames of the user's code: its message is
    enough.
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
            kind=type(error).__name__, message=said(error), chain=chain, error=error, remedy=remedy, says_all=says_all
        )

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
        except BaseException:  # that of any class
            state["error"] = None
        if self.error is not None:  # its frames hold on to this process's tensors
            self.error.__traceback__ = None
        return state


def _of_user(raised: Raised) -> bool:
    return any(isinstance(frame, Frame) and is_users(frame.file) for frame in raised.frames)


def column_summary(column: ColumnValues) -> ColumnSummary:
    """Describe one rank's part of a column."""
    dtype, row_shape = describe(column)
    return ColumnSummary(dtype=dtype, row_shape=row_shape, nbytes=nbytes(column))


def agreed_columns(replies: Sequence[Reply], writes: Sequence[str], where: str) -> dict[str, ColumnSummary]:
    """The columns of the ranks that make a stage's result, by name; bytes of all of them.

    Raises `StageError` naming operation, rank and column where ranks returned different columns, or not what the
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
                    "every rank returns Output(columns={...}) with the same names",
                )  # fmt: skip
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


@dataclass(frozen=True, kw_only=True)
class HostInfo:
    """Who a host is: one process on one device, rank `rank` of its pool's process group.

    lab: the workbench's id. share_memory: see `workbench.open`. again: how many earlier pools of that name `lab.move`
    has ended. tensor_ranks: so many ranks that stand side by side exchange activations in each layer of a role. gpus:
    its device is one, a share of one, or none: 0.
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
        """Unique in the life of its workbench, because batches refer to the hosts that made them."""
        return host_name(self.pool, self.rank, self.again)

    @property
    def peers(self) -> tuple[str, ...]:
        """The names of its pool's hosts, by rank."""
        return tuple(replace(self, rank=rank).name for rank in range(self.world_size))

    @property
    def offloads(self) -> bool:
        """Whether roles that do not compute are moved to host memory."""
        return self.share_memory == "always" or (bool(self.share_memory) and self.device.startswith("cuda"))


@dataclass(frozen=True, kw_only=True)
class Call:
    """One rank's part of a stage.

    kept: the shard that its output becomes, of this host or of another; None: it is dropped, as that of ranks which are
    no part of the result. released: keys of shards to be forgotten before. updates, resume_from: whether it updates the
    role, and where an interrupted update goes on. training: how an update trains the role. all_valid: whether rows that
    are not valid are refused. pulls: for each set of columns, which rows to pull from which shard.

    Pickled, it takes few bytes a row at most, so that the controller's messages stay small however many rows there are.
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
        """What other ranks are sent too, and what is this rank's own, pickled: no code of the user's is in it."""
        common = self.__getstate__()
        own = ("kept", "pulls", "rows", "minibatch_sizes", "sample", "resume_from", "released")
        return common, pickle.dumps({name: common.pop(name) for name in own})

    @classmethod
    def of_parts(cls, common: Mapping[str, Any], own: bytes) -> Call:
        """The call that `parts` took apart."""
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
