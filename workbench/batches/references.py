"""What a handle refers to: columns on hosts, and how many handles refer to each shard."""

from __future__ import annotations

import threading
import weakref
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from workbench.batches.location import Location, ShardId

if TYPE_CHECKING:
    from workbench.batches.columns import Table
    from workbench.batches.vocabulary import Vocabulary


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


class Settled(Protocol):
    """A batch that takes over what its makers have made."""

    def settle(self, *, wait: bool = True) -> None: ...


class Maker(Protocol):
    """A run that makes columns of a batch. writes: their names. made, meta: those, and what travels along, once it is
    done. dependents: the batches that wait for it."""

    number: int
    name: str
    writes: tuple[str, ...]
    made: Mapping[str, Column]
    meta: Mapping[str, Any]
    dependents: list[weakref.ref[Settled]]

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
