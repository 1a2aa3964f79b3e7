"""A stage call from the notebook's side: `StageRunner` checks that it is allowed, puts it in order, and runs it.

`workbench.stages.stage` has the steps of the call itself.
"""

from __future__ import annotations

import contextlib
import secrets
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Annotated, Any, SupportsFloat

import torch

from workbench.backends.hosts import Hosts
from workbench.backends.starting import settle
from workbench.batches import files
from workbench.batches.schema import ScoredRows
from workbench.display.interrupts import stoppable
from workbench.display.progress import note
from workbench.errors import BadInput, StageInterrupted, WorkbenchError
from workbench.messages.calls import HostInfo, Reply
from workbench.messages.metrics import MetricValues
from workbench.messages.operation import Operation
from workbench.placement import ROLLOUT
from workbench.stages.batch_store import BatchStore
from workbench.stages.debug import Failures
from workbench.stages.group import Groups, WorkerGroup
from workbench.stages.interrupted import AGAIN, AS_BEFORE, Interrupted
from workbench.stages.ledger import Counters, Ownership
from workbench.stages.live_settings import LiveSettings
from workbench.stages.run import Run, RunLog
from workbench.stages.scheduler import Scheduler
from workbench.stages.stage import StageRun
from workbench.support.notebook_cell import running_cell, running_position
from workbench.support.replaced import replaced
from workbench.support.validation import Rule
from workbench.telemetry.store import TelemetryStore

Metrics = Annotated[Mapping[str, SupportsFloat], Rule("must map names to numbers", 'write {"mean": 1.0}')]
# called with the meta of the rows that a stage gave rewards, and the rewards
ScoreListener = Callable[[Mapping[str, Any], Sequence[ScoredRows]], None]


class StageNames:
    """A class that carries out or records stages, under names that an algorithm gives them."""

    stage_name = ""  # "": the operation's own name

    def reported_as(self, stage: str) -> AbstractContextManager[None]:
        """Inside, report the metrics of calls under this name: an algorithm may call one operation in two stages."""
        return replaced(self, "stage_name", stage)


class StageRunner(StageNames):
    """Carries out the calls of worker groups, one after the other or, inside `lab.overlap()`, as their inputs come."""

    def __init__(
        self, hosts: Hosts, ownership: Ownership, groups: Groups, counters: Counters, batches: BatchStore,
        telemetry: TelemetryStore,
    ) -> None:  # fmt: skip
        self.hosts, self.ownership, self.groups, self.counters = hosts, ownership, groups, counters
        self.batches, self.telemetry = batches, telemetry
        self.failures, self.run_log = Failures(hosts.description.name), RunLog()
        self.interrupted = Interrupted(hosts, ownership, counters)
        self.scheduler, self.snapshots, self.live = Scheduler(hosts), Snapshots(self), LiveSettings(self)
        self.scores: list[ScoreListener] = []
        self._reusing = False
        self._driver: tuple[threading.Thread, str, Callable[[], bool]] | None = None
        self._drives = 0  # how often `driving` was entered

    # --- calls --------------------------------------------------------------------------------------------------------

    def call(self, group: WorkerGroup, operation: Operation, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operation on all ranks of its group.

        Returns the batch's next version, an update's metrics, or the value of each rank. Inside `overlap()`, returns at
        once a batch that waits when it is read, or the `Run`.
        """
        return self.carry_out(self.prepare(group, operation.name, args, kwargs))

    def submit(self, group: WorkerGroup, operation: Operation, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Run:
        """Run an operation in the background (on the inline backend: now)."""
        run = self.prepare(group, operation.name, args, kwargs)
        run.submit()
        return run

    def carry_out(self, run: StageRun) -> Any:
        """Run a prepared run, as `call` says."""
        self.batches.store.trim(lambda batch, path: files.write(path, batch))
        if not self.scheduler.overlaps:
            return run.run()
        self.scheduler.submit_unwaited(run)
        return run if run.batch is None else run.batch

    def prepare(
        self, group: WorkerGroup, operation: str, args: tuple[Any, ...], kwargs: Mapping[str, Any] | None = None,
        *, first: Callable[[], Sequence[Run]] = tuple, then: Callable[[], None] | None = None, as_update: bool = False,
    ) -> StageRun:  # fmt: skip
        """Return the run of a call, checked and not yet sent.

        first: called after the check; returns runs that come before this one. then: called after the run has succeeded,
        before waiters are woken. as_update: the role's later stages wait for it, as they do for updates.
        """
        self.check_driver()
        self.groups.check_whole(group)
        run = StageRun(self, group, operation, as_update=as_update, then=then)
        with stoppable(run.name, (AS_BEFORE, AGAIN)):
            try:
                run.check(args, kwargs or {})
            except WorkbenchError:
                self.counters.note_refused()
                raise
        before, called = first(), self.scheduler.called()
        # stages of a role come after its earlier updates, and are not run when one of them failed
        updates = [one for one in called if one.updates and one.group is group and not (one.done and one.given_up)]
        run.enqueue([*before, *updates])
        self._log(run)
        if run.input is not None and not run.input.pending:
            if run.operation.updates:
                self.interrupted.answer_ended(run)
            elif self._reusing and run.batch is not None and not updates:
                self._answer_from_store(run)
        return run

    def _log(self, run: StageRun) -> None:
        cell, now = running_cell(), self.counters.iteration
        iteration = now if run.input is None else int(run.input.finished_columns(())[1].get("iteration", now))
        self.run_log.add(run, run.reported_as, iteration, cell, aside=bool(self.snapshots.open))
        if cell is not None:
            called = {"cell": cell.number, "cell_id": cell.id, "at": running_position()}
        elif self._driver is not None:
            called = {"cell": 0, "cell_id": "", "drive": self._drives}
        else:
            return
        self.telemetry.append_event("run", run=run.number, stage=run.reported_as, **called)

    def _answer_from_store(self, run: StageRun) -> None:
        """End a run with a batch of the store, if the same code has read the same columns with the same weights."""
        store, weights = self.batches.store, self.counters.weights
        if not run.code or (run.operation.samples and run.arguments.get("seed") is None):  # the same call draws anew
            return
        assert run.input is not None and run.batch is not None
        batch, travels = run.input.copies(run.samples), run.operation.sent_columns(run.reads, run.input)
        state = weights[run.group.role].state if run.group.role in weights else ""
        for name in reversed(list(store)):
            origin, kept = store.origin(name), store.kept(name)
            if origin is None or kept is None:
                continue
            same = (origin.stage, origin.code, origin.weights_state) == (run.name, run.code, state)
            if not same or set(origin.travelled) != set(travels) or origin.meta_in != dict(batch.meta):
                continue
            made = {c: column for c, column in kept.columns.items() if column.made_with == run.code}
            read = (kept.columns[c].location.same(batch.columns[c].location) for c in travels if c not in made)
            if set(run.writes) <= set(made) and all(read):
                run.made_columns, run.meta, run.metrics = made, origin.meta_out, MetricValues(origin.metrics)
                note(f"{run.name}: from the store, as run {origin.run} made it")
                run.answer(run.batch)
                store.add(run.batch, origin, (), by_loop=run.by_loop)
                return

    def record_replies(self, replies: Sequence[Reply]) -> None:
        """Record the spans, transfers and syncs of replies."""
        self.telemetry.append_spans(span for reply in replies for span in reply.spans)
        self.telemetry.append_transfers(transfer for reply in replies for transfer in reply.transfers)
        self.telemetry.append_syncs(sync for reply in replies for sync in reply.syncs)

    def report(self, stage: str, metrics: Metrics) -> None:
        """Record metrics of a stage that is a function, like the metrics of operations."""
        values = MetricValues({name: float(value) for name, value in metrics.items()})
        self.telemetry.append_metrics(stage, self.counters.run, self.counters.iteration, values)
        self.counters.reported[stage] = values

    # --- who may call -------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def driving(self, what: str, stopping: Callable[[], bool] = lambda: False) -> Iterator[None]:
        """Inside, only this thread may call stages, so that a panel's button and a cell do not mix their steps.

        what: the name of the driver, for the `BadInput` in other threads. stopping: when it returns True, the next call
        raises `StageInterrupted`.
        """
        self.check_driver()
        self._drives += 1
        with replaced(self, "_driver", (threading.current_thread(), what, stopping)):
            yield

    @property
    def driver(self) -> str:
        """The name of the current driver, as given to `driving`; "" for cells."""
        return "" if self._driver is None else self._driver[1]

    def check_driver(self) -> None:
        """Raise `BadInput` while another thread drives, `StageInterrupted` where this thread is to stop, `NotFound`
        where the workbench is closed, `NotDriving` where another kernel drives it."""
        self.ownership.check_drives()
        driver = self._driver
        if driver is not None and driver[0] is threading.current_thread() and driver[2]():
            raise StageInterrupted(f"{driver[1]} was stopped", "the state is as after the previous stage", AGAIN)
        if driver is not None and driver[0] is not threading.current_thread():
            raise BadInput(
                f"a stage of {self.hosts.description.name!r} called now",
                f"{driver[1]} is under way, and stages of both would mix",
                "wait until it ends, or end it: Stop in the panel, close() of an endpoint",
            )

    def require_alone(self, what: str, rule: str) -> None:
        """Raise `BadInput` inside `overlap()` and `kept()`, and the errors of `check_driver`."""
        self.check_driver()
        if self.scheduler.overlaps:
            raise BadInput(f"{what} inside lab.overlap()", rule, "do it afterwards")
        self.snapshots.refuse(what, rule)

    def require_nothing_to_skip(self, what: str) -> None:
        """Raise `BadInput` in a resumed script that would repeat iterations from before the checkpoint."""
        skip, done = self.counters.iterations_to_skip, self.counters.iteration
        if skip and not self.snapshots.open:  # work that is put back afterwards may be repeated
            raise BadInput(
                f"{what} in a run that is resumed after {done} iterations, {skip} of them still to be skipped",
                "only algo.run(n) and `for _ in lab.iterations(n)` leave out iterations that were done before",
                "write the loop with lab.iterations(n), or continue by hand after wb.restore(path)",
            )

    # --- several at once ----------------------------------------------------------------------------------------------

    def open_runs(self) -> Sequence[Run]:
        """Return the runs that were called and have not ended, in call order."""
        return [run for run in self.scheduler.called() if not run.done]

    def reuse(self) -> AbstractContextManager[None]:
        """Inside, answer a stage from the store, and say so, if its code, arguments, input columns and weights are
        those of an earlier stage. Updates always run; so does generation without a seed. Of the notebook's names that a
        function reads, functions, classes, numbers, texts and settings are part of its code; lists, dicts and other
        objects are not."""
        return replaced(self, "_reusing", True)

    @contextlib.contextmanager
    def isolated(self, stage: str) -> Iterator[None]:
        """Inside, run stages one by one, and report their metrics as `stage`: between two iterations, for work that
        training must not notice. Afterwards the iteration, the numbers of draws, `last_metrics`, the store and the
        kernel's random state are as before. Weights are not put back: `lab.kept(...)` does that."""
        self.scheduler.wait()
        self.scheduler.drain()
        counters, batches = self.counters, self.batches
        metrics, iteration, draws = counters.last_metrics, counters.iteration, dict(counters.draws)
        looping, stored = batches.looping, set(batches.store)
        counters.last_metrics, batches.looping = {}, True
        try:
            with (
                replaced(self, "_reusing", False), replaced(self.scheduler, "overlaps", False),
                self.reported_as(stage), torch.random.fork_rng(devices=[]),
            ):  # fmt: skip
                yield
        finally:
            counters.last_metrics, counters.iteration, counters.draws = metrics, iteration, draws
            batches.looping = looping
            for name in set(batches.store) - stored:
                batches.store.release(name)
            batches.release_unused()
            self.ownership.record()


class Snapshots:
    """open: the hosts of each snapshot that is kept now, and the optimizer steps of its roles, as plain values, so that
    a later kernel can go back to the snapshot."""

    def __init__(self, runner: StageRunner) -> None:
        self._runner = runner
        self.open: dict[str, dict[str, Any]] = {}

    def refuse(self, what: str, rule: str) -> None:
        """Raise `BadInput` while a snapshot is open."""
        if self.open:
            raise BadInput(f"{what} inside lab.kept()", rule, "do it afterwards")

    @contextlib.contextmanager
    def kept(self, *roles: str) -> Iterator[Callable[[], None]]:
        """Keep the state of roles (weights, optimizer, schedule, step count) on their hosts, and go back to it at the
        end: `with lab.kept("actor") as go_back:`; go_back() goes back earlier."""
        runner, counters, groups = self._runner, self._runner.counters, self._runner.groups.by_role
        runner.ownership.check_open()
        for role in roles:
            if role not in groups:
                raise BadInput(f"role {role!r}", f"this workbench has {', '.join(groups)}")
        runner.scheduler.drain()
        key, draws = f"kept-{secrets.token_hex(4)}", dict(counters.draws)
        # rollout workers hold the weights that they were sent last: they are not put back, but synced at their next use
        weights = {role: counters.weights[role] for role in roles if role in counters.weights and role != ROLLOUT}
        here = self._by_host(roles)

        def go_back() -> None:
            runner.scheduler.drain()
            self._everywhere("restoring", here, "restore", key)
            counters.weights.update(weights)
            runner.interrupted.forget()
            counters.draws = dict(draws)
            runner.ownership.record()

        self._everywhere("keeping", here, "snapshot", key, which=True)
        steps = {role: kept.steps for role, kept in weights.items()}
        self.open[key] = {"hosts": [info.name for info in here], "steps": steps}
        runner.ownership.record()
        before, runner.telemetry.aside = runner.telemetry.aside, True
        try:
            yield go_back
        finally:
            try:
                go_back()  # waits for the stages that are still under way
            finally:
                runner.telemetry.aside = before
                self._everywhere("dropping the kept", here, "drop_snapshot", key)
                del self.open[key]
                runner.ownership.record()

    def _everywhere(
        self, doing: str, roles: Mapping[HostInfo, list[str]], method: str, key: str, *, which: bool = False
    ) -> None:
        hosts = self._runner.hosts
        steps = [
            hosts.step(f"{doing} {', '.join(mine)}", info.name, method, key, *([mine] if which else []))
            for info, mine in roles.items()
        ]
        settle(hosts.backend, steps, lambda _: None)

    def _by_host(self, roles: Sequence[str]) -> dict[HostInfo, list[str]]:
        """Return the hosts that keep something, with their roles; a role without own workers has nothing to keep."""
        groups = self._runner.groups.by_role
        own = [role for role in roles if groups[role].worker_role == role]
        here = {
            info: [role for role in own if groups[role].pool.name == info.pool] for info in self._runner.hosts.infos
        }
        return {info: mine for info, mine in here.items() if mine}
