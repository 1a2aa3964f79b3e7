"""What the next kernel goes on from: written while a workbench on Ray is used, read by `wb.attach`.

Beside its record (see `workbench.backends.registry`):

    batches.log     one entry a batch that the store keeps: what it is, where its shards lie, where it came from
    position.json   where the algorithm of the last step stands, streams of examples, automatic saves, checkpoints
    updates.pkl     updates that were interrupted between two of their steps
    open.pkl        stages that hosts are at: their kernel may end before they do

Hosts keep shards and their last reply, so that nothing that was finished is done twice: not an update whose kernel was
killed while it ran. Only the kernel that drives the workbench writes.
"""

from __future__ import annotations

import itertools
import json
import pickle
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from workbench.backends.hosts import Hosts
from workbench.batches.batch import Batch
from workbench.batches.location import Location
from workbench.batches.references import Column
from workbench.batches.store import Origin, Weights
from workbench.display.interrupts import uninterrupted
from workbench.errors import BadInput, HostDied
from workbench.messages.metric_values import MetricValues
from workbench.messages.metrics import Metrics, merge_metrics, reported
from workbench.messages.replies import Reply
from workbench.session.checkpoint.checkpoints import Checkpoints
from workbench.session.checkpoint.files import Checkpoint, read_checkpoint
from workbench.session.position import Position
from workbench.stages.journal import OpenRun
from workbench.stages.run import GRACE_S, Run
from workbench.stages.runner import StageRunner
from workbench.stages.unfinished import UnfinishedUpdate

if TYPE_CHECKING:
    from workbench.algorithms.loop import Algorithm

POLL_S = 0.2
SLACK = 200  # entries of the log about batches that are gone, beyond which it is written anew


@dataclass(frozen=True, kw_only=True)
class _Kept:
    """A batch. columns: by name, each with the number of its location instead of that."""

    name: str
    version: int
    columns: dict[str, tuple[dict[str, Any], int]]
    meta: dict[str, Any]
    origin: Origin
    by_loop: bool


@dataclass(frozen=True, kw_only=True)
class _Filed:
    """A batch that is in a file alone."""

    name: str
    origin: Origin
    columns: tuple[str, ...]
    meta: dict[str, Any]


class Handover:
    """Writes what the next kernel needs. folder: the workbench's record; nothing is written where that is gone."""

    def __init__(self, folder: Path, runner: StageRunner, position: Position, checkpoints: Checkpoints) -> None:
        self._folder, self._runner, self._position, self._checkpoints = folder, runner, position, checkpoints
        self._lock = threading.RLock()
        self._numbers: weakref.WeakKeyDictionary[Location, int] = weakref.WeakKeyDictionary()
        self._next = itertools.count()
        self._written: set[str] = set()
        self._entries = 0
        self._open: dict[int, OpenRun] = {}
        self._updates: dict[str, UnfinishedUpdate] = {}

    def write(self) -> None:
        """Write down how things stand."""
        self._note_batches()
        self._note_position()

    # --- writing ------------------------------------------------------------------------------------------------------

    def _note_batches(self, *, anew: bool = False) -> None:
        """Write down what the store has come to keep, or to forget. anew: all of it, in place of what is there."""
        with self._lock, uninterrupted():
            known = set(self._runner.batches.store)
            gone, come = self._written - known, known - self._written
            if not (anew or gone or come):
                return
            anew = anew or self._entries + len(gone) + len(come) > SLACK + 3 * len(known)
            if anew:
                self._numbers, self._entries, come, gone = weakref.WeakKeyDictionary(), 0, known, set()
            lines: list[Any] = [{"released": name} for name in sorted(gone)]
            numbers = dict[Location, int]()
            written = set[str]()
            for name in [name for name in self._runner.batches.store if name in come]:
                if (entry := self._entry(name, numbers, lines)) is not None:
                    lines.append(entry)
                    written.add(name)
            if lines or anew:
                self._write("batches.log", lines, more=not anew)
            self._numbers.update(numbers)
            self._written = written if anew else (self._written & known) | written
            self._entries += len(lines)

    def _entry(self, name: str, numbers: dict[Location, int], lines: list[Any]) -> Any:
        """What is to be known of a batch, after the locations of its columns; None while it is being made."""
        store = self._runner.batches.store
        batch, origin = store.kept(name), store.origin(name)
        assert origin is not None
        if batch is None:
            filed = store.filed(name)
            return None if filed is None else _Filed(name=name, origin=origin, columns=filed[0], meta=filed[1])
        columns = {}
        for column_name, column in batch.columns.items():
            number = self._numbers.get(column.location, numbers.get(column.location))
            if number is None:
                number = numbers[column.location] = next(self._next)
                lines.append((number, column.location))
            columns[column_name] = ({**column.__dict__, "location": None}, number)
        return _Kept(
            name=batch.name, version=batch.version, columns=columns, meta=dict(batch.meta), origin=origin,
            by_loop=store.by_loop(name),
        )  # fmt: skip

    def _note_position(self) -> None:
        """Write down where the algorithm stands, and what is drawn from beside the prompts."""
        position, runner = self._position, self._runner
        algorithm, automatic = position.algorithm, self._checkpoints.automatic
        values = {
            "algorithm": position.saved_algorithm if algorithm is None else _position(algorithm),
            "streams": [*(stream.state for stream in position.streams()), *position.saved_streams],
            "autosave": None if automatic is None else {**asdict(automatic), "time_s": None},
            "last_metrics": {stage: dict(found) for stage, found in runner.counters.last_metrics.items()},
            "checkpoints": [str(c.folder) if c else None for c in (position.last_saved, position.checkpoint)],
            "first_states": position.first_states,
            "kept": runner.snapshots.open,
        }
        updates = dict(runner.outcomes.updates.of_role)
        with self._lock:
            if self._folder.is_dir():
                new = self._folder / "position.new"
                new.write_text(json.dumps(values, default=str))
                new.replace(self._folder / "position.json")
                if updates != self._updates:
                    self._write("updates.pkl", [updates])
                    self._updates = updates

    def sent(self, run: OpenRun) -> None:
        """A stage goes to its hosts."""
        with self._lock:
            self._open[run.number] = run
            self._write("open.pkl", [dict(self._open)])

    def over(self, number: int) -> None:
        """Its hosts are done with it, and what came of it is written down."""
        with self._lock:
            if self._open.pop(number, None) is not None:
                self._write("open.pkl", [dict(self._open)])

    def _write(self, name: str, lines: list[Any], *, more: bool = False) -> None:
        if not self._folder.is_dir():
            return
        data = b"".join(pickle.dumps(line) for line in lines)
        if more:
            with (self._folder / name).open("ab") as file:
                file.write(data)
        else:
            (self._folder / f"{name}.new").write_bytes(data)
            (self._folder / f"{name}.new").replace(self._folder / name)

    # --- reading ------------------------------------------------------------------------------------------------------

    def take_over(self, note: Callable[[str], None]) -> None:
        """Give a workbench what the kernel before had: batches whose shards are there, runs that went on without it,
        and where its algorithm stood. note: called with what is waited for."""
        try:
            position = json.loads((self._folder / "position.json").read_text())
        except (OSError, ValueError):
            position = {}
        runner, weights = self._runner, self._runner.counters.weights
        for updates in _entries(self._folder / "updates.pkl"):
            runner.outcomes.updates.of_role = {
                role: replace(update, weights=weights[role])
                for role, update in updates.items() if role in weights
            }  # fmt: skip
        drives = not runner.ownership.watches
        if drives:
            for runs in _entries(self._folder / "open.pkl"):
                for run in runs.values():
                    _settle(runner, run, note)
            for key, kept in position.get("kept", {}).items():  # of a comparison that its kernel did not end
                for host in kept["hosts"]:
                    runner.hosts.backend.work(host, "restore", key)
                    runner.hosts.backend.work(host, "drop_snapshot", key)
                for role, steps in kept["steps"].items():
                    weights[role] = Weights.anew(steps)
        self._take_batches()
        if position:
            self._take_position(position)
        if drives:
            self._write("open.pkl", [{}])
            self._note_batches(anew=True)
            self._note_position()

    def _take_position(self, values: Mapping[str, Any]) -> None:
        position, checkpoints = self._position, self._checkpoints
        position.saved_algorithm, position.saved_streams = values["algorithm"], values["streams"]
        metrics = {stage: MetricValues(found) for stage, found in values["last_metrics"].items()}
        self._runner.counters.last_metrics = metrics
        position.first_states = values["first_states"]
        found: list[Checkpoint | None] = []
        for folder in values["checkpoints"]:
            found.append(None)
            with suppress(BadInput):
                found[-1] = read_checkpoint(Path(folder)) if folder else None
        position.last_saved, position.checkpoint = found
        if automatic := values["autosave"]:
            checkpoints.autosave(automatic["every"], minutes=automatic["minutes"], keep=automatic["keep"],
                         folder=automatic["folder"], models=automatic["models"])  # fmt: skip
            assert checkpoints.automatic is not None
            checkpoints.automatic.iteration = automatic["iteration"]
            checkpoints.automatic.written = [Path(path) for path in automatic["written"]]

    def _take_batches(self) -> None:
        hosts, batches = self._runner.hosts, self._runner.batches
        there: dict[str, set[str]] = {}
        for info in hosts.infos:
            with suppress(HostDied):
                there[info.name] = set(hosts.backend.ask(info.name, "shard_keys").result())
        locations: dict[int, Location] = {}
        found: dict[str, _Kept | _Filed] = {}
        for entry in _entries(self._folder / "batches.log"):
            if isinstance(entry, _Kept):
                found[f"{entry.name} v{entry.version}"] = entry
            elif isinstance(entry, _Filed):
                found[entry.name] = entry
            elif isinstance(entry, tuple):
                locations[entry[0]] = entry[1]
            else:
                found.pop(entry["released"], None)
        newest: dict[str, int] = {}
        for name in found:
            base, _, version = name.rpartition(" v")
            newest[base] = max(newest.get(base, 0), int(version))
        versions = {base: itertools.count(version + 1) for base, version in newest.items()}
        used: dict[str, set[str]] = {}
        for name, entry in found.items():
            numbers, file = versions[name.rpartition(" v")[0]], batches.store.file_of(name)
            if isinstance(entry, _Kept) and all(number in locations for _, number in entry.columns.values()):
                columns = {
                    n: Column(**{**values, "location": locations[i]}) for n, (values, i) in entry.columns.items()
                }
                shards = [
                    shard.now(hosts.shard_successors) for column in columns.values() for shard in column.location.shards
                ]
                if all(shard.key in there.get(shard.host, ()) for shard in shards):
                    batch = Batch(
                        entry.name, columns, source=batches, counts=batches.shard_counts, version=entry.version,
                        versions=numbers, meta=entry.meta,
                    )  # fmt: skip
                    batches.store.add(batch, entry.origin, (), by_loop=entry.by_loop)
                    for shard in shards:
                        used.setdefault(shard.host, set()).add(shard.key)
                    continue
            if file.is_file():
                batches.store.add_file(name, file, entry.origin, tuple(entry.columns), entry.meta, numbers)
        for host, keys in there.items():  # what that kernel held beside the store, it holds no longer
            if not self._runner.ownership.watches and (left := keys - used.get(host, set())):
                hosts.backend.work(host, "release", sorted(left))


def _entries(path: Path) -> Iterator[Any]:
    """What was written one after the other; a kernel that was killed may have left half an entry at the end."""
    try:
        file = path.open("rb")
    except OSError:
        return
    with file:
        while True:
            try:
                yield pickle.load(file)
            except (EOFError, pickle.UnpicklingError, AttributeError, ImportError):
                return


def _position(algorithm: Algorithm) -> dict[str, Any]:
    """Where an algorithm stands, in the form of a checkpoint's; batches by their names in the store."""
    made: dict[str, Any] = {}
    for stage, value in list(algorithm.made.items()) if algorithm.under_way else ():
        if isinstance(value, Run):
            value = value.result() if value.state == "done" else None
        if isinstance(value, Batch):
            value.settle(wait=False)
            if not value.pending:
                made[stage] = {"held": value.id}
        elif isinstance(value, Mapping):
            made[stage] = {"metrics": dict(value)}
    return algorithm.position(made)


def _settle(runner: StageRunner, run: OpenRun, note: Callable[[str], None]) -> None:
    """Wait for a stage that the kernel before had called, and keep what it did."""
    replies = [_reply(runner.hosts, run, host, note) for host in run.hosts]
    there = [reply for reply in replies if reply is not None]
    for reply in there:
        runner.telemetry.append_spans(reply.spans)
        runner.telemetry.append_transfers(reply.transfers)
        runner.telemetry.append_syncs(reply.syncs)
    if run.drawn is not None:
        runner.counters.draw_again(*run.drawn)
    if not run.updates or len(there) != len(run.hosts) or any(reply.failure for reply in there):
        return
    parts = [reply.stopped for reply in there if reply.stopped is not None]
    if parts and len(parts) == len(there):
        runner.outcomes.note_update(run, parts, None)
    elif not parts:
        metrics: Metrics = {}
        for rank in run.collecting:
            merge_metrics(metrics, there[rank].metrics)
        runner.outcomes.note_update(run, (), MetricValues(reported(metrics)))
    runner.telemetry.append_event("run of an earlier kernel", run=run.number, stage=run.name)


def _reply(hosts: Hosts, run: OpenRun, host: str, note: Callable[[str], None]) -> Reply | None:
    """What a host said, or says when it is done with it; None where it never ran it, or is gone. One that is at it and
    does not get on for `GRACE_S` counts as lost."""
    seen, since_s = None, time.monotonic()
    while True:
        try:
            reply: Reply | None = hosts.backend.ask(host, "reply_of", run.number).result()
            status = hosts.backend.ask(host, "status").result()
        except HostDied:
            return None
        if reply is not None or not status[0]:
            return reply
        if status != seen:
            seen, since_s = status, time.monotonic()
        if time.monotonic() - since_s > GRACE_S:
            pool = next(info.pool for info in hosts.infos if info.name == host)
            hosts.lost[pool] = f"run {run.number}, {run.name}"
            return None
        note(f"waiting for {run.name}, which was under way")
        time.sleep(POLL_S)
