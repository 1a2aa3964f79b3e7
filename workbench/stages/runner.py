"""A stage call: checked, planned, sent, collected, recorded.

lab.actor.compute_log_prob(batch)
  check    `checking.check_call`      arguments and columns                      -> StageCall
  queue    `StageRunner`, `Scheduler` a `Run`, which starts when its inputs are there and its pool is free
  plan     `StageSteps.plan`          which rank gets which rows, from whom      -> a Call for each rank
  send     `Run.send`, `Backend`      ranks pull rows, compute, keep the output  -> a Reply from each rank
  record   `StageSteps.finish`        metrics, weights, the batch's next version -> the result
"""

from __future__ import annotations

import contextlib
import numbers
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, SupportsFloat

from workbench.backends.hosts import Hosts
from workbench.batches import files
from workbench.batches.batch import Batch
from workbench.errors import BadInput, StageInterrupted, WorkbenchError
from workbench.errors.plain_text import shown
from workbench.messages.metric_values import MetricValues
from workbench.messages.operation import Operation
from workbench.stages.batch_store import BatchStore
from workbench.stages.checking import StageCall, check_call
from workbench.stages.counters import Counters
from workbench.stages.failing import Failures
from workbench.stages.group import WorkerGroup
from workbench.stages.groups import Groups
from workbench.stages.interruptions import AGAIN
from workbench.stages.live_settings import LiveSettings
from workbench.stages.outcomes import Outcomes
from workbench.stages.overlap import Overlap
from workbench.stages.ownership import Ownership
from workbench.stages.run import Run
from workbench.stages.run_log import RunLog
from workbench.stages.scheduler import Scheduler
from workbench.stages.snapshots import Snapshots
from workbench.stages.stage_names import StageNames
from workbench.stages.steps import ScoreListeners, StageParts, StageSteps
from workbench.support.notebook_cell import running_cell, running_position
from workbench.telemetry.store import TelemetryStore


class StageRunner(StageNames):
    """Carries out the calls of worker groups, one after the other or, inside `overlap()`, as their inputs come."""

    def __init__(
        self, hosts: Hosts, ownership: Ownership, groups: Groups, counters: Counters, batches: BatchStore,
        telemetry: TelemetryStore,
    ) -> None:  # fmt: skip
        self.hosts, self.ownership, self.groups, self.counters = hosts, ownership, groups, counters
        self.batches, self.telemetry = batches, telemetry
        self.failures = Failures(hosts.description.name)
        self.outcomes = Outcomes(hosts, ownership, counters, telemetry)
        self.scheduler, self.run_log = Scheduler(hosts), RunLog()
        self.snapshots = Snapshots(self.scheduler, hosts, ownership, groups, counters, telemetry)
        self.overlap = Overlap(self.scheduler)
        self.scores: ScoreListeners = []
        self._parts = StageParts(
            hosts=hosts, ownership=ownership, groups=groups, counters=counters, batches=batches, outcomes=self.outcomes,
            failures=self.failures, telemetry=telemetry, scores=self.scores,
        )  # fmt: skip
        self.live = LiveSettings(hosts, ownership, groups, counters, self.outcomes, telemetry)
        groups.assign = self.live.retrain
        self._reusing = False
        self._taker: tuple[str, Callable[[Batch], None]] | None = None
        self._driver: tuple[threading.Thread, str, Callable[[], bool]] | None = None
        self._drives = 0  # times that `driving` was entered

    # --- calls --------------------------------------------------------------------------------------------------------

    def call(self, group: WorkerGroup, operation: Operation, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """See `Workbench.call`."""
        return self.carry_out(self.prepare(group, operation.name, args, kwargs))

    def submit(self, group: WorkerGroup, operation: Operation, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Run:
        """See `Workbench.submit`."""
        run = self.prepare(group, operation.name, args, kwargs)
        run.submit()
        return run

    def carry_out(self, run: Run) -> Any:
        """Run what was prepared, as `call` says."""
        self.batches.store.trim(lambda batch, path: files.write(path, batch))
        if self.overlap.on:
            self.overlap.submit(run)
            return run if run.batch is None else run.batch
        return run.run()

    def prepare(
        self, group: WorkerGroup, operation: str, args: tuple[Any, ...], kwargs: Mapping[str, Any] | None = None,
        *, first: Callable[[], Sequence[Run]] = tuple, then: Callable[[], None] | None = None, as_update: bool = False,
    ) -> Run:  # fmt: skip
        """The run of a call, checked and not yet sent.

        first: called once it is checked, gives runs that come before it. then: called when it has succeeded, before
        waiters are woken. as_update: the role's later stages wait for it, as they do for updates.
        """
        self.groups.check_alive(group)
        self.check_driver()
        found = group.operations[operation].operation
        try:
            call = check_call(group, found, args, kwargs or {}, self.batches, self.hosts.description.name)
            if call.updates:
                self.require_nothing_to_skip(f"{group.role}.{operation}")
            call.check_columns()
        except WorkbenchError:
            self.counters.note_refused()
            raise
        self.outcomes.called(group.role)
        before, updates = first(), self._open_updates(group)
        steps = StageSteps(
            self._parts, call, self._stage_name or call.operation.name, self.counters.last_metrics, then,
            self._taker_of(operation),
        )  # fmt: skip
        run = self._run(steps, [*before, *updates, *call.awaited], call.updates or as_update)
        there = call.batch is not None and not call.batch.pending
        if call.updates and there:
            steps.answer_ended(run)
        elif self._reusing and run.batch is not None and there and not updates and not call.draws_anew:
            steps.answer_from_store(run)
        return run

    @contextlib.contextmanager
    def handing_over(self, operation: str, take: Callable[[Batch], None]) -> Iterator[None]:
        """Inside, the call of this operation gives the batch that it makes to `take` before the journal notes that the
        run is over: one entry has both, and a kernel that ends anywhere leaves both or none. Where stages overlap, a
        run may end when its caller has gone on, and gives it nothing."""
        self._taker = operation, take
        try:
            yield
        finally:
            self._taker = None

    def _taker_of(self, operation: str) -> Callable[[Batch], None] | None:
        taker = self._taker
        if taker is None or taker[0] != operation or self.overlap.on:
            return None
        self._taker = None
        return taker[1]

    def _run(self, steps: StageSteps, inputs: Sequence[Run], updates: bool) -> Run:
        call = steps.call
        batch, samples, joins = call.batch, call.samples, call.operation.protocol.joins and call.writes
        run = Run(
            number=self.counters.next_run(),
            stage=call.operation.name,
            group=call.group,
            inputs=list(dict.fromkeys(inputs)),
            steps=steps,
            outcomes=self.outcomes,
            scheduler=self.scheduler,
            timeout_s=call.timeout_s,
            updates=updates,
            writes=call.writes,
            code=call.code,
            result_ranks=call.result_ranks,
            by_loop=self.batches.by_loop,
            makes=(lambda run: batch.after(run, call.writes, samples, call.stale))
            if batch is not None and joins
            else None,
        )
        self._log(call, run, steps.reported_as)
        return run

    def _open_updates(self, group: WorkerGroup) -> list[Run]:
        """The updates of a role that were called before: its stages come after them, and are not run when one of them
        failed."""
        called = self.overlap.called()
        return [run for run in called if run.updates and run.group is group and not (run.done and run.given_up)]

    def _log(self, call: StageCall, run: Run, stage: str) -> None:
        cell, now = running_cell(), self.counters.iteration
        iteration = now if call.batch is None else int(call.batch.part(())[1].get("iteration", now))
        self.run_log.add(run, stage, iteration, cell, aside=bool(self.snapshots.open))
        if cell is not None:
            called = {"cell": cell.number, "cell_id": cell.id, "at": running_position()}
            self.telemetry.append_event("run", run=run.number, stage=stage, **called)
        elif self._driver is not None:
            drive = {"cell": 0, "cell_id": "", "drive": self._drives}
            self.telemetry.append_event("run", run=run.number, stage=stage, **drive)

    def report(self, stage: str, metrics: Mapping[str, SupportsFloat]) -> None:
        """See `Workbench.report`."""
        if not isinstance(metrics, Mapping):
            raise BadInput(f"metrics={shown(metrics)}", "numbers by name", f"lab.report({stage!r}, {{'loss': 0.5}})")
        for name, value in metrics.items():
            if not isinstance(value, numbers.Real):
                raise BadInput(f"metric {name!r} is {shown(value)}", "a metric is a number", "float(value)")
        values = MetricValues({name: float(value) for name, value in metrics.items()})
        self.telemetry.append_metrics(stage, self.counters.run, self.counters.iteration, values)
        self.counters.last_metrics[stage] = values

    # --- who may call -------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def driving(self, what: str, stopping: Callable[[], bool] = lambda: False) -> Iterator[None]:
        """Inside, only this thread calls stages: see `Workbench.driving`."""
        self.check_driver()
        before, self._driver = self._driver, (threading.current_thread(), what, stopping)
        self._drives += 1
        try:
            yield
        finally:
            self._driver = before

    @property
    def driver(self) -> str:
        """What drives now, as `driving` was told; "" for cells."""
        return "" if self._driver is None else self._driver[1]

    def check_driver(self) -> None:
        """Raise `NotFound` where the workbench is closed, `NotDriving` where another kernel drives it; beside that see
        `Workbench.check_driver`."""
        self.ownership.check_open()
        self.ownership.check_drives()
        driver = self._driver
        if driver is not None and driver[0] is threading.current_thread() and driver[2]():
            raise StageInterrupted(f"{driver[1]} was stopped", "things are as after the stage before", AGAIN)
        if driver is not None and driver[0] is not threading.current_thread():
            raise BadInput(
                f"a stage of {self.hosts.description.name!r} called now",
                f"{driver[1]} is under way, and the steps of two would mix",
                "wait until it is over, or end it: Stop in the panel, close() of an endpoint",
            )

    def require_alone(self, what: str, rule: str) -> None:
        """Raise `BadInput` inside `overlap()` and `kept()`, and as `check_driver` does."""
        self.check_driver()
        if self.overlap.on:
            raise BadInput(f"{what} inside lab.overlap()", rule, "do it afterwards")
        self.snapshots.refuse(what, rule)

    def require_nothing_to_skip(self, what: str) -> None:
        """Raise `BadInput` in a resumed script that is to do again what the checkpoint has seen already."""
        skip, done = self.counters.iterations_to_skip, self.counters.iteration
        if skip and not self.snapshots.open:  # what is put back afterwards may be done again
            raise BadInput(
                f"{what} in a run that is resumed after {done} iterations, of which {skip} come here",
                "algo.run(n) and `for _ in lab.iterations(n)` leave out what was done before; other lines cannot tell",
                "write the loop with lab.iterations(n), or go on by hand after wb.restore(path)",
            )

    # --- several at once ----------------------------------------------------------------------------------------------

    def open_runs(self) -> Sequence[Run]:
        """See `Workbench.open_runs`."""
        return [run for run in self.overlap.called() if not run.done]

    @contextlib.contextmanager
    def one_by_one(self) -> Iterator[None]:
        """Inside, every call blocks and is computed."""
        reusing, self._reusing = self._reusing, False
        try:
            with self.overlap.off():
                yield
        finally:
            self._reusing = reusing

    @contextlib.contextmanager
    def reuse(self) -> Iterator[None]:
        """Inside, stages are answered from the store: see `Workbench.reuse`."""
        self._reusing, before = True, self._reusing
        try:
            yield
        finally:
            self._reusing = before
