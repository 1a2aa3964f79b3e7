"""Decides when each run starts: a stage starts when its inputs are there and its pool is free, on one pool in call
order. Inside `overlapping()`, which is `lab.overlap()`, calls return at once."""

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
    """Holds the runs that have not ended. A pool has one stage under way at a time, so that what waits can still be
    given up, and an interrupt leaves no call queued behind. Runs of different pools overlap.

    A run that can start is sent by the thread that submits it. Another thread, which lives while runs are open, polls
    them and sends those that become ready.

    overlaps: whether calls return at once.
    """

    def __init__(self, hosts: Hosts) -> None:
        self._hosts = hosts
        self._open: list[StageRun] = []
        self._unwaited: list[StageRun] = []  # of `overlapping()`
        self.overlaps = False
        self.lock = threading.RLock()
        self._thread: threading.Thread | None = None

    def submit(self, run: StageRun) -> None:
        """Take a run on; it starts at once if it can."""
        with self.lock:
            self._open.append(run)
            try:
                self._advance()
            finally:  # an interrupt, too, leaves nothing behind that has ended or that nobody attends to
                self._open = [run for run in self._open if not run.over]
                if self._open and self._thread is None:
                    self._thread = threading.Thread(target=self._attend, name="workbench-runs", daemon=True)
                    self._thread.start()

    def open_runs(self) -> Sequence[Run]:
        """What has not ended, in call order."""
        with self.lock:
            return tuple(self._open)

    def called(self) -> Sequence[Run]:
        """The runs that have not ended, and those of `overlapping()` that were not waited for."""
        return list(dict.fromkeys((*self.open_runs(), *self._unwaited)))

    def drain(self) -> None:
        """Wait until every run has ended."""
        while runs := self.open_runs():
            for run in runs:
                run.join()

    def close(self) -> None:
        """Give up what has not ended, and wake its waiters."""
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
                if outstanding:  # with fewer answers than these none of the runs is over
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
        """Poll what runs, send what can run, until nothing changes."""
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
                except Exception as error:  # whatever it was, it ends this run and no other
                    run.fail(error)
                if run.over:
                    if run in self._open:
                        self._open.remove(run)
                    changed = True
                else:
                    busy.setdefault(pool, run)

    # --- calls that return at once ------------------------------------------------------------------------------------

    def submit_unwaited(self, run: StageRun) -> None:
        """Run it in the background; inside `overlapping()` it is waited for at the end."""
        if self.overlaps:
            self._unwaited.append(run)
        run.submit()

    @contextlib.contextmanager
    def overlapping(self) -> Iterator[None]:
        """Inside, a stage's call returns at once, and it runs when its inputs are there and its pool is free.

        So stages of different pools run at the same time, with the same lines as one by one. Waits at the end.
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
        """Wait for every stage of `overlap()`; raises the error of the first one that failed."""
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
        for run in runs:  # only now does the caller go on, who has them
            run.received()

    def _stop(self, error: BaseException) -> NoReturn:
        """Stop the runs, wait for that, and raise one `StageInterrupted` that says how far the updates among them
        came."""
        runs, self._unwaited = self._unwaited, []
        stopped = [run for run in runs if run.cancel()]
        for run in stopped:
            run.join()
        errors: list[Exception] = [error] if isinstance(error, StageInterrupted) else []
        errors += [interrupted.of(run) for run in stopped if run.updates and run.calls]
        errors = list({str(one): one for one in errors}.values())
        if len(errors) == 1:
            raise errors[0]
        states = "; ".join(str(one).rstrip(".") for one in errors)
        rest = () if states else (interrupted.AS_BEFORE, interrupted.AGAIN)
        raise StageInterrupted(states or "the stages under way were interrupted", *rest)
