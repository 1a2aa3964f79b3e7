"""`lab.recover`: what died is started again, and all of the workbench goes on from one checkpoint."""

from __future__ import annotations

import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from workbench.backends import RayBackend
from workbench.backends.base import answered
from workbench.backends.starting import join_pools, load_roles
from workbench.batches.store import Weights
from workbench.display.progress import Progress
from workbench.errors import BadInput, NotFound, WorkbenchError
from workbench.messages.calls import HostInfo
from workbench.placement import ROLLOUT
from workbench.session.checkpoint.files import Checkpoint, find_checkpoint
from workbench.session.checkpoint.restoring import Restoring

if TYPE_CHECKING:
    from workbench.algorithms.loop import Algorithm
    from workbench.controller import Workbench

ANSWER_S = 5.0  # a host whose process runs and that says nothing for so long counts as lost


def recover(lab: Workbench, path: str | Path | None = None) -> Checkpoint | None:
    """`lab.recover(path)`."""
    lab._check_open()
    lab.check_driver()
    if lab.overlapping or lab._keeping:
        where = "overlap()" if lab.overlapping else "kept()"
        raise BadInput(f"recover() inside lab.{where}", "it puts all roles back", "do it afterwards")
    checkpoint = newest(lab) if path is None else find_checkpoint(path)
    if checkpoint is None and not isinstance(lab._backend, RayBackend):
        raise BadInput(
            "recover() without a checkpoint, inline", "there are no processes to start again",
            "open it again with if_exists='replace', and next time with save_every=1",
        )  # fmt: skip
    # what does not fit is heard of before anything is ended
    restoring = None if checkpoint is None else Restoring(checkpoint, lab.description)
    began = time.monotonic()
    with Progress("recovering") as bar:

        def note(text: str) -> None:
            bar.label = f"recovering: {text}"
            bar.update(0, 0)

        for run in lab.scheduler.open_runs():
            run.cancel()
        note("waiting for the stages under way to stop")
        lab.scheduler.drain()
        anew = isinstance(lab._backend, RayBackend) and lab._backend.rejoin(note)
        # without a checkpoint all begin anew: a living role has learned what the others are to know nothing of
        lost = lost_pools(lab) if restoring and not anew else {info.pool for info in lab._infos}
        _restart(lab, lost, note)
        lab._failed = None
        if restoring is not None:
            restoring.load(lab, note)
            lab._credit = 0  # nothing is done again by itself
        else:
            _as_opened(lab)
    for algorithm in filter(None, [lab.algorithm]):
        _put_back(lab, algorithm)
    lab._updates_left.clear()
    for stream in lab.streams():
        lab.put_back(stream)
    lab._save_state()
    lab.note_position()
    lab.telemetry.append_event(
        "recovered", pools=sorted(lost), folder=None if checkpoint is None else str(checkpoint.folder),
        iteration=lab.iteration, seconds=time.monotonic() - began,
    )  # fmt: skip
    state = "as it was opened" if checkpoint is None else f"as after {_position(checkpoint)}, from {checkpoint.folder}"
    started = f"pool {', '.join(sorted(lost))} started again; " if lost else ""
    print(f"recovered in {time.monotonic() - began:.0f} s: {started}everything is {state}")
    return checkpoint


def newest(lab: Workbench) -> Checkpoint | None:
    """The newest checkpoint of a workbench: saved by this kernel, by itself, or the one that it was resumed from."""
    found = [checkpoint for checkpoint in (lab.last_saved, lab.checkpoint) if checkpoint is not None]
    with suppress(NotFound, BadInput):
        found.append(find_checkpoint(lab.run_folder))
    there = [checkpoint for checkpoint in found if checkpoint.folder.is_dir()]
    return max(there, key=lambda checkpoint: float(checkpoint.values["saved_s"]), default=None)


def lost_pools(lab: Workbench) -> set[str]:
    """The pools that are no longer whole: a process that has ended, or says nothing; ranks that no longer agree."""
    lost, asked = {*lab._broken, *lab._late}, {}
    for info in lab._infos:
        try:
            asked[info] = lab._backend.ask(info.name, "status")
        except WorkbenchError:
            lost.add(info.pool)
    lab._backend.wait(list(asked.values()), ANSWER_S)
    lost |= {info.pool for info, pending in asked.items() if not answered(pending)}
    return lost & {info.pool for info in lab._infos}


def _restart(lab: Workbench, lost: set[str], note: Any) -> None:
    """New processes in the place of those of some pools, with the models as they were opened."""
    if not lost:
        return
    backend = lab._backend
    old = [info for info in lab._infos if info.pool in lost]
    note("ending what is left of lost pools")
    with suppress(WorkbenchError):
        backend.end(old)
    infos = [_anew(info, lab.run_folder) if info.pool in lost else info for info in lab._infos]
    new = [info for info in infos if info.pool in lost]
    try:
        note("starting hosts")
        backend.start(new)
        join_pools(backend, new, note)
        pools = lab.description.placement.pools
        roles = {pool.name: [*pool.roles, "numeric"] if pool.name in lost else [] for pool in pools}
        load_roles(backend, new, lab.description, note, roles=roles)
    except BaseException:
        with suppress(WorkbenchError):
            backend.end(new)
        lab._broken |= dict.fromkeys(lost, "a recovery that failed")
        raise
    lab._stand(replace(lab.description, moved=tuple(infos)))
    for pool in lost:
        lab._broken.pop(pool, None)
        lab._late.pop(pool, None)
    lab._pools_ended |= {info.pool: info.again for info in old}
    lab.store.forget_hosts({info.name for info in old})
    lab._record_hosts()
    if isinstance(backend, RayBackend):
        backend.drive()


def _anew(info: HostInfo, run_folder: Path) -> HostInfo:
    """The host that comes after another one: of another name, as what that one kept is gone."""
    new = replace(info, again=info.again + 1)
    return replace(new, log_path=str(run_folder / "logs" / f"{new.name}.log"))


def _as_opened(lab: Workbench) -> None:
    """The counters of a workbench that was opened this moment; run numbers go on."""
    lab.iteration, lab._draws, lab.last_metrics = 0, {}, {}
    lab.prompts.go_back()
    lab.saved_algorithm, lab.saved_streams, lab.checkpoint, lab._credit = None, (), None, 0
    # rollout workers may be of another kind than the actor: they are sent its weights
    lab.weights = {role: Weights(steps=0, state="as opened" if role == ROLLOUT else "") for role in lab.weights}


def _put_back(lab: Workbench, algorithm: Algorithm) -> None:
    """The algorithm that this notebook holds goes back to where it stood."""
    algorithm.restart()
    algorithm.made.clear()
    algorithm._iteration = lab.iteration
    algorithm.taken_up = False
    if lab.saved_algorithm is None:
        algorithm.load_state(lab.first_states.get(type(algorithm).__name__, {}))
    lab.take_up(algorithm)


def _position(checkpoint: Checkpoint) -> str:
    algorithm = checkpoint.values["algorithm"]
    where = "in the middle of " if algorithm and algorithm["under_way"] else ""
    return f"{where}iteration {checkpoint.iteration}"


class Recovering:
    """The methods of a `Workbench` that bring it back."""

    last_saved: Checkpoint | None = None

    def recover(self, path: str | Path | None = None) -> Checkpoint | None:
        """Start again what died, and bring every role back to the last checkpoint, so that all know the same: weights,
        optimizers, random states, prompts, examples, and the algorithm that this notebook holds. Handles stay valid:
        `lab.actor`, `lab`, the algorithm; the next iteration is the one that would have come after the checkpoint. The
        checkpoint; None: there was none, and the workbench is as it was opened.

        path: another checkpoint than the newest of `lab.save`, `lab.autosave` and the one that it was resumed from.
        Only pools that are no longer whole get new processes, and lose the batches that they kept. All do without a
        checkpoint, and when this user's Ray head was gone, in whose place another one is started. Raises `BadInput`,
        with nothing touched, where the checkpoint does not fit.
        """
        return recover(cast("Workbench", self), path)
