"""The middle of a stage call, when its inputs are there: planned for each rank; then its replies made into a result."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from workbench.backends.hosts import Hosts
from workbench.batches.batch import Batch
from workbench.batches.location import Location, ShardId
from workbench.batches.references import Column
from workbench.batches.scored_rows import ScoredRows
from workbench.batches.store import Origin, Weights
from workbench.display.progress import note
from workbench.errors.plain_text import shown
from workbench.messages.calls import Call
from workbench.messages.metric_values import MetricValues
from workbench.messages.metrics import Metrics, merge_metrics, reported
from workbench.messages.replies import FailedRows, agreed_columns
from workbench.placement import ROLLOUT
from workbench.stages.batch_store import BatchStore
from workbench.stages.checking import StageCall
from workbench.stages.counters import Counters
from workbench.stages.failing import Failures
from workbench.stages.groups import Groups
from workbench.stages.outcomes import Outcomes
from workbench.stages.ownership import Ownership
from workbench.stages.planning import calls_on_batch, calls_without_batch
from workbench.stages.rank_errors import too_many_failed
from workbench.stages.run import Run
from workbench.telemetry.store import TelemetryStore

# are told the meta of the rows that a stage gave rewards, and the rewards
ScoreListeners = list[Callable[[Mapping[str, Any], Sequence[ScoredRows]], None]]


@dataclass(frozen=True, kw_only=True)
class StageParts:
    """The parts of a workbench that stages use."""

    hosts: Hosts
    ownership: Ownership
    groups: Groups
    counters: Counters
    batches: BatchStore
    outcomes: Outcomes
    failures: Failures
    telemetry: TelemetryStore
    scores: ScoreListeners


@dataclass(frozen=True)
class StageSteps:
    """The steps of one call.

    reported_as: the name under which its metrics are reported. metrics: the `last_metrics` of when it was called.
    then: called when it has succeeded, before waiters are woken. take: is given the batch that it makes, see
    `StageRunner.handing_over`.
    """

    parts: StageParts
    call: StageCall
    reported_as: str
    metrics: dict[str, MetricValues]
    then: Callable[[], None] | None = None
    take: Callable[[Batch], None] | None = None

    # --- plan ---------------------------------------------------------------------------------------------------------

    def plan(self, run: Run) -> list[Call]:
        """One call a rank."""
        call = self.call
        self.parts.groups.check_alive(call.group)
        self.parts.batches.release_unused()
        name = call.operation.name
        aside, inside, _ = self.reported_as.partition("/")
        stage = f"{aside}/{name}" if inside and aside == "evaluate" else name  # so that spans tell what it costs
        common = {
            "run": run.number, "key": f"{self.parts.ownership.controller}-{run.number}", "stage": stage, "method": name,
            "updates": call.updates, "role": call.group.worker_role, "kwargs": call.kwargs,
            "submitted_s": run.submitted_s, "training": call.training,
        }  # fmt: skip
        if call.batch is None:
            self.parts.ownership.record()  # the number of the run
            return calls_without_batch(call.group, call.operation, common, call.args)
        return self._plan_on_batch(call.batch, run, common)

    def _plan_on_batch(self, batch: Batch, run: Run, common: Mapping[str, Any]) -> list[Call]:
        call, travels = self.call, self.call.travelling
        run.read, meta = batch.part(travels)
        seed = self._seed(meta)
        seeded = {**meta, "seed": seed}
        if call.group.role == ROLLOUT:  # which trained weights there are is known here, not where samples are drawn
            seeded["trained_version"] = self.parts.counters.weights["actor"].steps
        if call.operation.generates:
            seeded["environments"] = self.parts.hosts.placement.environments
        calls = calls_on_batch(
            call.group, call.operation, common, call.args, batch, call.samples, travels, seeded,
            self.parts.hosts.shard_successors,
        )  # fmt: skip
        self.parts.outcomes.sent(run, seed)
        unfinished = self.parts.outcomes.unfinished(run, ended=False)
        if unfinished is None:
            return calls
        note(f"{run.name}: goes on at optimizer step {unfinished.parts[0].steps + 1} of {unfinished.parts[0].of}")
        return unfinished.resumed(calls, str(call.group.layout), call.result_ranks)

    def _seed(self, meta: Mapping[str, Any]) -> tuple[int, ...]:
        call = self.call
        seed, iteration = self.parts.hosts.description.seed, int(meta.get("iteration", 0))
        if not call.operation.samples:
            return (seed, iteration)
        if call.arguments.get("seed") is not None:
            return (int(call.arguments["seed"]), iteration)
        return (seed, iteration, self.parts.counters.next_draw(iteration))

    # --- record -------------------------------------------------------------------------------------------------------

    def finish(self, run: Run) -> Any:
        """What a run gives, recorded: the batch's next version, an update's metrics, or what ranks returned."""
        result = self._result(run)
        run.given = result if run.updates else None
        if run.given_up:
            self.parts.outcomes.not_received(run)
        self._report(run)
        self._tell_scores(run)
        if self.then is not None:
            self.then()
        if self.take is not None and isinstance(result, Batch) and not run.given_up:
            self.take(result)
        return result

    def _report(self, run: Run) -> None:
        if run.metrics:
            now = self.parts.counters.iteration
            iteration = int(run.calls[0].meta.get("iteration", now)) if run.calls else now
            rows = 0 if self.call.batch is None else self.call.batch.rows * self.call.samples
            self.parts.telemetry.append_metrics(self.reported_as, run.number, iteration, run.metrics, rows=rows)
            self.metrics[self.reported_as] = run.metrics

    def _tell_scores(self, run: Run) -> None:
        scored = [found for rank in run.result_ranks if (found := run.replies[rank].scored) is not None]
        if scored and not run.given_up:
            for listener in self.parts.scores:
                listener(run.calls[0].meta, scored)

    def failed(self, run: Run, error: Exception) -> None:
        """Keep what it failed with."""
        self.parts.failures.note(run, error, self.call.operation, self.call.batch, self.call.arguments)

    def _result(self, run: Run) -> Any:
        self.parts.outcomes.record(run)
        for said in dict.fromkeys(said for reply in run.replies for said in reply.notes):
            note(f"{run.name}: {said}")
        collected = [run.replies[rank] for rank in run.result_ranks]
        metrics: Metrics = {}
        for reply in collected:
            merge_metrics(metrics, reply.metrics)
        run.metrics = MetricValues(reported(metrics))
        self._count_update(run)
        if not self.call.operation.protocol.joins:
            return [reply.value for reply in collected]
        failed = {reply.rank: reply.failed for reply in collected if reply.failed is not None}
        if failed and self._are_too_many(failed):
            run.code = f"failed {run.code}"  # its columns are not those of a stage that succeeded
            kept = self._next_version(run, kept=True)
            group = run.group
            assert kept is not None
            raise too_many_failed(group.role, group.pool.name, run.stage, run.number, failed, kept)
        made = self._next_version(run)
        return run.metrics if made is None else made

    def _are_too_many(self, failed: Mapping[int, FailedRows]) -> bool:
        """Whether functions failed for more rows than the call allows."""
        assert self.call.batch is not None
        rows, (first, *_) = self.call.batch.rows * self.call.samples, failed.values()
        return sum(one.count for one in failed.values()) > first.most * rows

    def _count_update(self, run: Run) -> None:
        weights, role = self.parts.counters.weights, run.group.role
        # a run may take its turn as an update does and change no weights, such as `check_sync` of rollout workers
        if self.call.operation.updates and role in weights:
            weights[role] = Weights.fresh(int(run.metrics.get("optimizer_steps", weights[role].steps + 1)))

    def _next_version(self, run: Run, *, kept: bool = False) -> Batch | None:
        """The batch with the columns that were made; None where none were. kept: of a run that fails all the same."""
        replies, calls, ranks = run.replies, run.calls, run.result_ranks
        summaries = agreed_columns([replies[rank] for rank in ranks], run.writes, run.name)
        if not summaries:
            return None
        batch = self.call.batch
        assert batch is not None
        parts = [(ShardId(run.group.hosts[rank], calls[rank].key), calls[rank].rows) for rank in ranks]
        location = Location.of_parts([(shard, rows) for shard, rows in parts if rows is not None])
        self.parts.batches.shard_counts.hold(location)
        run.meta = replies[ranks[0]].meta
        run.made = {
            name: Column(
                dtype=summary.dtype, row_shape=summary.row_shape, nbytes=summary.nbytes, owner=run.group.role,
                location=location, made_with=run.code,
            )
            for name, summary in summaries.items()
        }  # fmt: skip
        if kept:
            made = batch.with_made(run, self.call.samples, self.call.stale)
        else:
            made = batch.with_columns(run.made, run.meta) if run.batch is None else run.batch
        self.parts.batches.store.add(made, self._origin(run, calls[0]), run.made.values(), by_loop=run.by_loop)
        return made

    def _origin(self, run: Run, call: Call) -> Origin:
        weights = self.parts.counters.weights.get(run.group.role)
        return Origin(
            stage=run.name,
            run=run.number,
            inputs=(call.batch,),
            arguments={name: f"{shown(value, 80)}" for name, value in call.kwargs.items()},
            weights_version=weights.steps if weights else None,
            weights_state=weights.state if weights else "",
            seed=tuple(call.meta["seed"]),
            travelled=tuple(dict.fromkeys(name for names, _ in call.pulls for name in names)),
            meta_in={name: value for name, value in call.meta.items() if name not in ("seed", "trained_version")},
            meta_out=run.meta,
            code=run.code,
            metrics=run.metrics,
        )

    # --- answered without being sent ----------------------------------------------------------------------------------

    def answer_ended(self, run: Run) -> None:
        """End an update that was done when it was interrupted, with the metrics that it had."""
        assert self.call.batch is not None
        run.read, _ = self.call.batch.part(self.call.travelling)
        if ended := self.parts.outcomes.unfinished(run, ended=True):
            note(f"{run.name}: was done when it was interrupted; these are its metrics")
            run.metrics = run.given = ended.result
            self._answer(run, ended.result)

    def answer_from_store(self, run: Run) -> None:
        """End a run with what the store has, where the same code has read the same columns with the same weights."""
        call, store, weights = self.call, self.parts.batches.store, self.parts.counters.weights
        assert call.batch is not None
        if not run.code:
            return
        batch, travels = call.batch.copies(call.samples), call.travelling
        state = weights[run.group.role].state if run.group.role in weights else ""
        for name in reversed(list(store)):
            origin, found = store.origin(name), store.kept(name)
            if origin is None or found is None:
                continue
            same = (origin.stage, origin.code, origin.weights_state) == (run.name, run.code, state)
            if not same or set(origin.travelled) != set(travels) or origin.meta_in != dict(batch.meta):
                continue
            made = {c: column for c, column in found.columns.items() if column.made_with == run.code}
            read = (found.columns[c].location.same(batch.columns[c].location) for c in travels if c not in made)
            if set(run.writes) <= set(made) and all(read):
                assert run.batch is not None
                run.made, run.meta, run.metrics = made, origin.meta_out, MetricValues(origin.metrics)
                note(f"{run.name}: from the store, as run {origin.run} made it")
                self._answer(run, run.batch)
                store.add(run.batch, origin, (), by_loop=run.by_loop)
                return

    def _answer(self, run: Run, result: Any) -> None:
        self._report(run)
        run.from_store = True
        run.settle(result)
