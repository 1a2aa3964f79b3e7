"""Handles runs that failed, were interrupted, or lost their kernel. The same call again takes no step of an update
twice, and draws the same samples.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from workbench.backends.hosts import Hosts
from workbench.batches.store import Weights
from workbench.display.progress import note
from workbench.errors import StageInterrupted, UpstreamError, WorkbenchError
from workbench.messages.calls import Call, Reply, UpdatePart
from workbench.messages.metrics import MetricValues
from workbench.stages.ledger import Counters, Ownership, SentRun

if TYPE_CHECKING:
    from workbench.stages.run import Run
    from workbench.stages.stage import StageRun

AS_BEFORE = "the state is as before the stage"
AGAIN = "run the same call again to continue; if it takes a batch, give the same one"


def unchanged(name: str) -> StageInterrupted:
    """Return the error for a run that changed nothing, and whose result was dropped."""
    return StageInterrupted(f"{name} was interrupted", AS_BEFORE, AGAIN)


def stopped_at(name: str, part: UpdatePart) -> StageInterrupted:
    """Return the error for an update that stopped between two of its steps."""
    if not part.steps:
        return unchanged(name)
    return StageInterrupted(
        f"{name} was interrupted after optimizer step {part.steps} of {part.of}",
        "the weights are those after that step",
        f"run the same call again, on the same batch, to continue with step {part.steps + 1}",
    )


def parts_left(replies: Sequence[Reply], ranks: int) -> tuple[UpdatePart, ...]:
    """Return how far the ranks came with an update, if all of them stopped between the same two steps; otherwise ()."""
    parts = tuple(reply.stopped for reply in replies if reply.stopped is not None)
    return parts if len(parts) == ranks and len({part.steps for part in parts}) == 1 else ()


def say_where(error: WorkbenchError, part: UpdatePart) -> None:
    """Add to the error of an update how many of its steps were taken."""
    if part.steps:
        left = f"it has taken optimizer step {part.steps} of {part.of}"
        again = "run the same call again: it repeats no step"
        if part.steps < part.of:
            again = f"run the same call again to continue with step {part.steps + 1}"
            again += "; with another loss, batch or setting it begins at step 1"
        error.rule = "; ".join(filter(None, (error.rule, left)))
        error.remedy = "; ".join(filter(None, (error.remedy, again)))


def broken_off(name: str, *, updates: bool) -> StageInterrupted:
    """Return the error for an inline run whose computation in this thread a second interrupt ended."""
    if updates:
        rule = "it stopped in the middle, and may have updated its role only in part"
        return StageInterrupted(f"{name} was interrupted twice", rule, "go back to a checkpoint with lab.recover()")
    return StageInterrupted(f"{name} was interrupted twice", "it stopped in the middle; its result is dropped", AGAIN)


def error_of(run: Run) -> Exception:
    """Return the error for an interrupted run that is over: nothing changed, or after which optimizer step it stopped.
    For a run that failed, its own error."""
    if run.state == "cancelled":
        return StageInterrupted(f"{run.name} was interrupted before it began", AS_BEFORE, AGAIN)
    if run.state == "done":
        run.runner.interrupted.not_received(run)
        if not run.updates:
            return unchanged(run.name)
        if not run.operation.updates:  # a sync
            return StageInterrupted(f"{run.name} was interrupted when it had ended", "the new weights are there", AGAIN)
        again = "run the same call again, on the same batch: it takes no step, and returns the metrics"
        return StageInterrupted(
            f"{run.name} was interrupted after its last optimizer step", "the update is done", again
        )
    error = run.future.exception()
    if isinstance(error, WorkbenchError) and not isinstance(error, UpstreamError):
        return error.with_traceback(None)
    return unchanged(run.name)


# --- updates that were interrupted ----------------------------------------------------------------------------------


class Interrupted:
    """unfinished: by role, the last update that was interrupted, failed, or lost its kernel: the same call again
    continues with its next step, or gives its metrics. An update of another kind, or another state of the role, ends
    it."""

    def __init__(self, hosts: Hosts, ownership: Ownership, counters: Counters) -> None:
        self._hosts, self._ownership, self._counters = hosts, ownership, counters
        self.unfinished: dict[str, SentRun] = {}
        self._open: dict[str, SentRun] = {}  # by role, the update that has ended and is open in the journal
        self._lock = threading.Lock()  # results return in the notebook's thread, runs end in the scheduler's

    # --- in this kernel -----------------------------------------------------------------------------------------------

    def clean_up(self, run: Run) -> None:
        """After a run that failed: have hosts drop its rows, and note how far an update came."""
        run.record_replies()
        role, weights = run.group.role, self._counters.weights
        if run.updates and role in weights and not (run.parts and not run.parts[0].steps):
            # where ranks failed in the middle of a step, or at different steps, their progress is unknown
            weights[role] = Weights.fresh(_steps(weights[role].steps, run.parts))
            if run.parts:
                failed = any(reply.failure is not None for reply in run.replies)
                self._remember(replace(_sent_run(run), failed=failed), run.parts, None)
        self._draw_again(run)
        if run.stuck:
            self._hosts.lost[run.group.pool.name] = f"run {run.number}, {run.name}"
        for shard in filter(None, (call.kept for call in run.calls)):
            self._hosts.backend.work(shard.host, "release", [shard.key])
        for host, call in zip(run.group.hosts, run.calls, strict=False):
            if call.released:  # the host may not have got to them
                self._hosts.backend.work(host, "release", call.released)

    def not_received(self, run: Run) -> None:
        """Note that the caller of a successful run did not get the result: the same call again must give it."""
        if run.updates and run.group.role in self._counters.weights and not run.writes:
            self._remember(_sent_run(run), run.parts, run.update_result)
            if run.ranks_ended:
                with self._lock:
                    self._ownership.keep_open(run.number)
                    self._keep(self.unfinished[run.group.role])
        elif not run.updates:
            self._draw_again(run)

    def _draw_again(self, run: Run) -> None:
        """Have the same call draw the same samples again, if no samples were drawn since."""
        seed = _seed(run.calls)
        if len(seed) == 3:
            self._counters.draw_again(seed[1], seed[2])

    def _remember(self, run: SentRun, parts: Sequence[UpdatePart], result: MetricValues | None) -> None:
        """Have the same call of an update continue with its next step, or give its metrics if it is complete."""
        weights = self._counters.weights[run.role]
        self.unfinished[run.role] = replace(run, weights=weights, parts=tuple(parts), result=result)

    def _take(self, run: Run, *, ended: bool) -> SentRun | None:
        """Return the interrupted update of which this run is the same call. ended: whether to look for a complete
        update."""
        role, weights = run.group.role, self._counters.weights.get(run.group.role)
        update = self.unfinished.get(role)
        if not run.updates or weights is None or update is None or (update.result is not None) != ended:
            return None
        del self.unfinished[role]
        return update if update.is_same_call(_sent_run(run), weights) else None

    def answer_ended(self, run: StageRun) -> None:
        """End a run that repeats a complete, interrupted update, with the metrics of that update."""
        assert run.input is not None
        run.read_columns, _ = run.input.finished_columns(run.operation.sent_columns(run.reads, run.input))
        if update := self._take(run, ended=True):
            note(f"{run.name}: it had ended when it was interrupted; these are its metrics")
            run.metrics = run.update_result = update.result
            run.answer(update.result, reported=run.runner.telemetry.reported(run.reported_as, update.number))

    def sent(self, run: Run, calls: list[Call]) -> list[Call]:
        """Record in the journal that a run goes to its hosts. Returns its calls; the calls of an interrupted update
        continue with its next step."""
        self._ownership.record(sent=_sent_run(run, _seed(calls)))
        update = self._take(run, ended=False)
        if update is None:
            return calls
        part = update.parts[0]
        where = f"continues at optimizer step {part.steps + 1} of {part.of}"
        note(f"{run.name}: {where if part.steps < part.of else f'has already taken all {part.of} optimizer steps'}")
        return update.resumed(calls, str(run.group.layout), run.result_ranks)

    def open_updates(self, *, failed: bool = False) -> list[str]:
        """Return the updates, as role.operation, that an interrupt stopped between two of their steps. failed: also
        those that an error stopped there. Settings of these can be changed, as they may have caused the error."""
        weights = self._counters.weights
        return [
            update.name
            for role, update in self.unfinished.items()
            if update.result is None and (failed or not update.failed) and weights.get(role) == update.weights
        ]

    def forget(self, *, behind: int | None = None) -> None:
        """After weights were put back, forget updates that belong to other weights. behind: also those of runs after
        this number."""
        for role, update in [*self.unfinished.items(), *self._open.items()]:
            if (behind is not None and update.number > behind) or update.weights != self._counters.weights.get(role):
                self.unfinished.pop(role, None)
                self._close(role)

    # --- for a later kernel -------------------------------------------------------------------------------------------
    # A sent run stays open in the journal until its caller has its result. A stage of an algorithm is closed by
    # the entry with the position, see `Ownership.one_entry`; an update by hand is closed when its metrics are returned.

    def record_end(self, run: Run) -> None:
        """Record in the journal the outcome of a run that its ranks have ended."""
        if self._ownership.journal is not None and run.batch is not None:
            run.batch.settle(wait=False)
        role, done_update = run.group.role, run.state == "done" and run.operation.updates
        with self._lock:
            update = self.unfinished.get(role)
            if update is None or update.number != run.number:
                update = None
                if done_update and not run.writes and not run.in_position and not run.was_received:
                    update = replace(_sent_run(run), weights=self._counters.weights.get(role), result=run.update_result)
            if update is not None:
                self._keep(update)
                return
            if done_update:
                self._close(role)  # an earlier update
            self._ownership.record(over=[run.number])

    def received(self, run: Run) -> None:
        """Note that the result of a run was returned to its caller."""
        with self._lock:
            run.was_received = True
            update = self._open.get(run.group.role)
            if update is not None and update.number == run.number:
                self._close(run.group.role)

    def _keep(self, update: SentRun) -> None:
        """Keep an update open in the journal, with its outcome, in place of an earlier one of the role."""
        earlier, self._open[update.role] = self._open.get(update.role), update
        over = [] if earlier is None or earlier.number == update.number else [earlier.number]
        self._ownership.record(sent=update, over=over)

    def _close(self, role: str) -> None:
        if (update := self._open.pop(role, None)) is not None:
            self._ownership.record(over=[update.number])

    def take_over(self, run: SentRun) -> None:
        """Continue an update that, as another kernel recorded, is complete or has stopped."""
        if run.role in self._counters.weights:
            self._remember(run, run.parts, run.result)
            self._open[run.role] = self.unfinished[run.role]

    def ended_without_kernel(self, run: SentRun, parts: Sequence[UpdatePart], result: MetricValues | None) -> None:
        """Remember an update that completed, or stopped, after its kernel had ended."""
        weights = self._counters.weights
        if run.role not in weights or (parts and not parts[0].steps):
            return
        before = weights[run.role].steps
        steps = _steps(before, parts) if result is None else result.get("optimizer_steps", before + 1)
        weights[run.role] = Weights.fresh(int(steps))
        self.take_over(replace(run, parts=tuple(parts), result=result))


def _steps(before: int, parts: Sequence[UpdatePart]) -> int:
    """Return how many optimizer steps a role has taken after parts of an update. before: the steps before it."""
    if not parts:
        return before
    counted = parts[0].metrics.get("optimizer_steps")
    return before + parts[0].steps if counted is None else int(counted.value)


def _seed(calls: Sequence[Call]) -> tuple[int, ...]:
    return calls[0].meta.get("seed", ()) if calls else ()


def _sent_run(run: Run, seed: tuple[int, ...] = ()) -> SentRun:
    return SentRun(
        number=run.number, name=run.name, role=run.group.role, hosts=run.group.hosts, code=run.code,
        updates=run.updates, result_ranks=run.result_ranks, layout=str(run.group.layout),
        read=run.read_columns if run.updates else {}, drawn=(seed[1], seed[2]) if len(seed) == 3 else None,
    )  # fmt: skip
