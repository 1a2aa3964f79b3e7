"""What the next kernel goes on from: written while a workbench on Ray is used, read by `wb.attach`.

Beside its record (see `workbench.registry`):

    batches.log     one entry a batch that the store keeps: what it is, where its shards lie, where it came from
    position.json   where the algorithm of the last step stands, streams of examples, automatic saves
    open.pkl        stages that hosts are at: their kernel may never hear of them

Hosts keep shards and their last reply, so that nothing that was finished is done twice: not an update whose kernel was
killed while it ran.
"""

from __future__ import annotations

import itertools
import json
import pickle
import threading
import weakref
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from workbench.dataflow.batch import Batch
from workbench.dataflow.location import Location
from workbench.dataflow.references import Column
from workbench.dataflow.run import MetricValues, Run
from workbench.dataflow.store import Origin
from workbench.workers.calls import Metrics, Reply, merge_metrics, reported

if TYPE_CHECKING:
    from workbench.algorithms.loop import Algorithm
    from workbench.controller import Workbench

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

    def write(self, lab: Workbench) -> None:
        """Write down how things stand."""
        self.batches(lab)
        self.position(lab)

    # --- writing ------------------------------------------------------------------------------------------------------

    def batches(self, lab: Workbench) -> None:
        """Write down what the store has come to keep, or to forget."""
        with self._lock:
            known = set(lab.store)
            lines: list[Any] = [{"released": name} for name in sorted(self._written - known)]
            lines += self._new(lab, known - self._written)
            self._written &= known
            if lines and self._entries + len(lines) > SLACK + 2 * len(known):
                self._numbers.clear()
                self._entries, self._written = 0, set()
                lines = self._new(lab, known)
                self._write("batches.log", lines)
            elif lines:
                self._write("batches.log", lines, more=True)
            self._entries += len(lines)

    def _new(self, lab: Workbench, names: set[str]) -> list[Any]:
        lines: list[Any] = []
        for name in [name for name in lab.store if name in names]:
            batch, origin = lab.store.kept(name), lab.store.origin(name)
            if batch is None or origin is None:
                continue
            columns = {}
            for column_name, column in batch.columns.items():
                number = self._numbers.get(column.location)
                if number is None:
                    number = self._numbers[column.location] = next(self._next)
                    lines.append((number, column.location))
                columns[column_name] = ({**column.__dict__, "location": None}, number)
            by_loop = lab.store.by_loop(name)
            lines.append(_Kept(
                name=batch.name, version=batch.version, columns=columns, meta=dict(batch.meta), origin=origin,
                by_loop=by_loop,
            ))  # fmt: skip
            self._written.add(name)
        return lines

    def position(self, lab: Workbench) -> None:
        """Write down where the algorithm stands, and what is drawn from beside the prompts."""
        algorithm = lab.algorithm
        automatic = lab._automatic
        values = {
            "algorithm": lab.saved_algorithm if algorithm is None else _position(algorithm),
            "streams": [*(stream.state for stream in lab.streams()), *lab.saved_streams],
            "autosave": None if automatic is None else {**asdict(automatic), "time_s": None},
            "last_metrics": {stage: dict(found) for stage, found in lab.last_metrics.items()},
        }
        with self._lock:
            if self._folder.is_dir():
                new = self._folder / "position.new"
                new.write_text(json.dumps(values, default=str))
                new.replace(self._folder / "position.json")

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

    def take_over(self, lab: Workbench) -> None:
        """Give a workbench what the kernel before had: batches whose shards are there, runs that went on without it,
        and where its algorithm stood."""
        self._take_batches(lab)
        for run in _entries(self._folder / "open.pkl"):
            for open_run in run.values():
                _settle(lab, open_run)
        try:
            position = json.loads((self._folder / "position.json").read_text())
        except (OSError, ValueError):
            position = {}
        if position:
            lab.saved_algorithm = position["algorithm"]
            lab.saved_streams = position["streams"]
            lab.last_metrics = {stage: MetricValues(found) for stage, found in position["last_metrics"].items()}
            if automatic := position["autosave"]:
                lab.autosave(automatic["every"], minutes=automatic["minutes"], keep=automatic["keep"],
                             folder=automatic["folder"], models=automatic["models"])  # fmt: skip
                assert lab._automatic is not None
                lab._automatic.iteration = automatic["iteration"]
                lab._automatic.written = [Path(path) for path in automatic["written"]]
        self._entries, self._written = SLACK, set()  # written anew, without what is gone
        if not lab.looks:
            self._write("open.pkl", [{}])
            self.batches(lab)

    def _take_batches(self, lab: Workbench) -> None:
        asked = {info.name: lab._backend.ask(info.name, "shard_keys") for info in lab._infos}
        there = {name: set(pending.result()) for name, pending in asked.items()}
        locations: dict[int, Location] = {}
        found: dict[str, _Kept] = {}
        for entry in _entries(self._folder / "batches.log"):
            if isinstance(entry, _Kept):
                found[f"{entry.name} v{entry.version}"] = entry
            elif isinstance(entry, tuple):
                locations[entry[0]] = entry[1]
            else:
                found.pop(entry["released"], None)
        newest: dict[str, int] = {}
        for entry in found.values():
            newest[entry.name] = max(newest.get(entry.name, 0), entry.version)
        versions = {name: itertools.count(version + 1) for name, version in newest.items()}
        used: dict[str, set[str]] = {}
        for name, entry in found.items():
            columns = {n: Column(**{**values, "location": locations[i]}) for n, (values, i) in entry.columns.items()}
            shards = [shard.now(lab._heirs) for column in columns.values() for shard in column.location.shards]
            if all(shard.key in there.get(shard.host, ()) for shard in shards):
                batch = Batch(
                    entry.name, columns, source=lab, counts=lab._counts, version=entry.version,
                    versions=versions[entry.name], meta=entry.meta,
                )  # fmt: skip
                lab.store.add(batch, entry.origin, (), by_loop=entry.by_loop)
                for shard in shards:
                    used.setdefault(shard.host, set()).add(shard.key)
            elif (file := lab.store.file_of(name)).is_file():
                lab.store.add_file(name, file, entry.origin, tuple(columns), entry.meta, versions[entry.name])
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
    return {
        "class": type(algorithm).__name__,
        "iteration": algorithm.iteration,
        "state": algorithm.state(),
        "under_way": bool(made),
        "made": made,
        "last_metrics": {stage: dict(values) for stage, values in algorithm.lab.last_metrics.items()} if made else {},
    }


def _settle(lab: Workbench, run: OpenRun) -> None:
    """Wait for a stage that the kernel before had called, and keep what it did."""
    if lab.looks:
        return
    hosts = [host for host in run.hosts if host in {info.name for info in lab._infos}]
    replies: list[Reply | None] = [p.result() for p in [lab._backend.work(h, "reply_of", run.number) for h in hosts]]
    there = [reply for reply in replies if reply is not None]
    for reply in there:
        lab.telemetry.append_spans(reply.spans)
        lab.telemetry.append_transfers(reply.transfers)
        lab.telemetry.append_syncs(reply.syncs)
    done = len(there) == len(run.hosts) and all(r.failure is None and r.stopped is None for r in there)
    if run.drawn is not None and lab._draws.get(run.drawn[0]) == run.drawn[1]:
        lab._draws[run.drawn[0]] -= 1  # its samples are drawn again
    if run.updates and done:
        metrics: Metrics = {}
        for rank in run.collecting:
            merge_metrics(metrics, there[rank].metrics)
        values = MetricValues(reported(metrics))
        lab.note_update_done(run, values)
        lab.telemetry.append_event("run of an earlier kernel", run=run.number, stage=run.name)
