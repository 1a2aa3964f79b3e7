"""What follows from runs that did not just end well: those that failed, were cancelled or abandoned, or whose kernel
is gone. No step of an update is taken twice, and no samples are drawn again."""

from __future__ import annotations

import threading
from collections.abc import Collection, Sequence

from workbench.backends.hosts import Hosts
from workbench.batches.store import Weights
from workbench.messages.metric_values import MetricValues
from workbench.messages.replies import Reply, UpdatePart
from workbench.stages.counters import Counters
from workbench.stages.journal import SentRun
from workbench.stages.ownership import Ownership
from workbench.stages.run import Run
from workbench.stages.unfinished import UnfinishedUpdate, UnfinishedUpdates
from workbench.telemetry.store import TelemetryStore


class Outcomes:
    """updates: those that were interrupted. finished: by role, the last update, until its metrics are known to have
    been delivered: the same call by a later kernel gives them, and takes no step. They have been delivered when the
    caller whose call returned them calls another stage of the role, and when the algorithm's position has them."""

    def __init__(self, hosts: Hosts, ownership: Ownership, counters: Counters, telemetry: TelemetryStore) -> None:
        self._hosts, self._ownership, self._counters, self._telemetry = hosts, ownership, counters, telemetry
        self.updates = UnfinishedUpdates()
        self.finished: dict[str, UnfinishedUpdate] = {}
        self._received: dict[str, int] = {}  # by role, the newest update whose result was returned to its caller
        self._lock = threading.Lock()  # results are returned in the notebook's thread, runs end in the scheduler's

    def record(self, run: Run) -> None:
        """Record what its ranks reported, once."""
        replies, run.unrecorded = run.unrecorded, []
        self.record_replies(replies)

    def record_replies(self, replies: Sequence[Reply]) -> None:
        """Record spans, transfers and syncs."""
        for reply in replies:
            self._telemetry.append_spans(reply.spans)
            self._telemetry.append_transfers(reply.transfers)
            self._telemetry.append_syncs(reply.syncs)

    def clean_up(self, run: Run) -> None:
        """After a run that failed: hosts forget its rows."""
        self.record(run)
        role, weights = run.group.role, self._counters.weights
        if run.updates and role in weights and not (run.parts and not run.parts[0].steps):
            steps = weights[role].steps  # where ranks failed, how far they came is not known
            if run.parts:
                told = run.parts[0].metrics.get("optimizer_steps")
                steps = steps + run.parts[0].steps if told is None else int(told.value)
            weights[role] = Weights.fresh(steps)
            if run.parts:
                self.remember(_sent_run(run), run.parts, None)
        self._draw_again(run)
        if run.stuck:
            self._hosts.lost[run.group.pool.name] = f"run {run.number}, {run.name}"
        self._hosts.forget_shard(run.group.hosts, run.calls[0].key)

    def not_received(self, run: Run) -> None:
        """A run has succeeded, and its caller did not get the result: the same call again must give it."""
        weights = self._counters.weights
        if run.updates and run.group.role in weights and not run.writes:
            self.remember(_sent_run(run), run.parts, run.given)
        elif not run.updates:
            self._draw_again(run)

    def _draw_again(self, run: Run) -> None:
        """Have the same call draw the same samples again, if none were drawn since."""
        seed: tuple[int, ...] = run.calls[0].meta.get("seed", ()) if run.calls else ()
        if len(seed) == 3:
            self._counters.draw_again(seed[1], seed[2])

    def unfinished(self, run: Run, *, ended: bool) -> UnfinishedUpdate | None:
        """What an update goes on from; see `UnfinishedUpdates.take`."""
        weights = self._counters.weights.get(run.group.role)
        return self.updates.take(_sent_run(run), weights, ended=ended) if run.updates and weights else None

    def remember(self, run: SentRun, parts: Sequence[UpdatePart], result: MetricValues | None) -> None:
        """Have the same call of an update go on with its next step, or give its metrics if it came to its end."""
        self.updates.of_role[run.role] = UnfinishedUpdate(
            run=run, weights=self._counters.weights[run.role], parts=tuple(parts), result=result
        )

    # --- for a later kernel -------------------------------------------------------------------------------------------

    def sent(self, run: Run, seed: tuple[int, ...]) -> None:
        """Record in the journal what goes to hosts."""
        self._ownership.record(sent=_sent_run(run, seed))

    def over(self, run: Run) -> None:
        """Record in the journal what came of a run that its ranks have ended."""
        if self._ownership.journal is not None and run.batch is not None:
            run.batch.settle(wait=False)
        weights = self._counters.weights
        if run.updates and run.state == "done" and not run.writes and run.group.role in weights:
            ended = UnfinishedUpdate(run=_sent_run(run), weights=weights[run.group.role], result=run.given)
            with self._lock:
                self.finished[run.group.role] = ended
        self._ownership.record(over=run.number)

    def received(self, run: Run) -> None:
        """Note that the result of a run was returned to its caller."""
        if run.updates:
            with self._lock:
                self._received[run.group.role] = max(run.number, self._received.get(run.group.role, 0))

    def called(self, role: str) -> None:
        """A caller calls a stage of this role: it has what was returned to it before."""
        with self._lock:
            if role in self.finished and self.finished[role].run.number <= self._received.get(role, 0):
                del self.finished[role]

    def in_position(self, results: Collection[object]) -> None:
        """The algorithm's position, which goes to the journal next, has these results of stages."""
        with self._lock:
            self.finished = {
                role: update
                for role, update in self.finished.items()
                if not any(update.result is result for result in results)
            }

    def known_updates(self) -> dict[str, UnfinishedUpdate]:
        """By role, what the same call of an update goes on from, or gives: of the weights that the role has now."""
        weights = self._counters.weights
        with self._lock:
            known = [*self.updates.of_role.items(), *self.finished.items()]
        return {role: update for role, update in known if weights.get(role) == update.weights}

    def ended_without_kernel(self, run: SentRun, parts: Sequence[UpdatePart], result: MetricValues | None) -> None:
        """Remember an update that ended, or stopped, after its kernel had ended."""
        weights = self._counters.weights
        if run.role not in weights or (parts and not parts[0].steps):
            return
        counted = parts[0].metrics.get("optimizer_steps") if parts else None
        steps = weights[run.role].steps + 1 if counted is None else counted.value
        steps = steps if result is None else result.get("optimizer_steps", steps)
        weights[run.role] = Weights.fresh(int(steps))
        self.remember(run, parts, result)


def _sent_run(run: Run, seed: tuple[int, ...] = ()) -> SentRun:
    return SentRun(
        number=run.number, name=run.name, role=run.group.role, hosts=run.group.hosts, code=run.code,
        updates=run.updates, result_ranks=run.result_ranks, layout=str(run.group.layout),
        read=run.read if run.updates else {}, drawn=(seed[1], seed[2]) if len(seed) == 3 else None,
    )  # fmt: skip
