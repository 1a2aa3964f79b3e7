"""Where the rows of a column lie, and which of them a rank has to pull from whom. Pure index arithmetic."""

from __future__ import annotations

import heapq
import threading
import weakref
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeVar

import numpy as np

from workbench.errors import BadInput

if TYPE_CHECKING:
    from workbench.batches.columns import Table
    from workbench.batches.handle import BatchHandle
    from workbench.batches.vocabulary import Vocabulary


T = TypeVar("T")


class ShardId(NamedTuple):
    """One table in the memory of one host."""

    host: str
    key: str

    def now(self, shard_successors: Mapping[str, str]) -> ShardId:
        """Where it is today. shard_successors: of each host that has ended, the host that took its shards over."""
        found = self
        while found.host in shard_successors:
            found = ShardId(shard_successors[found.host], inherited(found.host, found.key))
        return found


def inherited(host: str, key: str) -> str:
    """The key that a shard of `host` has on the host that took it over: two may have had one of the same key."""
    return f"{host}/{key}"


class Pull(NamedTuple):
    """Rows `positions` of `shard` become rows `destinations` of the puller's table.

    name: of the column in that shard, where it was renamed since.
    """

    shard: ShardId
    positions: np.ndarray
    destinations: np.ndarray
    name: str = ""

    def kept(self, columns: tuple[str, ...]) -> tuple[str, ...]:
        """The names under which the shard keeps these columns."""
        return (self.name,) if self.name else columns

    def named(self, kept: Mapping[str, T], columns: Iterable[str]) -> Mapping[str, T]:
        """What the shard gave for `kept(columns)`, under the names of today."""
        return dict.fromkeys(columns, kept[self.name]) if self.name else kept


@dataclass(frozen=True, eq=False)
class Location:
    """Row i of the column is row `position[i]` of `shards[shard[i]]`.

    Selecting, repeating and reordering rows change only these two arrays: no tensor moves.

    names: of the column in each of the shards, where it was renamed; else empty, and it has its own name there.
    """

    shards: tuple[ShardId, ...]
    shard: np.ndarray
    position: np.ndarray
    names: tuple[str, ...] = ()

    @classmethod
    def of_parts(cls, parts: Sequence[tuple[ShardId, np.ndarray]]) -> Location:
        """From shards in whose order the rows given by number (each once) lie."""
        total = sum(len(rows) for _, rows in parts)
        shard = np.full(total, -1, dtype=np.int32)
        position = np.empty(total, dtype=np.int64)
        for i, (_, rows) in enumerate(parts):
            shard[rows] = i
            position[rows] = np.arange(len(rows))
        if (shard < 0).any():
            raise ValueError("every row number from 0 to rows - 1 must stand in exactly one part")
        return cls(tuple(shard_id for shard_id, _ in parts), shard, position)

    def __len__(self) -> int:
        return len(self.shard)

    def take(self, rows: np.ndarray) -> Location:
        return replace(self, shard=self.shard[rows], position=self.position[rows])

    def kept_as(self, name: str) -> Location:
        """For a column about to be renamed: its shards keep it under `name`, or the name before that."""
        return self if self.names else replace(self, names=(name,) * len(self.shards))

    @classmethod
    def concat(cls, parts: Sequence[Location]) -> Location:
        """Rows of several locations, end to end. A shard of several of them stands in the result once, so that copies
        of a row stay known as copies."""
        numbers: dict[tuple[ShardId, str], int] = {}
        shard = []
        for part in parts:
            entries = zip(part.shards, part.names or ("",) * len(part.shards), strict=True)
            renumbered = np.array([numbers.setdefault(entry, len(numbers)) for entry in entries], dtype=np.int32)
            shard.append(renumbered[part.shard])
        names = tuple(name for _, name in numbers)
        return cls(
            tuple(shard_id for shard_id, _ in numbers),
            np.concatenate(shard),
            np.concatenate([part.position for part in parts]),
            names if any(names) else (),
        )

    def same(self, other: Location) -> bool:
        """Whether both say that the same stored rows stand in the same order."""
        if self is other:
            return True
        equal = np.array_equal(self.shard, other.shard) and np.array_equal(self.position, other.position)
        return equal and (self.shards, self.names) == (other.shards, other.names)

    def occurrences(self) -> np.ndarray:
        """For each row, how many earlier rows are the same stored row: copies made by taking a row twice."""
        stored = self.shard * (self.position.max(initial=0) + 1) + self.position  # one number a stored row
        order = np.argsort(stored, kind="stable")
        starts = np.flatnonzero(np.diff(stored[order], prepend=-1))
        counts = np.empty(len(self), dtype=np.int64)
        counts[order] = np.arange(len(self)) - np.repeat(starts, np.diff(starts, append=len(self)))
        return counts

    def pulls(self, rows: np.ndarray) -> list[Pull]:
        """What a rank that needs `rows`, in this order, pulls: one entry a shard, linear in rows."""
        shard, position = self.shard[rows], self.position[rows]
        narrow = np.uint16 if len(self.shards) <= 2**16 else np.int32  # of 16 bits numpy sorts in linear time
        order = np.argsort(shard.astype(narrow), kind="stable")
        ordered = shard[order]
        cuts = (ordered[1:] != ordered[:-1]).nonzero()[0] + 1
        pulls = []
        for start, end in pairwise((0, *cuts.tolist(), len(order))):
            group = order[start:end]
            if len(group):
                number = shard[group[0]]
                name = self.names[number] if self.names else ""
                pulls.append(Pull(self.shards[number], position[group], group, name))
        return pulls


# --- row numbers on their way to a host ------------------------------------------------------------------------------


PackedRows = range | np.ndarray


def packed(rows: np.ndarray) -> PackedRows:
    """Row numbers [rows], not negative: consecutive ones as a range, others in the smallest dtype that holds them."""
    if len(rows) and bool((rows[1:] == rows[:-1] + 1).all()):
        return range(rows[0].item(), rows[-1].item() + 1)
    return rows.astype(np.min_scalar_type(int(rows.max(initial=0))))


def unpacked(rows: PackedRows) -> np.ndarray:
    """The row numbers that were packed, int64."""
    return np.arange(rows.start, rows.stop) if isinstance(rows, range) else rows.astype(np.int64)


Chunks = list[np.ndarray]  # the row numbers of one rank, one array a minibatch


def balanced_shares(tokens: np.ndarray, ranks: int) -> list[np.ndarray]:
    """For each rank its row numbers, ascending: as many as `np.array_split` gives it, with nearly equal sums of tokens.

    tokens: of each row, [rows], at least `ranks` of them.

    Longest first (Graham 1969, https://doi.org/10.1137/0117039), with counts given: from the longest row on, each goes
    to the rank with the fewest tokens that has room. On skewed lengths this came out closer than Karmarkar and Karp's
    differencing in its form for equal counts, which has to spread the longest rows over all ranks.
    """
    room = [len(part) for part in np.array_split(tokens, ranks)]
    shares: list[list[int]] = [[] for _ in room]
    open_ranks = [(0, rank) for rank in range(ranks)]
    for row in np.argsort(-tokens, kind="stable").tolist():
        held, rank = heapq.heappop(open_ranks)
        shares[rank].append(row)
        if len(shares[rank]) < room[rank]:
            heapq.heappush(open_ranks, (held + int(tokens[row]), rank))
    return [np.array(sorted(share)) for share in shares]


def minibatch_rows(rows: int, minibatches: int) -> Chunks:
    """Consecutive rows, cut into equally many minibatches."""
    if left := rows % minibatches:
        fewer = f"take batch.take(range({rows - left})), which leaves {left} out, or " if rows > minibatches else ""
        raise BadInput(
            f"{rows} rows in {minibatches} minibatches",
            "the minibatches of an update must be equally large",
            f"{fewer}assign a training.minibatches that divides {rows}",
        )
    return np.split(np.arange(rows), minibatches)


@dataclass(frozen=True, kw_only=True)
class Column:
    """dtype; shape of one row ("*": a length that varies); bytes of all rows; the role that made it; where it lies.

    made_with: a text that is equal for equal code and arguments of the stage that made it; empty for what was put.
    """

    dtype: str
    row_shape: tuple[int | str, ...]
    nbytes: int
    owner: str
    location: Location
    made_with: str = ""


class Maker(Protocol):
    """A run that makes columns of a batch. writes: their names. made, meta: those, and what travels along, once it is
    done. dependents: the batches that wait for it."""

    number: int
    name: str
    writes: tuple[str, ...]
    made: Mapping[str, Column]
    meta: Mapping[str, Any]
    dependents: list[weakref.ref[BatchHandle]]

    @property
    def state(self) -> str: ...

    def result(self) -> Any: ...


class RowProvider(Protocol):
    """What a batch asks of its workbench: rows brought here, lengths of ragged rows, text for tokens, and whose
    tokens they are; and to note of which batches another was made."""

    def pull(self, columns: Mapping[str, Column], rows: np.ndarray) -> Table: ...

    def lengths(self, name: str, location: Location) -> np.ndarray: ...

    def decode(self, token_ids: Sequence[int]) -> str: ...

    @property
    def vocabulary(self) -> Vocabulary: ...

    def derived(self, batch: Any, tool: str, inputs: Sequence[Any]) -> None: ...


class ShardCounts:
    """Counts the handles that refer to each shard; a shard that nobody refers to is due for release."""

    def __init__(self) -> None:
        self._counts: Counter[ShardId] = Counter()
        self._due: list[ShardId] = []
        self._lock = threading.RLock()

    def hold(self, location: Location) -> None:
        """Count `location` until it is garbage collected."""
        with self._lock:
            self._counts.update(location.shards)
        weakref.finalize(location, self._drop, location.shards).atexit = False

    def _drop(self, shards: tuple[ShardId, ...]) -> None:
        with self._lock:
            self._counts.subtract(shards)
            for shard in shards:
                if self._counts[shard] <= 0:
                    del self._counts[shard]
                    self._due.append(shard)

    def take_due(self) -> list[ShardId]:
        """The shards due for release, each given out once."""
        with self._lock:
            due, self._due = self._due, []
            return due
