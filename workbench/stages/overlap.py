"""Calls that return at once: `lab.overlap()`."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import NoReturn

from workbench.errors import StageInterrupted
from workbench.stages.interruptions import AGAIN, AS_BEFORE
from workbench.stages.run import Run
from workbench.stages.scheduler import Scheduler
from workbench.stages.waiting import interrupted


class Overlap:
    """Whether calls return at once, and the runs of those that did and were not waited for yet."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler, self._depth, self._runs = scheduler, 0, list[Run]()

    @property
    def on(self) -> bool:
        """Whether calls return at once."""
        return self._depth > 0

    def submit(self, run: Run) -> None:
        """Run it in the background; inside `overlapping()` it is waited for at the end."""
        if self.on:
            self._runs.append(run)
        run.submit()

    def called(self) -> Sequence[Run]:
        """The runs that have not ended, and those that were not waited for."""
        return list(dict.fromkeys((*self._scheduler.open_runs(), *self._runs)))

    @contextlib.contextmanager
    def off(self) -> Iterator[None]:
        """Inside, every call blocks."""
        before, self._depth = self._depth, 0
        try:
            yield
        finally:
            self._depth = before

    @contextlib.contextmanager
    def overlapping(self) -> Iterator[None]:
        """Inside, a stage's call returns at once: see `Workbench.overlap`."""
        self._depth += 1
        try:
            yield
        except (KeyboardInterrupt, StageInterrupted) as error:
            self._stop(error)
        except BaseException:
            for run in self._runs:
                run.cancel()
            self._runs.clear()
            raise
        finally:
            self._depth -= 1
        self.wait()

    def wait(self) -> None:
        """Wait for every run; raises the error of the first one that failed."""
        runs, self._runs = self._runs, []
        errors = []
        for run in runs:
            try:
                run.wait()
            except (KeyboardInterrupt, StageInterrupted) as error:
                self._runs = runs
                self._stop(error)
            except Exception as error:
                errors.append(error)
        if errors:
            raise errors[0]
        for run in runs:  # only now does the caller go on, who has them
            run.received()

    def _stop(self, error: BaseException) -> NoReturn:
        """Stop the runs, wait for that, and raise one `StageInterrupted` that says how far the updates among them
        came."""
        runs, self._runs = self._runs, []
        stopped = [run for run in runs if run.cancel()]
        for run in stopped:
            run.join()
        said: list[Exception] = [error] if isinstance(error, StageInterrupted) else []
        said += [interrupted(run) for run in stopped if run.updates and run.calls]
        said = list({str(one): one for one in said}.values())
        if len(said) == 1:
            raise said[0]
        told = "; ".join(str(one).rstrip(".") for one in said)
        raise StageInterrupted(told or "the stages under way were interrupted", *(() if told else (AS_BEFORE, AGAIN)))
