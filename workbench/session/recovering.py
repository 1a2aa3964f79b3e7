"""`lab.recover`: what died is started again, and all of the workbench goes on from one checkpoint."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from workbench.backends.hosts import Hosts
from workbench.backends.ray import RayBackend
from workbench.backends.starting import Note, join_pools, load_roles
from workbench.batches.store import Weights
from workbench.data.prompt_stream import PromptStream
from workbench.display.interrupts import stoppable
from workbench.display.progress import Progress
from workbench.errors import BadInput, NotFound, WorkbenchError
from workbench.messages.calls import HostInfo
from workbench.placement import ROLLOUT
from workbench.session.checkpoint.files import Checkpoint, find_checkpoint
from workbench.session.checkpoint.restoring import Restoring
from workbench.session.position import Position
from workbench.stages.runner import StageRunner

RECOVERY = "a recovery that did not come to its end"
ANSWER_S = 20.0  # a host whose process runs and that says nothing for so long counts as lost


def recover(
    runner: StageRunner,
    position: Position,
    prompts: PromptStream,
    path: str | Path | None,
    reload: Callable[[], object],
) -> Checkpoint | None:
    """`lab.recover(path)`. reload: `lab.reload`, for this kernel where the hosts were restarted with edited code."""
    left = "some roles may be as after the checkpoint, and others not", "the same call again brings all of them to it"
    with stoppable("lab.recover()", left):
        checkpoint = _recover(runner, position, prompts, path)
    if runner.hosts.outdated:
        reload()
    return checkpoint


def _recover(
    runner: StageRunner, position: Position, prompts: PromptStream, path: str | Path | None
) -> Checkpoint | None:
    hosts, counters = runner.hosts, runner.counters
    runner.require_alone("recover()", "it puts all roles back")
    checkpoint = newest(hosts, position) if path is None else find_checkpoint(path)
    if checkpoint is None and not isinstance(hosts.backend, RayBackend):
        raise BadInput(
            "recover() without a checkpoint, inline", "there are no processes to start again",
            "open it again with if_exists='replace', and next time with save_every=1",
        )  # fmt: skip
    # what does not fit is refused before anything is ended
    restoring = None if checkpoint is None else Restoring(checkpoint, hosts.description)
    began = time.monotonic()
    # some roles are put back before others: until all are, no stage may run, in this kernel or in one that attaches
    position.recovering = True
    runner.ownership.record()
    try:
        with Progress("recovering") as bar:
            lost = _put_back(runner, position, prompts, restoring, bar.note)
        position.recovering = False
    except BaseException:
        hosts.lost |= dict.fromkeys((info.pool for info in hosts.infos), RECOVERY)
        raise
    if (algorithm := position.algorithm) is not None:
        position.put_back(algorithm)
    runner.interrupted.forget(all_of_them=True)
    for stream in position.streams():
        position.put_back_stream(stream)
    runner.ownership.record()
    runner.telemetry.append_event(
        "recovered", pools=sorted(lost), folder=None if checkpoint is None else str(checkpoint.folder),
        iteration=counters.iteration, seconds=time.monotonic() - began,
    )  # fmt: skip
    state = "as it was opened" if checkpoint is None else f"as after {_position(checkpoint)}, from {checkpoint.folder}"
    started = f"pool {', '.join(sorted(lost))} started again; " if lost else ""
    print(f"recovered in {time.monotonic() - began:.0f} s: {started}everything is {state}")
    return checkpoint


def _put_back(
    runner: StageRunner, position: Position, prompts: PromptStream, restoring: Restoring | None, note: Note
) -> set[str]:
    """Start what died again, and give all roles what a checkpoint has; None: what they had when the workbench was
    opened. Returns the pools that were started again."""
    hosts = runner.hosts
    for run in runner.scheduler.open_runs():
        run.cancel()
    note("waiting for the stages under way to stop")
    runner.scheduler.drain()
    head_was_gone = isinstance(hosts.backend, RayBackend) and hosts.backend.rejoin(note)
    hosts.lost = {pool: why for pool, why in hosts.lost.items() if why != RECOVERY}  # their processes are there
    # without a checkpoint all start again: a living role has learned from what the others no longer have
    all_anew = restoring is None or head_was_gone or hosts.outdated
    lost = {info.pool for info in hosts.infos} if all_anew else hosts.lost_pools(ANSWER_S)
    _restart(runner, lost, note)
    runner.failures.forget()
    if restoring is not None:
        restoring.load(runner, position, prompts, note)
        runner.counters.iterations_to_skip = 0  # nothing is done again by itself
    else:
        _begin_anew(runner, position, prompts)
    return lost


def newest(hosts: Hosts, position: Position) -> Checkpoint | None:
    """The newest checkpoint of a workbench: saved by this kernel, by itself, or the one that it was resumed from."""
    found = [checkpoint for checkpoint in (position.last_saved, position.checkpoint) if checkpoint is not None]
    with suppress(NotFound, BadInput):
        found.append(find_checkpoint(hosts.run_folder))
    there = [checkpoint for checkpoint in found if checkpoint.folder.is_dir()]
    return max(there, key=lambda checkpoint: float(checkpoint.values["saved_s"]), default=None)


def _restart(runner: StageRunner, lost: set[str], note: Note) -> None:
    """New processes in the place of those of some pools, with the models as they were opened."""
    if not lost:
        return
    hosts, backend = runner.hosts, runner.hosts.backend
    old = [info for info in hosts.infos if info.pool in lost]
    note("ending what is left of lost pools")
    with suppress(WorkbenchError):
        backend.end(old)
    infos = [_anew(info, hosts.run_folder) if info.pool in lost else info for info in hosts.infos]
    new = [info for info in infos if info.pool in lost]
    try:
        note("starting hosts")
        backend.start(new)
        join_pools(backend, new, note)
        pools = hosts.placement.pools
        roles = {pool.name: [*pool.roles, "numeric"] if pool.name in lost else [] for pool in pools}
        load_roles(backend, new, hosts.description, note, roles=roles)
    except BaseException:
        with suppress(WorkbenchError):
            backend.end(new)
        hosts.lost |= dict.fromkeys(lost, "a recovery that failed")
        raise
    with hosts.changing:
        hosts.become(replace(hosts.description, moved=tuple(infos)))
        runner.groups.follow_hosts()
    for pool in lost:
        hosts.lost.pop(pool, None)
        hosts.pending_cleanup.pop(pool, None)
    hosts.pools_ended |= {info.pool: info.again for info in old}
    runner.batches.store.forget_hosts({info.name for info in old})
    runner.ownership.record()
    hosts.record()
    hosts.drive()


def _anew(info: HostInfo, run_folder: Path) -> HostInfo:
    """The host that comes after another one: of another name, as what that one kept is gone."""
    new = replace(info, again=info.again + 1)
    return replace(new, log_path=str(run_folder / "logs" / f"{new.name}.log"))


def _begin_anew(runner: StageRunner, position: Position, prompts: PromptStream) -> None:
    """Go back to the counters of a workbench that was opened this moment; run numbers go on."""
    counters = runner.counters
    counters.iteration, counters.draws, counters.last_metrics = 0, {}, {}
    prompts.go_back()
    position.begin_anew()
    # rollout workers may be of another kind than the actor: they are sent its weights
    counters.weights = {
        role: Weights.fresh(0) if role == ROLLOUT else Weights(steps=0, state="") for role in counters.weights
    }


def _position(checkpoint: Checkpoint) -> str:
    algorithm = checkpoint.values["algorithm"]
    where = "in the middle of " if algorithm and algorithm["under_way"] else ""
    return f"{where}iteration {checkpoint.iteration}"
