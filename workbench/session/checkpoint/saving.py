"""`lab.save`: every rank writes its part of every role, the controller what it knows itself."""

from __future__ import annotations

import itertools
import shutil
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from workbench.backends.starting import Step, settle
from workbench.batches.batch import Batch
from workbench.batches.files import write
from workbench.data.prompt_stream import PromptStream
from workbench.display.interrupts import stoppable
from workbench.display.progress import Progress
from workbench.errors import BadInput, StageError, WriteFailed
from workbench.placement import ROLLOUT
from workbench.placement.moves import Models
from workbench.placement.state import Part, state_of
from workbench.session.checkpoint.files import LEDGER, MANIFEST, Checkpoint, new_folder, read_checkpoint, write_manifest
from workbench.session.position import Position
from workbench.stages.ledger import Counters
from workbench.stages.run import Run
from workbench.stages.runner import StageRunner
from workbench.support.files import new_or_empty, path_of, write_bytes
from workbench.workers.role_state import RoleFiles

if TYPE_CHECKING:
    from workbench.algorithms.loop import Algorithm

ANSWER_S = 60.0  # how long an error waits until hosts have closed the files


def save(
    runner: StageRunner, position: Position, prompts: PromptStream, path: str | Path, algorithm: Algorithm | None,
    *, models: bool,
) -> Checkpoint:  # fmt: skip
    """`lab.save(path, algorithm, models=...)`."""
    runner.check_driver()
    folder = new_or_empty(path_of(path, "path"))

    def left() -> tuple[str, str]:
        if (folder / MANIFEST).is_file():
            return "the checkpoint is there, and whole", f"wb.restore({str(folder)!r}) goes on from it"
        return "nothing of it is left, and what was saved before is as it was", "the same call again saves"

    with stoppable(f"saving to {str(folder)!r}", left):
        return _save(runner, position, prompts, folder, algorithm, models=models)


def _save(
    runner: StageRunner, position: Position, prompts: PromptStream, folder: Path, algorithm: Algorithm | None,
    *, models: bool,
) -> Checkpoint:  # fmt: skip
    _check_can_save(runner, folder)
    roles = role_files(runner, folder, models=models)
    _check_room(folder, roles)
    began = time.monotonic()
    try:
        with Progress(f"saving {folder.name}") as bar, new_folder(folder) as beside:
            state = controller_state(runner.counters, position, prompts)
            if prompts.records is not None:
                write_bytes(beside / LEDGER, prompts.records.state())
            kept = _kept_rollouts(position, beside)
            _write(
                runner,
                {**state, "buffer": kept, "priority": position.buffer.priority_name},
                algorithm,
                beside,
                {role: at(files, beside) for role, files in roles.items()},
                bar,
            )
    except WriteFailed as error:
        raise WriteFailed(f"nothing was saved to {str(folder)!r}: {error.value}", error.rule, error.remedy) from error
    except OSError as error:
        raise StageError(
            f"nothing was saved to {str(folder)!r}", str(error), "what was saved before is as it was"
        ) from error
    seconds = time.monotonic() - began
    runner.telemetry.append_event("saved", folder=str(folder), iteration=runner.counters.iteration, seconds=seconds)
    return read_checkpoint(folder)


def _check_can_save(runner: StageRunner, folder: Path) -> None:
    """Raise where roles cannot be saved now; waits for the stages under way."""
    runner.snapshots.refuse(f"save({str(folder)!r})", "that needs the roles as they are")
    if runner.scheduler.overlaps and runner.open_runs():
        raise BadInput(
            f"save({str(folder)!r}) inside lab.overlap()", "that needs the roles as they are", "do it afterwards"
        )
    for group in runner.groups.by_role.values():
        runner.groups.check_alive(group)
    runner.scheduler.drain()
    if left := runner.interrupted.open_updates():
        raise BadInput(
            f"save({str(folder)!r}) while {left[0]} is between two of its steps, as an interrupt left it",
            "a checkpoint would not know which are taken",
            "run the same call again, which takes the rest, and then save",
        )  # fmt: skip


def role_files(runner: StageRunner, folder: Path, *, models: bool) -> dict[str, RoleFiles]:
    """What there is to save of each role: all that training, or a refreshed reference, has changed."""
    description, weights = runner.hosts.description, runner.counters.weights
    found, described = {}, description.role_models()
    for role, model in described.items():
        if role == ROLLOUT:  # they are sent the actor's weights
            continue
        parts = saved_parts(described, role, refreshed=bool(role in weights and weights[role].state))
        if model is not None and not parts:
            continue
        layout = description.layout_of(role)
        found[role] = RoleFiles(
            role=role,
            folder=str(folder / "roles" / role),
            parts=parts,
            layout=layout if model is None else model.standing(layout),
            model=models and description.models[role].trained and description.is_ours(role),
        )
    return found


def saved_parts(models: Models, role: str, *, refreshed: bool) -> tuple[Part, ...]:
    """The parts of a role that change. refreshed: whether weights that are not trained were given to it."""
    model = models[role]
    if model is None:
        return ()
    return tuple(
        part for part in state_of(model) if model.trained != (part.what == "weights") and (model.trained or refreshed)
    )


def at(files: RoleFiles, folder: Path) -> RoleFiles:
    """The same, in another checkpoint's folder."""
    return replace(files, folder=str(folder / "roles" / files.role))


def _check_room(folder: Path, roles: Mapping[str, RoleFiles]) -> None:
    parts = [part for files in roles.values() for part in files.parts]
    state = sum(part.copies * sum(weight.nbytes for weight in part.weights) for part in parts)
    models = sum(weight.nbytes for files in roles.values() if files.model for weight in files.parts[-1].weights)
    wanted = state + models
    there = next(parent for parent in folder.parents if parent.exists())
    free = shutil.disk_usage(there).free
    if wanted > free:
        raise BadInput(
            f"save({str(folder)!r})", f"it takes about {wanted / 2**30:.2f} GiB, and {free / 2**30:.2f} GiB are free",
            "choose another disk, delete old checkpoints, or keep fewer with lab.autosave(keep=...)",
        )  # fmt: skip


def _write(
    runner: StageRunner, state: Mapping[str, Any], algorithm: Algorithm | None, folder: Path,
    roles: Mapping[str, RoleFiles], bar: Progress,
) -> None:  # fmt: skip
    hosts = runner.hosts
    rank_states = _on_ranks(runner, roles, "save_role", bar)
    # only when every rank has written its part: here ranks wait for each other
    _on_ranks(runner, {role: files for role, files in roles.items() if files.model}, "save_model", bar)
    for role, files in roles.items():
        for path in files.expected(moments=rank_states[role][0].moments):
            if not path.is_file():
                raise StageError(
                    f"{path.name} of {role} is not in {str(folder)!r}",
                    "its rank says that it wrote it: on another machine, which does not see this folder",
                    "give a folder that all machines share",
                )
    said = {
        role: {
            "layout": str(files.layout),
            "steps": rank_states[role][0].steps,
            "moments": rank_states[role][0].moments,
            "loss_scale": rank_states[role][0].loss_scale,
            "parts": [part.what for part in files.parts],
        }
        for role, files in roles.items()
    }
    values = {
        "name": hosts.description.name,
        "saved_s": time.time(),
        "run_folder": str(hosts.run_folder),
        "placement": str(hosts.placement),
        "roles": said,
        "state": state,
        "algorithm": None if algorithm is None else _algorithm_state(algorithm, folder),
    }
    write_manifest(folder, values, hosts.description, rank_states)


def _on_ranks(runner: StageRunner, roles: Mapping[str, RoleFiles], method: str, bar: Progress) -> dict[str, list[Any]]:
    """Have all ranks of roles write; the answers of each role's ranks."""
    backend, infos = runner.hosts.backend, runner.hosts.named()
    steps = {
        (role, rank): Step(f"saving {role}", infos[host], backend.work(host, method, files, rank))
        for role, files in roles.items() for rank, host in enumerate(runner.groups.by_role[role].hosts)
    }  # fmt: skip
    try:
        found = settle(backend, list(steps.values()), bar.note)
    except BaseException:  # they write into a folder that is about to go
        backend.wait([step.pending for step in steps.values()], ANSWER_S)
        for step in steps.values():
            if not step.pending.done():
                runner.hosts.clean_up_later(step.host.pool, "saving", step.pending)
        raise
    answers: dict[str, list[Any]] = {role: [] for role in roles}
    for (role, _), answer in zip(steps, found, strict=True):
        answers[role].append(answer)
    return answers


def controller_state(counters: Counters, position: Position, prompts: PromptStream) -> dict[str, Any]:
    """The counters of a workbench, and the positions of its prompts and examples, as plain values."""
    streams = [stream.state for stream in position.streams()]
    return {**counters.state(), "drawn": prompts.drawn, "prompts": prompts.state, "streams": streams}


def _kept_rollouts(position: Position, folder: Path) -> list[dict[str, Any]]:
    """What waits in the buffer, each batch in a file of its own."""
    numbers = itertools.count()

    def keep(batch: Batch) -> dict[str, str]:
        (folder / "buffer").mkdir(exist_ok=True)
        path = write(folder / "buffer" / f"{next(numbers)}.safetensors", batch)
        return {"batch": str(path.relative_to(folder))}

    return position.buffer.state(keep)


def _algorithm_state(algorithm: Algorithm, folder: Path) -> dict[str, Any]:
    """The position of an algorithm; what the iteration under way has made is written to files of its own."""
    made: dict[str, Any] = {}
    if algorithm.under_way:
        (folder / "made").mkdir()
        for number, (stage, value) in enumerate(algorithm.made.items()):
            found = value.result() if isinstance(value, Run) else value
            if isinstance(found, Batch):
                made[stage] = {
                    "batch": str(write(folder / "made" / f"{number}.safetensors", found).relative_to(folder))
                }
            elif isinstance(found, Mapping):
                made[stage] = {"metrics": dict(found)}
            else:
                raise BadInput(
                    f"saving in the middle of an iteration whose stage {stage!r} made a {type(found).__name__}",
                    "batches and metrics can be saved",
                    "finish the iteration first, with iterate()",
                )
    return algorithm.position(made)
