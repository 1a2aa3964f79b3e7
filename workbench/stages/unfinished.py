"""Updates that were interrupted: the same call again goes on with the next step, so that none is taken twice."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from workbench.batches.references import Column
from workbench.batches.store import Weights
from workbench.messages.calls import Call
from workbench.messages.metrics import Metrics, merge_metrics
from workbench.messages.replies import UpdatePart

if TYPE_CHECKING:
    from workbench.stages.run import Run


@dataclass(frozen=True, kw_only=True)
class UnfinishedUpdate:
    """code, read: of the call, its arguments among it, and the columns that it read. weights: as it left them.
    layout, result_ranks: of the ranks, and whose metrics count. parts: how far each rank came. result: what it gave,
    where it came to its end all the same."""

    stage: str
    code: str
    read: Mapping[str, Column]
    weights: Weights
    layout: str = ""
    result_ranks: Sequence[int] = ()
    parts: tuple[UpdatePart, ...] = ()
    result: Any = None

    def resumed(self, calls: Sequence[Call], layout: str, result_ranks: Sequence[int]) -> list[Call]:
        """Calls that go on with its next step. layout, result_ranks: as they are now."""
        parts = self.parts
        if layout != self.layout:  # it has moved since: what counts of what the ranks had found goes to one that counts
            found: Metrics = {}
            for rank in self.result_ranks:
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

    def note(self, run: Run, weights: Weights, result_ranks: Sequence[int], result: Any = None) -> None:
        """Remember where a run was left."""
        self.of_role[run.group.role] = UnfinishedUpdate(
            stage=run.name, code=run.code, read=run.read, weights=weights, layout=str(run.group.layout),
            result_ranks=tuple(result_ranks), parts=run.parts, result=result,
        )  # fmt: skip

    def open(self, weights: Mapping[str, Weights]) -> list[str]:
        """The updates that are between two of their steps. weights: the current ones."""
        return [
            update.stage
            for role, update in self.of_role.items()
            if update.result is None and weights.get(role) == update.weights
        ]

    def clear(self) -> None:
        """Forget them: no role is in a state that one of them led to."""
        self.of_role.clear()

    def take(self, run: Run, read: Mapping[str, Column], weights: Weights, *, ended: bool) -> UnfinishedUpdate | None:
        """What a run goes on from, if it is the same update as the one that was interrupted. ended: whether to look for
        one that came to its end."""
        found = self.of_role.get(run.group.role)
        if found is None or (found.result is not None) != ended:
            return None
        del self.of_role[run.group.role]
        same = (found.stage, found.code, found.weights) == (run.name, run.code, weights)
        if not same or set(found.read) != set(read):
            return None
        return found if all(found.read[name].location.same(read[name].location) for name in read) else None
