"""`lab.recover`: restarts dead processes, and puts the whole workbench back to one checkpoint. Where only rollout
workers died, nothing is put back.

Hosts keep shards and their last reply, so that finished work is never repeated, not even an update whose kernel was
killed while the update ran.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from workbench.backends.hosts import Hosts
from workbench.backends.ray import RayBackend
from workbench.backends.starting import Note, begin_loading, join_pools, settle
from workbench.batches.batch import Batch
from workbench.batches.location import Column, Location, ShardId
from workbench.batches.store import Weights
from workbench.data.prompt_stream import PromptStream
from workbench.display.interrupts import stoppable
from workbench.display.progress import Progress
from workbench.errors import BadInput, HostDied, NotFound, WorkbenchError
from workbench.messages.calls import Reply
from workbench.messages.metrics import MetricValues, merge_metrics, reported
from workbench.placement import ROLLOUT
from workbench.session.checkpoint.checkpoints import Automatic, Checkpoints
from workbench.session.checkpoint.files import Checkpoint, find_checkpoint, read_checkpoint
from workbench.session.checkpoint.restoring import Restoring, say_assigned
from workbench.session.journal import KeptBatch, Recorded
from workbench.session.position import Position
from workbench.stages.interrupted import parts_left
from workbench.stages.ledger import SentRun
from workbench.stages.runner import StageRunner
from workbench.stages.stage import GRACE_S

RECOVERY = "a recovery that did not finish"
ANSWER_S = 20.0  # a running host that does not answer for this long counts as lost


def recover(
    runner: StageRunner,
    position: Position,
    prompts: PromptStream,
    path: str | Path | None,
    reload: Callable[[], object],
) -> Checkpoint | None:
    """`lab.recover(path)`. reload: `lab.reload`, called in this kernel when hosts were restarted with edited code."""
    left = "some roles may have the state of the checkpoint, and others not", "run the same call again"
    with stoppable("lab.recover()", left):
        checkpoint = _recover(runner, position, prompts, path)
    if runner.hosts.outdated:
        reload()
    return checkpoint


def _recover(
    runner: StageRunner, position: Position, prompts: PromptStream, path: str | Path | None
) -> Checkpoint | None:
    hosts, counters = runner.hosts, runner.counters
    runner.require_alone("recover()", "a recovery puts back all roles")
    checkpoint = newest(hosts, position) if path is None else find_checkpoint(path)
    if path is None and not (position.recovering or hosts.outdated):
        lost = hosts.lost_pools(ANSWER_S)
        if lost and all(pool.roles == (ROLLOUT,) for pool in hosts.placement.pools if pool.name in lost):
            _restart_rollout_workers(runner, lost)
            return None
        if not (lost or checkpoint or hosts.inline):
            raise BadInput(
                "recover() without a lost host or a checkpoint", "it would put all back to the opening's state",
                "continue your work; or begin again with wb.open(..., if_exists='replace')",
            )  # fmt: skip
    if checkpoint is None and not isinstance(hosts.backend, RayBackend):
        raise BadInput(
            "recover() without a checkpoint, inline", "the inline backend has no processes to restart",
            "open it again with if_exists='replace', and next time with save_every=1",
        )  # fmt: skip
    # a checkpoint that does not fit is refused before anything is ended
    restoring = None if checkpoint is None else Restoring(checkpoint, hosts.description)
    began = time.monotonic()
    # roles are put back one after another: until all are, no stage may run, in this kernel or in one that attaches
    position.recovering = True
    runner.ownership.record()
    try:
        with Progress("recovering") as bar:
            lost = _put_back(runner, position, prompts, restoring, bar.note)
        position.recovering = False
    except BaseException:
        hosts.lost |= dict.fromkeys((info.pool for info in hosts.infos), RECOVERY)
        raise
    position.noted.clear()  # these settings are no longer current
    if (algorithm := position.algorithm) is not None:
        position.put_back(algorithm)
    runner.interrupted.forget(behind=0)
    for stream in position.streams():
        position.put_back_stream(stream)
    runner.ownership.record()
    runner.telemetry.append_event(
        "recovered", pools=sorted(lost), folder=None if checkpoint is None else str(checkpoint.folder),
        iteration=counters.iteration, seconds=time.monotonic() - began,
    )  # fmt: skip
    state = "as it was opened" if checkpoint is None else f"as after {_position(checkpoint)}, from {checkpoint.folder}"
    started = f"pool {', '.join(sorted(lost))} restarted; " if lost else ""
    print(f"recovered in {time.monotonic() - began:.0f} s: {started}everything is {state}")
    say_assigned(hosts.description)
    return checkpoint


def _restart_rollout_workers(runner: StageRunner, lost: set[str]) -> None:
    """Restart rollout workers. Nothing is put back, as they have learned nothing and keep no rows: see `StageRun`."""
    began, weights = time.monotonic(), runner.counters.weights
    with Progress("recovering") as bar:
        for run in runner.scheduler.open_runs():
            if run.group.pool.name in lost:
                run.cancel()
        bar.note("waiting for the stages under way to end")
        runner.scheduler.drain()
        _restart(runner, lost, bar.note)
    weights[ROLLOUT] = Weights.fresh(weights[ROLLOUT].steps)  # the new workers are sent the actor's weights
    runner.ownership.record()
    seconds = time.monotonic() - began
    runner.telemetry.append_event("restarted", pools=sorted(lost), seconds=seconds)
    print(f"recovered in {seconds:.0f} s: pool {', '.join(sorted(lost))} restarted; nothing went back")


def _put_back(
    runner: StageRunner, position: Position, prompts: PromptStream, restoring: Restoring | None, note: Note
) -> set[str]:
    """Restart dead processes, and give all roles the state of the checkpoint, or, where `restoring` is None, their
    state from the opening of the workbench. Returns the restarted pools."""
    hosts = runner.hosts
    for run in runner.scheduler.open_runs():
        run.cancel()
    note("waiting for the stages under way to stop")
    runner.scheduler.drain()
    head_was_gone = isinstance(hosts.backend, RayBackend) and hosts.backend.rejoin(note)
    hosts.lost = {pool: why for pool, why in hosts.lost.items() if why != RECOVERY}  # the processes of these pools run
    # without a checkpoint all pools restart: a living role was trained together with the lost ones
    all_anew = restoring is None or head_was_gone or hosts.outdated
    lost = {info.pool for info in hosts.infos} if all_anew else hosts.lost_pools(ANSWER_S)
    _restart(runner, lost, note)
    runner.failures.forget()
    if restoring is not None:
        restoring.load(runner, position, prompts, note)
        runner.counters.iterations_to_skip = 0  # nothing is repeated automatically
    else:
        _reset(runner, position, prompts)
    return lost


def newest(hosts: Hosts, position: Position) -> Checkpoint | None:
    """Return the newest checkpoint of a workbench: a manual or automatic save, or the one that it was resumed from."""
    found = [checkpoint for checkpoint in (position.last_saved, position.checkpoint) if checkpoint is not None]
    with suppress(NotFound, BadInput):
        found.append(find_checkpoint(hosts.run_folder))
    there = [checkpoint for checkpoint in found if checkpoint.folder.is_dir()]
    return max(there, key=lambda checkpoint: float(checkpoint.values["saved_s"]), default=None)


def _restart(runner: StageRunner, lost: set[str], note: Note) -> None:
    """Replace the processes of the pools `lost` by new ones, with the models as they were opened."""
    if not lost:
        return
    hosts, backend = runner.hosts, runner.hosts.backend
    old = [info for info in hosts.infos if info.pool in lost]
    note("ending processes of lost pools")
    with suppress(WorkbenchError):
        backend.end(old)
    # their successors have other names, because what the old hosts kept is gone
    infos = [replace(info, again=info.again + 1) if info.pool in lost else info for info in hosts.infos]
    infos = [replace(info, log_path=str(hosts.run_folder / "logs" / f"{info.name}.log")) for info in infos]
    new = [info for info in infos if info.pool in lost]
    try:
        note("starting hosts")
        backend.start(new)
        join_pools(backend, new, note)
        pools = hosts.placement.pools
        roles = {pool.name: [*pool.roles, "numeric"] if pool.name in lost else [] for pool in pools}
        settle(backend, begin_loading(backend, new, hosts.description, note, roles=roles), note)
    except BaseException:
        with suppress(WorkbenchError):
            backend.end(new)
        hosts.lost |= dict.fromkeys(lost, "a recovery that failed")
        raise
    with hosts.changing:
        hosts.set_description(replace(hosts.description, moved=tuple(infos)))
        runner.groups.follow_hosts()
    for pool in lost:
        hosts.lost.pop(pool, None)
        hosts.pending_cleanup.pop(pool, None)
    hosts.pools_ended |= {info.pool: info.again for info in old}
    runner.batches.store.forget_hosts({info.name for info in old})
    runner.ownership.record()
    hosts.record()
    hosts.drive()


def _reset(runner: StageRunner, position: Position, prompts: PromptStream) -> None:
    """Go back to the counters of a workbench that was just opened; run numbers go on."""
    counters = runner.counters
    counters.iteration, counters.draws, counters.last_metrics = 0, {}, {}
    prompts.reset()
    position.reset()
    # rollout workers may be of another class than the actor: they are sent its weights
    counters.weights = {
        role: Weights.fresh(0) if role == ROLLOUT else Weights(steps=0, state="") for role in counters.weights
    }


def _position(checkpoint: Checkpoint) -> str:
    algorithm = checkpoint.values["algorithm"]
    where = "in the middle of " if algorithm and algorithm["under_way"] else ""
    return f"{where}iteration {checkpoint.iteration}"


POLL_S = 0.2


def take_over(
    recorded: Recorded, runner: StageRunner, position: Position, checkpoints: Checkpoints, prompts: PromptStream,
    note: Note,
) -> None:  # fmt: skip
    """Give a workbench what the previous kernel recorded. note: called with a text about what is waited for."""
    if recorded.counters:
        _take_counters(recorded.counters, runner)
        prompts.restore(
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
    # stages of the previous kernel may have gone on without it, so that weights may have changed: rollout workers are
    # sent the actor's weights again
    for role, weights in values["weights"].items():
        counters.weights[role] = Weights.fresh(weights["steps"])
    counters.take_draws(values)
    counters.iterations_to_skip = values["iterations_to_skip"]
    # a kernel that ended in the middle of a move has noted successors that are in no placement
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
    runner.live.others = dict.fromkeys(values.get("others", ()))  # missing in the journal of an older kernel
    position.last_saved, position.checkpoint = map(_checkpoint, values["checkpoints"])
    if automatic := values["autosave"]:
        paths = {"folder": Path(automatic["folder"]), "written": [Path(path) for path in automatic["written"]]}
        checkpoints.automatic = Automatic(**{**automatic, **paths, "time_s": time.monotonic()})


def _checkpoint(folder: str | None) -> Checkpoint | None:
    with suppress(BadInput):  # the checkpoint is gone
        return read_checkpoint(Path(folder)) if folder else None
    return None


def _end_snapshots(runner: StageRunner, snapshots: Mapping[str, Any]) -> None:
    """Go back to the snapshots of a comparison that the previous kernel did not end."""
    for key, kept in snapshots.items():
        for host in kept["hosts"]:
            runner.hosts.backend.work(host, "restore", key)
            runner.hosts.backend.work(host, "drop_snapshot", key)
        for role, steps in kept["steps"].items():
            runner.counters.weights[role] = Weights.fresh(steps)


# --- batches ----------------------------------------------------------------------------------------------------------


def _take_batches(recorded: Recorded, runner: StageRunner) -> None:
    """Put the batches whose shards or files still exist into the store; hosts drop all other shards."""
    hosts, batches = runner.hosts, runner.batches
    there: dict[str, set[str]] = {}
    for info in hosts.infos:
        with suppress(HostDied):
            there[info.name] = set(hosts.backend.ask(info.name, "shard_keys").result())
    newest, used = dict[str, int](), set[ShardId]()
    for base, _, version in (name.rpartition(" v") for name in recorded.batches):
        newest[base] = max(newest.get(base, 0), int(version))
    later = {base: itertools.count(version + 1) for base, version in newest.items()}  # versions to come, by batch
    for name, entry in recorded.batches.items():
        numbers, file = later[name.rpartition(" v")[0]], batches.store.file_of(name)
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


def _columns(entry: KeptBatch, locations: Mapping[str, Location]) -> dict[str, Column] | None:
    """Return the columns of a batch; None where a location could not be read."""
    if not all(number in locations for _, number in entry.columns.values()):
        return None
    return {
        name: Column(**{**values, "location": locations[number]}) for name, (values, number) in entry.columns.items()
    }


# --- stages that were under way ---------------------------------------------------------------------------------------


def _finish(runner: StageRunner, run: SentRun, note: Note) -> None:
    """Wait for a stage that the previous kernel had called, and keep its results."""
    replies = [_reply(runner.hosts, run, host, note) for host in run.hosts]
    there = [reply for reply in replies if reply is not None]
    runner.record_replies(there)
    if run.drawn is not None:
        runner.counters.draw_again(*run.drawn)
    if not run.updates or len(there) != len(run.hosts):
        return
    failed = any(reply.failure is not None for reply in there)
    if parts := parts_left(there, len(there)):
        runner.interrupted.ended_without_kernel(replace(run, failed=failed), parts, None)
    elif failed:
        return
    elif not any(reply.stopped for reply in there):
        metrics = merge_metrics({}, *(there[rank].metrics for rank in run.result_ranks))
        runner.interrupted.ended_without_kernel(run, (), MetricValues(reported(metrics)))
    runner.telemetry.append_event("run of an earlier kernel", run=run.number, stage=run.name)


def _reply(hosts: Hosts, run: SentRun, host: str, note: Note) -> Reply | None:
    """Return a host's reply, once the host has ended the stage; None where the host never ran it, or is gone. A host
    that makes no progress for `GRACE_S` counts as lost."""
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
