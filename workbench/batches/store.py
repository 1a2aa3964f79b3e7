"""The store of batches by name and version, with their origin. It keeps a batch until it is released or evicted."""

from __future__ import annotations

import secrets
import time
import warnings
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd

from workbench.errors import NotFound
from workbench.support.validation import whole

if TYPE_CHECKING:
    from workbench.batches.batch import Batch
    from workbench.batches.location import Column


# Above a limit, the store also releases this share of it, so that the next stage does not have to release again.
SLACK = 0.1


@dataclass(frozen=True, kw_only=True)
class Weights:
    """The weights of a role: the number of optimizer steps, and a text that is unique to this state of the role."""

    steps: int
    state: str

    @classmethod
    def fresh(cls, steps: int) -> Weights:
        """Return weights that differ from all others, also from others with as many steps."""
        return cls(steps=steps, state=secrets.token_hex(4))


@dataclass(frozen=True, kw_only=True)
class Origin:
    """The origin of a batch.

    stage: "role.operation", "put", or a batch's own method. inputs: names of the batches that it was made from.
    weights_version: optimizer steps of the role's weights; None for a role without weights. weights_state:
    distinguishes weights with equally many steps, such as those of branches. code: a short text that is equal for equal
    code and arguments. travelled: the columns that were sent to the ranks. meta_in, meta_out: the meta sent with them,
    and the entries that the stage added. metrics: as the stage reported them.
    """

    stage: str
    run: int | None = None
    inputs: tuple[str, ...] = ()
    arguments: Mapping[str, Any] = field(default_factory=dict)
    weights_version: int | None = None
    weights_state: str = ""
    seed: tuple[int, ...] = ()
    travelled: tuple[str, ...] = ()
    meta_in: Mapping[str, Any] = field(default_factory=dict)
    meta_out: Mapping[str, Any] = field(default_factory=dict)
    code: str = ""
    metrics: Mapping[str, float] = field(default_factory=dict)


@dataclass(kw_only=True)
class _Entry:
    """The store's record of a batch. kept: the store's own handle; None for a batch that was only noted, or evicted.
    file: the file with an evicted batch's columns."""

    origin: Origin
    made_s: float
    rows: int
    columns: tuple[str, ...]
    by_loop: bool
    version: int
    versions: Iterator[int]
    handle: weakref.ref[Batch]
    kept: Batch | None
    file: Path | None = None
    meta: Mapping[str, Any] = field(default_factory=dict)

    @property
    def batch(self) -> Batch | None:
        """The batch if it is on the hosts; else None."""
        return self.handle() or self.kept


class Store:
    """Batches by "name vversion". Keeps batches on the hosts up to `limit_bytes` and `limit_batches` (each batch also
    takes memory in the kernel): assignable whole numbers from 0 on. Above a limit it evicts batches that the notebook
    does not hold, oldest first: a batch of a cell is written to `folder`, a batch of a loop is dropped."""

    def __init__(self, folder: Path, limit_bytes: int) -> None:
        self.folder, self.limit_bytes, self.limit_batches = folder, limit_bytes, 500
        self._entries: dict[str, _Entry] = {}
        self._most_bytes = 0  # an upper bound of the resident bytes: the last count plus the columns added since

    def __setattr__(self, name: str, value: Any) -> None:
        if name in ("limit_bytes", "limit_batches"):
            whole(f"store.{name}", value, 0)
        super().__setattr__(name, value)

    def add(self, batch: Batch, origin: Origin, made: Iterable[Column], *, by_loop: bool) -> None:
        """Keep a batch. made: its new columns, which no other batch has."""
        self.note(batch, origin, by_loop=by_loop)
        self._entries[batch.id].kept = batch.twin()
        self._most_bytes += sum(column.nbytes for column in made)

    def note(self, batch: Batch, origin: Origin, *, by_loop: bool) -> None:
        """Record a batch's origin without keeping the batch: other batches, which are kept, have its columns."""
        self._entries[batch.id] = _Entry(
            origin=origin,
            made_s=time.time(),
            rows=batch.rows,
            columns=batch.names,
            by_loop=by_loop,
            version=batch.version,
            versions=batch.versions,
            handle=weakref.ref(batch),
            kept=None,
        )

    def resident_bytes(self) -> int:
        """Return the bytes of all columns that are kept on the hosts, counting each column once."""
        columns: dict[tuple[int, str], Column] = {}
        for entry in list(self._entries.values()):
            batch = entry.batch
            if batch is not None and not batch.pending:
                columns |= {(id(column.location), name): column for name, column in batch.columns.items()}
        return sum(column.nbytes for column in columns.values())

    def trim(self, save: Callable[[Batch, Path], Path]) -> None:
        """Evict batches above the limits that the notebook does not hold. save: writes a batch to a file, and returns
        the file's path."""
        if self._most_bytes > self.limit_bytes:
            self._most_bytes = self.resident_bytes()
        too_large = self._most_bytes > self.limit_bytes
        count = sum(entry.kept is not None for entry in list(self._entries.values()))  # another thread may add
        too_many = count > self.limit_batches
        for name, entry in list(self._entries.items()):
            too_large = too_large and self._most_bytes > (1 - SLACK) * self.limit_bytes
            too_many = too_many and count > (1 - SLACK) * self.limit_batches
            if not (too_large or too_many):
                return
            kept = entry.kept
            if entry.handle() is not None or (kept is not None and kept.pending):
                continue
            if kept is not None:
                if not (entry.by_loop or entry.file):  # a batch that was read from its file is still there
                    self.folder.mkdir(parents=True, exist_ok=True)
                    try:
                        entry.file = save(kept, self.file_of(name))
                    except Exception as error:  # a batch that cannot be written stays in memory, and the stage goes on
                        warnings.warn(f"{name} stays in memory: {error}", stacklevel=2)
                        continue
                entry.columns, entry.meta, entry.kept = tuple(kept.columns), dict(kept.meta), None
                del kept  # its memory is counted below
                count -= 1
                if too_large:
                    self._most_bytes = self.resident_bytes()
            if entry.by_loop and entry.file is None:
                del self._entries[name]

    def release(self, name: str) -> None:
        """Forget a batch, or all versions of a name. The notebook's handles keep their memory."""
        gone = [full for full in list(self._entries) if name in (full, full.rpartition(" ")[0])]
        if not gone:
            raise self._unknown(name)
        for full in gone:
            entry = self._entries.pop(full)
            if entry.file is not None:
                entry.file.unlink(missing_ok=True)

    def get(self, name: str, load: Callable[[Path], Batch]) -> Batch:
        """Return a batch by "name vversion", or the newest version of a name. Reads an evicted batch from its file."""
        newest = (known for known in reversed(list(self._entries)) if known.startswith(f"{name} v"))
        full = name if name in self._entries else next(newest, "")
        if not full:
            raise self._unknown(name)
        entry = self._entries[full]
        batch = entry.batch
        if batch is not None:
            return batch
        if entry.file is None:
            raise self._unknown(full)
        before = set(self._entries)
        loaded = load(entry.file)
        for part in set(self._entries) - before:  # the batch already has its entry
            del self._entries[part]
        batch = loaded.known_as(full.rpartition(" ")[0], entry.version, entry.versions, entry.columns, entry.meta)
        entry.handle, entry.kept = weakref.ref(batch), batch.twin()
        return batch

    def _unknown(self, name: str) -> NotFound:
        known = ", ".join(list(self._entries)[-6:]) or "none"
        return NotFound(f"no batch {name!r} in the store", f"the newest are: {known}", "see lab.batches()")

    def kept(self, name: str) -> Batch | None:
        """Return a batch that is whole and on the hosts; None for others."""
        entry = self._entries.get(name)
        batch = None if entry is None else entry.batch
        return batch if batch is not None and not batch.pending else None

    def forget_hosts(self, hosts: Collection[str]) -> None:
        """Forget batches that lay on hosts that are gone, unless they are in files."""
        for name, entry in list(self._entries.items()):
            batch = entry.batch
            if batch is None or batch.pending:
                continue
            if any(shard.host in hosts for column in batch.columns.values() for shard in column.location.shards):
                if entry.file is None:
                    del self._entries[name]
                else:
                    entry.kept, entry.handle = None, lambda: None  # type: ignore[assignment]

    def by_loop(self, name: str) -> bool:
        """Whether a loop made the batch, not a cell."""
        return self._entries[name].by_loop

    def filed(self, name: str) -> tuple[tuple[str, ...], dict[str, Any]] | None:
        """Return columns and meta of a batch that the store has in a file; None for others."""
        entry = self._entries[name]
        return None if entry.file is None else (entry.columns, dict(entry.meta))

    def file_of(self, name: str) -> Path:
        """Return the path of the file for an evicted batch."""
        return self.folder / f"{name.replace(' ', '-')}.safetensors"

    def add_file(
        self, name: str, file: Path, origin: Origin, columns: tuple[str, ...], meta: Mapping[str, Any],
        versions: Iterator[int],
    ) -> None:  # fmt: skip
        """Record a batch that is only in a file."""
        self._entries[name] = _Entry(
            origin=origin, made_s=file.stat().st_mtime, rows=0, columns=columns, by_loop=False,
            version=int(name.rpartition(" v")[2]), versions=versions, handle=lambda: None,  # type: ignore[arg-type]
            kept=None, file=file, meta=meta,
        )  # fmt: skip

    def origin(self, name: str) -> Origin | None:
        """Return the origin of a batch; None for an unknown batch."""
        entry = self._entries.get(name)
        return None if entry is None else entry.origin

    def column_names(self, name: str) -> tuple[str, ...]:
        """Return the names of a batch's columns, also of columns that are being made; () for an unknown batch."""
        entry = self._entries.get(name)
        if entry is None:
            return ()
        batch = entry.batch
        return entry.columns if batch is None else batch.names

    def iteration(self, name: str) -> int | None:
        """Return the iteration of a batch, as far as it is known without waiting; None for a batch without one."""
        entry = self._entries.get(name)
        if entry is None:
            return None
        batch = entry.batch
        found = (entry.meta or entry.origin.meta_in) if batch is None else batch.finished_columns(())[1]
        return None if "iteration" not in found else int(found["iteration"])

    def __iter__(self) -> Iterator[str]:
        return iter(list(self._entries))

    def frame(self) -> pd.DataFrame:
        """Return a frame with one row per batch, in order: the stage that made it, its inputs, size and place."""
        rows = []
        for name, entry in list(self._entries.items()):
            batch = entry.batch
            rows.append(
                {
                    "batch": name,
                    "stage": entry.origin.stage,
                    "inputs": ", ".join(entry.origin.inputs),
                    "rows": entry.rows,
                    "columns": len(entry.columns),
                    "size_bytes": 0 if batch is None or batch.pending else batch.nbytes,
                    "where": "hosts" if entry.batch is not None else "file" if entry.file else "gone",
                    "held": entry.handle() is not None,
                    "weights_version": entry.origin.weights_version,
                    "run": entry.origin.run,
                    "code": entry.origin.code,
                    "made_s": entry.made_s,
                }
            )
        frame = pd.DataFrame(rows)
        if rows:
            frame[["weights_version", "run"]] = frame[["weights_version", "run"]].astype("Int64")
        return frame

    def lineage(self, name: str) -> pd.DataFrame:
        """Return a frame of the batch and of all batches that it was made from, newest first."""
        frame, wanted = self.frame(), [name]
        for current in wanted:  # grows
            origin = self.origin(current)
            wanted += [one for one in origin.inputs if one not in wanted] if origin is not None else ()
        columns = ["batch", "stage", "inputs", "weights_version", "code", "run"]
        if not len(frame):
            return frame
        return frame[frame["batch"].isin(wanted)][columns].iloc[::-1].reset_index(drop=True)
