"""Carrying out stages: from a call of a group's operation to the batch's next version.

A stage: check arguments and columns -> deal out rows (protocol) -> send each rank its row numbers -> ranks pull,
compute, keep -> the controller hears shapes, metrics, spans and errors, and makes the batch's next version.
"""

from __future__ import annotations

import contextlib
import functools
import numbers
import secrets
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, cast

from workbench.backends import registry
from workbench.batches.batch import Batch
from workbench.batches.location import Location, ShardId
from workbench.batches.references import Column
from workbench.batches.store import Origin, Weights
from workbench.errors import BadInput, StageInterrupted
from workbench.messages.calls import Call
from workbench.messages.metric_values import MetricValues
from workbench.messages.metrics import Metrics, merge_metrics, reported
from workbench.messages.operation import Operation
from workbench.messages.replies import agreed_columns
from workbench.placement import ROLLOUT
from workbench.session.reloading import Reloading
from workbench.stages.ended_runs import EndedRuns
from workbench.stages.failing import Failing
from workbench.stages.group import WorkerGroup
from workbench.stages.planning import calls_on_batch, calls_without_batch
from workbench.stages.run import Run
from workbench.stages.run_log import RunLog
from workbench.stages.scheduler import Scheduler
from workbench.stages.stage_names import StageNames
from workbench.support.notebook_cell import running_cell
from workbench.support.validation import at_least

if TYPE_CHECKING:
    import pandas as pd

    from workbench.algorithms.loop import Algorithm
    from workbench.data.prompt_stream import PromptStream


class Stages(StageNames, Failing, Reloading, EndedRuns):
    """The methods of a `Workbench` that run stages, and the counters that they move."""

    prompts: PromptStream
    seed: int
    iteration: int
    last_metrics: dict[str, MetricValues]
    _run_number: int
    _draws: dict[int, int]
    _overlapping: int
    _overlapped: list[Run]
    _reusing: bool
    _keeping: int
    _algorithm: weakref.ref[Algorithm] | None = None
    require_nothing_passed_over: Callable[[str], None]
    _driver: tuple[threading.Thread, str, Callable[[], bool]] | None = None

    @functools.cached_property
    def run_log(self) -> RunLog:
        return RunLog()

    @functools.cached_property
    def scheduler(self) -> Scheduler:
        return Scheduler(self._backend)

    def call(self, group: WorkerGroup, operation: Operation, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operation on all ranks of its group.

        Returns the batch's next version, an update's metrics, or what each rank returned. Inside `overlap()`, returns
        at once: a batch that waits when it is read, or the `Run`.
        """
        return self.carry_out(self._run(group, operation, args, kwargs))

    def carry_out(self, run: Run) -> Any:
        """Run what was prepared, as `call` says."""
        self.store.trim(lambda batch, path: batch.save(path))
        if self._overlapping:
            self.send(run)
            return run if run.batch is None else run.batch
        with run.progress() as bar:
            return run.start(self.scheduler, bar)

    def submit(self, group: WorkerGroup, operation: Operation, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Run:
        """Run an operation in the background (on the inline backend: now)."""
        run = self._run(group, operation, args, kwargs)
        run.submit(self.scheduler)
        return run

    def prepare(
        self, group: WorkerGroup, operation: str, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None,
        *, first: Callable[[], Sequence[Run]] = tuple, then: Callable[[], None] | None = None,
    ) -> Run:  # fmt: skip
        """The run of a call, checked and not yet sent.

        first: called once it is checked, gives runs that come before it. then: called when it has succeeded, before who
        waits for it hears of it.
        """
        return self._run(group, group.operations[operation].operation, args, dict(kwargs or {}), first, then)

    def send(self, run: Run) -> None:
        """Run what was prepared in the background; inside `overlap()` it is waited for at the end."""
        if self._overlapping:
            self._overlapped.append(run)
        run.submit(self.scheduler)

    @property
    def overlapping(self) -> bool:
        """Whether calls return at once, see `overlap`."""
        return self._overlapping > 0

    def open_runs(self) -> Sequence[Run]:
        """What was called and has not ended, in call order."""
        runs = (*self.scheduler.open_runs(), *self._overlapped)
        return [run for run in dict.fromkeys(runs) if not run.done]

    @property
    def algorithm(self) -> Algorithm | None:
        """The algorithm that took the last step, while somebody holds it: with it go the batches that it made."""
        return None if self._algorithm is None else self._algorithm()

    @algorithm.setter
    def algorithm(self, algorithm: Algorithm | None) -> None:
        self._algorithm = None if algorithm is None else weakref.ref(algorithm)

    def runs(self) -> pd.DataFrame:
        """What stages this kernel called, one a row, in order: which cell called it, how far it is, how it ended."""
        return self.run_log.frame()

    @contextlib.contextmanager
    def driving(self, what: str, stopping: Callable[[], bool] = lambda: False) -> Iterator[None]:
        """Inside, only this thread calls stages: a panel's button and a cell do not mix their steps.

        what: is doing it, for the `BadInput` that calls of other threads get. stopping: where it says so, the next call
        raises `StageInterrupted`.
        """
        self.check_driver()
        before, self._driver = self._driver, (threading.current_thread(), what, stopping)
        try:
            yield
        finally:
            self._driver = before

    def check_driver(self) -> None:
        """Raise `BadInput` while another thread drives, `StageInterrupted` where this one is to stop."""
        self._check_drives()
        driver = self._driver
        if driver is not None and driver[0] is threading.current_thread() and driver[2]():
            raise StageInterrupted(f"{driver[1]} was stopped", "things are as after the stage before")
        if driver is not None and driver[0] is not threading.current_thread():
            raise BadInput(
                f"a stage of {self.name!r} called now",
                f"{driver[1]} is under way, and the steps of two would mix",
                "wait until it is over, or press Stop in the panel",
            )

    @contextlib.contextmanager
    def overlap(self) -> Iterator[None]:
        """Inside, a stage's call returns at once, and it runs when its inputs are there and its pool is free.

        So stages of different pools run at the same time, with the same lines as one by one. Waits at the end.
        """
        self._overlapping += 1
        try:
            yield
        except (KeyboardInterrupt, StageInterrupted) as error:
            self._stop_overlapped(error)
        except BaseException:
            for run in self._overlapped:
                run.cancel()
            self._overlapped.clear()
            raise
        finally:
            self._overlapping -= 1
        self.wait()

    @contextlib.contextmanager
    def reuse(self) -> Iterator[None]:
        """Inside, a stage whose code, arguments, input columns and weights are those of an earlier one is answered from
        the store, and says so. Updates never are; generation only where a seed is given. Variables that a function
        reads from the notebook are not part of its code."""
        self._reusing, before = True, self._reusing
        try:
            yield
        finally:
            self._reusing = before

    def wait(self) -> None:
        """Wait for every stage of `overlap()`; raises the error of the first one that failed."""
        runs, self._overlapped = self._overlapped, []
        errors = []
        for run in runs:
            try:
                run.result()
            except (KeyboardInterrupt, StageInterrupted) as error:
                self._overlapped = runs
                self._stop_overlapped(error)
            except Exception as error:
                errors.append(error)
        if errors:
            raise errors[0]

    # --- a run ------------------------------------------------------------------------------------------------------

    def report(self, stage: str, metrics: Mapping[str, float]) -> None:
        """Record what a function that is a stage has to tell, beside the metrics of the operations."""
        if not isinstance(metrics, Mapping):
            raise BadInput(f"metrics={metrics!r:.60}", "numbers by name", f"lab.report({stage!r}, {{'loss': 0.5}})")
        for name, value in metrics.items():
            if not isinstance(value, numbers.Real):
                raise BadInput(f"metric {name!r} is {value!r:.60}", "a metric is a number", "float(value)")
        values = MetricValues({name: float(value) for name, value in metrics.items()})
        self.telemetry.append_metrics(stage, self._run_number, self.iteration, values)
        self.last_metrics[stage] = values

    def _run(
        self, group: WorkerGroup, operation: Operation, args: tuple[Any, ...], kwargs: dict[str, Any],
        first: Callable[[], Sequence[Run]] = tuple, then: Callable[[], None] | None = None,
    ) -> Run:  # fmt: skip
        """The run of a call, checked as far as it can be before its inputs are there; see `prepare`."""
        self._check_alive(group)
        self.check_driver()
        where = f"{group.role}.{operation.name}"
        timeout_s = kwargs.pop("timeout_s", None)
        if timeout_s is not None:
            at_least("timeout_s", timeout_s, 0, strictly=True)
        batch, args = self._batch_argument(where, operation, args, kwargs)
        arguments, samples = group.operations[operation.name].arguments(args, kwargs)
        if operation.samples:
            kwargs.pop("samples", None)
        code = group.operations[operation.name].code(arguments, samples)
        operation = operation.given(arguments)
        if operation.updates:
            self.require_nothing_passed_over(where)
        if batch is not None:
            batch.need(operation.needed(arguments), where)
            group.operations[operation.name].check_columns(arguments, batch.names)
        before = first()

        # a role's stages come after its updates, and are not run when one of these failed
        called = (*self.scheduler.open_runs(), *self._overlapped)
        updates = [r for r in called if r.updates and r.group is group and not (r.done and r.given_up)]
        reads = operation.needed(arguments) if operation.takes_batch else ()
        awaited = [] if batch is None else cast("list[Run]", batch.makers(operation.awaited(reads, batch)))
        metrics, reported_as = self.last_metrics, self._stage_name or operation.name

        def plan() -> list[Call]:
            self._check_alive(group)
            self._release()
            common = {
                "run": run.number, "key": f"{self._id}-{run.number}", "stage": operation.name,
                "method": operation.name, "updates": operation.updates, "role": group.worker_role, "kwargs": kwargs,
                "submitted_s": run.submitted_s,
            }  # fmt: skip
            if batch is None:
                return calls_without_batch(group, operation, common, args)
            travels = operation.travelling(reads, batch)
            run.read, meta = batch.part(travels)
            seeded = {**meta, "seed": self._stage_seed(operation, meta, arguments)}
            if group.role == ROLLOUT:  # who samples with the weights as they are: here is known which there are
                seeded["trained_version"] = self.weights["actor"].steps
            calls = calls_on_batch(group, operation, common, args, batch, samples, travels, seeded, self._heirs)
            self._note_sent(run, seeded["seed"])
            begun = self._unfinished(run, ended=False)
            if begun is None:
                return calls
            print(f"{run.name}: goes on at optimizer step {begun.parts[0].steps + 1} of {begun.parts[0].of}")
            return begun.resumed(calls, str(group.layout), operation.protocol.collect(group.layout))

        def finish(run: Run) -> Any:
            result = self._result(operation, batch, run)
            run.given = result if run.updates else None
            if run.given_up:
                self._unheard(run)
            self._report(run, reported_as, metrics)
            if then is not None:
                then()
            return result

        run = Run(
            number=self._next_run(),
            stage=operation.name,
            group=group,
            inputs=list(dict.fromkeys([*before, *updates, *awaited])),
            plan=plan,
            finish=finish,
            clean=self._clean_up,
            unheard=self._unheard,
            noted=lambda run, error: self._note_failure(run, error, operation, batch, arguments),
            timeout_s=timeout_s,
        )
        run.collecting = tuple(operation.protocol.collect(group.layout))
        run.updates, run.writes = operation.updates, operation.written(arguments)
        run.code, run.by_loop = code, self.looping
        if batch is not None and operation.protocol.joins and run.writes:
            run.batch = batch.after(run, run.writes, samples)
        self._log(run, reported_as, batch)
        if self._handover is not None:
            run.when_ended(functools.partial(self._note_over, weakref.ref(run)))
        if batch is not None and run.updates and not batch.pending:
            run.read, _ = batch.part(operation.travelling(reads, batch))
            if ended := self._unfinished(run, ended=True):
                print(f"{run.name}: was done when it was interrupted; these are its metrics")
                self._answer(run, reported_as, ended.result)
        if batch is not None and run.batch is not None and self._reusing:
            drawn_anew = operation.samples and arguments.get("seed") is None
            if not (batch.pending or updates or drawn_anew):
                self._reuse(run, batch.copies(samples), operation.travelling(reads, batch), reported_as)
        return run

    def _log(self, run: Run, stage: str, batch: Batch | None) -> None:
        cell = running_cell()
        iteration = self.iteration if batch is None else int(batch.part(())[1].get("iteration", self.iteration))
        self.run_log.add(run, stage, iteration, cell, aside=self._keeping > 0)
        if cell is not None:
            self.telemetry.append_event("run", run=run.number, stage=stage, cell=cell.number, cell_id=cell.id)

    def _reuse(self, run: Run, batch: Batch, travels: tuple[str, ...], reported_as: str) -> None:
        """Answer a run from the store, where the same code has read the same columns with the same weights."""
        state = self.weights[run.group.role].state if run.group.role in self.weights else ""
        for name in reversed(list(self.store)):
            origin, found = self.store.origin(name), self.store.kept(name)
            if origin is None or found is None:
                continue
            same = (origin.stage, origin.code, origin.weights_state) == (run.name, run.code, state)
            if not same or set(origin.travelled) != set(travels) or origin.meta_in != dict(batch.meta):
                continue
            made = {c: column for c, column in found.columns.items() if column.made_with == run.code}
            read = (found.columns[c].location.same(batch.columns[c].location) for c in travels if c not in made)
            if set(run.writes) <= set(made) and all(read):
                assert run.batch is not None
                run.made, run.meta = made, origin.meta_out
                print(f"{run.name}: from the store, as run {origin.run} made it")
                run.metrics = MetricValues(origin.metrics)
                self._report(run, reported_as, self.last_metrics)
                run.from_store = True
                run.settle(run.batch)
                self.store.add(run.batch, origin, (), by_loop=run.by_loop)
                return

    def _batch_argument(
        self, where: str, operation: Operation, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Batch | None, tuple[Any, ...]]:
        if not operation.takes_batch:
            return None, args
        batch, rest = (kwargs.pop("batch"), args) if "batch" in kwargs else (args[0] if args else None, args[1:])
        if isinstance(batch, Run):
            if batch.batch is None:
                raise BadInput(f"{where}({batch!r})", "that run makes no batch", "give it a batch")
            batch = batch.batch
        if not isinstance(batch, Batch):
            raise BadInput(
                f"{where}({type(batch).__name__})", "its first argument is a batch", "start with lab.prompts.next(n)"
            )
        if batch._source is not self:
            raise BadInput(f"{batch!r}", f"comes from another workbench than {self.name!r}", "use this one's batches")
        return batch, rest

    def _stage_seed(
        self, operation: Operation, meta: Mapping[str, Any], arguments: Mapping[str, Any]
    ) -> tuple[int, ...]:
        iteration = int(meta.get("iteration", 0))
        if not operation.samples:
            return (self.seed, iteration)
        if arguments.get("seed") is not None:
            return (int(arguments["seed"]), iteration)
        draw = self._draws[iteration] = self._draws.get(iteration, -1) + 1
        self._save_state()
        return (self.seed, iteration, draw)

    def _report(self, run: Run, stage: str, last_metrics: dict[str, MetricValues]) -> None:
        if run.metrics:
            iteration = int(run.calls[0].meta.get("iteration", self.iteration)) if run.calls else self.iteration
            self.telemetry.append_metrics(stage, run.number, iteration, run.metrics)
            last_metrics[stage] = run.metrics

    def _result(self, operation: Operation, batch: Batch | None, run: Run) -> Any:
        calls, replies, group = run.calls, run.replies, run.group
        self._record(run)
        for note in dict.fromkeys(note for reply in replies for note in reply.notes):
            print(f"{run.name}: {note}")
        ranks = operation.protocol.collect(group.layout)
        metrics: Metrics = {}
        for rank in ranks:
            merge_metrics(metrics, replies[rank].metrics)
        run.metrics = values = MetricValues(reported(metrics))
        if operation.updates and group.role in self.weights:
            steps = int(values.get("optimizer_steps", self.weights[group.role].steps + 1))
            self.weights[group.role] = Weights(steps=steps, state=secrets.token_hex(4))
            self._save_state()
        if not operation.protocol.joins:
            return [replies[rank].value for rank in ranks]
        collected = [replies[rank] for rank in ranks]
        summaries = agreed_columns(collected, run.writes, run.name)
        if not summaries:
            return values
        assert batch is not None
        parts = [(ShardId(group.hosts[rank], calls[rank].key), calls[rank].rows) for rank in ranks]
        location = Location.of_parts([(shard, rows) for shard, rows in parts if rows is not None])
        self._counts.hold(location)
        run.meta = replies[ranks[0]].meta
        run.made = {
            name: Column(
                dtype=summary.dtype,
                row_shape=summary.row_shape,
                nbytes=summary.nbytes,
                owner=group.role,
                location=location,
                made_with=run.code,
            )
            for name, summary in summaries.items()
        }
        made = batch.with_columns(run.made, run.meta) if run.batch is None else run.batch
        self.store.add(made, self._origin(run, calls[0]), run.made.values(), by_loop=run.by_loop)
        return made

    def _origin(self, run: Run, call: Call) -> Origin:
        weights = self.weights.get(run.group.role)
        return Origin(
            stage=run.name,
            run=run.number,
            inputs=(call.batch,),
            arguments={name: f"{value!r:.80}" for name, value in call.kwargs.items()},
            weights_version=weights.steps if weights else None,
            weights_state=weights.state if weights else "",
            seed=tuple(call.meta["seed"]),
            travelled=tuple(dict.fromkeys(name for names, _ in call.pulls for name in names)),
            meta_in={name: value for name, value in call.meta.items() if name not in ("seed", "trained_version")},
            meta_out=run.meta,
            code=run.code,
            metrics=run.metrics,
        )

    # --- counters ---------------------------------------------------------------------------------------------------

    def _next_run(self) -> int:
        self._run_number += 1
        self._save_state()
        return self._run_number

    def _save_state(self) -> None:
        if self.description.backend == "ray" and self._drives():
            registry.save_state(
                self.description.id,
                {
                    "run": self._run_number,
                    "batch": self._batch_number,
                    "iteration": self.iteration,
                    "drawn": self.prompts.drawn,
                    "prompts": self.prompts.state,
                    "weights": {role: asdict(weights) for role, weights in self.weights.items()},
                    "draws": self._draws.get(self.iteration, -1),
                    "pools_ended": self._pools_ended,
                    "heirs": self._heirs,
                    "credit": self._credit,
                },
            )

    def _restore_state(self) -> None:
        """Go on from the counters that the kernel before this one kept."""
        state = registry.load_state(self.description.id)
        if not state:
            return
        self._run_number, self._batch_number = state["run"], state["batch"]
        self.iteration, self.prompts.drawn = state["iteration"], state["drawn"]
        # what that kernel had called may have gone on without it: no weights are known to be those of then, and rollout
        # workers are sent the actor's anew
        for role, weights in state["weights"].items():
            self.weights[role] = Weights(steps=weights["steps"], state=secrets.token_hex(4))
        self._draws[self.iteration] = state["draws"]
        self._pools_ended, self._heirs = state["pools_ended"], dict(state["heirs"])
        self._credit = state["credit"]
        self.prompts.state = state["prompts"]
        if self.prompts.source and state["prompts"]:
            self.prompts.source.load_state_dict(state["prompts"])
