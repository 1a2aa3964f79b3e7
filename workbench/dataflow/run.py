"""One execution of a stage: a future with progress, result and error."""

from __future__ import annotations

import asyncio
import contextlib
import time
import weakref
from collections.abc import Callable, Generator, Mapping, Sequence
from concurrent.futures import CancelledError, Future, InvalidStateError, wait
from typing import TYPE_CHECKING, Any, Literal

from workbench.display.progress import Progress
from workbench.errors import HostDied, StageError, StageInterrupted, UpstreamError, WorkbenchError
from workbench.workers.backends.base import Backend, Pending
from workbench.workers.calls import Call, Failure, Reply

if TYPE_CHECKING:
    from workbench.dataflow.batch import Batch
    from workbench.dataflow.references import Column
    from workbench.dataflow.scheduler import Scheduler
    from workbench.workers.group import WorkerGroup

# A rank that failed leaves those that step with it waiting in a collective. Ranks that show no progress for this long
# after a failure are taken to be stuck there; those that get on are waited for.
GRACE_S = 60.0
SHOW_S = 0.2
COUNT_ROWS = ("generate_sequences", "compute_reward", "compute_cost")

State = Literal["waiting", "running", "done", "failed", "cancelled"]


class Run:
    """One call a rank of one group, made when its inputs are there.

    `result()` waits; `await run` waits without blocking the notebook.

    code: a text that is equal for equal code and arguments. batch: what it is making, where that is a batch; it can be
    given to the next stage at once, as the run itself can. made, meta: the columns that it made, and what is to travel
    along, once it is done. metrics: what its ranks reported. dependents: batches that wait for it.
    plan: makes the calls, once the inputs are there. finish: makes the result of the replies. clean: lets the hosts
    forget what a run left that came to nothing.
    """

    def __init__(
        self,
        *,
        number: int,
        stage: str,
        group: WorkerGroup,
        inputs: Sequence[Run],
        plan: Callable[[], list[Call]],
        finish: Callable[[Run], Any],
        clean: Callable[[Run], None],
    ) -> None:
        self.number, self.stage, self.group = number, stage, group
        self.name = f"{group.role}.{stage}"
        self.calls: list[Call] = []
        self.replies: list[Reply] = []
        self.stuck = self.updates = self.by_loop = self.from_store = False
        self.unrecorded: list[Reply] = []
        self.batch: Batch | None = None
        self.code = ""
        self.writes: tuple[str, ...] = ()
        self.submitted_s = time.time()
        self.started_s = self.ended_s = 0.0  # unix times; 0.0: not yet
        self.made: Mapping[str, Column] = {}
        self.meta: Mapping[str, Any] = {}
        self.metrics = MetricValues()
        self.dependents: list[weakref.ref[Batch]] = []
        self._inputs, self._plan, self._finish, self._clean = list(inputs), plan, finish, clean
        self._future: Future[Any] = Future()
        self._pending: list[Pending] = []
        self._waiting_ranks: list[int] = []
        self._quiet_since = 0.0  # monotonic, from `send` on
        self._seen: dict[str, tuple[str, int, int, int]] = {}
        self._asked: dict[str, Pending] = {}
        self._asked_s: dict[str, float] = {}
        self._abandoned = ""
        self._scheduler: Scheduler | None = None
        self.lock: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()  # the scheduler's, while it has it
        self._counts = _Counts()

    # --- for who waits ------------------------------------------------------------------------------------------------

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
    def counted(self) -> tuple[int, int]:
        """Micro-batches, or rows, that the first rank has done, and of how many; (0, 0) where they are not counted."""
        status = next(iter(self._seen.values()), None)
        return self._counts.seen if status is None else (status[1], status[2])

    @property
    def error(self) -> str:
        """What ended it, in one line; empty unless it failed or was cancelled."""
        if self._future.cancelled():
            return self._abandoned or "it was cancelled"
        error = self._future.exception() if self._future.done() else None
        return "" if error is None else f"{type(error).__name__}: {error}".splitlines()[0]

    def start(self, scheduler: Scheduler, bar: Progress) -> Any:
        """Submit it and wait: the blocking form of a call."""
        self._counts.report, self._scheduler = bar.update, scheduler
        with contextlib.suppress(KeyboardInterrupt):  # the run says what was interrupted
            scheduler.submit(self)
        return self.wait(bar)

    def result(self) -> Any:
        """Wait: the batch's next version, an update's metrics, or what ranks returned.

        Raises `StageError` (of the kind of the first cause) when ranks failed, `HostDied` when a process ended,
        `UpstreamError` when an input failed. An interrupt stops the waiting, and a run that is not yet under way.
        """
        with self.progress() as bar:
            return self.wait(bar)

    def progress(self) -> Progress:
        """A progress line for who waits for it."""
        return Progress(self.name, unit="rows" if self.stage in COUNT_ROWS else "micro-batches")

    def wait(self, bar: Progress) -> Any:
        """`result`, shown on a progress line that is there already."""
        try:
            while not wait([self._future], timeout=SHOW_S).done:
                self._show(bar)
        except KeyboardInterrupt:
            self.cancel()
            raise self._interrupted() from None
        try:
            return self._future.result()
        except CancelledError:
            raise self._not_run() from None

    def when_over(self, act: Callable[[], object]) -> None:
        """Call `act` once it has ended, however; now, if it has."""
        self._future.add_done_callback(lambda _: act())

    def join(self) -> None:
        """Wait until it has ended, however."""
        wait([self._future])

    def cancel(self) -> bool:
        """Give it up: what has not begun is not begun, and what is under way ends with its result dropped.

        Stages that need its result fail, and name it. Returns whether it had not ended yet.
        """
        if self.done:
            return False
        with self.lock:  # not while it is being sent
            self._abandoned = "it was cancelled"
            if self._future.cancel():
                self.ended_s = time.time()
                self._future.set_running_or_notify_cancel()  # wakes those who wait
                self._forget()
        return True

    def __await__(self) -> Generator[Any, None, Any]:
        return self._awaited().__await__()

    async def _awaited(self) -> Any:
        # shielded: a task that is given up, or runs out of time, leaves the stage alone
        with contextlib.suppress(CancelledError, asyncio.CancelledError):
            return await asyncio.shield(asyncio.wrap_future(self._future))
        if self._future.cancelled():
            raise self._not_run()
        raise asyncio.CancelledError

    def _not_run(self) -> UpstreamError:
        return UpstreamError(f"{self.name} was not run: it was cancelled")

    def __repr__(self) -> str:
        return f"<Run {self.number}: {self.name}, {self.state}>"

    def _interrupted(self) -> StageInterrupted:
        if self.state == "cancelled":
            return StageInterrupted(f"{self.name} was interrupted before it began", "things are as before the stage")
        return StageInterrupted(
            f"{self.name} was interrupted in the notebook",
            "its ranks finish what they began, and the result is dropped",
            "the next call waits for them; an update that was under way has been applied when it ends",
        )

    def _show(self, bar: Progress) -> None:
        upstream = next((run for run in self._inputs if run.state == "running"), None)
        if upstream is None and self.state == "waiting" and self._scheduler is not None:
            mine = [run for run in self._scheduler.open_runs() if run.group.pool == self.group.pool]
            upstream = next((run for run in mine if run.state == "running"), None)
        shown = self if upstream is None else upstream
        bar.label = shown.name if shown is self else f"{self.name} waits for {shown.name}"
        failed = [str(rank) for rank, pending in enumerate(shown._pending) if _failed(pending)]
        if failed:
            bar.label = f"{shown.name}: rank {', '.join(failed)} failed, waiting for the others"
        status = next(iter(shown._seen.values()), None)
        bar.update(*(status[1:] if status else (0, 0, 0)))

    # --- for the scheduler --------------------------------------------------------------------------------------------

    def blocked(self) -> bool:
        """Whether an input is still to come; fails this run if one never will."""
        for run in self._inputs:
            if run.state in ("failed", "cancelled"):
                self.fail(run._as_cause(self.name))
                return True
        return not all(run.done for run in self._inputs)

    def _as_cause(self, consumer: str) -> UpstreamError:
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
        return self._plan()

    def send(self, backend: Backend) -> None:
        """Make the calls and give them to the hosts."""
        if not self._future.set_running_or_notify_cancel():
            return
        try:
            self.calls, self.started_s = self.plan(), time.time()
            for host, call in zip(self.group.hosts, self.calls, strict=True):
                self._pending.append(backend.execute(host, call, self._counts.hear))
            self._waiting_ranks = list(range(len(self.calls)))
            self._quiet_since = time.monotonic()
        except BaseException as error:
            # ranks that have their call would wait for those that have not
            self.stuck = 0 < len(self._pending) < len(self.group.hosts)
            if isinstance(error, KeyboardInterrupt):  # inline, the stage runs in here
                rule = "it stopped where it was: optimizer steps that were taken stay taken"
                self.fail(StageInterrupted(f"{self.name} was interrupted", rule))
                raise
            if not isinstance(error, Exception):
                raise
            self.fail(error)

    def outstanding(self) -> list[Pending]:
        """Answers that are still to come."""
        return [self._pending[rank] for rank in self._waiting_ranks]

    def poll(self, backend: Backend) -> None:
        """Look at what has come; ends the run when all is there, or when what is missing will never come."""
        self._waiting_ranks = [rank for rank in self._waiting_ranks if not self._pending[rank].done()]
        if not self._waiting_ranks:
            self._end()
            return
        failed = any(_failed(pending) for pending in self._pending)
        now = time.monotonic()
        hosts = [self.group.hosts[rank] for rank in self._waiting_ranks]
        if self._ask(backend, hosts if failed else hosts[:1]) or not failed:
            self._quiet_since = now
        elif now - self._quiet_since > GRACE_S:
            self.stuck = True
            self._end()

    def _ask(self, backend: Backend, hosts: Sequence[str]) -> bool:
        """Ask hosts how far they are, without waiting for the answer; whether one of them has got on."""
        got_on = False
        for host in hosts:
            asked = self._asked.get(host)
            if asked is not None and asked.done():
                del self._asked[host]
                with contextlib.suppress(WorkbenchError):
                    status = asked.result()
                    got_on |= status != self._seen.get(host)
                    self._seen[host] = status
            elif asked is None and time.monotonic() - self._asked_s.get(host, 0.0) > SHOW_S:
                self._asked[host], self._asked_s[host] = backend.ask(host, "status"), time.monotonic()
        return got_on

    def _end(self) -> None:
        try:
            self._collect()
            if self._abandoned:
                raise UpstreamError(f"the result of {self.name} was dropped", self._abandoned)
            result = self._finish(self)
        except Exception as error:
            self.fail(error)
        else:
            self.settle(result)

    def settle(self, result: Any) -> None:
        """End the run with a result."""
        self._forget()
        self.ended_s = time.time()
        self._future.set_result(result)
        for dependent in self.dependents:
            batch = dependent()
            if batch is not None:
                batch.settle(wait=False)
        self.dependents = []

    def fail(self, error: Exception) -> None:
        """End the run with an error; the first one counts."""
        clean, self._clean = self._clean, lambda run: None
        try:
            if self.calls:
                clean(self)
        except Exception as second:
            error.add_note(f"and while cleaning up: {second!r}")
        self._forget()
        self.ended_s = time.time()
        with contextlib.suppress(InvalidStateError):
            self._future.set_exception(error)

    def _forget(self) -> None:
        """Let go of inputs, so that batches which nobody else holds are released."""
        self._inputs, self._plan, self._finish, self._clean = [], list, lambda run: None, lambda run: None

    def _collect(self) -> None:
        failures: dict[int, Failure] = {}
        dead: HostDied | None = None
        for rank, pending in enumerate(self._pending):
            if not pending.done():
                continue
            try:
                reply: Reply = pending.result()
            except HostDied as error:
                dead = dead or error
                continue
            self.replies.append(reply)
            self.unrecorded.append(reply)
            if reply.failure is not None:
                failures[rank] = reply.failure
        if dead is not None:  # what other ranks ran into follows from it
            self.stuck = True
            raise dead
        if failures:
            raise self._error(failures)

    def _error(self, failures: dict[int, Failure]) -> WorkbenchError:
        """One error for all ranks: of the first cause's own class where it is ours, equal causes grouped."""
        first = next(iter(failures.values()))
        ranks = ", ".join(
            str(rank) for rank, f in failures.items() if (f.kind, f.message) == (first.kind, first.message)
        )
        where = f"{self.name} failed on rank {ranks}"
        others = sum((f.kind, f.message) != (first.kind, first.message) for f in failures.values())
        rule = f"{others} other rank(s) failed otherwise" if others else ""
        remedy = (
            "other ranks wait in a collective for a rank that failed: open the workbench again with if_exists='replace'"
            if self.stuck
            else ""
        )
        if isinstance(first.error, WorkbenchError):
            error: WorkbenchError = type(first.error)(
                f"{where}: {first.error.value}", first.error.rule or rule, first.error.remedy or remedy
            )
        else:
            error = StageError(f"{where}: {first.kind}: {first.message}", rule, remedy)
            error.add_note(f"on rank {ranks}:\n{first.traceback}")
        error.__cause__ = first.error
        return error


class _Counts:
    """What the ranks of the inline backend tell of themselves. No part of the run: hosts hold on to it."""

    def __init__(self) -> None:
        self.seen = (0, 0)
        self.report: Callable[[int, int, int], None] = lambda done, total, tokens: None

    def hear(self, done: int, total: int, tokens: int) -> None:
        self.seen = (done, total)
        self.report(done, total, tokens)


def _failed(pending: Pending) -> bool:
    if not pending.done():
        return False
    try:
        return pending.result().failure is not None
    except Exception:  # a host that is gone, an answer that cannot be read
        return True


class MetricValues(dict[str, float]):
    """What an update reports: metrics by name, with a table for a repr."""

    def _repr_html_(self) -> str:
        from workbench.display.html import table

        return table([{"metric": name, "value": f"{value:.6g}"} for name, value in self.items()], max_rows=60)
