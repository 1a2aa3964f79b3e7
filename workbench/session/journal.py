"""The journal of a workbench on Ray: what a later kernel goes on from. Only the kernel that drives it appends.

It is one file in the workbench's record (see `workbench.backends.registry`). A stage appends an entry when it is sent,
and one when its hosts have ended it. An entry says what has changed since the one before:

    counters   JSON: numbers of runs, batches and draws, the weights of each role, where the prompts are
    position   JSON: where the algorithm of the last step is, streams of examples, automatic saves, checkpoints
    updates    updates that were interrupted between two of their steps, or whose metrics nobody has yet, by role
    sent       stages that went to their hosts, by number: `SentRun`
    over       the number of a stage that its hosts have ended
    locations  where rows of columns are, by number: `Location`
    batches    what the store keeps, by name: `KeptBatch` or `FiledBatch`
    released   names of batches that the store keeps no longer

Values that are not text are pickled one by one: one that another kernel cannot read hides no other.
"""

from __future__ import annotations

import itertools
import json
import pickle
import threading
import warnings
import weakref
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from workbench.backends import registry
from workbench.batches.batch import Batch
from workbench.batches.location import Location
from workbench.batches.store import Origin
from workbench.data.prompt_stream import PromptStream
from workbench.display.interrupts import uninterrupted
from workbench.session.checkpoint.checkpoints import Checkpoints
from workbench.session.position import Position
from workbench.stages.journal import SentRun
from workbench.stages.run import Run
from workbench.stages.runner import StageRunner
from workbench.stages.unfinished import UnfinishedUpdate

if TYPE_CHECKING:
    from workbench.algorithms.loop import Algorithm

SLACK = 200  # entries beyond three a batch, beyond which the journal is compacted


@dataclass(frozen=True, kw_only=True)
class KeptBatch:
    """A batch on the hosts. columns: by name, each without its location and with the number of that."""

    name: str
    version: int
    columns: dict[str, tuple[dict[str, Any], int]]
    meta: dict[str, Any]
    origin: Origin
    by_loop: bool


@dataclass(frozen=True, kw_only=True)
class FiledBatch:
    """A batch that is in a file alone."""

    name: str
    origin: Origin
    columns: tuple[str, ...]
    meta: dict[str, Any]


class SessionJournal:
    """Appends to the journal of one workbench; nothing where that was closed elsewhere."""

    def __init__(
        self, runner: StageRunner, position: Position, checkpoints: Checkpoints, prompts: PromptStream
    ) -> None:
        self._runner, self._position, self._checkpoints, self._prompts = runner, position, checkpoints, prompts
        self._lock = threading.RLock()
        self._open: dict[int, bytes] = {}
        self._start()

    def _start(self) -> None:
        """Forget what has been written."""
        self._texts: dict[str, str] = {}
        self._updates: dict[str, UnfinishedUpdate] = {}
        self._names: set[str] = set()
        self._numbers: weakref.WeakKeyDictionary[Location, int] = weakref.WeakKeyDictionary()
        self._next_number, self._entries = itertools.count(), 0

    def rewrite(self) -> None:
        """Compact the journal: one entry in place of all."""
        with self._lock, uninterrupted():
            self._start()
            registry.start_journal(self._lab, {**self._changes(), "sent": dict(self._open)})

    def append(self, *, sent: SentRun | None = None, over: int | None = None) -> None:
        """See `workbench.stages.journal.Journal`."""
        with self._lock, uninterrupted():
            entry: dict[str, Any] = {}
            if sent is not None:
                self._open[sent.number] = pickle.dumps(sent)
                entry["sent"] = {sent.number: self._open[sent.number]}
            if over is not None and self._open.pop(over, None) is not None:
                entry["over"] = over
            if self._entries > SLACK + 3 * len(self._names):
                self.rewrite()
            elif entry := {**entry, **self._changes()}:
                registry.append_to_journal(self._lab, entry)
                self._entries += 1

    @property
    def _lab(self) -> str:
        return self._runner.hosts.description.id

    # --- what has changed ---------------------------------------------------------------------------------------------

    def _changes(self) -> dict[str, Any]:
        changes: dict[str, Any] = {}
        for section, values in (("counters", self._counter_values()), ("position", self._position_values())):
            text = json.dumps(values, default=str)
            if text != self._texts.get(section):
                changes[section] = self._texts[section] = text
        outcomes = self._runner.outcomes
        updates = outcomes.updates.of_role | outcomes.finished
        if updates != self._updates:
            changes["updates"], self._updates = pickle.dumps(updates), updates
        return changes | self._batch_changes()

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
            "streams": [*(stream.state for stream in position.streams()), *position.saved_streams],
            "autosave": None if automatic is None else {**asdict(automatic), "time_s": None},
            "last_metrics": {stage: dict(found) for stage, found in runner.counters.last_metrics.items()},
            "checkpoints": [str(c.folder) if c else None for c in (position.last_saved, position.checkpoint)],
            "first_states": position.first_states,
            "snapshots": runner.snapshots.open,
        }

    def _batch_changes(self) -> dict[str, Any]:
        """What the store has come to keep, and to forget."""
        store = self._runner.batches.store
        there = list(store)
        released = self._names - set(there)
        self._names -= released
        locations, batches = dict[int, bytes](), dict[str, bytes]()
        for name in there:
            if name in self._names or (batch := self._describe(name, locations)) is None:
                continue
            self._names.add(name)
            try:
                batches[name] = pickle.dumps(batch)
            except Exception as error:  # meta may hold any value: the stage goes on
                warnings.warn(f"a later kernel will not have {name}: {error}", stacklevel=2)
        changes = {"released": sorted(released), "locations": locations, "batches": batches}
        return {section: value for section, value in changes.items() if value}

    def _describe(self, name: str, locations: dict[int, bytes]) -> KeptBatch | FiledBatch | None:
        """What is to be known of a batch, whose new locations are added to `locations`; None while it is being made."""
        store = self._runner.batches.store
        batch, origin = store.kept(name), store.origin(name)
        assert origin is not None
        if batch is None:
            filed = store.filed(name)
            return None if filed is None else FiledBatch(name=name, origin=origin, columns=filed[0], meta=filed[1])
        columns = {}
        for column_name, column in batch.columns.items():
            if column.location not in self._numbers:
                number = self._numbers[column.location] = next(self._next_number)
                locations[number] = pickle.dumps(column.location)
            columns[column_name] = ({**column.__dict__, "location": None}, self._numbers[column.location])
        return KeptBatch(
            name=batch.name, version=batch.version, columns=columns, meta=dict(batch.meta), origin=origin,
            by_loop=store.by_loop(name),
        )  # fmt: skip


def _position_of(algorithm: Algorithm) -> dict[str, Any]:
    """Where an algorithm is, in the form of a checkpoint's; batches by their names in the store."""
    made: dict[str, Any] = {}
    for stage, value in list(algorithm.made.items()) if algorithm.under_way else ():
        if isinstance(value, Run):
            value = value.future.result() if value.state == "done" else None
        if isinstance(value, Batch):
            value.settle(wait=False)
            if not value.pending:
                made[stage] = {"held": value.id}
        elif isinstance(value, Mapping):
            made[stage] = {"metrics": dict(value)}
    return algorithm.position(made)


@dataclass
class Recorded:
    """What a journal says, all entries together. The fields are the sections."""

    counters: dict[str, Any] = field(default_factory=dict)
    position: dict[str, Any] = field(default_factory=dict)
    updates: dict[str, UnfinishedUpdate] = field(default_factory=dict)
    open_runs: dict[int, SentRun] = field(default_factory=dict)
    locations: dict[int, Location] = field(default_factory=dict)
    batches: dict[str, KeptBatch | FiledBatch] = field(default_factory=dict)


def read_journal(lab: str) -> Recorded:
    """What the journal of the workbench with this id says."""
    found: dict[str, Any] = {"counters": "{}", "position": "{}", "updates": pickle.dumps({})}
    collected: dict[str, dict[Any, bytes]] = {"sent": {}, "locations": {}, "batches": {}}
    for entry in registry.journal(lab):
        found |= {section: entry[section] for section in found if section in entry}
        for section, values in collected.items():
            values |= entry.get(section, {})
        collected["sent"].pop(entry.get("over"), None)
        for name in entry.get("released", ()):
            collected["batches"].pop(name, None)
    runs, locations, batches = (_readable(collected[section]) for section in ("sent", "locations", "batches"))
    return Recorded(
        counters=json.loads(found["counters"]), position=json.loads(found["position"]),
        updates=_readable({"": found["updates"]}).get("", {}), open_runs=runs, locations=locations, batches=batches,
    )  # fmt: skip


def _readable(pickled: Mapping[Any, bytes]) -> dict[Any, Any]:
    """The values that this process can read: others are of code that it cannot import."""
    found = {}
    for key, value in pickled.items():
        try:
            found[key] = pickle.loads(value)
        except (AttributeError, ImportError):
            continue
    return found
