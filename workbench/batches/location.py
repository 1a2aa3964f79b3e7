"""Where the rows of a column lie, and which of them a rank has to pull from whom. Pure index arithmetic."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, TypeVar

import numpy as np

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
        """The location of a choice of rows."""
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
        cuts = np.flatnonzero(np.diff(shard[order])) + 1
        pulls = []
        for group in np.split(order, cuts):
            if len(group):
                number = shard[group[0]]
                name = self.names[number] if self.names else ""
                pulls.append(Pull(self.shards[number], position[group], group, name))
        return pulls


# --- row numbers on their way to a host: small, because most of them are runs of consecutive numbers -----------------


class PackedRows(NamedTuple):
    """Run i is `counts[i]` consecutive numbers from `starts[i]`; without `counts`, `starts` are the numbers."""

    starts: np.ndarray
    counts: np.ndarray | None

    def unpack(self) -> np.ndarray:
        """The row numbers [rows], int64."""
        starts = self.starts.astype(np.int64)
        if self.counts is None:
            return starts
        counts = self.counts.astype(np.int64)
        before = np.cumsum(counts) - counts
        return np.arange(counts.sum()) + np.repeat(starts - before, counts)


def pack(rows: np.ndarray) -> PackedRows:
    """Row numbers [rows], not negative, in few bytes; linear in rows."""
    first = np.flatnonzero(np.diff(rows, prepend=-2) != 1)
    if 2 * len(first) < len(rows):
        return PackedRows(_narrow(rows[first]), _narrow(np.diff(first, append=len(rows))))
    return PackedRows(_narrow(rows), None)


def _narrow(numbers: np.ndarray) -> np.ndarray:
    return numbers.astype(np.min_scalar_type(int(numbers.max()))) if len(numbers) else numbers
