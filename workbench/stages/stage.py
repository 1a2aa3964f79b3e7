"""One call of an operation. The methods of `StageRun` are in the order in which they run; docs/design.md follows one
call through them. `workbench.stages.run` has the waiting for a result, `workbench.stages.interrupted` the handling of
interrupts, cancellations and failures.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import InvalidStateError
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from workbench.batches.batch import Batch
from workbench.batches.location import Column, Location, Pull, ShardId
from workbench.batches.schema import OF_ONE_RESPONSE
from workbench.batches.store import Origin, Weights
from workbench.display.progress import note
from workbench.errors import BadInput, StageInterrupted, StageTimeout, UpstreamError
from workbench.errors.plain_text import shown
from workbench.messages.calls import Call, Reply, agreed_columns
from workbench.messages.metrics import MetricValues, merge_metrics, reported
from workbench.placement import ROLLOUT
from workbench.settings.training import Training
from workbench.stages import interrupted
from workbench.stages.ranks import input_failed, one_error, too_many_failed
from workbench.stages.run import Run, interruptible, receive, wait_for
from workbench.support.checked_calls import checked_call
from workbench.support.validation import at_least

if TYPE_CHECKING:
    from workbench.stages.group import WorkerGroup
    from workbench.stages.runner import StageRunner

# After one rank fails, others may wait for it in a collective for ever. Ranks that make no progress for this long after
# a failure, or when they are to stop, count as stuck; ranks that make progress are waited for.
GRACE_S = 60.0


class StageRun(Run):
    """A `Run` from its call to its result.

    args, kwargs: as sent to the ranks. samples: copies of each row. training: the role's settings at the call; None:
    not an update.
    """

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    samples: int
    training: Training | None

    def __init__(
        self, runner: StageRunner, group: WorkerGroup, stage: str, *, as_update: bool = False,
        then: Callable[[], None] | None = None,
    ) -> None:  # fmt: skip
        """as_update, then: see `StageRunner.prepare`."""
        super().__init__(runner, group, stage)
        self.operation = group.operations[stage].operation
        self.updates = as_update or self.operation.updates
        self._then = then

    # --- 1 check ------------------------------------------------------------------------------------------------------

    def check(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Raise `BadInput`, or `UnknownColumn`, for a call that cannot be carried out."""
        group, called, given = self.group, self.group.operations[self.stage], dict(kwargs)
        self.timeout_s = given.pop("timeout_s", None)
        if self.timeout_s is not None:
            at_least("timeout_s", self.timeout_s, 0, strictly=True)
        if self.operation.takes_batch:
            self.input, args = self._batch_argument(args, given)
        self.arguments, self.samples = called.arguments(args, given)
        if self.operation.samples:
            given.pop("samples", None)
        self.args, self.kwargs = args, given
        self.code = called.code(self.arguments, self.samples)
        self.operation = self.operation.resolved(self.arguments)
        self.reads = self.operation.needed(self.arguments) if self.operation.takes_batch else ()
        self.writes = self.operation.written(self.arguments)
        self.result_ranks = tuple(self.operation.protocol.collect(group.layout))
        self.training = group.spec.training if self.operation.updates and group.spec.trained else None
        if self.operation.updates:
            self.runner.require_nothing_to_skip(self.name)
        if self.input is not None:
            called.check_columns(self.arguments, self.input.names)
            self.input.need(self.reads, self.name)

    def _batch_argument(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Batch, tuple[Any, ...]]:
        batch, rest = (kwargs.pop("batch"), args) if "batch" in kwargs else (args[0] if args else None, args[1:])
        if isinstance(batch, Run):
            if batch.batch is None:
                raise BadInput(f"{self.name}({batch!r})", "that run returns no batch", "give a batch")
            batch = batch.batch
        if not isinstance(batch, Batch):
            raise BadInput(
                f"{self.name}({'' if batch is None else type(batch).__name__})",
                "the first argument must be a batch",
                "start with lab.prompts.next(n)",
            )
        if not batch.is_of(self.runner.batches):
            lab = self.runner.hosts.description.name
            raise BadInput(f"{batch!r}", f"it is from another workbench than {lab!r}", "use this one's batches")
        return batch, rest

    # --- 2 enqueue ----------------------------------------------------------------------------------------------------

    def enqueue(self, inputs: Sequence[Run]) -> None:
        """Give the run its number, and the batch that it will make. inputs: the runs that come before it, in addition
        to those that make columns it reads."""
        self.number, self.submitted_s = self.runner.counters.next_run(), time.time()
        self.by_loop, self.in_position = self.runner.batches.by_loop, self.runner.ownership.has_position
        self.reported_as = self.runner.stage_name or self.operation.name
        self._last_metrics = self.runner.counters.reported  # those of the iteration of the call
        batch, makers = self.input, []
        if batch is not None:
            awaited = batch.makers(self.operation.columns_to_wait_for(self.reads, batch))
            makers = [run for run in awaited if isinstance(run, Run)]
            if self.operation.protocol.joins and self.writes:
                self.batch = batch.copies(self.samples).with_pending(self, self.writes, self._stale)
        self._inputs = list(dict.fromkeys([*inputs, *makers]))

    @property
    def _stale(self) -> tuple[str, ...]:
        """Columns of an earlier response, which do not belong to the response that this stage draws."""
        return OF_ONE_RESPONSE if self.operation.samples else ()

    def run(self) -> Any:
        """Submit it and wait: the blocking form of a call."""
        with self.progress() as bar, interruptible(self) as presses:
            self.ranks.counts.report = bar.update
            with contextlib.suppress(KeyboardInterrupt):  # the run says what was interrupted
                self.runner.scheduler.submit(self)
            return receive(self, bar, presses)

    @checked_call("run.submit")
    def submit(self) -> None:
        """Submit it, in the background; the inline backend runs it now."""
        with interruptible(self) as presses:
            with contextlib.suppress(KeyboardInterrupt):
                self.runner.scheduler.submit(self)
            if presses.count:
                with self.progress() as bar:
                    wait_for(self, bar, presses)

    # --- 3 plan: called by the scheduler, once its inputs are there ---------------------------------------------------

    def blocked(self) -> bool:
        """Whether an input is still to come. Fails this run if an input never will."""
        for run in self._inputs:
            if run.state in ("failed", "cancelled"):
                self.fail(input_failed(self.name, run.name, None if run.future.cancelled() else run.future.exception()))
                return True
        return not all(run.done for run in self._inputs)

    def plan(self) -> list[Call]:
        """Return one call per rank."""
        runner, operation = self.runner, self.operation
        runner.groups.check_alive(self.group)
        aside, inside, _ = self.reported_as.partition("/")
        stage = f"{aside}/{self.stage}" if inside and aside == "evaluate" else self.stage  # spans tell what it costs
        common: dict[str, Any] = {
            "run": self.number, "stage": stage,
            "method": self.stage, "updates": operation.updates, "role": self.group.worker_role, "args": self.args,
            "kwargs": self.kwargs, "submitted_s": self.submitted_s, "training": self.training, "meta": {},
        }  # fmt: skip
        if self.input is not None:
            return self._calls_on_batch(self.input, common)
        runner.ownership.record()  # the number of the run
        size = len(self.group.hosts)
        if not operation.protocol.values_per_rank:
            return [Call(**common) for _ in range(size)]
        for value in self.args:
            if not isinstance(value, Sequence) or len(value) != size:
                raise BadInput(
                    f"{self.stage}: {shown(value)}", f"ALL_TO_ALL takes one input a rank, as lists of {size}"
                )
        per_rank = zip(*self.args, strict=True) if self.args else [()] * size
        return [Call(**{**common, "args": tuple(values)}) for values in per_rank]

    def _calls_on_batch(self, batch: Batch, common: Mapping[str, Any]) -> list[Call]:
        runner, operation, travels = self.runner, self.operation, self.operation.sent_columns(self.reads, batch)
        self.read_columns, meta = batch.finished_columns(travels)
        meta = {**meta, "seed": self._seed(meta)}
        if self.group.role == ROLLOUT:  # the trained weights' version is known only here, not on the workers
            meta["trained_version"] = runner.counters.weights["actor"].steps
        if operation.generates:
            meta["environments"] = runner.hosts.placement.environments
        common = {**common, "batch": batch.id, "meta": meta, "all_valid": operation.counts_all_rows}
        columns, _ = batch.copies(self.samples).finished_columns(travels)
        dealt, collected = self.group.operations[self.stage].deal_rows(batch.rows * self.samples)
        sample = columns["prompt_uid"].location.occurrences() if operation.samples else None
        calls = []
        for rank, chunks in enumerate(dealt):
            rows = np.concatenate(chunks)
            calls.append(
                Call(
                    **common, rows=rows,
                    kept=self._kept(rank, collected) if operation.protocol.joins and rank in collected else None,
                    pulls=tuple(group_pulls(columns, travels, rows, runner.hosts.shard_successors)),
                    minibatch_sizes=tuple(map(len, chunks)), sample=None if sample is None else sample[rows],
                )
            )  # fmt: skip
        return runner.interrupted.sent(self, calls)

    def _kept(self, rank: int, collected: Sequence[int]) -> ShardId:
        """Return where the rows that a rank makes are kept. Rows of rollout workers are kept on the actor's hosts,
        dealt out evenly: the actor reads them, and a rollout worker that dies takes no rows with it. collected: the
        ranks that make the result."""
        key = f"{self.runner.ownership.controller}-{self.number}"
        if self.group.role != ROLLOUT:
            return ShardId(self.group.hosts[rank], key)
        readers = self.runner.groups.lead.hosts
        return ShardId(readers[collected.index(rank) % len(readers)], f"{key}-{rank}")

    def _seed(self, meta: Mapping[str, Any]) -> tuple[int, ...]:
        seed, iteration = self.runner.hosts.description.seed, int(meta.get("iteration", 0))
        if not self.operation.samples:
            return (seed, iteration)
        if self.arguments.get("seed") is not None:
            return (int(self.arguments["seed"]), iteration)
        return (seed, iteration, self.runner.counters.next_draw(iteration))

    # --- 4 send -------------------------------------------------------------------------------------------------------

    def send(self) -> None:
        """Make the calls and give them to the hosts."""
        if not self.future.set_running_or_notify_cancel():
            return
        backend, answers = self.runner.hosts.backend, self.ranks.answers
        try:
            calls, hosts, self.started_s = self.plan(), self.group.hosts, time.time()
            due = self.runner.batches.release_unused(hosts)  # after all errors that the plan can raise
            self.calls = [replace(c, released=due[h]) if h in due else c for h, c in zip(hosts, calls, strict=True)]
            self.begin_clock()
            if self.timeout_s is not None and not self.updates:  # inline; an update ends between optimizer steps only
                self.ranks.counts.limit(self._clock_s + self.timeout_s, self.timeout_s)
            for answer in backend.execute(hosts, self.calls, self.ranks.counts.count):
                answers.append(answer)
            self.ranks.begin()
        except BaseException as error:
            # ranks that have their call would wait for ranks without one
            self.stuck = 0 < len(answers) < len(self.group.hosts)
            if isinstance(error, KeyboardInterrupt):  # a second one, inline, where this call runs the stage
                self.stuck |= self.updates  # no stage may use a half-done update
                self.fail(interrupted.broken_off(self.name, updates=self.updates))
                raise
            if not isinstance(error, Exception):
                raise
            self.fail(error)

    # --- 5 poll: called by the scheduler until it is over -------------------------------------------------------------

    def poll(self) -> None:
        """Look for replies; end the run when all are there, or when the missing ones will never come."""
        if not self.ranks.poll(self.runner.hosts.backend):
            self._end()
            return
        ending = bool(self.ranks.failed) or self._stopping
        if self.ranks.stalled_s(self.runner.hosts.backend, ending=ending) > GRACE_S:
            self.stuck = True
            self._end()

    def begin_clock(self) -> None:
        """Start the clock of `timeout_s`, unless it runs already: when the ranks begin, or, behind a run that was
        cancelled, when this run waits."""
        self._clock_s = self._clock_s or time.monotonic()

    def check_time(self) -> None:
        """Fail the run if it is late. Its ranks then stop as after an interrupt."""
        if self.timeout_s is None or not self._clock_s or self.done:
            return
        if time.monotonic() - self._clock_s <= self.timeout_s:
            return
        late = f"{self.name} took longer than timeout_s={self.timeout_s:g}"
        if not self.calls:
            self.fail(StageTimeout(
                late, f"it waited for pool {self.group.pool.name!r}, which still runs a stage that was cancelled",
                "wait for that stage, or if it never ends restart its pool with lab.recover()",
            ))  # fmt: skip
            return
        error = StageTimeout(
            late, self.ranks.status_text(self.runner.hosts.backend),
            "its ranks stop at the next safe point, for which the next call waits; run an update again to continue "
            "with its remaining steps",
        )  # fmt: skip
        self._abandoned = f"its timeout_s={self.timeout_s:g} had passed"
        self.ended_s = time.time()
        self.runner.failures.note(self, error)
        with contextlib.suppress(InvalidStateError):
            self.future.set_exception(error)
        self._leave()

    def _end(self) -> None:
        try:
            self._collect()
            if self._abandoned and not self.updates:
                raise UpstreamError(f"the result of {self.name} was dropped", self._abandoned)
            result = self.record()
        except Exception as error:
            self.fail(error)
        else:
            self.settle(result)

    def _collect(self) -> None:
        """Take the replies; raise the error of ranks that failed, were stopped, or are stuck."""
        replies, failures, dead = self.ranks.collect()
        self.replies += replies
        self.unrecorded += replies
        if dead is not None:  # errors of other ranks follow from the lost host
            self.stuck = True
            raise dead
        if failures:
            error = one_error(self, failures)
            self.parts = interrupted.parts_left(self.replies, len(self.group.hosts))
            if self.parts:
                interrupted.say_where(error, self.parts[0])
            raise error
        if self.stuck:
            ranks = ", ".join(map(str, self.ranks.working))
            raise StageInterrupted(
                f"{self.name} was asked to stop, but rank {ranks} showed no progress for {GRACE_S:g} s",
                "it waits in a collective, or for code that does not return: its pool is lost",
                "lab.recover() restarts it, and continues from the newest checkpoint",
            )
        self.parts = tuple(reply.stopped for reply in self.replies if reply.stopped is not None)
        if self.parts:
            raise interrupted.stopped_at(self.name, self.parts[0]) if self.updates else interrupted.unchanged(self.name)

    # --- 6 record -----------------------------------------------------------------------------------------------------

    def record(self) -> Any:
        """Record the result and return it: the batch's next version, an update's metrics, or the ranks' values."""
        runner, role = self.runner, self.group.role
        self.record_replies()
        for line in dict.fromkeys(line for reply in self.replies for line in reply.notes):
            note(f"{self.name}: {line}")
        collected = [self.replies[rank] for rank in self.result_ranks]
        self.metrics = MetricValues(reported(merge_metrics({}, *(reply.metrics for reply in collected))))
        weights = runner.counters.weights
        # some runs are ordered like updates but change no weights, such as `check_sync` of rollout workers
        if self.operation.updates and role in weights:
            weights[role] = Weights.fresh(int(self.metrics.get("optimizer_steps", weights[role].steps + 1)))
        result = self._made(collected) if self.operation.protocol.joins else [reply.value for reply in collected]
        self.update_result = result if self.updates else None
        if self.given_up:
            runner.interrupted.not_received(self)
        self._report()
        scored = [reply.scored for reply in collected if reply.scored is not None]
        if scored and not self.given_up:
            for listener in runner.scores:
                listener(self.calls[0].meta, scored)
        if self._then is not None:
            self._then()
        return result

    def _made(self, collected: Sequence[Reply]) -> Any:
        """Return the batch's next version; the metrics where no columns were made. Raises the error of the first row
        that failed, if more rows failed than the call allows."""
        batch, failed = self.input, {reply.rank: reply.failed for reply in collected if reply.failed is not None}
        assert batch is not None
        most = next((found.most for found in failed.values()), 1.0)
        too_many = sum(found.count for found in failed.values()) > most * batch.rows * self.samples
        if too_many:
            self.code = f"failed {self.code}"  # so that `reuse` never takes its columns
        summaries = agreed_columns(collected, self.writes, self.name)
        if not summaries:
            return self.metrics
        calls = [self.calls[rank] for rank in self.result_ranks]
        parts = [(call.kept, call.rows) for call in calls if call.kept is not None and call.rows is not None]
        location = Location.of_parts(parts)
        self.runner.batches.shard_counts.hold(location)
        self.meta = collected[0].meta
        self.made_columns = {
            name: Column(
                dtype=summary.dtype, row_shape=summary.row_shape, nbytes=summary.nbytes, owner=self.group.role,
                location=location, made_with=self.code,
            )
            for name, summary in summaries.items()
        }  # fmt: skip
        made = self.batch
        if made is None or too_many:
            made = batch.copies(self.samples).with_results(self, self._stale)
        self.runner.batches.store.add(made, self._origin(), self.made_columns.values(), by_loop=self.by_loop)
        if too_many:
            raise too_many_failed(self, failed, made)
        return made

    def _origin(self) -> Origin:
        call, weights = self.calls[0], self.runner.counters.weights.get(self.group.role)
        return Origin(
            stage=self.name,
            run=self.number,
            inputs=(call.batch,),
            arguments={name: f"{shown(value, 80)}" for name, value in call.kwargs.items()},
            weights_version=weights.steps if weights else None,
            weights_state=weights.state if weights else "",
            seed=tuple(call.meta["seed"]),
            travelled=tuple(dict.fromkeys(name for names, _ in call.pulls for name in names)),
            meta_in={name: value for name, value in call.meta.items() if name not in ("seed", "trained_version")},
            meta_out=self.meta,
            code=self.code,
            metrics=self.metrics,
        )

    def answer(self, result: Any, *, reported: bool = False) -> None:
        """End the run without sending it, with the result of an earlier run. reported: whether the telemetry already
        has that run's metrics, for this call."""
        self._report(reported=reported)
        self.from_store = True
        self.settle(result)

    def _report(self, *, reported: bool = False) -> None:
        """Record its metrics under the stage name of its caller. reported: whether the telemetry has them already."""
        if self.metrics:
            runner, now = self.runner, self.runner.counters.iteration
            iteration = int(self.calls[0].meta.get("iteration", now)) if self.calls else now
            rows = 0 if self.input is None else self.input.rows * self.samples
            if not reported:
                runner.telemetry.append_metrics(self.reported_as, self.number, iteration, self.metrics, rows=rows)
            self._last_metrics[self.reported_as] = self.metrics


def group_pulls(
    columns: Mapping[str, Column], names: tuple[str, ...], rows: np.ndarray, shard_successors: Mapping[str, str]
) -> list[tuple[tuple[str, ...], tuple[Pull, ...]]]:
    """Return the pulls for these rows; columns in one location are pulled together. shard_successors: see
    `ShardId.now`."""
    together: dict[int, tuple[Location, list[str]]] = {}
    for name in names:
        location = columns[name].location
        together.setdefault(id(location), (location, []))[1].append(name)
    found = [(tuple(group), tuple(location.pulls(rows))) for location, group in together.values()]
    if shard_successors:
        found = [(n, tuple(p._replace(shard=p.shard.now(shard_successors)) for p in pulls)) for n, pulls in found]
    return found
