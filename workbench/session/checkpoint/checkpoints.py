"""`lab.save` and `lab.autosave`: every rank writes its part of every role, the controller writes its own state."""

from __future__ import annotations

import itertools
import shutil
import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from workbench.algorithms.loop import Algorithm
from workbench.backends.starting import settle
from workbench.batches.batch import Batch
from workbench.batches.files import write
from workbench.data.prompt_stream import PromptStream
from workbench.display.interrupts import stoppable
from workbench.display.progress import Progress
from workbench.errors import BadInput, HostDied, StageError, StageInterrupted, WriteFailed
from workbench.placement import ROLLOUT
from workbench.placement.moves import Models
from workbench.placement.state import Part, state_of
from workbench.session.checkpoint.files import (
    AUTOMATIC,
    LEDGER,
    MANIFEST,
    Checkpoint,
    read_checkpoint,
    sweep,
    write_manifest,
)
from workbench.session.position import Position
from workbench.stages.run import Run
from workbench.stages.runner import StageRunner
from workbench.support.files import new_folder, new_or_empty, real_path, write_bytes
from workbench.support.validation import PositiveFloat, PositiveInt
from workbench.workers.role_state import RoleFiles

ANSWER_S = 60.0  # how long an error waits until hosts have closed the files


@dataclass
class Automatic:
    """When and where `autosave` saves. iteration, time_s: of the last save. written: saved folders that still exist."""

    folder: Path
    every: int | None
    minutes: float | None
    keep: int
    models: bool
    iteration: int
    time_s: float = field(default_factory=time.monotonic)
    written: list[Path] = field(default_factory=list)

    def note(self, folder: Path, iteration: int) -> None:
        """Note that a checkpoint was written."""
        self.iteration, self.time_s = iteration, time.monotonic()
        self.written.append(folder)

    def due(self, iteration: int) -> bool:
        """Whether it is time to save, after `iteration` iterations."""
        if iteration <= self.iteration:
            return False
        counted = self.every is not None and iteration - self.iteration >= self.every
        return counted or (self.minutes is not None and time.monotonic() - self.time_s >= 60 * self.minutes)


def _unused(folder: Path) -> Path:
    """Return the folder, or one with a number appended where it exists: after `recover` an iteration is saved again."""
    names = (folder.with_name(f"{folder.name}-{number}") for number in itertools.count(2))
    return next(path for path in itertools.chain([folder], names) if not path.exists())


class Checkpoints:
    """Saves a run to disk: on request, and between iterations. automatic: when to save without a request."""

    def __init__(self, runner: StageRunner, position: Position, prompts: Callable[[], PromptStream]) -> None:
        self._runner, self._position, self._prompts = runner, position, prompts
        self.automatic: Automatic | None = None

    def save(self, path: str | Path, algorithm: Algorithm | None = None, *, models: bool = True) -> Checkpoint:
        """Write the whole state of the run to a new folder: of each role the weights, moments of Adam, step count and
        schedule; the random states of the ranks; the positions of prompts, examples and the algorithm.
        `wb.restore(path)`, and a script with `--resume PATH`, continue from it, under this placement or another.

        algorithm: the algorithm to save, with its KL coefficient, multiplier and unfinished iteration; None: the one
        that took the last step, while a variable holds it. models: also write each trained role's model to
        `roles/<role>/model`, for transformers and vLLM.

        The folder appears once all of it is on the disk, or not at all. With several machines, all of them must see the
        folder. Waits for the stages under way. Raises `BadInput` where the folder is not empty or the disk has no room,
        `StageError` where a rank cannot write; earlier checkpoints stay as they were. Where the folder is a checkpoint,
        as when a script runs a second time, the run is saved beside it before the error, which names that folder. A
        resumed script returns the checkpoint that it had saved there before.
        """
        self._runner.check_driver()
        folder = real_path(path, "path")
        if (saved := self._saved_before(folder)) is not None:
            return saved
        if (folder / MANIFEST).is_file():
            beside = self.save(_unused(folder), algorithm, models=models)
            rule = f"it is a checkpoint, so this run was saved to {str(beside.folder)!r}"
            raise BadInput(f"{str(folder)!r} is not empty", rule, "next time, choose another path")
        new_or_empty(folder)

        def left() -> tuple[str, str]:
            if (folder / MANIFEST).is_file():
                return "the checkpoint is complete", f"wb.restore({str(folder)!r}) continues from it"
            return "no part of it was kept, and earlier checkpoints are unchanged", "run the same call again"

        with stoppable(f"saving to {str(folder)!r}", left):
            saved = self._save(folder, algorithm or self._position.algorithm, models=models)
        self._position.last_saved = saved
        return saved

    def autosave(
        self, every: PositiveInt | None = 1, *, minutes: PositiveFloat | None = None, keep: PositiveInt = 2,
        folder: str | Path | None = None, models: bool = False,
    ) -> None:  # fmt: skip
        """Save after each `every` iterations, or when `minutes` have passed since the last save, whichever comes first.
        `lab.autosave(minutes=30)` goes by minutes alone; `lab.autosave(None)` ends automatic saves.

        Saves after an algorithm's iteration has ended, and before prompts or examples of the next one are drawn. keep:
        how many automatic checkpoints stay on the disk; older ones are deleted after a new one is written. folder:
        where to save; default `checkpoints` in the run folder. models: as in `save`. A save that fails gives a warning,
        and the run goes on.
        """
        if every is None and minutes is None:
            self.automatic = None
            return
        where = self._runner.hosts.run_folder / AUTOMATIC if folder is None else real_path(folder, "autosave(folder)")
        every = None if minutes is not None and every == 1 else every  # every=1 would always come first
        self.automatic = Automatic(where, every, minutes, keep, models, self._runner.counters.iteration)

    def save_if_due(self, algorithm: Algorithm | None = None) -> None:
        """Save between two iterations, if `autosave` asks for it now."""
        automatic, iteration = self.automatic, self._runner.counters.iteration
        if automatic is None or self._runner.snapshots.open or not automatic.due(iteration):
            return
        run_folder = self._runner.hosts.run_folder
        own = automatic.folder.is_relative_to(run_folder)  # elsewhere other runs may save as well
        folder = _unused(automatic.folder / f"{'' if own else f'{run_folder.name}-'}iteration-{iteration:06d}")
        try:
            self.save(folder, algorithm, models=automatic.models)
        except (StageInterrupted, HostDied):
            if (folder / MANIFEST).is_file():  # it was whole before the interrupt came
                automatic.note(folder, iteration)
            raise
        except Exception as error:
            warnings.warn(f"no checkpoint after iteration {iteration}: {error}", stacklevel=2)
            return
        automatic.note(folder, iteration)
        while len(automatic.written) > automatic.keep:
            shutil.rmtree(automatic.written.pop(0), ignore_errors=True)

    def _saved_before(self, folder: Path) -> Checkpoint | None:
        """Return the checkpoint in a folder if this script was resumed, has begun no iteration since, and saved it
        before it was resumed."""
        start, counters = self._position.checkpoint, self._runner.counters
        resumed = self._position.passed_over or counters.iterations_to_skip
        if start is None or not resumed or counters.iteration != start.iteration or not (folder / MANIFEST).is_file():
            return None
        if (there := read_checkpoint(folder)).values["saved_s"] > start.values["saved_s"]:
            return None
        print(f"{str(folder)!r} was saved before this run was resumed")
        return there

    # --- carrying it out ----------------------------------------------------------------------------------------------

    def _save(self, folder: Path, algorithm: Algorithm | None, *, models: bool) -> Checkpoint:
        self._check_can_save(folder, algorithm)
        roles = self._role_files(folder, models=models)
        _check_room(folder, roles)
        began = time.monotonic()
        try:
            sweep(folder.parent)
            with Progress(f"saving {folder.name}") as bar, new_folder(folder) as beside:
                there = {role: replace(files, folder=str(beside / "roles" / role)) for role, files in roles.items()}
                self._write(beside, there, algorithm, bar)
        except WriteFailed as error:
            error.value = f"nothing was saved to {str(folder)!r}: {error.value}"
            raise
        self._runner.telemetry.append_event(
            "saved", folder=str(folder), iteration=self._runner.counters.iteration, seconds=time.monotonic() - began
        )
        return read_checkpoint(folder)

    def _check_can_save(self, folder: Path, algorithm: Algorithm | None) -> None:
        """Wait for the stages under way, and raise where roles cannot be saved now."""
        runner = self._runner
        runner.snapshots.refuse(f"save({str(folder)!r})", "states of roles are not final there")
        if runner.scheduler.overlaps and runner.open_runs():
            raise BadInput(
                f"save({str(folder)!r}) inside lab.overlap()", "states of roles are not final there", "save after it"
            )
        for group in runner.groups.by_role.values():
            runner.groups.check_alive(group)
        runner.scheduler.drain()
        under_way = algorithm is not None and algorithm.under_way  # it would repeat all steps of a failed update
        if left := runner.interrupted.open_updates(failed=under_way):
            raise BadInput(
                f"save({str(folder)!r}) after {left[0]} stopped or failed between two of its steps",
                "a checkpoint does not record which steps were taken",
                "run the same call again for the remaining steps, or give it up with "
                + ("lab.algorithm.restart()" if under_way else f"another update of {left[0].partition('.')[0]}"),
            )  # fmt: skip

    def _role_files(self, folder: Path, *, models: bool) -> dict[str, RoleFiles]:
        """Return what to save of each role: all state that training, or a refresh of the reference, has changed."""
        description, weights = self._runner.hosts.description, self._runner.counters.weights
        found, described = {}, description.role_models()
        for role, model in described.items():
            if role == ROLLOUT:  # rollout workers are sent the actor's weights
                continue
            parts = saved_parts(described, role, refreshed=bool(role in weights and weights[role].state))
            if model is not None and not parts:
                continue
            layout = description.layout_of(role)
            found[role] = RoleFiles(
                role=role,
                folder=str(folder / "roles" / role),
                parts=parts,
                layout=layout if model is None else model.rank_layout(layout),
                model=models and description.models[role].trained and description.is_ours(role),
            )
        return found

    def _write(self, folder: Path, roles: Mapping[str, RoleFiles], algorithm: Algorithm | None, bar: Progress) -> None:
        hosts, position, prompts = self._runner.hosts, self._position, self._prompts()
        streams = [stream.state for stream in position.streams()]
        state = {
            **self._runner.counters.state(), "drawn": prompts.drawn, "prompts": prompts.state, "streams": streams,
            "priority": position.buffer.priority_name,
        }  # fmt: skip
        if prompts.records is not None:
            write_bytes(folder / LEDGER, prompts.records.state())
        state["buffer"] = position.buffer.state(_keeping(folder, "buffer"))
        rank_states = self._on_ranks(roles, "save_role", bar)
        # only after every rank has written its part: in this step ranks wait for each other
        self._on_ranks({role: files for role, files in roles.items() if files.model}, "save_model", bar)
        for role, files in roles.items():
            for path in files.expected(moments=rank_states[role][0].moments):
                if not path.is_file():
                    raise StageError(
                        f"{path.name} of {role} is not in {str(folder)!r}",
                        "its rank wrote it on another machine, which does not share this folder",
                        "use a folder that all machines share",
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

    def _on_ranks(self, roles: Mapping[str, RoleFiles], method: str, bar: Progress) -> dict[str, list[Any]]:
        """Have all ranks of the roles write, and return the answers of each role's ranks."""
        runner, backend = self._runner, self._runner.hosts.backend
        steps = {
            (role, rank): runner.hosts.step(f"saving {role}", host, method, files, rank)
            for role, files in roles.items() for rank, host in enumerate(runner.groups.by_role[role].hosts)
        }  # fmt: skip
        try:
            found = settle(backend, list(steps.values()), bar.note)
        except BaseException:  # ranks still write into a folder that is about to be deleted
            backend.wait([step.pending for step in steps.values()], ANSWER_S)
            for step in steps.values():
                if not step.pending.done():
                    runner.hosts.clean_up_later(step.host.pool, "saving", step.pending)
            raise
        answers: dict[str, list[Any]] = {role: [] for role in roles}
        for (role, _), answer in zip(steps, found, strict=True):
            answers[role].append(answer)
        return answers


def saved_parts(models: Models, role: str, *, refreshed: bool) -> tuple[Part, ...]:
    """Return the parts of a role that change. refreshed: whether a role that is not trained was given new weights."""
    model = models[role]
    if model is None:
        return ()
    return tuple(
        part for part in state_of(model) if model.trained != (part.what == "weights") and (model.trained or refreshed)
    )


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


def _keeping(folder: Path, part: str) -> Callable[[Batch], dict[str, str]]:
    """Return a function that writes each batch to a file of its own, in subfolder `part` of a checkpoint."""
    numbers = itertools.count()

    def keep(batch: Batch) -> dict[str, str]:
        (folder / part).mkdir(exist_ok=True)
        path = write(folder / part / f"{next(numbers)}.safetensors", batch)
        return {"batch": str(path.relative_to(folder))}

    return keep


def _algorithm_state(algorithm: Algorithm, folder: Path) -> dict[str, Any]:
    """Return the position of an algorithm; write what its unfinished iteration has made to files."""
    made: dict[str, Any] = {}
    keep = _keeping(folder, "made")
    for stage, value in algorithm.made.items() if algorithm.under_way else ():
        found = value.result() if isinstance(value, Run) else value
        if isinstance(found, Batch):
            made[stage] = keep(found)
        elif isinstance(found, Mapping):
            made[stage] = {"metrics": dict(found)}
        else:
            raise BadInput(
                f"saving in the middle of an iteration whose stage {stage!r} made a {type(found).__name__}",
                "only batches and metrics can be saved",
                "finish the iteration first, with iterate()",
            )
    return algorithm.position(made)
