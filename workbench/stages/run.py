"""What a caller holds of a stage under way: a future with progress, result and error; and the log of stage calls."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping
from concurrent.futures import Future, InvalidStateError, wait
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import pandas as pd

from workbench.display.interrupts import Presses, on_interrupt
from workbench.display.progress import Progress
from workbench.errors import HostDied, StageError, StageInterrupted, UpstreamError
from workbench.errors.plain_text import said, shown
from workbench.messages.calls import Call, Reply, UpdatePart
from workbench.messages.metrics import MetricValues
from workbench.messages.operation import Operation
from workbench.stages import interrupted
from workbench.stages.ranks import RankWatch
from workbench.support.checked_calls import checked_call

if TYPE_CHECKING:
    from workbench.batches.batch import Batch
    from workbench.batches.handle import BatchHandle
    from workbench.batches.location import Column
    from workbench.stages.group import WorkerGroup
    from workbench.stages.runner import StageRunner
    from workbench.support.notebook_cell import Cell


SHOW_S = 0.2
COUNT_ROWS = ("generate_sequences", "compute_reward", "compute_cost")

State = Literal["waiting", "running", "done", "failed", "cancelled"]


class Run:
    """One call a rank of one group. `result()` waits; `await run` waits without blocking the notebook; the run, or its
    `batch`, can be given to the next stage at once.

    stage: the name of its operation; name: with its role. arguments: all by name, defaults among them. updates: whether
    the role's later stages wait for it. code: a text that is equal for equal code and arguments. reads, writes:
    columns. result_ranks: the ranks whose outputs and metrics make the result. reported_as: the name under which its
    metrics are reported. in_position: whether its result goes into the position of an algorithm. input, batch: what it
    was given, until it has ended, and what it makes.
    Once it is done: made and meta, the columns that it made and what travels along; metrics, what its ranks reported;
    given, the result of an update; read, the columns that an update read. parts: of an update that was left between
    two steps, how many each rank took. Unix times are 0.0 until then.
    """

    number, submitted_s, started_s, ended_s = 0, 0.0, 0.0, 0.0
    timeout_s: float | None = None
    code, reported_as = "", ""
    reads: tuple[str, ...] = ()
    writes: tuple[str, ...] = ()
    result_ranks: tuple[int, ...] = ()
    updates = by_loop = stuck = from_store = in_position = was_received = False
    input: Batch | None = None
    batch: Batch | None = None
    given: Any = None
    operation: Operation
    arguments: Mapping[str, Any]
    _then: Callable[[], None] | None = None

    def __init__(self, runner: StageRunner, group: WorkerGroup, stage: str) -> None:
        self.runner, self.group, self.stage, self.name = runner, group, stage, f"{group.role}.{stage}"
        self.future: Future[Any] = Future()
        self.calls: list[Call] = []
        self.replies: list[Reply] = []
        self.unrecorded: list[Reply] = []
        self.parts: tuple[UpdatePart, ...] = ()
        self.made: Mapping[str, Column] = {}
        self.read: Mapping[str, Column] = {}
        self.meta: Mapping[str, Any] = {}
        self.metrics = MetricValues()
        self.dependents: list[weakref.ref[BatchHandle]] = []  # batches that wait for it
        self.ranks = RankWatch(group.hosts, "rows" if stage in COUNT_ROWS else "micro-batches")
        self._inputs: list[Run] = []
        self._cleaned = False
        self._over = threading.Event()
        self._abandoned = ""  # why its result is not wanted any more
        self._stopping = False  # whether its ranks were asked to leave it
        self._clock_s = 0.0  # monotonic, from when `timeout_s` counts

    # --- for those who wait -------------------------------------------------------------------------------------------

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
            others = self.runner.scheduler.open_runs()
            runs = [*runs, *(run for run in others if run.group.pool == self.group.pool)]
        return next((run for run in runs if run.state == "running"), None)

    @checked_call("run.result")
    def result(self) -> Any:
        """Wait: the batch's next version, an update's metrics, or what ranks returned.

        Raises `StageError` (of the kind of the first cause) when ranks failed, `HostDied` when a process ended,
        `UpstreamError` when an input failed. An interrupt stops the run where nothing is half done, waits for that, and
        raises `StageInterrupted`, which says what was done; a second one stops the waiting too.
        """
        with self.progress() as bar, interruptible(self) as presses:
            return receive(self, bar, presses)

    def __getitem__(self, metric: str) -> Any:
        """A metric of an update, for which it waits, as reading a batch does."""
        return self.result()[metric]

    def get(self, metric: str, default: Any = None) -> Any:
        """A metric of an update; `default` where it has none of that name."""
        return self.result().get(metric, default)

    @checked_call("run.wait")
    def wait(self) -> Any:
        """Wait as `result` does, for a caller that does not get the result yet."""
        with self.progress() as bar, interruptible(self) as presses:
            return wait_for(self, bar, presses)

    def received(self) -> None:
        """Note that its caller has its result."""
        self.runner.interrupted.received(self)

    def __await__(self) -> Generator[Any, None, Any]:
        return _wait_async(self).__await__()

    def record_replies(self) -> None:
        """Record what its ranks reported, once."""
        replies, self.unrecorded = self.unrecorded, []
        self.runner.record_replies(replies)

    def progress(self) -> Progress:
        return Progress(self.name, unit=self.ranks.unit)

    def when_over(self, act: Callable[[], object]) -> None:
        """Call `act` once it has ended, in whatever way; now, if it has."""
        self.future.add_done_callback(lambda _: act())

    def join(self, timeout_s: float | None = None) -> None:
        """Wait until it is over, in whatever way."""
        self._over.wait(timeout_s)

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
        with self.runner.scheduler.lock:  # not while it is being sent, or ended
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
        if not self.calls or self.done or self.runner.hosts.backend.name != "inline":
            return False
        self._abandoned = "it was cancelled"
        self._leave()
        return True

    def _leave(self) -> None:
        if not self._stopping and self.calls:
            self._stopping = True
            for host in self.group.hosts:
                self.runner.hosts.backend.ask(host, "stop", self.number)
            self.ranks.note_progress()

    def __repr__(self) -> str:
        return f"<Run {self.number}: {self.name}, {self.state}>"

    # --- ending -------------------------------------------------------------------------------------------------------

    def settle(self, result: Any) -> None:
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
                self.runner.interrupted.not_received(self)
            elif self.calls and not cleaned:
                self.runner.interrupted.clean_up(self)
        except Exception as second:
            error.add_note(f"and while cleaning up: {shown(second, 400)}")
        if self.calls and not self.done:
            self.runner.failures.note(self, error)
        self._forget()
        self.ended_s = time.time()
        with contextlib.suppress(InvalidStateError):
            self.future.set_exception(error)
        self._set_over()

    def _forget(self) -> None:
        """Drop its inputs, so that batches which nobody else holds are released."""
        self._inputs, self.input, self._then, self._cleaned = [], None, None, True

    def _set_over(self) -> None:
        self._over.set()
        try:
            self.runner.interrupted.over(self)
        except Exception as error:  # what cannot be written down ends no run
            warnings.warn(f"after {self.name}: {shown(error, 400)}", stacklevel=2)


@contextlib.contextmanager
def interruptible(run: Run) -> Iterator[Presses]:
    """Inside, the first interrupt asks the run to stop; the second raises `StageInterrupted`."""
    with on_interrupt(run.leave_if_inline) as presses:
        try:
            yield presses
        except KeyboardInterrupt:
            raise StageInterrupted(
                f"{run.name} was interrupted twice",
                "its ranks stop at the next place where nothing is half done, and nobody waits for them",
                "the next call waits for them; the same call again goes on",
            ) from None


def wait_for(run: Run, bar: Progress, presses: Presses) -> Any:
    """The result of a run, or its error. After an interrupt: when its ranks have left it, `StageInterrupted`."""
    while not (run.future.done() and (run.over or not presses.count)):
        if presses.count:
            run.cancel()
            run.join(SHOW_S)
        else:
            wait([run.future], timeout=SHOW_S)
        _show(run, bar, stopping=presses.count > 0)
    if presses.count:
        raise interrupted.of(run)
    return _outcome(run)


def receive(run: Run, bar: Progress, presses: Presses) -> Any:
    """As `wait_for`, for the caller that gets the result."""
    result = wait_for(run, bar, presses)
    run.received()
    if presses.count:  # after the run had ended: the caller does not get it
        raise interrupted.of(run)
    return result


async def _wait_async(run: Run) -> Any:
    """The result of a run. Where the task is cancelled, the run is cancelled too, and the task ends when the ranks have
    left it: the next call waits for nothing."""
    waited = asyncio.wrap_future(run.future)
    waited.add_done_callback(lambda future: future.cancelled() or future.exception())  # read here, in any case
    try:
        while not waited.done():  # an interrupt of a notebook is handled when its loop wakes
            await asyncio.wait([waited], timeout=SHOW_S)
    except asyncio.CancelledError as cancelled:
        run.cancel()
        while not run.over:
            await asyncio.sleep(SHOW_S / 4)
        error = interrupted.of(run)
        cancelled._render_traceback_ = error._render_traceback_  # type: ignore[attr-defined]  # for IPython
        raise cancelled from error
    result = _outcome(run)
    run.received()
    return result


def _outcome(run: Run) -> Any:
    if run.future.cancelled():
        raise UpstreamError(f"{run.name} was not run: it was cancelled")
    error = run.future.exception()
    if error is not None:
        raise error.with_traceback(None)  # it may be raised again, elsewhere
    return run.future.result()


def _show(run: Run, bar: Progress, *, stopping: bool) -> None:
    shown = run.waits_for or run
    bar.label = shown.name if shown is run else f"{run.name} waits for {shown.name}"
    if stopping:
        bar.label = f"{run.name}: stopping where nothing is half done (interrupt again to leave it behind)"
    if failed := shown.ranks.failed:
        bar.label = f"{shown.name}: rank {', '.join(map(str, failed))} failed, waiting for the others"
    bar.update(*shown.ranks.progressed)


KEPT = 1000


@dataclass(kw_only=True)
class RunRecord:
    """One stage call.

    stage: as an algorithm calls it; operation: of its role. cell: the number of the notebook's cell that called it;
    0 for none. state: waiting, running, done, failed, "from the store", "stopped" (by the user), or "not run" (what it
    needs failed or was stopped, or it had not begun when it was stopped). done_units of total_units: micro-batches, or
    rows, on one rank; 0 where they are not counted. batch: what it makes, for `lab.batch(...)`; "" for metrics. error:
    what ended it.
    aside: of a comparison or a check, after which all is as before.
    """

    run: int
    stage: str
    operation: str
    role: str
    pool: str
    iteration: int
    cell: int
    batch: str
    submitted_s: float
    started_s: float = 0.0
    ended_s: float = 0.0
    state: str = "waiting"
    done_units: int = 0
    total_units: int = 0
    error: str = ""
    aside: bool = False


def _state(run: Run) -> str:
    if run.state == "cancelled":
        return "stopped" if run.calls else "not run"
    error = run.future.exception() if run.state == "failed" else None
    if isinstance(error, StageInterrupted):
        return "stopped"
    if isinstance(error, UpstreamError) or (isinstance(error, HostDied) and not run.calls):
        return "not run"
    return "from the store" if run.from_store and run.done else run.state


class RunLog:
    """The last stage calls of a workbench, newest last: the cell, the progress, the end. Holds no results."""

    def __init__(self) -> None:
        self._entries: deque[tuple[RunRecord, weakref.ref[Run]]] = deque(maxlen=KEPT)
        self._lock = threading.Lock()

    def add(self, run: Run, stage: str, iteration: int, cell: Cell | None, *, aside: bool) -> None:
        record = RunRecord(
            run=run.number, stage=stage, operation=run.stage, role=run.group.role, pool=run.group.pool.name,
            iteration=iteration, cell=cell.number if cell else 0, batch=run.batch.id if run.batch is not None else "",
            submitted_s=run.submitted_s, aside=aside,
        )  # fmt: skip
        kept = weakref.ref(run)
        with self._lock:
            self._entries.append((record, kept))
        run.when_over(lambda: self._look(record, kept))

    def _look(self, record: RunRecord, kept: weakref.ref[Run]) -> RunRecord:
        """Update the record from its run, unless that was garbage collected."""
        if (run := kept()) is not None and record.ended_s == 0.0:
            record.state = _state(run)
            record.done_units, record.total_units = run.ranks.counted
            record.started_s = run.started_s
            if run.done:
                record.ended_s, record.error = run.ended_s, run.error
        return record

    def records(self, iteration: int | None = None) -> list[RunRecord]:
        """Those of an iteration, or all that are kept, in call order."""
        with self._lock:
            entries = list(self._entries)
        return [self._look(*entry) for entry in entries if iteration in (None, entry[0].iteration)]

    def frame(self) -> pd.DataFrame:
        """What stages this kernel called, one a row, in order: which cell called it, how far it is, how it ended: see
        `RunRecord`; duration_s is what it has taken so far, from where it began: 0 for one that has not begun, or never
        did."""
        frame = pd.DataFrame(self.records(), columns=[*RunRecord.__dataclass_fields__])
        end_s = frame["ended_s"].where(frame["ended_s"] > 0, time.time())
        frame["duration_s"] = (end_s - frame["started_s"]).clip(lower=0.0).where(frame["started_s"] > 0, 0.0)
        return frame
