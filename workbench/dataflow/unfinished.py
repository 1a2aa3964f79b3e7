"""Updates that were interrupted: the same call again goes on where they stood, so that no step is taken twice."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from workbench.dataflow.references import Column
from workbench.dataflow.store import Weights
from workbench.workers.calls import Call, Metrics, UpdatePart, merge_metrics

if TYPE_CHECKING:
    from workbench.dataflow.run import Run


@dataclass(frozen=True, kw_only=True)
class UnfinishedUpdate:
    """code, read: of the call, its arguments among it, and the columns that it read. weights: as it left them.
    parts: how far each rank came. result: what it gave, where it came to its end all the same."""

    stage: str
    code: str
    read: Mapping[str, Column]
    weights: Weights
    parts: tuple[UpdatePart, ...] = ()
    result: Any = None

    def resumed(self, calls: Sequence[Call], collecting: Sequence[int]) -> list[Call]:
        """Calls that go on where it stood. collecting: the ranks whose metrics count."""
        parts = list(self.parts)
        if len(parts) != len(calls):  # it has moved since: what the ranks had found goes to one of them
            found: Metrics = {}
            for part in parts:
                merge_metrics(found, part.metrics)
            first = parts[0]
            parts = [replace(first, metrics=found if rank == collecting[0] else {}) for rank in range(len(calls))]
        return [replace(call, begun=part) for call, part in zip(calls, parts, strict=True)]


class UnfinishedUpdates:
    """The last interrupted update of each role. An update of another kind, or another state of the role, ends it."""

    def __init__(self) -> None:
        self._of_role: dict[str, UnfinishedUpdate] = {}

    def note(self, run: Run, weights: Weights, result: Any = None) -> None:
        """Remember where a run was left."""
        self._of_role[run.group.role] = UnfinishedUpdate(
            stage=run.name, code=run.code, read=run.read, weights=weights, parts=run.parts, result=result
        )

    def note_done(
        self, role: str, stage: str, code: str, read: Mapping[str, Column], weights: Weights, result: Any
    ) -> None:
        """Remember an update that came to its end after its kernel had."""
        self._of_role[role] = UnfinishedUpdate(stage=stage, code=code, read=read, weights=weights, result=result)

    def clear(self) -> None:
        """Forget them: no role is in a state that one of them led to."""
        self._of_role.clear()

    def take(self, run: Run, read: Mapping[str, Column], weights: Weights, *, ended: bool) -> UnfinishedUpdate | None:
        """What a run goes on from, if it is the same update as the one that was interrupted. ended: whether to look for
        one that came to its end."""
        found = self._of_role.get(run.group.role)
        if found is None or (found.result is not None) != ended:
            return None
        del self._of_role[run.group.role]
        same = (found.stage, found.code, found.weights) == (run.name, run.code, weights)
        if not same or set(found.read) != set(read):
            return None
        return found if all(found.read[name].location.same(read[name].location) for name in read) else None
