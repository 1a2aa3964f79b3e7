"""What the next kernel goes on from: written while a workbench on Ray is used, read by `wb.attach`.

Beside its record (see `workbench.backends.registry`):

    batches.log     one entry a batch that the store keeps: what it is, where its shards lie, where it came from
    position.json   where the algorithm of the last step stands, streams of examples, automatic saves, checkpoints
    updates.pkl     updates that were interrupted between two of their steps
    open.pkl        stages that hosts are at: their kernel may never hear of them

Hosts keep shards and their last reply, so that nothing that was finished is done twice: not an update whose kernel was
killed while it ran. Only the kernel that drives the workbench writes.
"""

from __future__ import annotations

import itertools
import json
import pickle
import secrets
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from workbench.batches.batch import Batch
from workbench.batches.location import Location
from workbench.batches.references import Column
from workbench.batches.store import Origin, Weights
from workbench.display.interrupts import uninterrupted
from workbench.errors import BadInput, HostDied
from workbench.messages.metric_values import MetricValues
from workbench.messages.metrics import Metrics, merge_metrics, reported
from workbench.messages.replies import Reply
from workbench.session.checkpoint.files import Checkpoint, read_checkpoint
from workbench.stages.run import GRACE_S, Run
from workbench.stages.unfinished import UnfinishedUpdate

if TYPE_CHECKING:
    from workbench.algorithms.loop import Algorithm
    from workbench.controller import Workbench

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


@dataclass(frozen=True, kw_only=True)
class OpenRun:
    """A stage that was sent to hosts. read: the columns that an update read. drawn: (iteration, draw), where it drew
    samples."""

    number: int
    name: str
    role: str
    hosts: tuple[str, ...]
    code: str
    updates: bool
    collecting: tuple[int, ...]
    layout: str = ""
    read: Mapping[str, Column] = field(default_factory=dict)
    drawn: tuple[int, int] | None = None


class Handover:
    """Writes what the next kernel needs. folder: the workbench's record; nothing is written where that is gone."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._lock = threading.RLock()
        self._numbers: weakref.WeakKeyDictionary[Location, int] = weakref.WeakKeyDictionary()
        self._next = itertools.count()
        self._written: set[str] = set()
        self._entries = 0
        self._open: dict[int, OpenRun] = {}
        self._updates: dict[str, UnfinishedUpdate] = {}

    def write(self, lab: Workbench) -> None:
        """Write down how things stand."""
        self.batches(lab)
        self.position(lab)

    # --- writing ------------------------------------------------------------------------------------------------------

    def batches(self, lab: Workbench, *, anew: bool = False) -> None:
        """Write down what the store has come to keep, or to forget. anew: all of it, in place of what is there."""
        with self._lock, uninterrupted():
            known = set(lab.store)
            gone, come = self._written - known, known - self._written
            if not (anew or gone or come):
                return
            anew = anew or self._entries + len(gone) + len(come) > SLACK + 3 * len(known)
            if anew:
                self._numbers, self._entries, come, gone = weakref.WeakKeyDictionary(), 0, known, set()
            lines: list[Any] = [{"released": name} for name in sorted(gone)]
            numbers = dict[Location, int]()
            written = set[str]()
            for name in [name for name in lab.store if name in come]:
                if (entry := self._entry(lab, name, numbers, lines)) is not None:
                    lines.append(entry)
                    written.add(name)
            if lines or anew:
                self._write("batches.log", lines, more=not anew)
            self._numbers.update(numbers)
            self._written = written if anew else (self._written & known) | written
            self._entries += len(lines)

    def _entry(self, lab: Workbench, name: str, numbers: dict[Location, int], lines: list[Any]) -> Any:
        """What is to be known of a batch, after the locations of its columns; None while it is being made."""
        batch, origin = lab.store.kept(name), lab.store.origin(name)
        assert origin is not None
        if batch is None:
            filed = lab.store.filed(name)
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
            by_loop=lab.store.by_loop(name),
        )  # fmt: skip

    def position(self, lab: Workbench) -> None:
        """Write down where the algorithm stands, and what is drawn from beside the prompts."""
        algorithm = lab.algorithm
        automatic = lab._automatic
        values = {
            "algorithm": lab.saved_algorithm if algorithm is None else _position(algorithm),
            "streams": [*(stream.state for stream in lab.streams()), *lab.saved_streams],
            "autosave": None if automatic is None else {**asdict(automatic), "time_s": None},
            "last_metrics": {stage: dict(found) for stage, found in lab.last_metrics.items()},
            "checkpoints": [str(c.folder) if c else None for c in (lab.last_saved, lab.checkpoint)],
            "first_states": lab.first_states,
            "kept": lab.snapshots,
        }
        updates = dict(lab._updates_left.of_role)
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

    def take_over(self, lab: Workbench, note: Callable[[str], None]) -> None:
        """Give a workbench what the kernel before had: batches whose shards are there, runs that went on without it,
        and where its algorithm stood. note: called with what is waited for."""
        try:
            position = json.loads((self._folder / "position.json").read_text())
        except (OSError, ValueError):
            position = {}
        for updates in _entries(self._folder / "updates.pkl"):
            lab._updates_left.of_role = {
                role: replace(update, weights=lab.weights[role])
                for role, update in updates.items() if role in lab.weights
            }  # fmt: skip
        if not lab.looks:
            for runs in _entries(self._folder / "open.pkl"):
                for run in runs.values():
                    _settle(lab, run, note)
            for key, kept in position.get("kept", {}).items():  # of a comparison that its kernel did not end
                for host in kept["hosts"]:
                    lab._backend.work(host, "restore", key)
                    lab._backend.work(host, "drop_snapshot", key)
                for role, steps in kept["steps"].items():
                    lab.weights[role] = Weights(steps=steps, state=secrets.token_hex(4))
        self._take_batches(lab)
        if position:
            self._take_position(lab, position)
        if not lab.looks:
            self._write("open.pkl", [{}])
            self.batches(lab, anew=True)
            self.position(lab)

    def _take_position(self, lab: Workbench, position: Mapping[str, Any]) -> None:
        lab.saved_algorithm, lab.saved_streams = position["algorithm"], position["streams"]
        lab.last_metrics = {stage: MetricValues(found) for stage, found in position["last_metrics"].items()}
        lab.first_states = position["first_states"]
        found: list[Checkpoint | None] = []
        for folder in position["checkpoints"]:
            found.append(None)
            with suppress(BadInput):
                found[-1] = read_checkpoint(Path(folder)) if folder else None
        lab.last_saved, lab.checkpoint = found
        if automatic := position["autosave"]:
            lab.autosave(automatic["every"], minutes=automatic["minutes"], keep=automatic["keep"],
                         folder=automatic["folder"], models=automatic["models"])  # fmt: skip
            assert lab._automatic is not None
            lab._automatic.iteration = automatic["iteration"]
            lab._automatic.written = [Path(path) for path in automatic["written"]]

    def _take_batches(self, lab: Workbench) -> None:
        there: dict[str, set[str]] = {}
        for info in lab._infos:
            with suppress(HostDied):
                there[info.name] = set(lab._backend.ask(info.name, "shard_keys").result())
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
            numbers, file = versions[name.rpartition(" v")[0]], lab.store.file_of(name)
            if isinstance(entry, _Kept) and all(number in locations for _, number in entry.columns.values()):
                columns = {
                    n: Column(**{**values, "location": locations[i]}) for n, (values, i) in entry.columns.items()
                }
                shards = [shard.now(lab._heirs) for column in columns.values() for shard in column.location.shards]
                if all(shard.key in there.get(shard.host, ()) for shard in shards):
                    batch = Batch(
                        entry.name, columns, source=lab, counts=lab._counts, version=entry.version, versions=numbers,
                        meta=entry.meta,
                    )  # fmt: skip
                    lab.store.add(batch, entry.origin, (), by_loop=entry.by_loop)
                    for shard in shards:
                        used.setdefault(shard.host, set()).add(shard.key)
                    continue
            if file.is_file():
                lab.store.add_file(name, file, entry.origin, tuple(entry.columns), entry.meta, numbers)
        for host, keys in there.items():  # what that kernel held beside the store, it holds no longer
            if not lab.looks and (left := keys - used.get(host, set())):
                lab._backend.work(host, "release", sorted(left))


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


def _settle(lab: Workbench, run: OpenRun, note: Callable[[str], None]) -> None:
    """Wait for a stage that the kernel before had called, and keep what it did."""
    replies = [_reply(lab, run, host, note) for host in run.hosts]
    there = [reply for reply in replies if reply is not None]
    for reply in there:
        lab.telemetry.append_spans(reply.spans)
        lab.telemetry.append_transfers(reply.transfers)
        lab.telemetry.append_syncs(reply.syncs)
    if run.drawn is not None and lab._draws.get(run.drawn[0]) == run.drawn[1]:
        lab._draws[run.drawn[0]] -= 1  # its samples are drawn again
    if not run.updates or len(there) != len(run.hosts) or any(reply.failure for reply in there):
        return
    parts = [reply.stopped for reply in there if reply.stopped is not None]
    if parts and len(parts) == len(there):
        lab.note_update(run, parts, None)
    elif not parts:
        metrics: Metrics = {}
        for rank in run.collecting:
            merge_metrics(metrics, there[rank].metrics)
        lab.note_update(run, (), MetricValues(reported(metrics)))
    lab.telemetry.append_event("run of an earlier kernel", run=run.number, stage=run.name)


def _reply(lab: Workbench, run: OpenRun, host: str, note: Callable[[str], None]) -> Reply | None:
    """What a host said, or says when it is done with it; None where it never ran it, or is gone. One that is at it and
    does not get on for `GRACE_S` counts as lost."""
    seen, since_s = None, time.monotonic()
    while True:
        try:
            reply: Reply | None = lab._backend.ask(host, "reply_of", run.number).result()
            status = lab._backend.ask(host, "status").result()
        except HostDied:
            return None
        if reply is not None or not status[0]:
            return reply
        if status != seen:
            seen, since_s = status, time.monotonic()
        if time.monotonic() - since_s > GRACE_S:
            pool = next(info.pool for info in lab._infos if info.name == host)
            lab._broken[pool] = f"run {run.number}, {run.name}"
            return None
        note(f"waiting for {run.name}, which was under way")
        time.sleep(POLL_S)
