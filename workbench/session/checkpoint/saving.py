"""`lab.save`: every rank writes its part of every role, the controller what it knows itself."""

from __future__ import annotations

import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from workbench.backends.starting import Step, settle
from workbench.batches.batch import Batch
from workbench.display.progress import Progress
from workbench.errors import BadInput, StageError, StageInterrupted
from workbench.placement import ROLLOUT
from workbench.placement.moves import Models
from workbench.placement.state import Part, state_of
from workbench.session.checkpoint.files import Checkpoint, new_folder, read_checkpoint, write_manifest
from workbench.stages.run import Run
from workbench.workers.role_files import RoleFiles

if TYPE_CHECKING:
    from workbench.algorithms.loop import Algorithm
    from workbench.controller import Workbench

ANSWER_S = 60.0  # how long an error waits for hosts to let go of the files


def save(lab: Workbench, path: str | Path, algorithm: Algorithm | None, *, models: bool) -> Checkpoint:
    """`lab.save(path, algorithm, models=...)`."""
    folder = Path(path).expanduser().resolve()
    lab._check_open()
    lab.check_driver()
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise BadInput(
            f"{str(folder)!r} holds something", "a checkpoint is saved to a new or empty folder", "choose another"
        )
    if lab._keeping or (lab.overlapping and lab.open_runs()):
        where = "kept()" if lab._keeping else "overlap()"
        raise BadInput(
            f"save({str(path)!r}) inside lab.{where}", "that needs the roles as they are", "do it afterwards"
        )
    for group in lab.groups.values():
        lab._check_alive(group)
    lab.scheduler.drain()
    if left := lab._updates_left.open(lab.weights):
        raise BadInput(
            f"save({str(path)!r}) while {left[0]} stands between two of its steps, as an interrupt left it",
            "a checkpoint would not know which are taken",
            "run the same call again, which takes the rest, and then save",
        )  # fmt: skip
    roles = role_files(lab, folder, models=models)
    _check_room(folder, roles)
    began = time.monotonic()
    try:
        with Progress(f"saving {folder.name}") as bar, new_folder(folder) as beside:
            _write(lab, algorithm, beside, {role: at(files, beside) for role, files in roles.items()}, bar)
    except KeyboardInterrupt:
        raise StageInterrupted(
            f"saving to {str(folder)!r} was interrupted",
            "nothing of it is left, and what was saved before is as it was",
        ) from None
    except OSError as error:
        raise StageError(
            f"nothing was saved to {str(folder)!r}", str(error), "what was saved before is as it was"
        ) from error
    lab.telemetry.append_event("saved", folder=str(folder), iteration=lab.iteration, seconds=time.monotonic() - began)
    return read_checkpoint(folder)


def role_files(lab: Workbench, folder: Path, *, models: bool) -> dict[str, RoleFiles]:
    """What there is to save of each role: all that training, or a refreshed reference, has changed."""
    found, described = {}, lab.description.role_models()
    for role, model in described.items():
        if role == ROLLOUT:  # they are sent the actor's weights
            continue
        parts = saved_parts(described, role, refreshed=bool(role in lab.weights and lab.weights[role].state))
        if model is not None and not parts:
            continue
        layout = lab.description.layout_of(role)
        found[role] = RoleFiles(
            role=role,
            folder=str(folder / "roles" / role),
            parts=parts,
            layout=layout if model is None else model.standing(layout),
            model=models and lab.description.models[role].trained and lab.description.is_ours(role),
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
    lab: Workbench, algorithm: Algorithm | None, folder: Path, roles: Mapping[str, RoleFiles], bar: Progress
) -> None:
    def note(text: str) -> None:
        bar.label = f"saving {folder.name}: {text}"
        bar.update(0, 0)

    def asked(roles: Sequence[str], method: str) -> dict[str, list[Any]]:
        """The answers of each role's ranks."""
        steps, answers = {}, dict[str, list[Any]]()
        for role in roles:
            for rank, host in enumerate(lab.groups[role].hosts):
                pending = lab._backend.work(host, method, roles_files[role], rank)
                steps[role, rank] = Step(f"saving {role}", infos[host], pending)
        try:
            found = settle(lab._backend, list(steps.values()), note)
        except BaseException:  # they write into a folder that is about to go
            lab._backend.wait([step.pending for step in steps.values()], ANSWER_S)
            for step in steps.values():
                if not step.pending.done():
                    lab._late.setdefault(step.host.pool, []).append(("saving", step.pending))
            raise
        for (role, _), answer in zip(steps, found, strict=True):
            answers.setdefault(role, []).append(answer)
        return answers

    infos, roles_files = {info.name: info for info in lab._infos}, roles
    carried = asked(list(roles), "save_role")
    # only when every rank has written its part: here ranks wait for each other
    asked([role for role, files in roles.items() if files.model], "save_model")
    for role, files in roles.items():
        for path in files.expected(moments=carried[role][0].moments):
            if not path.is_file():
                raise StageError(
                    f"{path.name} of {role} is not in {str(folder)!r}",
                    "its rank says that it wrote it: on another machine, which does not see this folder",
                    "give a folder that all machines share",
                )
    values = {
        "name": lab.name,
        "saved_s": time.time(),
        "run_folder": str(lab.run_folder),
        "placement": str(lab.placement),
        "roles": {
            role: {
                "layout": str(files.layout),
                "steps": carried[role][0].steps,
                "parts": [part.what for part in files.parts],
            }
            for role, files in roles.items()
        },
        "state": controller_state(lab),
        "algorithm": None if algorithm is None else _algorithm_state(algorithm, folder),
    }
    write_manifest(folder, values, lab.description, carried)


def controller_state(lab: Workbench) -> dict[str, Any]:
    """The counters of a workbench, and where its prompts and examples stand, as plain values."""
    return {
        "run": lab._run_number,
        "iteration": lab.iteration,
        "drawn": lab.prompts.drawn,
        "prompts": lab.prompts.state,
        "weights": {role: asdict(weights) for role, weights in lab.weights.items()},
        "draws": lab._draws.get(lab.iteration, -1),
        "streams": [stream.state for stream in lab.streams()],
    }


def _algorithm_state(algorithm: Algorithm, folder: Path) -> dict[str, Any]:
    """Where an algorithm stands; what the iteration under way has made is written beside."""
    made: dict[str, Any] = {}
    if algorithm.under_way:
        (folder / "made").mkdir()
        for number, (stage, value) in enumerate(algorithm.made.items()):
            found = value.result() if isinstance(value, Run) else value
            if isinstance(found, Batch):
                made[stage] = {"batch": str(found.save(folder / "made" / f"{number}.safetensors").relative_to(folder))}
            elif isinstance(found, Mapping):
                made[stage] = {"metrics": dict(found)}
            else:
                raise BadInput(
                    f"saving in the middle of an iteration whose stage {stage!r} made a {type(found).__name__}",
                    "batches and metrics can be saved",
                    "finish the iteration first, with iterate()",
                )
    return algorithm.position(made)
