"""One execution of a stage: a future with progress, result and error."""

from __future__ import annotations

import contextlib
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Generator, Mapping, Sequence
from concurrent.futures import Future, InvalidStateError
from typing import TYPE_CHECKING, Any, Literal

from workbench.backends.base import Backend
from workbench.batches.references import Settled
from workbench.display.progress import Progress
from workbench.errors import StageError, StageTimeout, UpstreamError
from workbench.errors.plain_text import said, shown
from workbench.messages.calls import Call
from workbench.messages.metric_values import MetricValues
from workbench.messages.replies import Reply, UpdatePart
from workbench.stages import interruptions
from workbench.stages.rank_errors import input_failed, one_error
from workbench.stages.rank_watch import RankWatch
from workbench.stages.run_protocols import Ranks, RunOutcomes, Steps
from workbench.stages.stopping import StopCoordinator
from workbench.stages.waiting import interruptible, wait_async, wait_for
from workbench.support.checked_calls import checked_call

if TYPE_CHECKING:
    from workbench.batches.batch import Batch
    from workbench.batches.references import Column
    from workbench.stages.scheduler import Scheduler

# A rank that failed leaves those that step with it waiting in a collective. Ranks that show no progress for this long
# after a failure, or when they are to stop, are taken to be stuck; those that make progress are waited for.
GRACE_S = 60.0
COUNT_ROWS = ("generate_sequences", "compute_reward", "compute_cost")

State = Literal["waiting", "running", "done", "failed", "cancelled"]


class Run:
    """One call a rank of one group, made when its inputs are there.

    `result()` waits; `await run` waits without blocking the notebook.

    inputs: the runs that come before it. timeout_s: how long it may take, from when its ranks begin or, behind a run
    that was cancelled, from when it waits. updates: whether the role's later stages wait for it. writes: the columns
    that it is registered to write. code: a text that is equal for equal code and arguments. result_ranks: the ranks
    whose outputs and metrics make the result. makes: gives the batch that it is making, which can be given to the next
    stage at once, as the run itself can.

    read: the columns that an update read. made, meta: the columns that it made, and the meta that it adds, once it is
    done. metrics: what its ranks reported. given: the result of an update. parts: of an update that was stopped, how
    many steps each rank took. dependents: batches that wait for it. Unix times are 0.0 until then.
    """

    def __init__(
        self, *, number: int, stage: str, group: Ranks, inputs: Sequence[Run], steps: Steps, outcomes: RunOutcomes,
        scheduler: Scheduler, timeout_s: float | None = None, updates: bool = False, writes: tuple[str, ...] = (),
        code: str = "", result_ranks: tuple[int, ...] = (), by_loop: bool = False,
        makes: Callable[[Run], Batch] | None = None,
    ) -> None:  # fmt: skip
        self.number, self.stage, self.group = number, stage, group
        self.name = f"{group.role}.{stage}"
        self.updates, self.writes, self.code = updates, writes, code
        self.result_ranks, self.by_loop, self.timeout_s = result_ranks, by_loop, timeout_s
        self.future: Future[Any] = Future()
        self.calls: list[Call] = []
        self.replies: list[Reply] = []
        self.unrecorded: list[Reply] = []
        self.parts: tuple[UpdatePart, ...] = ()
        self.stuck = self.from_store = False
        self.submitted_s, self.started_s, self.ended_s = time.time(), 0.0, 0.0
        self.made: Mapping[str, Column] = {}
        self.read: Mapping[str, Column] = {}
        self.given: Any = None
        self.meta: Mapping[str, Any] = {}
        self.metrics = MetricValues()
        self.dependents: list[weakref.ref[Settled]] = []
        self._inputs, self._outcomes, self._scheduler = list(inputs), outcomes, scheduler
        self._steps: Steps | None = steps
        self._cleaned = False
        self._over = threading.Event()
        self._abandoned = ""  # why its result is not wanted any more
        self._backend: Backend | None = None  # from `send` on
        self._stopping: StopCoordinator | None = None
        self._clock_s = 0.0  # monotonic, from when `timeout_s` counts
        self._unit = "rows" if stage in COUNT_ROWS else "micro-batches"
        self.ranks = RankWatch(group.hosts, self._unit)
        self.batch = None if makes is None else makes(self)

    # --- for those who wait ----------------------------------------------------------------------------------------

    @property
    def state(self) -> State:
        """waiting (for inputs, or for its pool), running, done, failed, or cancelled."""
        if self.future.cancelled():
            return "cancelled"
        if self.future.done():
            return "failed" if self.future.exception() else "done"
        return "running" if self.calls else "waiting"

    @property
    def done(self) -> bool:
        """Whether `result` returns, or raises, at once."""
        return self.future.done()

    @property
    def over(self) -> bool:
        """Whether its ranks have ended it, or are lost: a run that was cancelled, or is late, is `done` before."""
        return self._over.is_set()

    @property
    def given_up(self) -> bool:
        """Whether its ranks still compute what nobody waits for."""
        return bool(self._abandoned) and not self.over

    @property
    def error(self) -> str:
        """What ended it, in one line; empty unless it failed or was cancelled."""
        if self.future.cancelled():
            return self._abandoned or "it was cancelled"
        error = self.future.exception() if self.future.done() else None
        return "" if error is None else f"{type(error).__name__}: {said(error)}".splitlines()[0]

    @property
    def waits_for(self) -> Run | None:
        """The run under way that this one waits for: one that makes an input, or has its pool."""
        runs = self._inputs
        if self.state == "waiting":
            runs = [*runs, *(run for run in self._scheduler.open_runs() if run.group.pool == self.group.pool)]
        return next((run for run in runs if run.state == "running"), None)

    def run(self) -> Any:
        """Submit it and wait: the blocking form of a call."""
        with self._progress() as bar, interruptible(self) as presses:
            self.ranks.counts.report = bar.update
            with contextlib.suppress(KeyboardInterrupt):  # the run says what was interrupted
                self._scheduler.submit(self)
            result = wait_for(self, bar, presses)
        self.received()
        return result

    @checked_call("run.submit")
    def submit(self) -> None:
        """Submit it, in the background; on the inline backend it runs now."""
        with interruptible(self) as presses:
            with contextlib.suppress(KeyboardInterrupt):
                self._scheduler.submit(self)
            if presses.count:
                with self._progress() as bar:
                    wait_for(self, bar, presses)

    @checked_call("run.result")
    def result(self) -> Any:
        """Wait: the batch's next version, an update's metrics, or what ranks returned.

        Raises `StageError` (of the kind of the first cause) when ranks failed, `HostDied` when a process ended,
        `UpstreamError` when an input failed. An interrupt stops the run where nothing is half done, waits for that, and
        raises `StageInterrupted`, which says what was done; a second one stops the waiting too.
        """
        result = self.wait()
        self.received()
        return result

    @checked_call("run.wait")
    def wait(self) -> Any:
        """Wait as `result` does, for a caller that does not get the result yet."""
        with self._progress() as bar, interruptible(self) as presses:
            return wait_for(self, bar, presses)

    def __await__(self) -> Generator[Any, None, Any]:
        return wait_async(self).__await__()

    def _progress(self) -> Progress:
        return Progress(self.name, unit=self._unit)

    def when_over(self, act: Callable[[], object]) -> None:
        """Call `act` once it has ended, in whatever way; now, if it has."""
        self.future.add_done_callback(lambda _: act())

    def join(self, timeout_s: float | None = None) -> None:
        """Wait until it is over, in whatever way."""
        self._over.wait(timeout_s)

    def received(self) -> None:
        """Note that its caller has its result."""
        self._outcomes.received(self)

    def not_received(self) -> None:
        """Note that its waiter was interrupted, and the result reaches nobody."""
        self._outcomes.not_received(self)

    def __repr__(self) -> str:
        return f"<Run {self.number}: {self.name}, {self.state}>"

    # --- stopping -----------------------------------------------------------------------------------------------------

    @checked_call("run.cancel")
    def cancel(self) -> bool:
        """Cancel it, without waiting: what has not begun is not begun, and its ranks leave it at the next place where
        nothing is half done. An update that comes to its end all the same counts; other results are dropped. Stages
        that need its result fail, and name it. Returns whether it had not ended yet.
        """
        if self.done:
            return False
        if self.calls and self.leave_if_inline():  # the lock is with the thread that computes it
            return True
        with self._scheduler.lock:  # not while it is being sent, or ended
            if self.done:
                return False
            self._abandoned = "it was cancelled"
            if self.future.cancel():
                self.ended_s = time.time()
                self.future.set_running_or_notify_cancel()  # wakes those who wait
                self._set_over()
                self._forget()
            else:
                self._leave()
        return True

    def leave_if_inline(self) -> bool:
        """Have it stop where this process computes it, without a lock; whether that is so. Called in the notebook's
        thread, wherever that is."""
        if self._backend is None or self._backend.name != "inline" or self.done:
            return False
        self._abandoned = "it was cancelled"
        self._leave()
        return True

    def _leave(self) -> None:
        """Ask its ranks to leave it."""
        if self._stopping is None and self._backend is not None:
            self._stopping = StopCoordinator(self._backend, self.group.hosts, self.number)
            self.ranks.note_progress()

    # --- for the scheduler --------------------------------------------------------------------------------------------

    def blocked(self) -> bool:
        """Whether an input is still to come; fails this run if one never will."""
        for run in self._inputs:
            if run.state in ("failed", "cancelled"):
                self.fail(input_failed(self.name, run.name, None if run.future.cancelled() else run.future.exception()))
                return True
        return not all(run.done for run in self._inputs)

    def plan(self) -> list[Call]:
        """The calls that `send` makes."""
        return [] if self._steps is None else self._steps.plan(self)

    def send(self, backend: Backend) -> None:
        """Make the calls and give them to the hosts."""
        if not self.future.set_running_or_notify_cancel():
            return
        try:
            self.calls, self.started_s = self.plan(), time.time()
            self._backend = backend
            self.begin_clock()
            if self.timeout_s is not None and not self.updates:  # inline; an update ends between optimizer steps only
                self.ranks.counts.limit(self._clock_s + self.timeout_s, self.timeout_s)
            for host, call in zip(self.group.hosts, self.calls, strict=True):
                self.ranks.answers.append(backend.execute(host, call, self.ranks.counts.count))
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
        late = f"{self.name} took longer than timeout_s={self.timeout_s:g}"
        if not self.calls:
            self.fail(StageTimeout(
                late, f"it waited for pool {self.group.pool.name!r}, which is at work on a stage that was given up",
                "wait for it, or where it never ends start its pool again with lab.recover()",
            ))  # fmt: skip
            return
        error = StageTimeout(
            late, self.ranks.at(backend),
            "its ranks leave it at the next place where nothing is half done, for which the next call waits; the same "
            "call again of an update goes on with the steps that are left",
        )  # fmt: skip
        self._abandoned = f"its timeout_s={self.timeout_s:g} had passed"
        self.ended_s = time.time()
        self._note_failure(error)
        with contextlib.suppress(InvalidStateError):
            self.future.set_exception(error)
        self._leave()

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

    # --- ending -------------------------------------------------------------------------------------------------------

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
        self.parts = tuple(reply.stopped for reply in self.replies if reply.stopped is not None)
        if self.parts:
            part = self.parts[0]
            raise interruptions.after(self.name, part) if self.updates else interruptions.as_before(self.name)

    def settle(self, result: Any) -> None:
        """End the run with a result."""
        self._forget()
        self.ended_s = time.time()
        with contextlib.suppress(InvalidStateError):  # late: its waiters have been woken
            self.future.set_result(result)
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
            if isinstance(error, StageError) and error.batch is not None:  # its rows are kept
                self._outcomes.not_received(self)
            elif self.calls and not cleaned:
                self._outcomes.clean_up(self)
        except Exception as second:
            error.add_note(f"and while cleaning up: {shown(second, 400)}")
        if self.calls and not self.done:
            self._note_failure(error)
        self._forget()
        self.ended_s = time.time()
        with contextlib.suppress(InvalidStateError):
            self.future.set_exception(error)
        self._set_over()

    def _forget(self) -> None:
        """Drop its inputs, so that batches which nobody else holds are released."""
        self._inputs, self._steps, self._cleaned = [], None, True

    def _note_failure(self, error: Exception) -> None:
        if self._steps is not None:
            self._steps.failed(self, error)

    def _set_over(self) -> None:
        self._over.set()
        try:
            self._outcomes.over(self)
        except Exception as error:  # what cannot be written down ends no run
            warnings.warn(f"after {self.name}: {shown(error, 400)}", stacklevel=2)
