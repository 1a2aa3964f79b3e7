"""What becomes of runs that did not just end well: stopped, failed, unheard of, or of a kernel that is gone."""

from __future__ import annotations

import secrets
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, NoReturn, cast

from workbench.batches.store import Weights
from workbench.errors import StageInterrupted
from workbench.messages.metric_values import MetricValues
from workbench.messages.replies import UpdatePart
from workbench.session.handover import Handover, OpenRun
from workbench.stages.held_batches import HeldBatches
from workbench.stages.interruptions import AS_BEFORE
from workbench.stages.run import Run
from workbench.stages.unfinished import UnfinishedUpdate, UnfinishedUpdates

if TYPE_CHECKING:
    from workbench.controller import Workbench


class EndedRuns(HeldBatches):
    """The methods of a `Workbench` that see to it that no step of an update is taken twice, no samples are drawn anew,
    and the next kernel knows."""

    last_metrics: dict[str, MetricValues]
    _draws: dict[int, int]
    _handover: Handover | None
    _overlapped: list[Run]
    _updates_left: UnfinishedUpdates

    if TYPE_CHECKING:

        def _save_state(self) -> None: ...
        def _report(self, run: Run, stage: str, last_metrics: dict[str, MetricValues]) -> None: ...

    def _stop_overlapped(self, error: BaseException) -> NoReturn:
        """Stop what was called in `overlap()`, wait for that, and raise one `StageInterrupted` that says how far the
        updates among it came."""
        runs, self._overlapped = self._overlapped, []
        stopped = [run for run in runs if run.cancel()]
        for run in stopped:
            run.join()
        said: list[Exception] = [error] if isinstance(error, StageInterrupted) else []
        said += [run.interrupted() for run in stopped if run.updates and run.calls]
        said = list({str(one): one for one in said}.values())
        if len(said) == 1:
            raise said[0]
        told = "; ".join(str(one).rstrip(".") for one in said)
        raise StageInterrupted(told or "the stages under way were interrupted", "" if told else AS_BEFORE)

    def _clean_up(self, run: Run) -> None:
        """After a run that came to nothing."""
        self._record(run)
        role = run.group.role
        if run.updates and role in self.weights and not (run.parts and not run.parts[0].steps):
            steps = self.weights[role].steps  # where ranks failed, how far they came is not known
            if run.parts:
                told = run.parts[0].metrics.get("optimizer_steps")
                steps = steps + run.parts[0].steps if told is None else int(told.value)
            self.weights[role] = Weights(steps=steps, state=secrets.token_hex(4))
            if run.parts:
                self._updates_left.note(run, self.weights[role], run.collecting)
        self._draw_again(run)
        self._save_state()
        if run.stuck:
            self._broken[run.group.pool.name] = f"run {run.number}, {run.name}"
        self._drop(run.group.hosts, run.calls[0].key)

    def _unheard(self, run: Run) -> None:
        """A run has ended well, and nobody has its result: the same call again is as if this had not been."""
        if run.updates and run.group.role in self.weights and not run.writes:
            self._updates_left.note(run, self.weights[run.group.role], run.collecting, run.given)
        elif not run.updates:
            self._draw_again(run)

    def _draw_again(self, run: Run) -> None:
        """Let the same call again draw the same samples, if none were drawn since."""
        seed: tuple[int, ...] = run.calls[0].meta.get("seed", ()) if run.calls else ()
        if len(seed) == 3 and self._draws.get(seed[1]) == seed[2]:
            self._draws[seed[1]] -= 1

    def _record(self, run: Run) -> None:
        replies, run.unrecorded = run.unrecorded, []
        for reply in replies:
            self.telemetry.append_spans(reply.spans)
            self.telemetry.append_transfers(reply.transfers)
            self.telemetry.append_syncs(reply.syncs)

    # --- for the next kernel -----------------------------------------------------------------------------------------

    def _note_sent(self, run: Run, seed: tuple[int, ...]) -> None:
        """Write down for the next kernel what goes to hosts."""
        if self._handover is not None:
            self._handover.sent(OpenRun(
                number=run.number, name=run.name, role=run.group.role, hosts=run.group.hosts, code=run.code,
                updates=run.updates, collecting=run.collecting, layout=str(run.group.layout),
                read=run.read if run.updates else {},
                drawn=(seed[1], seed[2]) if len(seed) == 3 else None,
            ))  # fmt: skip

    def _note_over(self, ended: weakref.ref[Run]) -> None:
        """Write down what came of a run: held weakly, as it holds who is told of its end."""
        run = ended()
        if run is None or self._handover is None or not self._drives():
            return
        try:
            if run.batch is not None:
                run.batch.settle(wait=False)
            self._handover.write(cast("Workbench", self))
        finally:
            self._handover.over(run.number)

    def note_position(self) -> None:
        """Write down where the algorithm stands, for the next kernel."""
        if self._handover is not None and self._drives():
            self._handover.write(cast("Workbench", self))

    def note_update(self, run: OpenRun, parts: Sequence[UpdatePart], result: MetricValues | None) -> None:
        """Take in an update that ended, or stopped, after its kernel had: the same call again gives its metrics, or
        goes on where it stood."""
        if run.role not in self.weights or (parts and not parts[0].steps):
            return
        told = parts[0].metrics.get("optimizer_steps") if parts else None
        steps = self.weights[run.role].steps + 1 if told is None else told.value
        steps = steps if result is None else result.get("optimizer_steps", steps)
        self.weights[run.role] = weights = Weights(steps=int(steps), state=secrets.token_hex(4))
        self._updates_left.of_role[run.role] = UnfinishedUpdate(
            stage=run.name, code=run.code, read=run.read, weights=weights, layout=run.layout,
            collecting=run.collecting, parts=tuple(parts), result=result,
        )  # fmt: skip

    def _unfinished(self, run: Run, *, ended: bool) -> UnfinishedUpdate | None:
        """What an update goes on from; see `UnfinishedUpdates.take`."""
        weights = self.weights.get(run.group.role)
        return self._updates_left.take(run, run.read, weights, ended=ended) if run.updates and weights else None

    def _answer(self, run: Run, reported_as: str, result: MetricValues) -> None:
        """End a run that is not to be sent."""
        run.metrics = result
        self._report(run, reported_as, self.last_metrics)
        run.from_store = True
        run.settle(result)
