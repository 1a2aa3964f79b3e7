"""One execution of a stage: a future with progress, result and error."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from concurrent.futures import Future, InvalidStateError, wait
from typing import TYPE_CHECKING, Any, Literal, Protocol

from workbench.backends.base import Backend, Pending
from workbench.batches.references import Settled
from workbench.display.interrupts import Presses, on_interrupt
from workbench.display.progress import Progress
from workbench.errors import StageTimeout, UpstreamError, WorkbenchError
from workbench.messages.calls import Call
from workbench.messages.metric_values import MetricValues
from workbench.messages.replies import Reply, UpdatePart
from workbench.placement.placement import Pool
from workbench.settings.layout import Layout
from workbench.stages import interruptions
from workbench.stages.rank_errors import one_error
from workbench.stages.rank_watch import RankWatch
from workbench.stages.stopping import StopCoordinator

if TYPE_CHECKING:
    from workbench.batches.batch import Batch
    from workbench.batches.references import Column
    from workbench.stages.scheduler import Scheduler

# A rank that failed leaves those that step with it waiting in a collective. Ranks that show no progress for this long
# after a failure, or when they are to stop, are taken to be stuck; those that get on are waited for.
GRACE_S = 60.0
SHOW_S = 0.2
COUNT_ROWS = ("generate_sequences", "compute_reward", "compute_cost")

State = Literal["waiting", "running", "done", "failed", "cancelled"]


class Ranks(Protocol):
    """The ranks of a role: a `WorkerGroup`."""

    role: str
    pool: Pool
    hosts: tuple[str, ...]
    layout: Layout


class Steps(Protocol):
    """What a run does of its own. It holds the batch that the run reads, and is let go when the run has ended."""

    def plan(self, run: Run) -> list[Call]:
        """Make the calls, once the inputs are there."""

    def finish(self, run: Run) -> Any:
        """Make the result of the replies."""

    def failed(self, run: Run, error: Exception) -> None:
        """Called with an error of its own, before waiters are woken."""


class RunOutcomes(Protocol):
    """What follows from runs."""

    def clean_up(self, run: Run) -> None:
        """Let the hosts forget what a run that failed has left."""

    def not_received(self, run: Run) -> None:
        """Called when the waiter was interrupted and never gets the result."""

    def over(self, run: Run) -> None:
        """Called when its ranks are done with it."""


class Run:
    """One call a rank of one group, made when its inputs are there.

    `result()` waits; `await run` waits without blocking the notebook.

    inputs: the runs that come before it. timeout_s: how long it may take, from when its ranks begin or, behind a run
    that was given up, from when it waits. updates: whether the role's later stages wait for it. writes: the columns
    that it is registered to write. code: a text that is equal for equal code and arguments. result_ranks: the ranks whose
    metrics count. makes: gives the batch that it is making, which can be given to the next stage at once, as the run
    itself can.

    read: the columns that an update read. made, meta: the columns that it made, and what is to travel along, once it is
    done. metrics: what its ranks reported. given: the result of an update. dependents: batches that wait for it.
    """

    def __init__(
        self, *, number: int, stage: str, group: Ranks, inputs: Sequence[Run], steps: Steps, outcomes: RunOutcomes,
        timeout_s: float | None = None, updates: bool = False, writes: tuple[str, ...] = (), code: str = "",
        result_ranks: tuple[int, ...] = (), by_loop: bool = False, makes: Callable[[Run], Batch] | None = None,
    ) -> None:  # fmt: skip
        self.number, self.stage, self.group = number, stage, group
        self.name = f"{group.role}.{stage}"
        self.updates, self.writes, self.code = updates, writes, code
        self.result_ranks, self.by_loop, self.timeout_s = result_ranks, by_loop, timeout_s
        self.calls: list[Call] = []
        self.replies: list[Reply] = []
        self.unrecorded: list[Reply] = []
        self.parts: tuple[UpdatePart, ...] = ()  # of an update that was stopped: how far each rank came
        self.stuck = self.from_store = False
        self.submitted_s = time.time()
        self.started_s = self.ended_s = 0.0  # unix times; 0.0: not yet
        self.made: Mapping[str, Column] = {}
        self.read: Mapping[str, Column] = {}
        self.given: Any = None
        self.meta: Mapping[str, Any] = {}
        self.metrics = MetricValues()
        self.dependents: list[weakref.ref[Settled]] = []
        self._inputs, self._outcomes = list(inputs), outcomes
        self._steps: Steps | None = steps
        self._cleaned = False
        self._future: Future[Any] = Future()
        self._over = threading.Event()  # its ranks are at it no more: that may be after its waiters were told
        self.lock: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()  # the scheduler's, while it has it
        self._scheduler: Scheduler | None = None
        self._abandoned = ""
        self._backend: Backend | None = None  # from `send` on
        self._stopping: StopCoordinator | None = None
        self._clock_s = 0.0  # monotonic, from when `timeout_s` counts
        self._unit = "rows" if stage in COUNT_ROWS else "micro-batches"
        self.ranks = RankWatch(group.hosts, self._unit)
        self.batch = None if makes is None else makes(self)

    # --- for those who wait ----------------------------------------------------------------------------------------

    @property
    def state(self) -> State:
        """Where it stands: waiting (for inputs, or for its pool), running, done, failed, cancelled."""
        if self._future.cancelled():
            return "cancelled"
        if self._future.done():
            return "failed" if self._future.exception() else "done"
        return "running" if self.calls else "waiting"

    @property
    def done(self) -> bool:
        """Whether `result` returns, or raises, at once."""
        return self._future.done()

    @property
    def over(self) -> bool:
        """Whether its ranks are done with it, or lost: a run that was given up, or is late, is `done` before."""
        return self._over.is_set()

    @property
    def given_up(self) -> bool:
        """Whether nobody waits for what its ranks are still at."""
        return bool(self._abandoned) and not self.over

    @property
    def counted(self) -> tuple[int, int]:
        """Micro-batches, or rows, that the first rank has done, and of how many; (0, 0) where they are not counted."""
        return self.ranks.counted

    @property
    def error(self) -> str:
        """What ended it, in one line; empty unless it failed or was cancelled."""
        if self._future.cancelled():
            return self._abandoned or "it was cancelled"
        error = self._future.exception() if self._future.done() else None
        return "" if error is None else f"{type(error).__name__}: {error}".splitlines()[0]

    def start(self, scheduler: Scheduler, bar: Progress) -> Any:
        """Submit it and wait: the blocking form of a call."""
        self.ranks.counts.report, self._scheduler = bar.update, scheduler
        with self._interruptible() as presses:
            with contextlib.suppress(KeyboardInterrupt):  # the run says what was interrupted
                scheduler.submit(self)
            return self._wait(bar, presses)

    def submit(self, scheduler: Scheduler) -> None:
        """Submit it, in the background; on the inline backend it runs now."""
        with self._interruptible() as presses:
            with contextlib.suppress(KeyboardInterrupt):
                scheduler.submit(self)
            if presses.count:
                with self.progress() as bar:
                    self._wait(bar, presses)

    def result(self) -> Any:
        """Wait: the batch's next version, an update's metrics, or what ranks returned.

        Raises `StageError` (of the kind of the first cause) when ranks failed, `HostDied` when a process ended,
        `UpstreamError` when an input failed. An interrupt stops the run where nothing is half done, waits for that, and
        raises `StageInterrupted`, which says where things stand; a second one stops the waiting too.
        """
        with self.progress() as bar:
            return self.wait(bar)

    def progress(self) -> Progress:
        """A progress line for its waiters."""
        return Progress(self.name, unit=self._unit)

    def wait(self, bar: Progress) -> Any:
        """`result`, shown on a progress line that is there already."""
        with self._interruptible() as presses:
            return self._wait(bar, presses)

    @contextlib.contextmanager
    def _interruptible(self) -> Iterator[Presses]:
        """Inside, an interrupt asks the run to stop."""
        with on_interrupt(self._press) as presses:
            try:
                yield presses
            except KeyboardInterrupt:  # pressed again
                raise interruptions.left_alone(self.name) from None

    def _press(self) -> bool:
        """Called wherever the notebook's thread is: takes no lock, but leaves a stage that this process computes, and
        says whether that is so."""
        if self._backend is None or self._backend.name != "inline" or self.done:
            return False
        self._abandoned = "it was cancelled"
        self._leave()
        return True

    def _wait(self, bar: Progress, presses: Presses) -> Any:
        while not (self._future.done() and (self.over or not presses.count)):
            if presses.count:
                self.cancel()
                self._over.wait(SHOW_S)
            else:
                wait([self._future], timeout=SHOW_S)
            self._show(bar, stopping=presses.count > 0)
        if presses.count:
            raise self.interrupted()
        if self._future.cancelled():
            raise self._not_run()
        error = self._future.exception()
        if error is not None:
            raise error.with_traceback(None)  # it may be raised again, elsewhere
        return self._future.result()

    def when_over(self, act: Callable[[], object]) -> None:
        """Call `act` once it has ended, however; now, if it has."""
        self._future.add_done_callback(lambda _: act())

    def _set_over(self) -> None:
        self._over.set()
        try:
            self._outcomes.over(self)
        except Exception as error:  # what cannot be written down ends no run
            warnings.warn(f"after {self.name}: {error!r}", stacklevel=2)

    def join(self) -> None:
        """Wait until it is over, however."""
        self._over.wait()

    def cancel(self) -> bool:
        """Give it up, without waiting: what has not begun is not begun, and ranks that are at it leave it at the next
        place where nothing is half done. An update that comes to its end all the same counts; other results are
        dropped. Stages that need its result fail, and name it. Returns whether it had not ended yet.
        """
        if self.done:
            return False
        if self.calls and self._press():  # the lock is with who computes it
            return True
        with self.lock:  # not while it is being sent, or ended
            if self.done:
                return False
            self._abandoned = "it was cancelled"
            if self._future.cancel():
                self.ended_s = time.time()
                self._future.set_running_or_notify_cancel()  # wakes those who wait
                self._set_over()
                self._forget()
            else:
                self._leave()
        return True

    def _leave(self) -> None:
        """Let its ranks leave it."""
        if self._stopping is None and self._backend is not None:
            self._stopping = StopCoordinator(self._backend, self.group.hosts, self.number)
            self.ranks.heard()

    def __await__(self) -> Generator[Any, None, Any]:
        return self._awaited().__await__()

    async def _awaited(self) -> Any:
        """`result`, without blocking. A task that is given up, or runs out of time, gives the run up too, and ends when
        the run's ranks have left it: the next call waits for nothing."""
        waited = asyncio.wrap_future(self._future)
        waited.add_done_callback(lambda future: future.cancelled() or future.exception())  # read here, in any case
        try:
            while not waited.done():  # an interrupt of a notebook is heard when its loop wakes
                await asyncio.wait([waited], timeout=SHOW_S)
        except asyncio.CancelledError as given_up:
            self.cancel()
            while not self.over:
                await asyncio.sleep(SHOW_S / 4)
            interrupted = self.interrupted()
            given_up._render_traceback_ = interrupted._render_traceback_  # type: ignore[attr-defined]  # for IPython
            raise given_up from interrupted
        if self._future.cancelled():
            raise self._not_run()
        error = self._future.exception()
        if error is not None:
            raise error.with_traceback(None) from error.__cause__
        return self._future.result()

    def _not_run(self) -> UpstreamError:
        return UpstreamError(f"{self.name} was not run: it was cancelled")

    def __repr__(self) -> str:
        return f"<Run {self.number}: {self.name}, {self.state}>"

    def interrupted(self) -> Exception:
        """What an interrupt made of it, once it is over: as before, or after which optimizer step. A failure of its own
        stays that."""
        if self.state == "cancelled":
            return interruptions.before_it_began(self.name)
        if self.state == "done":
            self._outcomes.not_received(self)
        if self.updates and self.state == "done":
            return interruptions.after_all_steps(self.name)
        error = None if self.state == "done" else self._future.exception()
        if isinstance(error, WorkbenchError) and not isinstance(error, UpstreamError):
            return error.with_traceback(None)
        return interruptions.as_before(self.name)

    def _show(self, bar: Progress, *, stopping: bool = False) -> None:
        upstream = next((run for run in self._inputs if run.state == "running"), None)
        if upstream is None and self.state == "waiting" and self._scheduler is not None:
            mine = [run for run in self._scheduler.open_runs() if run.group.pool == self.group.pool]
            upstream = next((run for run in mine if run.state == "running"), None)
        shown = self if upstream is None else upstream
        bar.label = shown.name if shown is self else f"{self.name} waits for {shown.name}"
        if stopping:
            bar.label = f"{self.name}: stopping where nothing is half done (interrupt again to leave it behind)"
        if failed := shown.ranks.failed:
            bar.label = f"{shown.name}: rank {', '.join(map(str, failed))} failed, waiting for the others"
        bar.update(*shown.ranks.progressed)

    # --- for the scheduler --------------------------------------------------------------------------------------------

    def blocked(self) -> bool:
        """Whether an input is still to come; fails this run if one never will."""
        for run in self._inputs:
            if run.state in ("failed", "cancelled"):
                self.fail(run.as_cause(self.name))
                return True
        return not all(run.done for run in self._inputs)

    def as_cause(self, consumer: str) -> UpstreamError:
        """The error of a stage that needs its result."""
        error = None if self._future.cancelled() else self._future.exception()
        if isinstance(error, UpstreamError):  # the first cause is further up
            cause = UpstreamError(f"{consumer} was not run", error.rule, error.remedy)
            cause.__cause__ = error.__cause__
        else:
            # errors of ours name their stage already
            said = f"{self.name} was cancelled" if error is None else str(error)
            cause = UpstreamError(f"{consumer} was not run", said if self.name in said else f"{self.name}: {said}")
            cause.__cause__ = error
        return cause

    def plan(self) -> list[Call]:
        """The calls that `send` makes."""
        return [] if self._steps is None else self._steps.plan(self)

    def send(self, backend: Backend) -> None:
        """Make the calls and give them to the hosts."""
        if not self._future.set_running_or_notify_cancel():
            return
        try:
            self.calls, self.started_s = self.plan(), time.time()
            self._backend = backend
            self.begin_clock()
            if self.timeout_s is not None and not self.updates:  # inline; an update ends between optimizer steps only
                self.ranks.counts.limit(self._clock_s + self.timeout_s, self.timeout_s)
            for host, call in zip(self.group.hosts, self.calls, strict=True):
                self.ranks.answers.append(backend.execute(host, call, self.ranks.counts.hear))
            self.ranks.begin()
        except BaseException as error:
            # ranks that have their call would wait for those that have not
            self.stuck = 0 < len(self.ranks.answers) < len(self.group.hosts)
            if isinstance(error, KeyboardInterrupt):  # inline, where the stage runs in here: pressed twice
                self.fail(interruptions.cut_short(self.name, updates=self.updates))
                raise
            if not isinstance(error, Exception):
                raise
            self.fail(error)

    def begin_clock(self) -> None:
        """Count its time from now, if it does not count yet."""
        self._clock_s = self._clock_s or time.monotonic()

    def check_time(self, backend: Backend) -> None:
        """Fail it if it is late. Its ranks leave it as after an interrupt."""
        if self.timeout_s is None or not self._clock_s or self.done:
            return
        if time.monotonic() - self._clock_s <= self.timeout_s:
            return
        error = StageTimeout(
            f"{self.name} took longer than timeout_s={self.timeout_s:g}",
            self._at(backend),
            "its ranks leave it at the next place where nothing is half done, for which the next call waits; the same "
            "call again of an update goes on with the steps that are left"
            if self.calls
            else "wait for it, or where it never ends start its pool again with lab.recover()",
        )
        if not self.calls:
            self.fail(error)
            return
        self._abandoned = f"its timeout_s={self.timeout_s:g} had passed"
        self.ended_s = time.time()
        self._note_failure(error)
        with contextlib.suppress(InvalidStateError):
            self._future.set_exception(error)
        self._leave()

    def _at(self, backend: Backend) -> str:
        """What each rank is at, in words."""
        if not self.calls:
            return f"it waited for pool {self.group.pool.name!r}, which is at work on a stage that was given up"
        return self.ranks.at(backend)

    def outstanding(self) -> list[Pending]:
        """Answers that are still to come."""
        return self.ranks.outstanding

    def poll(self, backend: Backend) -> None:
        """Look at what has come; ends the run when all is there, or when what is missing will never come."""
        if not self.ranks.look():
            self._end()
            return
        if self._stopping is not None:
            self._stopping.poll(self.ranks.working)
        ending = bool(self.ranks.failed) or self._stopping is not None
        if self.ranks.quiet_s(backend, ending=ending) > GRACE_S:
            self.stuck = True
            self._end()

    def _end(self) -> None:
        try:
            self._collect()
            if self._abandoned and not self.updates:
                raise UpstreamError(f"the result of {self.name} was dropped", self._abandoned)
            result = None if self._steps is None else self._steps.finish(self)
        except Exception as error:
            self.fail(error)
        else:
            self.settle(result)

    def settle(self, result: Any) -> None:
        """End the run with a result."""
        self._forget()
        self.ended_s = time.time()
        with contextlib.suppress(InvalidStateError):  # late: its waiters have been woken
            self._future.set_result(result)
        self._set_over()
        for dependent in self.dependents:
            batch = dependent()
            if batch is not None:
                batch.settle(wait=False)
        self.dependents = []

    def fail(self, error: Exception) -> None:
        """End the run with an error; the first one counts."""
        cleaned, self._cleaned = self._cleaned, True
        try:
            if self.calls and not cleaned:
                self._outcomes.clean_up(self)
        except Exception as second:
            error.add_note(f"and while cleaning up: {second!r}")
        if self.calls and not self.done:
            self._note_failure(error)
        self._forget()
        self.ended_s = time.time()
        with contextlib.suppress(InvalidStateError):
            self._future.set_exception(error)
        self._set_over()

    def _forget(self) -> None:
        """Let go of inputs, so that batches which nobody else holds are released."""
        self._inputs, self._steps, self._cleaned = [], None, True

    def _note_failure(self, error: Exception) -> None:
        if self._steps is not None:
            self._steps.failed(self, error)

    def _collect(self) -> None:
        replies, failures, dead = self.ranks.collect()
        self.replies += replies
        self.unrecorded += replies
        if dead is not None:  # what other ranks ran into follows from it
            self.stuck = True
            raise dead
        if failures:
            raise one_error(self.group.role, self.group.pool.name, self.stage, self.number, failures, stuck=self.stuck)
        if self.stuck:
            ranks = ", ".join(map(str, self.ranks.working))
            raise interruptions.stuck(self.name, ranks, GRACE_S)
        parts = [reply.stopped for reply in self.replies if reply.stopped is not None]
        if parts:
            self.parts = tuple(parts)
            part = parts[0]
            raise interruptions.after(self.name, part) if self.updates else interruptions.as_before(self.name)
