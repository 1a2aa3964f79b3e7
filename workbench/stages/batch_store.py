"""Moves batches between notebook and hosts, and keeps what stages made by name and version."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch

from workbench.backends.hosts import Hosts
from workbench.batches import files
from workbench.batches.batch import Batch
from workbench.batches.columns import Ragged, Table, assembled, check_form, describe, from_wire, nbytes, to_wire
from workbench.batches.location import Column, Location, ShardCounts, ShardId
from workbench.batches.schema import SCHEMA
from workbench.batches.store import Origin, Store
from workbench.batches.vocabulary import Vocabulary
from workbench.display.interrupts import stoppable
from workbench.errors import BadInput
from workbench.errors.plain_text import shown
from workbench.models.tokenizers import load_tokenizer
from workbench.stages.group import Groups
from workbench.stages.ledger import Counters, Ownership
from workbench.stages.stage import group_pulls
from workbench.support.validation import NonNegativeFloat, NonNegativeInt, Number, checked


class BatchStore:
    """Moves rows between the notebook and the hosts, keeps what stages made, and tells hosts which shards no batch
    refers to. A `Batch` calls it as its source.

    vocabulary: of the tokens in all batches. store: what stages made, by name and version. looping: whether a loop over
    iterations is running. iterating: whether `iterate` is running.
    """

    def __init__(self, hosts: Hosts, groups: Groups, ownership: Ownership, counters: Counters, room_bytes: int) -> None:
        self._hosts, self._groups, self._ownership, self._counters = hosts, groups, ownership, counters
        lead = hosts.description.models[hosts.description.lead].name
        assert lead is not None
        self.tokenizer = load_tokenizer(lead)
        self.vocabulary = Vocabulary(lead, self.tokenizer)
        self.shard_counts = ShardCounts()
        self.store = Store(hosts.run_folder / "batches", room_bytes)
        self.looping = self.iterating = False

    @property
    def by_loop(self) -> bool:
        """Whether new batches are made by a loop, over iterations or over stages, and not by a cell."""
        return self.looping or self.iterating

    def put(self, table: Any, *, meta: Mapping[str, Any] | None = None, owner: str = "notebook") -> Batch:
        """Make a batch of columns, which go to the first host of the actor's pool (without an actor, of the pool of the
        first role with a model).

        table: name -> Tensor [rows, ...], `Ragged`, or list of Python objects, all with the same number of rows (the
        form that `Batch.fetch` gives). For a column that stages know, such as "rewards" or "prompt_ids", a list of
        numbers, or a list of lists of numbers, is converted. meta: plain values that stay with the batch, such as the
        sampling temperature.
        """
        found, where = _as_table(table), "put()" if owner == "notebook" else owner
        meta = _as_meta(meta, where)
        self.vocabulary.check(found, where)
        _check_texts(found, where)
        if len({len(column) for column in found.values()}) != 1 or not all(map(len, found.values())):
            sizes = ", ".join(f"{name}: {len(column)}" for name, column in found.items())
            raise BadInput(
                f"put() of columns with rows {{{sizes}}}", "all columns must have equally many rows, at least one"
            )
        self._groups.check_alive(self._groups.lead)
        self._counters.batch += 1
        host, key = self._groups.lead.hosts[0], f"{self._ownership.controller}-put-{self._counters.batch}"
        self._hosts.backend.ask(host, "put", key, to_wire(found)).result()
        rows = len(next(iter(found.values())))
        location = Location.of_parts([(ShardId(host, key), np.arange(rows))])
        columns = {}
        for name, column in found.items():
            dtype, row_shape = describe(column)
            columns[name] = Column(
                dtype=dtype, row_shape=row_shape, nbytes=nbytes(column), owner=owner, location=location
            )
        batch = Batch(f"batch{self._counters.batch}", columns, source=self, counts=self.shard_counts, meta=meta)
        origin = Origin(stage="put" if owner == "notebook" else owner)
        self.store.add(batch, origin, columns.values(), by_loop=self.by_loop)
        return batch

    @stoppable("lab.load()", ("no batch was loaded", "run the same call again"))
    def load(self, path: str | Path) -> Batch:
        """Load a batch that `Batch.save` wrote, in this workbench or another: the same rows, columns and meta.

        The rows go to the same host as with `put`. Raises `BadInput` for a file that is missing or not a saved batch,
        and for token ids of another tokenizer.
        """
        meta, tables = files.read(path, self.vocabulary)
        parts = [self.put(table, meta=meta, owner=Path(path).name) for table in tables]
        return Batch.concat(parts) if len(parts) > 1 else parts[0]

    def get(self, name: str) -> Batch:
        """Return a batch of the store by "name vversion", or the newest version of a name."""
        return self.store.get(name, self.load)

    def forget(self, name: str | Batch) -> None:
        """Remove a batch, or all versions of a name, from the store; its memory is freed once no variable holds it."""
        self.store.release(name.id if isinstance(name, Batch) else name)
        self.release_unused()

    def derived(self, batch: Batch, tool: str, inputs: Sequence[Batch]) -> None:
        """Note, for the lineage, that a method of a batch made another batch."""
        origin = Origin(stage=f"batch.{tool}", inputs=tuple(other.id for other in inputs))
        self.store.note(batch, origin, by_loop=self.by_loop)

    def pull(self, columns: Mapping[str, Column], rows: np.ndarray) -> Table:
        """Fetch rows of columns into this process (for `Batch.fetch`)."""
        self._ownership.check_open()
        table: Table = {}
        for names, pulls in group_pulls(columns, tuple(columns), rows, self._hosts.shard_successors):
            parts = []
            for p in pulls:
                host, key = p.shard
                wire = self._hosts.backend.ask(host, "fetch", key, p.stored_names(names), p.positions).result()
                parts.append((p.destinations, p.renamed(from_wire(wire), names)))
            table |= assembled(parts)
        return {name: table[name] for name in columns}

    def lengths(self, name: str, location: Location) -> np.ndarray:
        """Return the lengths of the rows of a ragged column, from the hosts (for `Batch.lengths`)."""
        self._ownership.check_open()
        lengths = np.empty(len(location), dtype=np.int64)
        pulls = location.pulls(np.arange(len(location)))
        shards = [pull.shard.now(self._hosts.shard_successors) for pull in pulls]
        asked = [
            self._hosts.backend.ask(shard.host, "lengths", shard.key, p.name or name, p.positions)
            for shard, p in zip(shards, pulls, strict=True)
        ]
        for pull, pending in zip(pulls, asked, strict=True):
            lengths[pull.destinations] = pending.result()
        return lengths

    def decode(self, token_ids: Iterable[NonNegativeInt]) -> str:
        """Return the text of token ids, special tokens included."""
        ids = list(token_ids)
        if wrong := [i for i in ids if not 0 <= i < self.vocabulary.size]:
            rule = f"{self.vocabulary.name!r} has ids 0 to {self.vocabulary.size - 1}"
            raise BadInput(f"token id {wrong[0]}", rule, "give ids of this workbench's tokenizer")
        return str(self.tokenizer.decode(ids))

    def release_unused(self, called: Collection[str] = ()) -> dict[str, list[str]]:
        """Tell the hosts which shards no batch refers to any more. A handle that only looks holds none. called: hosts
        that are about to be called: what they can release is returned, by host, and sent with those calls."""
        if not self._ownership.drives:
            return {}
        due: dict[str, list[str]] = {}
        for shard in (shard.now(self._hosts.shard_successors) for shard in self.shard_counts.take_due()):
            due.setdefault(shard.host, []).append(shard.key)
        there = {info.name for info in self._hosts.infos}  # other hosts are gone, with all their shards
        for host in (there & due.keys()).difference(called):
            self._hosts.backend.ask(host, "release", due[host])
        return {host: due[host] for host in called if host in due}


# the parts of the meta that stages read; all other parts are the user's own
META: Mapping[str, Any] = {
    "iteration": NonNegativeInt,
    "temperature": NonNegativeFloat,
    "truncation": Mapping[str, Number],
}


def _as_meta(meta: Mapping[str, Any] | None, where: str) -> dict[str, Any]:
    try:
        return {name: checked(f"meta[{name!r}]", value, META.get(name, Any)) for name, value in (meta or {}).items()}
    except BadInput as error:
        raise BadInput(f"{where}: {error.value}", error.rule, error.remedy) from None


def _check_texts(table: Table, where: str) -> None:
    """Raise `BadInput` for a text with half a surrogate pair, which cannot be written."""
    for name, column in table.items():
        for row, value in enumerate(column if isinstance(column, list) else ()):
            if isinstance(value, str) and any("\ud800" <= character <= "\udfff" for character in value):
                raise BadInput(
                    f"{where}: column {name!r} has half a character in row {row}",
                    "texts are Unicode without lone surrogates",
                    "value.encode('utf-8', 'replace').decode() replaces them",
                )


def _as_table(table: Any) -> Table:
    """Return the columns of a table that a user puts, and check that each has rows."""
    if not isinstance(table, Mapping):
        remedy = "write put({'rewards': df['rewards'].tolist(), ...})"
        raise BadInput(f"put({shown(table)})", "a table is a dict of columns", remedy)
    if other := [name for name in table if not isinstance(name, str)]:
        raise BadInput(f"put() of a column {shown(other[0])}", "a column's name is a text", f"write '{other[0]}'")
    found: Table = {name: _as_numbers(name, column) for name, column in table.items()}
    for name, column in found.items():
        check_form(name, column, BadInput, "put(): ")
    return found


def _as_numbers(name: str, column: Any) -> Any:
    """Convert a column that stages know, given as lists, to tensors or `Ragged`; return other columns unchanged."""
    schema = SCHEMA.get("rewards" if name.startswith("rewards/") else name)
    if not isinstance(column, list) or schema is None or schema.holds == "text":
        return column
    with suppress(TypeError, ValueError, RuntimeError):
        if schema.row == "one" or not np.ndim(next(iter(column), 0)):
            return torch.tensor(column)
        rows = [row.tolist() if hasattr(row, "tolist") else row for row in column]
        values = torch.tensor([number for row in rows for number in row])
        return Ragged(values if len(values) else values.long(), torch.tensor([len(row) for row in rows]))
    return column
