"""The journal of a workbench on Ray, from which a later kernel continues. Only the kernel that drives it appends.

The journal is one file in the workbench's record (see `workbench.backends.registry`). A stage appends an entry when it
is sent, and another when its hosts have ended it. An entry has the changes since the previous entry:

    controller the handle that wrote the entry, see `Ownership`
    whole      present where the entry replaces all earlier ones; later entries of other handles do not count
    counters   JSON: numbers of runs, batches and draws, the weights of each role, the position of the prompts
    position   JSON: positions of the last algorithm and the streams of examples, automatic saves, checkpoints
    sent       stages that were sent to their hosts, by number: `SentRun`; written again with the outcome of an
               update that was interrupted, or whose metrics no caller has yet
    over       numbers of stages whose results their callers have, or that left nothing
    locations  where rows of columns are, by controller and number: `Location`
    batches    batches that the store has come to keep, by name: `KeptBatch` or `FiledBatch`
    ledger     news of the ledger of prompts; a whole entry has all of the ledger, as `ledger_state`
    released   names of batches that the store no longer keeps

Values that are not text are pickled one by one, so that a value that another kernel cannot read hides no other value. A
damaged entry is left out (see `workbench.backends.journal_file`). After an entry could not be written, or another
process has written the file, the next entry is a whole one.
"""

from __future__ import annotations

import itertools
import json
import pickle
import threading
import warnings
import weakref
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from workbench.backends import journal_file, registry
from workbench.batches.batch import Batch
from workbench.batches.location import Location
from workbench.batches.store import Origin
from workbench.data.prompt_stream import PromptStream
from workbench.display.interrupts import uninterrupted
from workbench.errors.plain_text import said
from workbench.session.checkpoint.checkpoints import Checkpoints
from workbench.session.position import Position
from workbench.stages.ledger import SentRun
from workbench.stages.run import Run
from workbench.stages.runner import StageRunner

if TYPE_CHECKING:
    from workbench.algorithms.loop import Algorithm

SLACK = 200  # the journal is compacted when it has more entries than three per batch plus SLACK


@dataclass(frozen=True, kw_only=True)
class KeptBatch:
    """A batch on the hosts. columns: by name, each without its location, and the location's number."""

    name: str
    version: int
    columns: dict[str, tuple[dict[str, Any], str]]
    meta: dict[str, Any]
    origin: Origin
    by_loop: bool


@dataclass(frozen=True, kw_only=True)
class FiledBatch:
    """A batch that is only in a file."""

    name: str
    origin: Origin
    columns: tuple[str, ...]
    meta: dict[str, Any]


class SessionJournal:
    """Appends to the journal of one workbench, unless another kernel drives it or has closed it."""

    def __init__(
        self, runner: StageRunner, position: Position, checkpoints: Checkpoints, prompts: PromptStream
    ) -> None:
        self._runner, self._position, self._checkpoints, self._prompts = runner, position, checkpoints, prompts
        self._lab, self._controller = runner.hosts.description.id, runner.ownership.controller
        self._lock = threading.RLock()
        self._open = {run.number: pickle.dumps(run) for run in runner.interrupted.unfinished.values()}
        self._complete = False  # whether the file has all entries that this object noted as written
        self._stamp: journal_file.Stamp | None = None  # of the file, as this kernel left it
        self._start()

    def _start(self) -> None:
        """Forget what has been written, so that the next entry is a whole one."""
        if self._prompts.records is not None:
            self._prompts.records.changes = None
        self._texts: dict[str, str] = {}
        self._names: set[str] = set()
        self._numbers: weakref.WeakKeyDictionary[Location, str] = weakref.WeakKeyDictionary()
        self._next_number, self._entries = itertools.count(), 0

    def rewrite(self) -> None:
        """Compact the journal: replace all entries by one."""
        with self._lock, uninterrupted(), self._written():
            self._start()
            entry = {**self._changes(), "sent": dict(self._open), "whole": True, "controller": self._controller}
            registry.start_journal(self._lab, entry)

    def append(self, *, sent: SentRun | None = None, over: Collection[int] = ()) -> None:
        """Append the changes since the last entry. sent, over: see `Ownership.record`."""
        with self._lock, uninterrupted():
            entry: dict[str, Any] = {}
            if sent is not None:
                self._open[sent.number] = pickle.dumps(sent)
                entry["sent"] = {sent.number: self._open[sent.number]}
            if closed := [number for number in over if self._open.pop(number, None) is not None]:
                entry["over"] = closed
            if self._stamp != registry.journal_stamp(self._lab):  # written by a slow earlier kernel, or by the next one
                self._complete = False
                self._runner.ownership.notice_takeover()
            if not self._runner.ownership.drives:
                return
            if not self._complete or self._entries > SLACK + 3 * len(self._names):
                self.rewrite()
                return
            with self._written():
                if entry := {**entry, **self._changes()}:
                    registry.append_to_journal(self._lab, {**entry, "controller": self._controller})
                    self._entries += 1

    @contextmanager
    def _written(self) -> Iterator[None]:
        """Mark the file as incomplete while the block writes: after an error, the next entry is a whole one."""
        self._complete = False
        yield
        self._complete, self._stamp = True, registry.journal_stamp(self._lab)

    # --- what has changed ---------------------------------------------------------------------------------------------

    def _changes(self) -> dict[str, Any]:
        changes: dict[str, Any] = {}
        for section, values in (("counters", self._counter_values()), ("position", self._position_values())):
            text = json.dumps(values, default=str)
            if text != self._texts.get(section):
                changes[section] = self._texts[section] = text
        return changes | self._ledger_changes() | self._batch_changes()

    def _ledger_changes(self) -> dict[str, Any]:
        """Return what was noted in the ledger since the last entry; the whole ledger, where nothing is written yet."""
        records = self._prompts.records
        if records is None:
            return {}
        if records.changes is None:
            return {"ledger_state": records.state_and_changes()}
        changes = records.take_changes()
        return {"ledger": changes} if changes else {}

    def _counter_values(self) -> dict[str, Any]:
        hosts, counters, prompts = self._runner.hosts, self._runner.counters, self._prompts
        return {
            **counters.state(),
            "batch": counters.batch,
            "iterations_to_skip": counters.iterations_to_skip,
            "drawn": prompts.drawn,
            "prompts": prompts.state,
            "pools_ended": hosts.pools_ended,
            "shard_successors": hosts.shard_successors,
        }

    def _position_values(self) -> dict[str, Any]:
        position, runner = self._position, self._runner
        algorithm, automatic = position.algorithm, self._checkpoints.automatic
        return {
            "algorithm": position.saved_algorithm if algorithm is None else _position_of(algorithm),
            "buffer": position.buffer.state(_held),
            "priority": position.buffer.priority_name,
            "streams": [*(stream.state for stream in position.streams()), *position.saved_streams],
            "autosave": None if automatic is None else {**asdict(automatic), "time_s": None},
            "last_metrics": {stage: dict(found) for stage, found in runner.counters.last_metrics.items()},
            "checkpoints": [str(c.folder) if c else None for c in (position.last_saved, position.checkpoint)],
            "first_states": position.first_states,
            "others": list(runner.live.others),
            "snapshots": runner.snapshots.open,
            "recovering": position.recovering,
        }

    def _batch_changes(self) -> dict[str, Any]:
        """Return the batches that the store has added and released since the last entry."""
        store = self._runner.batches.store
        there = list(store)
        released = self._names - set(there)
        self._names -= released
        locations, batches = dict[str, bytes](), dict[str, bytes]()
        for name in there:
            if name in self._names or (batch := self._describe(name, locations)) is None:
                continue
            self._names.add(name)
            try:
                batches[name] = pickle.dumps(batch)
            except Exception as error:  # meta may hold a value that cannot be pickled; the stage goes on
                warnings.warn(f"a later kernel will not have {name}: {said(error)}", stacklevel=2)
        changes = {"released": sorted(released), "locations": locations, "batches": batches}
        return {section: value for section, value in changes.items() if value}

    def _describe(self, name: str, locations: dict[str, bytes]) -> KeptBatch | FiledBatch | None:
        """Describe a batch, and add its new locations to `locations`; None while the batch is being made."""
        store = self._runner.batches.store
        batch, origin = store.kept(name), store.origin(name)
        assert origin is not None
        if batch is None:
            filed = store.filed(name)
            return None if filed is None else FiledBatch(name=name, origin=origin, columns=filed[0], meta=filed[1])
        columns = {}
        for column_name, column in batch.columns.items():
            if column.location not in self._numbers:
                number = self._numbers[column.location] = f"{self._controller}-{next(self._next_number)}"
                locations[number] = pickle.dumps(column.location)
            columns[column_name] = ({**column.__dict__, "location": None}, self._numbers[column.location])
        return KeptBatch(
            name=batch.name, version=batch.version, columns=columns, meta=dict(batch.meta), origin=origin,
            by_loop=store.by_loop(name),
        )  # fmt: skip


def _position_of(algorithm: Algorithm) -> dict[str, Any]:
    """Return the position of an algorithm in the form of a checkpoint's; batches are named as in the store."""
    made: dict[str, Any] = {}
    for stage, value in list(algorithm.made.items()) if algorithm.under_way else ():
        if isinstance(value, Run):
            value = value.future.result() if value.state == "done" else None
        if isinstance(value, Batch):
            if (held := _held(value)) is not None:
                made[stage] = held
        elif isinstance(value, Mapping):
            made[stage] = {"metrics": dict(value)}
    return algorithm.position(made)


def _held(batch: Batch) -> dict[str, str] | None:
    """Return the name of a batch in the store; None while the batch is being made."""
    batch.settle(wait=False)
    return None if batch.pending else {"held": batch.id}


@dataclass
class Recorded:
    """The content of a journal, all entries together. The fields are the sections."""

    counters: dict[str, Any] = field(default_factory=dict)
    position: dict[str, Any] = field(default_factory=dict)
    open_runs: dict[int, SentRun] = field(default_factory=dict)
    locations: dict[str, Location] = field(default_factory=dict)
    batches: dict[str, KeptBatch | FiledBatch] = field(default_factory=dict)
    ledger: bytes | None = None
    ledger_changes: list[bytes] = field(default_factory=list)


def read_journal(lab: str) -> Recorded:
    """Read the journal of the workbench with this id. Warns of each value that cannot be read."""
    texts: dict[str, str] = {"counters": "{}", "position": "{}"}
    pickled: dict[str, dict[Any, bytes]] = {"sent": {}, "locations": {}, "batches": {}}
    ledger, ledger_changes = None, list[bytes]()
    for entry in registry.owned_entries(lab):
        if "ledger_state" in entry:
            ledger, ledger_changes = entry["ledger_state"], []
        ledger_changes += entry.get("ledger", [])
        texts |= {section: entry[section] for section in texts if section in entry}
        for section in ("sent", "locations", "batches"):
            pickled[section] |= entry.get(section, {})
        for number in entry.get("over", ()):
            pickled["sent"].pop(number, None)
        for name in entry.get("released", ()):
            pickled["batches"].pop(name, None)
    found = {section: _readable(section, values) for section, values in pickled.items()}
    return Recorded(
        counters=json.loads(texts["counters"]), position=json.loads(texts["position"]),
        open_runs=found["sent"], locations=found["locations"], batches=found["batches"],
        ledger=ledger, ledger_changes=ledger_changes,
    )  # fmt: skip


def _readable(section: str, pickled: Mapping[Any, bytes]) -> dict[Any, Any]:
    """Unpickle the values that this process can read, and warn of those whose code is missing or has changed."""
    found = {}
    for key, value in pickled.items():
        try:
            found[key] = pickle.loads(value)
        except Exception as error:  # unpickling runs the code of the value's class
            warnings.warn(f"{section} {key!r} of the journal cannot be read: {error!r}", stacklevel=3)
    return found
