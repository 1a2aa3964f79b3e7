"""Updates that were interrupted: the same call again goes on with the next step, so that none is taken twice."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from workbench.batches.store import Weights
from workbench.messages.calls import Call
from workbench.messages.metrics import Metrics, merge_metrics
from workbench.messages.replies import UpdatePart
from workbench.stages.journal import SentRun


@dataclass(frozen=True, kw_only=True)
class UnfinishedUpdate:
    """weights: as the run left them. parts: how far each rank came. result: what it gave, where it came to its end all
    the same."""

    run: SentRun
    weights: Weights
    parts: tuple[UpdatePart, ...] = ()
    result: Any = None

    def resumed(self, calls: Sequence[Call], layout: str, result_ranks: Sequence[int]) -> list[Call]:
        """Calls that go on with its next step. layout, result_ranks: as they are now."""
        parts = self.parts
        if layout != self.run.layout:  # it has moved since: the metrics so far go to one rank whose metrics count
            found: Metrics = {}
            for rank in self.run.result_ranks:
                merge_metrics(found, parts[rank].metrics)
            empty = replace(parts[0], metrics={})
            parts = tuple(
                replace(empty, metrics=found) if rank == result_ranks[0] else empty for rank in range(len(calls))
            )
        return [replace(call, resume_from=part) for call, part in zip(calls, parts, strict=True)]


class UnfinishedUpdates:
    """The last interrupted update of each role. An update of another kind, or another state of the role, ends it."""

    def __init__(self) -> None:
        self.of_role: dict[str, UnfinishedUpdate] = {}

    def open(self, weights: Mapping[str, Weights]) -> list[str]:
        """The updates that are between two of their steps. weights: the current ones."""
        return [
            update.run.name
            for role, update in self.of_role.items()
            if update.result is None and weights.get(role) == update.weights
        ]

    def take(self, run: SentRun, weights: Weights, *, ended: bool) -> UnfinishedUpdate | None:
        """What a run goes on from, if it is the same update as the one that was interrupted. ended: whether to look for
        one that came to its end."""
        found = self.of_role.get(run.role)
        if found is None or (found.result is not None) != ended:
            return None
        del self.of_role[run.role]
        before = found.run
        if (before.name, before.code, found.weights) != (run.name, run.code, weights) or set(before.read) != set(
            run.read
        ):
            return None
        return found if all(before.read[name].location.same(run.read[name].location) for name in run.read) else None
