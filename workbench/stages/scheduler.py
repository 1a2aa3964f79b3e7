"""Decides when each run starts: when its inputs are there and its pool is free. On one pool, runs start in call order.
Inside `overlapping()`, which is `lab.overlap()`, calls return at once."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator, Sequence
from typing import NoReturn

from workbench.backends.hosts import Hosts
from workbench.errors import StageInterrupted, UpstreamError
from workbench.stages import interrupted
from workbench.stages.run import Run
from workbench.stages.stage import StageRun

POLL_S = 0.05


class Scheduler:
    """Holds the runs that have not ended. A pool has one stage under way at a time, so that waiting runs can still be
    cancelled, and an interrupt leaves no queued call. Runs of different pools overlap.

    A run that can start is sent by the thread that submits it. Another thread, which lives while runs are open, polls
    them and sends those that become ready.

    overlaps: whether calls return at once.
    """

    def __init__(self, hosts: Hosts) -> None:
        self._hosts = hosts
        self._open: list[StageRun] = []
        self._unwaited: list[StageRun] = []  # runs of `overlapping()` that nobody has waited for
        self.overlaps = False
        self.lock = threading.RLock()
        self._thread: threading.Thread | None = None

    def submit(self, run: StageRun) -> None:
        """Add a run, and start it at once if possible."""
        with self.lock:
            self._open.append(run)
            try:
                self._advance()
            finally:  # after an interrupt, too, every run in the list is open and has a thread that polls it
                self._open = [run for run in self._open if not run.ranks_ended]
                if self._open and self._thread is None:
                    self._thread = threading.Thread(target=self._attend, name="workbench-runs", daemon=True)
                    self._thread.start()

    def open_runs(self) -> Sequence[Run]:
        """Return the runs that have not ended, in call order."""
        with self.lock:
            return tuple(self._open)

    def called(self) -> Sequence[Run]:
        """Return the runs that have not ended, and those of `overlapping()` that nobody has waited for."""
        return list(dict.fromkeys((*self.open_runs(), *self._unwaited)))

    def drain(self) -> None:
        """Wait until every run has ended."""
        while runs := self.open_runs():
            for run in runs:
                run.join()

    def close(self) -> None:
        """Give up all runs that have not ended, and wake their waiters."""
        with self.lock:
            for run in self._open:
                run.cancel()
                run.fail(UpstreamError(f"{run.name} was given up: the workbench was closed"))
            self._open = []
            thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join()

    def _attend(self) -> None:
        while True:
            with self.lock:
                if not self._open:
                    self._thread = None
                    return
                outstanding = [pending for run in self._open if (pending := run.ranks.outstanding)]
            try:
                if outstanding:  # no run can end before this many answers are there
                    every = [pending for some in outstanding for pending in some]
                    self._hosts.backend.wait(every, POLL_S, count=min(map(len, outstanding)))
                else:
                    time.sleep(POLL_S)
            except Exception as error:  # the backend is gone: no run will get an answer
                with self.lock:
                    for run in self._open:
                        run.fail(error)
            with self.lock:
                self._advance()

    def _advance(self) -> None:
        """Poll the runs under way and send those that can start, until nothing changes."""
        changed = True
        while changed:
            changed = False
            busy: dict[str, StageRun] = {}
            for run in list(self._open):
                pool = run.group.pool.name
                try:
                    if run.state == "waiting" and pool not in busy and not run.blocked():
                        run.send()
                        changed = True
                    elif run.state == "waiting" and pool in busy and busy[pool].given_up:
                        run.begin_clock()
                    if run.ranks.outstanding:
                        run.poll()
                    run.check_time()
                except Exception as error:  # any error ends only this run
                    run.fail(error)
                if run.ranks_ended:
                    if run in self._open:
                        self._open.remove(run)
                    changed = True
                else:
                    busy.setdefault(pool, run)

    # --- calls that return at once ------------------------------------------------------------------------------------

    def submit_unwaited(self, run: StageRun) -> None:
        """Run in the background; inside `overlapping()`, its end waits for the run."""
        if self.overlaps:
            self._unwaited.append(run)
        run.submit()

    @contextlib.contextmanager
    def overlapping(self) -> Iterator[None]:
        """Inside, a stage's call returns at once, and the stage runs when its inputs are there and its pool is free.

        The same code thus runs stages of different pools at the same time. Waits for all of them at the end.
        """
        before, self.overlaps = self.overlaps, True
        try:
            yield
        except (KeyboardInterrupt, StageInterrupted) as error:
            self._stop(error)
        except BaseException:
            for run in self._unwaited:
                run.cancel()
            self._unwaited.clear()
            raise
        finally:
            self.overlaps = before
        self.wait()

    def wait(self) -> None:
        """Wait for every stage of `overlap()`, and raise the error of the first one that failed."""
        runs, self._unwaited = self._unwaited, []
        errors = []
        for run in runs:
            try:
                run.wait()
            except (KeyboardInterrupt, StageInterrupted) as error:
                self._unwaited = runs
                self._stop(error)
            except Exception as error:
                errors.append(error)
        if errors:
            raise errors[0]
        for run in runs:  # the caller has the results only now
            run.runner.interrupted.received(run)

    def _stop(self, error: BaseException) -> NoReturn:
        """Stop the runs, wait for that, and raise one `StageInterrupted` that says how far each update came."""
        runs, self._unwaited = self._unwaited, []
        stopped = [run for run in runs if run.cancel()]
        for run in stopped:
            run.join()
        errors: list[Exception] = [error] if isinstance(error, StageInterrupted) else []
        errors += [interrupted.error_of(run) for run in stopped if run.updates and run.calls]
        errors = list({str(one): one for one in errors}.values())
        if len(errors) == 1:
            raise errors[0]
        states = "; ".join(str(one).rstrip(".") for one in errors)
        rest = () if states else (interrupted.AS_BEFORE, interrupted.AGAIN)
        raise StageInterrupted(states or "the stages under way were interrupted", *rest)
