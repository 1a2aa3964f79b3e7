"""A later kernel takes up a workbench: batches, stages that went on without their kernel, the place of the algorithm.

Hosts keep shards and their last reply, so that nothing that was finished is done twice: not an update whose kernel was
killed while it ran.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from workbench.backends.hosts import Hosts
from workbench.batches.batch import Batch
from workbench.batches.location import Location, ShardId
from workbench.batches.references import Column
from workbench.batches.store import Weights
from workbench.data.prompt_stream import PromptStream
from workbench.errors import BadInput, HostDied
from workbench.messages.metric_values import MetricValues
from workbench.messages.metrics import Metrics, merge_metrics, reported
from workbench.messages.replies import Reply
from workbench.session.checkpoint.checkpoints import Checkpoints
from workbench.session.checkpoint.files import Checkpoint, read_checkpoint
from workbench.session.journal import KeptBatch, Recorded
from workbench.session.position import Position
from workbench.session.recovering import RECOVERY
from workbench.stages.ledger import SentRun
from workbench.stages.runner import StageRunner
from workbench.stages.stage import GRACE_S

POLL_S = 0.2
Note = Callable[[str], None]


def take_over(
    recorded: Recorded, runner: StageRunner, position: Position, checkpoints: Checkpoints, prompts: PromptStream,
    note: Note,
) -> None:  # fmt: skip
    """Give a workbench what the kernel before had. note: called with what is waited for."""
    if recorded.counters:
        _take_counters(recorded.counters, runner)
        prompts.go_on(
            recorded.counters["drawn"], recorded.counters["prompts"], recorded.ledger, recorded.ledger_changes
        )
    if runner.ownership.drives:
        for run in recorded.open_runs.values():
            if run.parts or run.result is not None:
                runner.interrupted.take_over(run)
            else:
                _finish(runner, run, note)
        _end_snapshots(runner, recorded.position.get("snapshots", {}))
    _take_batches(recorded, runner)
    if recorded.position:
        _take_position(recorded.position, runner, position, checkpoints)
    if position.recovering:
        runner.hosts.lost |= dict.fromkeys((info.pool for info in runner.hosts.infos), RECOVERY)


def _take_counters(values: Mapping[str, Any], runner: StageRunner) -> None:
    hosts, counters = runner.hosts, runner.counters
    counters.run, counters.batch, counters.iteration = values["run"], values["batch"], values["iteration"]
    # stages of that kernel may have gone on without it: no weights are known to be those of then, and rollout workers
    # are sent the actor's again
    for role, weights in values["weights"].items():
        counters.weights[role] = Weights.fresh(weights["steps"])
    counters.take_draws(values)
    counters.iterations_to_skip = values["iterations_to_skip"]
    # a kernel that ended before it recorded its move has noted successors that no placement has
    successors, there = dict(values["shard_successors"]), {info.name for info in hosts.infos}
    hosts.pools_ended = values["pools_ended"]
    hosts.shard_successors = {old: new for old, new in successors.items() if new in there or new in successors}


def _take_position(
    values: Mapping[str, Any], runner: StageRunner, position: Position, checkpoints: Checkpoints
) -> None:
    position.saved_algorithm, position.saved_streams = values["algorithm"], values["streams"]
    position.fill_buffer(values)
    metrics = {stage: MetricValues(found) for stage, found in values["last_metrics"].items()}
    runner.counters.last_metrics = metrics
    position.first_states, position.recovering = values["first_states"], values["recovering"]
    position.last_saved, position.checkpoint = map(_checkpoint, values["checkpoints"])
    if automatic := values["autosave"]:
        checkpoints.autosave(automatic["every"], minutes=automatic["minutes"], keep=automatic["keep"],
                             folder=automatic["folder"], models=automatic["models"])  # fmt: skip
        assert checkpoints.automatic is not None
        checkpoints.automatic.iteration = automatic["iteration"]
        checkpoints.automatic.written = [Path(path) for path in automatic["written"]]


def _checkpoint(folder: str | None) -> Checkpoint | None:
    with suppress(BadInput):  # it is gone
        return read_checkpoint(Path(folder)) if folder else None
    return None


def _end_snapshots(runner: StageRunner, snapshots: Mapping[str, Any]) -> None:
    """Go back to the snapshots of a comparison that its kernel did not end."""
    for key, kept in snapshots.items():
        for host in kept["hosts"]:
            runner.hosts.backend.work(host, "restore", key)
            runner.hosts.backend.work(host, "drop_snapshot", key)
        for role, steps in kept["steps"].items():
            runner.counters.weights[role] = Weights.fresh(steps)


# --- batches ----------------------------------------------------------------------------------------------------------


def _take_batches(recorded: Recorded, runner: StageRunner) -> None:
    """Put the batches whose shards, or whose files, are there into the store; hosts forget all other shards."""
    hosts, batches = runner.hosts, runner.batches
    there: dict[str, set[str]] = {}
    for info in hosts.infos:
        with suppress(HostDied):
            there[info.name] = set(hosts.backend.ask(info.name, "shard_keys").result())
    versions, used = _later_versions(recorded.batches), set[ShardId]()
    for name, entry in recorded.batches.items():
        numbers, file = versions[name.rpartition(" v")[0]], batches.store.file_of(name)
        columns = _columns(entry, recorded.locations) if isinstance(entry, KeptBatch) else None
        shards = [
            shard.now(hosts.shard_successors)
            for column in (columns or {}).values() for shard in column.location.shards
        ]  # fmt: skip
        if isinstance(entry, KeptBatch) and columns and all(s.key in there.get(s.host, ()) for s in shards):
            batch = Batch(
                entry.name, columns, source=batches, counts=batches.shard_counts, version=entry.version,
                versions=numbers, meta=entry.meta,
            )  # fmt: skip
            batches.store.add(batch, entry.origin, (), by_loop=entry.by_loop)
            used.update(shards)
        elif file.is_file():
            batches.store.add_file(name, file, entry.origin, tuple(entry.columns), entry.meta, numbers)
    if runner.ownership.drives:
        for host, keys in there.items():
            if left := sorted(key for key in keys if ShardId(host, key) not in used):
                hosts.backend.work(host, "release", left)


def _later_versions(names: Mapping[str, Any]) -> dict[str, Iterator[int]]:
    """By the name of a batch, the numbers of its versions to come."""
    newest: dict[str, int] = {}
    for name in names:
        base, _, version = name.rpartition(" v")
        newest[base] = max(newest.get(base, 0), int(version))
    return {base: itertools.count(version + 1) for base, version in newest.items()}


def _columns(entry: KeptBatch, locations: Mapping[str, Location]) -> dict[str, Column] | None:
    """The columns of a batch; None where a location could not be read."""
    if not all(number in locations for _, number in entry.columns.values()):
        return None
    return {
        name: Column(**{**values, "location": locations[number]}) for name, (values, number) in entry.columns.items()
    }


# --- stages that were under way ---------------------------------------------------------------------------------------


def _finish(runner: StageRunner, run: SentRun, note: Note) -> None:
    """Wait for a stage that the kernel before had called, and keep what it did."""
    replies = [_reply(runner.hosts, run, host, note) for host in run.hosts]
    there = [reply for reply in replies if reply is not None]
    runner.record_replies(there)
    if run.drawn is not None:
        runner.counters.draw_again(*run.drawn)
    if not run.updates or len(there) != len(run.hosts) or any(reply.failure for reply in there):
        return
    parts = [reply.stopped for reply in there if reply.stopped is not None]
    if parts and len(parts) == len(there):
        runner.interrupted.ended_without_kernel(run, parts, None)
    elif not parts:
        metrics: Metrics = {}
        for rank in run.result_ranks:
            merge_metrics(metrics, there[rank].metrics)
        runner.interrupted.ended_without_kernel(run, (), MetricValues(reported(metrics)))
    runner.telemetry.append_event("run of an earlier kernel", run=run.number, stage=run.name)


def _reply(hosts: Hosts, run: SentRun, host: str, note: Note) -> Reply | None:
    """The reply of a host, once it has ended the stage; None where it never ran it, or is gone. A host that makes no
    progress for `GRACE_S` counts as lost."""
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
