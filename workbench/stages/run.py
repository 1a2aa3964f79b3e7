"""The caller's handle of a stage under way: a future with progress, result and error; and the log of stage calls."""

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
    """One stage call: one `Call` per rank of a group. `result()` waits; `await run` waits without blocking the
    notebook; the run, or its `batch`, can be given to the next stage at once.

    stage: the name of its operation; name: with its role. arguments: all by name, defaults among them. updates: whether
    the role's later stages wait for it. code: a text that is equal for equal code and arguments. reads, writes:
    columns. result_ranks: the ranks whose outputs and metrics make the result. reported_as: the name under which its
    metrics are reported. in_position: whether its result goes into the position of an algorithm. input, batch: the
    batch it was given (until it has ended) and the batch it makes. Once it is done: made_columns, meta: what it made;
    metrics: from its ranks; update_result: of an update; read_columns: that an update read. parts: of an update that
    stopped between two steps, how many steps each rank took. Unix times are 0.0 until they are known.
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
    update_result: Any = None
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
        self.made_columns: Mapping[str, Column] = {}
        self.read_columns: Mapping[str, Column] = {}
        self.meta: Mapping[str, Any] = {}
        self.metrics = MetricValues()
        self.dependents: list[weakref.ref[BatchHandle]] = []  # batches that wait for this run
        self.ranks = RankWatch(group.hosts, "rows" if stage in COUNT_ROWS else "micro-batches")
        self._inputs: list[Run] = []
        self._cleaned = False
        self._ended = threading.Event()
        self._abandoned = ""  # why its result is no longer wanted
        self._stopping = False  # whether its ranks were asked to stop
        self._clock_s = 0.0  # monotonic, the start of `timeout_s`

    # --- state and waiting --------------------------------------------------------------------------------------------

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
        """Whether `result` returns, or raises, immediately."""
        return self.future.done()

    @property
    def ranks_ended(self) -> bool:
        """Whether its ranks have ended, or are lost. A run that was cancelled, or is late, is `done` earlier."""
        return self._ended.is_set()

    @property
    def given_up(self) -> bool:
        """Whether its ranks still compute a result that nobody waits for."""
        return bool(self._abandoned) and not self.ranks_ended

    @property
    def error(self) -> str:
        """The reason of its end, in one line; empty unless it failed or was cancelled."""
        if self.future.cancelled():
            return self._abandoned or "it was cancelled"
        error = self.future.exception() if self.future.done() else None
        return "" if error is None else f"{type(error).__name__}: {said(error)}".splitlines()[0]

    @property
    def waits_for(self) -> Run | None:
        """The run under way that this one waits for: it makes an input, or has its pool."""
        runs = self._inputs
        if self.state == "waiting":
            others = self.runner.scheduler.open_runs()
            runs = [*runs, *(run for run in others if run.group.pool == self.group.pool)]
        return next((run for run in runs if run.state == "running"), None)

    @checked_call("run.result")
    def result(self) -> Any:
        """Wait, and return the batch's next version, an update's metrics, or the values that ranks returned.

        Raises `StageError` (of the kind of the first cause) when ranks failed, `HostDied` when a process ended,
        `UpstreamError` when an input failed. An interrupt stops the run at the next safe place, waits for that, and
        raises `StageInterrupted`, which says what was done; a second interrupt ends the waiting, too.
        """
        with self.progress() as bar, interruptible(self) as presses:
            return receive(self, bar, presses)

    def __getitem__(self, metric: str) -> Any:
        """Return a metric of an update, after waiting for the update, as reading a batch does."""
        return self.result()[metric]

    @checked_call("run.get")
    def get(self, metric: str, default: Any = None) -> Any:
        """Return a metric of an update; `default` where it has no metric of that name."""
        return self.result().get(metric, default)

    @checked_call("run.wait")
    def wait(self) -> Any:
        """Wait as `result` does, but do not count the result as received."""
        with self.progress() as bar, interruptible(self) as presses:
            return wait_for(self, bar, presses)

    def __await__(self) -> Generator[Any, None, Any]:
        return _wait_async(self).__await__()

    def record_replies(self) -> None:
        """Record what the ranks reported, once."""
        replies, self.unrecorded = self.unrecorded, []
        self.runner.record_replies(replies)

    def progress(self) -> Progress:
        return Progress(self.name, unit=self.ranks.unit)

    def when_done(self, act: Callable[[], object]) -> None:
        """Call `act` once the run is done, in whatever way; now, if it is."""
        self.future.add_done_callback(lambda _: act())

    def join(self, timeout_s: float | None = None) -> None:
        """Wait until its ranks have ended, in whatever way."""
        self._ended.wait(timeout_s)

    # --- stopping -----------------------------------------------------------------------------------------------------

    @checked_call("run.cancel")
    def cancel(self) -> bool:
        """Cancel the run, without waiting: a run that has not begun never begins, and ranks stop at the next place
        where nothing is half done. An update that completes nevertheless counts; other results are dropped. Stages that
        need the result fail, and name this run. Returns whether the run had not ended yet."""
        if self.done:
            return False
        if self.calls and self.leave_if_inline():  # the thread that computes it holds the lock
            return True
        with self.runner.scheduler.lock:  # not while the run is being sent, or ended
            if self.done:
                return False
            self._abandoned = "it was cancelled"
            if self.future.cancel():
                self.ended_s = time.time()
                self.future.set_running_or_notify_cancel()  # wakes its waiters
                self._set_ended()
                self._forget()
            else:
                self._leave()
        return True

    def leave_if_inline(self) -> bool:
        """Ask the run to stop, without a lock, if this process computes it; return whether it does. Called in the
        notebook's thread, at any point of its code."""
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
        with contextlib.suppress(InvalidStateError):  # it was late: its waiters have been woken
            self.future.set_result(result)
        self._set_ended()
        for dependent in self.dependents:
            batch = dependent()
            if batch is not None:
                batch.settle(wait=False)
        self.dependents = []

    def fail(self, error: Exception) -> None:
        """End the run with an error; the first one counts."""
        cleaned, self._cleaned = self._cleaned, True
        try:
            if isinstance(error, StageError) and error.batch is not None:  # its finished rows are kept
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
        self._set_ended()

    def _forget(self) -> None:
        """Drop its inputs, so that batches that nobody else holds are released."""
        self._inputs, self.input, self._then, self._cleaned = [], None, None, True

    def _set_ended(self) -> None:
        self._ended.set()
        try:
            self.runner.interrupted.record_end(self)
        except Exception as error:  # an error of the record does not end the run
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
                "its ranks stop at the next safe point, and this call does not wait for them",
                "the next call waits for them; run the same call again to continue",
            ) from None


def wait_for(run: Run, bar: Progress, presses: Presses) -> Any:
    """Return a run's result, or raise its error. After an interrupt, wait for its ranks; raise `StageInterrupted`."""
    while not (run.future.done() and (run.ranks_ended or not presses.count)):
        if presses.count:
            run.cancel()
            run.join(SHOW_S)
        else:
            wait([run.future], timeout=SHOW_S)
        _show(run, bar, stopping=presses.count > 0)
    if presses.count:
        raise interrupted.error_of(run)
    return _outcome(run)


def receive(run: Run, bar: Progress, presses: Presses) -> Any:
    """Do as `wait_for`, and note that the caller has the result."""
    result = wait_for(run, bar, presses)
    run.runner.interrupted.received(run)
    if presses.count:  # interrupted after the run had ended: the caller does not get the result
        raise interrupted.error_of(run)
    return result


async def _wait_async(run: Run) -> Any:
    """Return the result of a run. If the task is cancelled, the run is cancelled too, and the task ends when the ranks
    have stopped, so that the next call need not wait."""
    waited = asyncio.wrap_future(run.future)
    waited.add_done_callback(lambda future: future.cancelled() or future.exception())  # retrieves its exception
    try:
        while not waited.done():  # the notebook handles an interrupt when its event loop wakes
            await asyncio.wait([waited], timeout=SHOW_S)
    except asyncio.CancelledError as cancelled:
        run.cancel()
        while not run.ranks_ended:
            await asyncio.sleep(SHOW_S / 4)
        error = interrupted.error_of(run)
        cancelled._render_traceback_ = error._render_traceback_  # type: ignore[attr-defined]  # for IPython
        raise cancelled from error
    result = _outcome(run)
    run.runner.interrupted.received(run)
    return result


def _outcome(run: Run) -> Any:
    if run.future.cancelled():
        raise UpstreamError(f"{run.name} was not run: it was cancelled")
    error = run.future.exception()
    if error is not None:
        raise error.with_traceback(None)  # it may be raised again, in another place
    return run.future.result()


def _show(run: Run, bar: Progress, *, stopping: bool) -> None:
    shown = run.waits_for or run
    bar.label = shown.name if shown is run else f"{run.name} waits for {shown.name}"
    if stopping:
        bar.label = f"{run.name}: stopping at the next safe point (interrupt again to stop waiting)"
    if failed := shown.ranks.failed:
        bar.label = f"{shown.name}: rank {', '.join(map(str, failed))} failed, waiting for the others"
    bar.update(*shown.ranks.progressed)


KEPT = 1000


@dataclass(kw_only=True)
class RunRecord:
    """One stage call.

    stage: its name in the algorithm; operation: of its role. cell: the number of the notebook's cell that called it; 0:
    no cell. state: waiting, running, done, failed, "from the store", "stopped" (by the user), or "not run" (an input
    failed or was stopped, or it was stopped before it began). done_units of total_units: micro-batches, or rows, on one
    rank; 0 where they are not counted. batch: the one it makes, for `lab.batch(...)`; "" for metrics. error: the reason
    of its end. aside: whether it is part of a comparison or a check, which leaves no trace in training.
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
    """The last stage calls of a workbench, newest last: their cells, progress and outcomes. Holds no results."""

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
        run.when_done(lambda: self._refresh(record, kept))

    def _refresh(self, record: RunRecord, kept: weakref.ref[Run]) -> RunRecord:
        """Update the record from its run, unless the run was garbage collected."""
        if (run := kept()) is not None and record.ended_s == 0.0:
            record.state = _state(run)
            record.done_units, record.total_units = run.ranks.counted
            record.started_s = run.started_s
            if run.done:
                record.ended_s, record.error = run.ended_s, run.error
        return record

    def records(self, iteration: int | None = None) -> list[RunRecord]:
        """Return the records of an iteration (None: all that are kept), in call order."""
        with self._lock:
            entries = list(self._entries)
        return [self._refresh(*entry) for entry in entries if iteration in (None, entry[0].iteration)]

    def frame(self) -> pd.DataFrame:
        """Return the stages that this kernel called, one per row, in order: the cell that called it, its progress and
        its outcome, see `RunRecord`. duration_s: the time since the stage began, or until it ended; 0 for a stage that
        has not begun."""
        frame = pd.DataFrame(self.records(), columns=[*RunRecord.__dataclass_fields__])
        end_s = frame["ended_s"].where(frame["ended_s"] > 0, time.time())
        frame["duration_s"] = (end_s - frame["started_s"]).clip(lower=0.0).where(frame["started_s"] > 0, 0.0)
        return frame
