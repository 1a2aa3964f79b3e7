"""Where the rows of a column lie, and which rows a rank has to pull from which shard. Pure index arithmetic."""

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
        """Return the shard's present id. shard_successors: by ended host, the host that took over its shards."""
        found = self
        while found.host in shard_successors:
            found = ShardId(shard_successors[found.host], inherited(found.host, found.key))
        return found


def inherited(host: str, key: str) -> str:
    """Return the key of a shard of `host` on the host that took it over. Both hosts may have had the same key."""
    return f"{host}/{key}"


class Pull(NamedTuple):
    """Rows `positions` of `shard` become rows `destinations` of the puller's table.

    name: the column's name in that shard, if it was renamed since; else "".
    """

    shard: ShardId
    positions: np.ndarray
    destinations: np.ndarray
    name: str = ""

    def stored_names(self, columns: tuple[str, ...]) -> tuple[str, ...]:
        """Return the names under which the shard keeps these columns."""
        return (self.name,) if self.name else columns

    def renamed(self, stored: Mapping[str, T], columns: Iterable[str]) -> Mapping[str, T]:
        """Return the shard's columns under their present names. stored: by `self.stored_names(columns)`."""
        return dict.fromkeys(columns, stored[self.name]) if self.name else stored


@dataclass(frozen=True, eq=False)
class Location:
    """Row i of the column is row `position[i]` of `shards[shard[i]]`.

    Selecting, repeating and reordering rows change only these two arrays: no tensor moves.

    names: the column's name in each of the shards, if it was renamed; else empty, and the names are equal.
    """

    shards: tuple[ShardId, ...]
    shard: np.ndarray
    position: np.ndarray
    names: tuple[str, ...] = ()

    @classmethod
    def of_parts(cls, parts: Sequence[tuple[ShardId, np.ndarray]]) -> Location:
        """Return the location for (shard, numbers of its rows in order) pairs; every row number occurs once."""
        total = sum(len(rows) for _, rows in parts)
        shard = np.full(total, -1, dtype=np.int32)
        position = np.empty(total, dtype=np.int64)
        for i, (_, rows) in enumerate(parts):
            shard[rows] = i
            position[rows] = np.arange(len(rows))
        if (shard < 0).any():
            raise ValueError("every row number from 0 to rows - 1 must be in exactly one part")
        return cls(tuple(shard_id for shard_id, _ in parts), shard, position)

    def __len__(self) -> int:
        return len(self.shard)

    def take(self, rows: np.ndarray) -> Location:
        return replace(self, shard=self.shard[rows], position=self.position[rows])

    def stored_as(self, name: str) -> Location:
        """Return the location of a column to be renamed: its shards keep it under `name`, or an even older name."""
        return self if self.names else replace(self, names=(name,) * len(self.shards))

    @classmethod
    def concat(cls, parts: Sequence[Location]) -> Location:
        """Return the rows of several locations, end to end. A shard of several locations occurs once in the result, so
        that copies of a row are still recognized."""
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
        """Whether both locations have the same stored rows in the same order."""
        equal = np.array_equal(self.shard, other.shard) and np.array_equal(self.position, other.position)
        return equal and (self.shards, self.names) == (other.shards, other.names)

    def occurrences(self) -> np.ndarray:
        """Return for each row the number of earlier rows that are copies of the same stored row, int64 [rows]."""
        stored = self.shard * (self.position.max(initial=0) + 1) + self.position  # one number per stored row
        order = np.argsort(stored, kind="stable")
        starts = np.flatnonzero(np.diff(stored[order], prepend=-1))
        counts = np.empty(len(self), dtype=np.int64)
        counts[order] = np.arange(len(self)) - np.repeat(starts, np.diff(starts, append=len(self)))
        return counts

    def pulls(self, rows: np.ndarray) -> list[Pull]:
        """Return the pulls of a rank that needs `rows` in this order: one per shard, in time linear in rows."""
        shard, position = self.shard[rows], self.position[rows]
        narrow = np.uint16 if len(self.shards) <= 2**16 else np.int32  # NumPy sorts 16-bit numbers in linear time
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
    """Return row numbers [rows], not negative, as a range if they are consecutive, else in the smallest dtype."""
    if len(rows) and bool((rows[1:] == rows[:-1] + 1).all()):
        return range(rows[0].item(), rows[-1].item() + 1)
    return rows.astype(np.min_scalar_type(int(rows.max(initial=0))))


def unpacked(rows: PackedRows) -> np.ndarray:
    """Return the row numbers from a result of `packed`, int64."""
    return np.arange(rows.start, rows.stop) if isinstance(rows, range) else rows.astype(np.int64)


Chunks = list[np.ndarray]  # the row numbers of one rank, one array per minibatch


def balanced_shares(tokens: np.ndarray, ranks: int) -> list[np.ndarray]:
    """Return each rank's row numbers, ascending: as many as by `np.array_split`, with nearly equal sums of tokens.

    tokens: the number of tokens of each row, [rows], with at least `ranks` rows.

    Longest first (Graham 1969, https://doi.org/10.1137/0117039), with fixed counts: each row, from the longest on, goes
    to the rank with the fewest tokens that has room. For skewed lengths this was more even than Karmarkar and Karp's
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
    """Cut consecutive rows into equally large minibatches; raise `BadInput` if the number does not divide."""
    if left := rows % minibatches:
        fewer = f"use batch.take(range({rows - left})), which leaves {left} out, or " if rows > minibatches else ""
        raise BadInput(
            f"{rows} rows in {minibatches} minibatches",
            "the minibatches of an update must be equally large",
            f"{fewer}set training.minibatches to a divisor of {rows}",
        )
    return np.split(np.arange(rows), minibatches)


@dataclass(frozen=True, kw_only=True)
class Column:
    """A column of a batch. row_shape: the shape of one row ("*": a varying length). nbytes: bytes of all rows.

    owner: the role that made the column. made_with: equal for equal code and arguments of the stage; "" if put.
    """

    dtype: str
    row_shape: tuple[int | str, ...]
    nbytes: int
    owner: str
    location: Location
    made_with: str = ""


class Maker(Protocol):
    """A run that makes columns of a batch. writes: their names. made_columns, meta: the columns, and the entries of the
    batch's meta, once the run is done. dependents: the batches that wait for the run."""

    number: int
    name: str
    writes: tuple[str, ...]
    made_columns: Mapping[str, Column]
    meta: Mapping[str, Any]
    dependents: list[weakref.ref[BatchHandle]]

    @property
    def state(self) -> str: ...

    def result(self) -> Any: ...


class RowProvider(Protocol):
    """The services of a workbench for its batches: pull rows into this process, count tokens of ragged rows, decode
    tokens, name the vocabulary, and record from which batches a batch was derived."""

    def pull(self, columns: Mapping[str, Column], rows: np.ndarray) -> Table: ...

    def lengths(self, name: str, location: Location) -> np.ndarray: ...

    def decode(self, token_ids: Sequence[int]) -> str: ...

    @property
    def vocabulary(self) -> Vocabulary: ...

    def derived(self, batch: Any, tool: str, inputs: Sequence[Any]) -> None: ...


class ShardCounts:
    """Counts the locations that refer to each shard; a shard without references is due for release."""

    def __init__(self) -> None:
        self._counts: Counter[ShardId] = Counter()
        self._due: list[ShardId] = []
        self._lock = threading.RLock()

    def hold(self, location: Location) -> None:
        """Count the shards of `location` as referred to until it is garbage collected."""
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
        """Return the shards due for release, each only once."""
        with self._lock:
            due, self._due = self._due, []
            return due
