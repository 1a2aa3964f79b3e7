"""The methods of a `Workbench` that keep a run on disk and go on with it."""

from __future__ import annotations

import itertools
import shutil
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from workbench.algorithms.loop import Algorithm
from workbench.data.prompt_stream import PromptStream
from workbench.errors import HostDied, StageInterrupted
from workbench.session.checkpoint.files import AUTOMATIC, MANIFEST, Checkpoint
from workbench.session.checkpoint.saving import save
from workbench.session.position import Position
from workbench.stages.runner import StageRunner
from workbench.support.files import real_path
from workbench.support.validation import at_least, whole


@dataclass
class Automatic:
    """When to save by itself, and where. iteration, time_s: of the last one. written: those that are left."""

    folder: Path
    every: int | None
    minutes: float | None
    keep: int
    models: bool
    iteration: int
    time_s: float = field(default_factory=time.monotonic)
    written: list[Path] = field(default_factory=list)

    def note(self, folder: Path, iteration: int) -> None:
        """A checkpoint was written."""
        self.iteration, self.time_s = iteration, time.monotonic()
        self.written.append(folder)

    def due(self, iteration: int) -> bool:
        """Whether it is time, after that many iterations."""
        if iteration <= self.iteration:
            return False
        counted = self.every is not None and iteration - self.iteration >= self.every
        return counted or (self.minutes is not None and time.monotonic() - self.time_s >= 60 * self.minutes)


def _unused(folder: Path) -> Path:
    """Another folder where this one is there: of the same iteration, which is made again after `recover`."""
    names = (folder.with_name(f"{folder.name}-{number}") for number in itertools.count(2))
    return next(path for path in itertools.chain([folder], names) if not path.exists())


class Checkpoints:
    """Saves a run to disk: on request, and by itself between iterations. automatic: when that is."""

    def __init__(self, runner: StageRunner, position: Position, prompts: Callable[[], PromptStream]) -> None:
        self._runner, self._position, self._prompts = runner, position, prompts
        self.automatic: Automatic | None = None

    def save(self, path: str | Path, algorithm: Algorithm | None = None, *, models: bool = True) -> Checkpoint:
        """Write all that the run is to a new folder: of each role weights, moments of Adam, step count and schedule;
        the random states of their ranks; the positions of prompts, examples and the algorithm. `wb.restore(path)` goes
        on from it, under this placement or another, and a script with `--resume PATH`.

        algorithm: whose KL coefficient, multiplier, and iteration under way are kept; None: the one that took the last
        step, while a variable holds it. models: also write each trained role's model to
        `roles/<role>/model`, for transformers and vLLM.

        The folder is there when all of it is on the disk, or not at all. On several machines it is one that all of them
        see. Waits for the stages under way. Raises `BadInput` where the folder holds something or the disk has no room,
        `StageError` where a rank cannot write; what was saved before stays as it was.
        """
        position = self._position
        found = algorithm or position.algorithm
        position.last_saved = save(self._runner, position, self._prompts(), path, found, models=models)
        return position.last_saved

    def autosave(
        self, every: int | None = 1, *, minutes: float | None = None, keep: int = 2,
        folder: str | Path | None = None, models: bool = False,
    ) -> None:  # fmt: skip
        """Save after each `every` iterations, or when `minutes` have passed since the last time, whichever comes first;
        `lab.autosave(None)` ends it.

        It happens when an algorithm's iteration is over, and before prompts or examples of the next one are drawn.
        keep: how many of these are left on the disk; older ones are deleted once a new one is there. folder: where;
        default `checkpoints` in the run folder. models: as in `save`. What cannot be saved is warned of, and
        the run goes on.
        """
        if every is None and minutes is None:
            self.automatic = None
            return
        if every is not None:
            whole("autosave(every)", every, 1)
        if minutes is not None:
            at_least("autosave(minutes)", minutes, 0, strictly=True)
        whole("autosave(keep)", keep, 1)
        where = self._runner.hosts.run_folder / AUTOMATIC if folder is None else real_path(folder, "autosave(folder)")
        self.automatic = Automatic(where, every, minutes, keep, models, self._runner.counters.iteration)

    def save_if_due(self, algorithm: Algorithm | None = None) -> None:
        """Between two iterations: save where `autosave` says so."""
        automatic = self.automatic
        if automatic is None or self._runner.snapshots.open or not automatic.due(self._runner.counters.iteration):
            return
        own = automatic.folder.is_relative_to(self._runner.hosts.run_folder)  # elsewhere other runs may save as well
        name = (
            f"{'' if own else f'{self._runner.hosts.run_folder.name}-'}iteration-{self._runner.counters.iteration:06d}"
        )
        folder = _unused(automatic.folder / name)
        try:
            self.save(folder, algorithm, models=automatic.models)
        except (StageInterrupted, HostDied):
            if (folder / MANIFEST).is_file():  # it was whole before the interrupt came
                automatic.note(folder, self._runner.counters.iteration)
            raise
        except Exception as error:
            warnings.warn(f"no checkpoint after iteration {self._runner.counters.iteration}: {error}", stacklevel=2)
            return
        automatic.note(folder, self._runner.counters.iteration)
        while len(automatic.written) > automatic.keep:
            shutil.rmtree(automatic.written.pop(0), ignore_errors=True)
