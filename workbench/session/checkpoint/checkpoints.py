"""The methods of a `Workbench` that keep a run on disk and go on with it."""

from __future__ import annotations

import shutil
import time
import warnings
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from workbench.errors import BadInput, HostDied, StageInterrupted
from workbench.session.checkpoint.files import AUTOMATIC, Checkpoint
from workbench.session.checkpoint.restoring import take_up
from workbench.session.checkpoint.saving import save
from workbench.support.validation import at_least, whole

if TYPE_CHECKING:
    from workbench.algorithms.loop import Algorithm
    from workbench.controller import Workbench
    from workbench.data.example_stream import ExampleStream


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

    def due(self, iteration: int) -> bool:
        """Whether it is time, after that many iterations."""
        if iteration <= self.iteration:
            return False
        counted = self.every is not None and iteration - self.iteration >= self.every
        return counted or (self.minutes is not None and time.monotonic() - self.time_s >= 60 * self.minutes)


class Checkpoints:
    """What a workbench keeps on disk. checkpoint: the one that it went on from, if any."""

    checkpoint: Checkpoint | None = None
    saved_streams: Sequence[dict[str, Any]] = ()
    saved_algorithm: dict[str, Any] | None = None
    _automatic: Automatic | None = None
    _credit = 0  # iterations that a resumed script is not to repeat
    _streams: Sequence[weakref.ref[ExampleStream]] = ()
    first_states: dict[str, dict[str, Any]]  # of algorithms, by class, when they took their first step
    last_saved: Checkpoint | None

    # those of the workbench
    _keeping: int
    run_folder: Path
    iteration: int
    algorithm: Algorithm | None

    def save(self, path: str | Path, algorithm: Algorithm | None = None, *, models: bool = True) -> Checkpoint:
        """Write all that the run is to a new folder: of each role weights, moments of Adam, step count and schedule;
        the random states of their ranks; where prompts, examples and the algorithm stand. `wb.restore(path)` goes on
        from it, under this placement or another, and a script with `--resume PATH`.

        algorithm: whose KL coefficient, multiplier, and iteration under way are kept; None: the one that took the last
        step, while somebody holds it. models: also write each trained role's model to
        `roles/<role>/model`, for transformers and vLLM.

        The folder is there when all of it is on the disk, or not at all. On several machines it is one that all of them
        see. Waits for the stages under way. Raises `BadInput` where the folder holds something or the disk has no room,
        `StageError` where a rank cannot write; what was saved before stays as it was.
        """
        self.last_saved = save(cast("Workbench", self), path, algorithm or self.algorithm, models=models)
        return self.last_saved

    def autosave(
        self,
        every: int | None = 1,
        *,
        minutes: float | None = None,
        keep: int = 2,
        folder: str | Path | None = None,
        models: bool = False,
    ) -> None:
        """Save after each `every` iterations, or when `minutes` have passed since the last time, whichever comes first;
        `lab.autosave(None)` ends it.

        It happens when an algorithm's iteration is over, and before prompts or examples of the next one are drawn.
        keep: how many of these are left on the disk; older ones are deleted once a new one is there. folder: where;
        default `checkpoints` in the run folder. models: as in `save`. What cannot be saved is warned of, and
        the run goes on.
        """
        if every is None and minutes is None:
            self._automatic = None
            return
        if every is not None:
            whole("autosave(every)", every, 1)
        if minutes is not None:
            at_least("autosave(minutes)", minutes, 0, strictly=True)
        whole("autosave(keep)", keep, 1)
        where = self.run_folder / AUTOMATIC if folder is None else Path(folder).expanduser().resolve()
        self._automatic = Automatic(where, every, minutes, keep, models, self.iteration)

    def save_if_due(self, algorithm: Algorithm | None = None) -> None:
        """Between two iterations: save where `autosave` says so."""
        automatic = self._automatic
        if automatic is None or self._keeping or not automatic.due(self.iteration):
            return
        own = automatic.folder.is_relative_to(self.run_folder)  # elsewhere other runs may save as well
        name = f"{'' if own else f'{self.run_folder.name}-'}iteration-{self.iteration:06d}"
        try:
            written = self.save(automatic.folder / name, algorithm, models=automatic.models)
        except (StageInterrupted, HostDied):
            raise
        except Exception as error:
            warnings.warn(f"no checkpoint after iteration {self.iteration}: {error}", stacklevel=2)
            return
        automatic.iteration, automatic.time_s = self.iteration, time.monotonic()
        automatic.written.append(written.folder)
        while len(automatic.written) > automatic.keep:
            shutil.rmtree(automatic.written.pop(0), ignore_errors=True)

    def iterations(self, n: int) -> Iterator[int]:
        """The numbers 1 to n, for a loop of iterations by hand: `for _ in lab.iterations(100): ppo.iterate()`. In a
        script that is resumed, without those that were made before."""
        whole("iterations", n, 1)
        for number in range(1 + self.passed_over(n), n + 1):
            before = self.iteration
            yield number
            if self.iteration != before + 1:
                raise BadInput(
                    f"turn {number} of lab.iterations({n}) began {self.iteration - before} iterations",
                    "a turn is one iteration, so that a resumed script knows how many turns were made",
                    "give each algorithm a loop of its own, or count with range",
                )

    def passed_over(self, iterations: int) -> int:
        """How many of that many iterations were made before the script was resumed; they are counted once."""
        passed = min(iterations, self._credit)
        self._credit -= passed
        return passed

    def require_nothing_passed_over(self, what: str) -> None:
        """Raise `BadInput` in a resumed script that is to do again what the checkpoint has seen already."""
        if self._credit and not self._keeping:  # what is put back afterwards may be done again
            raise BadInput(
                f"{what} in a run that is resumed after {self.iteration} iterations, of which {self._credit} come here",
                "algo.run(n) and `for _ in lab.iterations(n)` leave out what was done before; other lines cannot tell",
                "write the loop with lab.iterations(n), or go on by hand after wb.restore(path)",
            )

    def take_up(self, algorithm: Algorithm) -> None:
        """Let a new algorithm go on where the one of its class stood when the checkpoint was saved."""
        saved = self.saved_algorithm
        if saved is None or algorithm.taken_up or saved["class"] != type(algorithm).__name__:
            return
        algorithm.taken_up = True
        take_up(algorithm, saved)
        moved = ", ".join(f"{name}={value:.6g}" for name, value in saved["state"].items())
        where = f"in iteration {self.iteration}" if saved["under_way"] else f"after iteration {self.iteration}"
        print(f"{saved['class']} goes on {where}{f', with {moved}' if moved else ''}")

    def add_stream(self, stream: ExampleStream) -> None:
        """Know of a stream whose place is saved; one of the same rows as a saved one goes on where that stood."""
        self._streams = [*(known for known in self._streams if known() is not None), weakref.ref(stream)]
        self.put_back(stream)

    def put_back(self, stream: ExampleStream) -> None:
        """Let a stream go on where the saved one of the same rows stood; where none was saved, from its start."""
        stream.take_up(stream.first)
        for state in self.saved_streams:
            if stream.take_up(state):
                self.saved_streams = [other for other in self.saved_streams if other is not state]
                break

    def streams(self) -> list[ExampleStream]:
        """The streams of examples that are in use."""
        return [stream for known in self._streams if (stream := known()) is not None]
