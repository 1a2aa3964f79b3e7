"""What stages made, by name and version, with where it came from; kept until it is released or pushed out."""

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


# Beyond the limit, this part of it is released on top, so that the next stage does not have to release again.
SLACK = 0.1


@dataclass(frozen=True, kw_only=True)
class Weights:
    """Which weights a role has: optimizer steps, and a text that no other state of it has."""

    steps: int
    state: str

    @classmethod
    def fresh(cls, steps: int) -> Weights:
        """Weights that equal no others, however many steps those have had."""
        return cls(steps=steps, state=secrets.token_hex(4))


@dataclass(frozen=True, kw_only=True)
class Origin:
    """Where a batch came from.

    stage: "role.operation", "put", or a batch's own method. inputs: names of the batches that it was made of.
    weights_version: optimizer steps of the role's weights; None for a role that has none. weights_state: tells weights
    of equally many steps apart, as branches have them. code: a short text that is
    equal for equal code and arguments. travelled: the columns that went to the ranks. meta_in, meta_out: what travelled
    along with them, and what the stage added to it. metrics: what the stage reported.
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
    """What is known of a batch. kept: a handle of its own; None for one that was only noted, or pushed out. file: where
    the columns of one that was pushed out are."""

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
        """The batch, where it is on the hosts."""
        return self.handle() or self.kept


class Store:
    """Batches by "name vversion". Holds them on the hosts up to `limit_bytes` and `limit_batches` (each takes memory in
    the kernel too, however few rows it has), whole numbers from 0 on, which may be set; beyond either, those that the
    notebook does not hold go, oldest first: what a cell made is written to `folder` before, what a loop made is
    dropped."""

    def __init__(self, folder: Path, limit_bytes: int) -> None:
        self.folder, self.limit_bytes, self.limit_batches = folder, limit_bytes, 500
        self._entries: dict[str, _Entry] = {}
        self._most_bytes = 0  # resident bytes are no more than this: they were counted, and what came since is added

    def __setattr__(self, name: str, value: Any) -> None:
        if name in ("limit_bytes", "limit_batches"):
            whole(f"store.{name}", value, 0)
        super().__setattr__(name, value)

    def add(self, batch: Batch, origin: Origin, made: Iterable[Column], *, by_loop: bool) -> None:
        """Keep a batch. made: its columns that no other batch has."""
        self.note(batch, origin, by_loop=by_loop)
        self._entries[batch.id].kept = batch.twin()
        self._most_bytes += sum(column.nbytes for column in made)

    def note(self, batch: Batch, origin: Origin, *, by_loop: bool) -> None:
        """Note where a batch came from, without keeping it: its columns are those of batches that are kept."""
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
        """Bytes of all columns that are kept on the hosts, each counted once."""
        columns: dict[tuple[int, str], Column] = {}
        for entry in list(self._entries.values()):
            batch = entry.batch
            if batch is not None and not batch.pending:
                columns |= {(id(column.location), name): column for name, column in batch.columns.items()}
        return sum(column.nbytes for column in columns.values())

    def trim(self, save: Callable[[Batch, Path], Path]) -> None:
        """Release what is beyond a limit and not held by the notebook; `save` writes a batch to a file and returns its
        name."""
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
                if not (entry.by_loop or entry.file):  # one that was read from its file is still in it
                    self.folder.mkdir(parents=True, exist_ok=True)
                    try:
                        entry.file = save(kept, self.file_of(name))
                    except Exception as error:  # what cannot be written stays: nothing is lost, and the stage goes on
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
        """Forget a batch, or all versions of one name; its memory is free when the notebook holds it no longer."""
        gone = [full for full in list(self._entries) if name in (full, full.rpartition(" ")[0])]
        if not gone:
            raise self._unknown(name)
        for full in gone:
            entry = self._entries.pop(full)
            if entry.file is not None:
                entry.file.unlink(missing_ok=True)

    def get(self, name: str, load: Callable[[Path], Batch]) -> Batch:
        """A batch by "name vversion", or the newest version of a name; read from its file where it was pushed out."""
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
        for part in set(self._entries) - before:  # it has its entry already
            del self._entries[part]
        batch = loaded.known_as(full.rpartition(" ")[0], entry.version, entry.versions, entry.columns, entry.meta)
        entry.handle, entry.kept = weakref.ref(batch), batch.twin()
        return batch

    def _unknown(self, name: str) -> NotFound:
        known = ", ".join(list(self._entries)[-6:]) or "none"
        return NotFound(f"no batch {name!r} in the store", f"the newest are: {known}", "see lab.batches()")

    def kept(self, name: str) -> Batch | None:
        """A batch that is on the hosts; None for one that is not."""
        entry = self._entries.get(name)
        batch = None if entry is None else entry.batch
        return batch if batch is not None and not batch.pending else None

    def forget_hosts(self, hosts: Collection[str]) -> None:
        """Forget what lay on hosts that are gone; what is in files stays."""
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
        """Whether a loop made it, not a cell."""
        return self._entries[name].by_loop

    def filed(self, name: str) -> tuple[tuple[str, ...], dict[str, Any]] | None:
        """Columns and meta of a batch that is in a file of its own; None for others."""
        entry = self._entries[name]
        return None if entry.file is None else (entry.columns, dict(entry.meta))

    def file_of(self, name: str) -> Path:
        """Where a batch is written that has to leave the hosts."""
        return self.folder / f"{name.replace(' ', '-')}.safetensors"

    def add_file(
        self, name: str, file: Path, origin: Origin, columns: tuple[str, ...], meta: Mapping[str, Any],
        versions: Iterator[int],
    ) -> None:  # fmt: skip
        """Know of a batch that is in a file alone."""
        self._entries[name] = _Entry(
            origin=origin, made_s=file.stat().st_mtime, rows=0, columns=columns, by_loop=False,
            version=int(name.rpartition(" v")[2]), versions=versions, handle=lambda: None,  # type: ignore[arg-type]
            kept=None, file=file, meta=meta,
        )  # fmt: skip

    def origin(self, name: str) -> Origin | None:
        """Where a batch came from; None for one that is not known."""
        entry = self._entries.get(name)
        return None if entry is None else entry.origin

    def column_names(self, name: str) -> tuple[str, ...]:
        """The columns of a batch, wherever they are, and those that are being made; none for one that is not known."""
        entry = self._entries.get(name)
        if entry is None:
            return ()
        batch = entry.batch
        return entry.columns if batch is None else batch.names

    def iteration(self, name: str) -> int | None:
        """The iteration that a batch is of, as far as it is known without waiting; None for one that is of none."""
        entry = self._entries.get(name)
        if entry is None:
            return None
        batch = entry.batch
        found = (entry.meta or entry.origin.meta_in) if batch is None else batch.part(())[1]
        return None if "iteration" not in found else int(found["iteration"])

    def __iter__(self) -> Iterator[str]:
        return iter(list(self._entries))

    def frame(self) -> pd.DataFrame:
        """What stages made and the store keeps: one row a batch, in order: what made it, of what, its size, and where
        it is."""
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
        """The batch and all that it was made of, newest first."""
        frame = self.frame()
        wanted, queue = [], [name]
        while queue:
            current = queue.pop(0)
            if current not in wanted:
                wanted.append(current)
                origin = self.origin(current)
                queue += origin.inputs if origin is not None else ()
        columns = ["batch", "stage", "inputs", "weights_version", "code", "run"]
        if not len(frame):
            return frame
        return frame[frame["batch"].isin(wanted)][columns].iloc[::-1].reset_index(drop=True)
