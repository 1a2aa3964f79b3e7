"""The rows of batches that a host keeps, sends to other hosts, and pulls from them."""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np

from workbench.batches.columns import (
    ColumnValues,
    Table,
    assembled,
    check_form,
    from_wire,
    own_copy,
    ragged_in,
    rows_at,
    table_bytes,
    to_wire,
)
from workbench.batches.location import Pull, inherited
from workbench.errors import NotFound, StageError
from workbench.messages.calls import Call, HostInfo
from workbench.telemetry import Recorder
from workbench.workers.weight_exchange import HostCall


class _Shard(NamedTuple):
    """A table with its size in bytes, counted once: an iteration asks for the sum over all shards."""

    columns: Table
    nbytes: int

    @classmethod
    def of(cls, columns: Table) -> _Shard:
        return cls(columns, table_bytes(columns))


class Shards:
    """A host's shards by key. A shard is some columns of some rows; hosts pull shards from each other. call: calls
    another host, which answers while it computes, see `HostCall`."""

    def __init__(self, info: HostInfo, recorder: Recorder, call: HostCall) -> None:
        self.info, self.recorder, self._call_host = info, recorder, call
        self._shards: dict[str, _Shard] = {}
        self._lock = threading.Lock()

    def _keep(self, columns: Table, call: Call) -> Table:
        rows = 0 if call.rows is None else len(call.rows)
        for name, column in columns.items():  # the controller adds operation and rank to the errors
            check_form(name, column, StageError)
            if len(column) != rows:
                rule = f"the rank got {rows} rows, and an operation must return one row for each, in the same order"
                raise StageError(f"column {name!r} has {len(column)} rows", rule)
        if columns and call.kept is not None:
            host, key = call.kept
            if host == self.info.name:
                shard = _Shard.of(own_copy(columns))  # a worker may still write into its own tensors
                with self._lock:
                    self._shards[key] = shard
            else:
                names = ", ".join(columns)
                with self.recorder.transfer(self.info.name, host, batch=call.batch, columns=names) as moved:
                    self._call_host(host, "put", key, to_wire(columns))
                    moved.bytes = table_bytes(columns)
        return columns

    def _pull(self, call: Call, counted: Any) -> Table:
        """Return a call's columns in memory of their own: a worker may write into them, and a batch never changes."""
        assert call.rows is not None
        pulled: Table = {}
        for names, pulls in call.pulls:
            pulled |= assembled([(pull.destinations, self._fetch_one(call, names, pull, counted)) for pull in pulls])
        return pulled

    def _fetch_one(self, call: Call, names: tuple[str, ...], pull: Pull, counted: Any) -> Mapping[str, ColumnValues]:
        key, kept = pull.shard.key, pull.stored_names(names)
        if pull.shard.host == self.info.name:
            return pull.renamed(rows_at(self._kept(key, kept), pull.positions), names)
        with self.recorder.transfer(
            pull.shard.host, self.info.name, batch=call.batch, columns=", ".join(names)
        ) as moved:
            part = from_wire(self._call_host(pull.shard.host, "fetch", key, kept, pull.positions))
            moved.bytes = table_bytes(part)
        named = pull.renamed(part, names)
        counted.bytes += table_bytes(named)
        return named

    def _kept(self, key: str, names: Iterable[str]) -> Table:
        with self._lock:
            shard = self._shards.get(key)
        if shard is None:
            raise NotFound(
                f"shard {key} is no longer on host {self.info.name}", "its batch was released", "run its stage again"
            )
        return {name: shard.columns[name] for name in names}

    def fetch(self, key: str, columns: tuple[str, ...], positions: np.ndarray) -> dict[str, Any]:
        return to_wire(rows_at(self._kept(key, columns), positions))

    def lengths(self, key: str, column: str, positions: np.ndarray) -> np.ndarray:
        """Return the lengths of some rows of a ragged column; the controller balances rows with them."""
        return ragged_in(self._kept(key, (column,)), column).lengths.numpy()[positions]

    def put(self, key: str, wire: dict[str, Any]) -> None:
        """Keep a table that the controller (prompts) or a rollout worker made."""
        with self._lock:
            self._shards[key] = _Shard.of(own_copy(from_wire(wire)))

    def release(self, keys: Collection[str]) -> None:
        with self._lock:
            for key in keys:
                self._shards.pop(key, None)

    # --- moving the shards of a host that is about to end -------------------------------------------------------------

    def inherit(self, host: str) -> None:
        for key in self._call_host(host, "shard_keys"):
            with self.recorder.transfer(host, self.info.name, columns=key, kind="move") as moved:
                shard = _Shard.of(own_copy(from_wire(self._call_host(host, "whole_shard", key))))
                moved.bytes = shard.nbytes
            with self._lock:
                self._shards[inherited(host, key)] = shard

    def disinherit(self, hosts: Collection[str]) -> None:
        """Forget the inherited shards of hosts that stay after all."""
        prefixes = tuple(inherited(host, "") for host in hosts)
        with self._lock:
            for key in [key for key in self._shards if key.startswith(prefixes)]:
                del self._shards[key]

    @property
    def shard_bytes(self) -> int:
        with self._lock:
            return sum(shard.nbytes for shard in self._shards.values())

    def shard_keys(self) -> list[str]:
        with self._lock:
            return list(self._shards)

    def whole_shard(self, key: str) -> dict[str, Any]:
        with self._lock:
            return to_wire(self._shards[key].columns)
