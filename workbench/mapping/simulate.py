"""Simulate a plan's iteration as a timeline: each call begins as soon as its inputs exist and its devices are free."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from itertools import accumulate

import pandas as pd

from workbench.display.html import seconds_text
from workbench.display.timeline import Timeline, timeline
from workbench.mapping.plan import CallPlan, Plan, RolePlan
from workbench.mapping.workload import STAGES
from workbench.support.checked_calls import checked_call
from workbench.telemetry.spans import Span

KINDS = {
    **dict.fromkeys(("transition", "relayout", "sync"), "weight_sync"), "transfer": "transfer", "load": "load",
}  # fmt: skip
MOST_LANES = 8  # devices drawn per set; all its devices do the same


@dataclass(frozen=True, eq=False)
class Simulation:
    """One simulated iteration of a plan. spans: in the form that a workbench records, in seconds from the iteration's
    beginning, without the time between calls. stage_s: by stage, seconds from the end of earlier stages to its end."""

    plan: Plan
    spans: tuple[Span, ...]
    stage_s: dict[str, float]

    @property
    def iteration_s(self) -> float:
        return max((span.end_s for span in self.spans), default=0.0) + self.plan.workload.between_s

    def frame(self) -> pd.DataFrame:
        """Return the spans, one per row, with the columns of `lab.spans()`."""
        frame = pd.DataFrame([span.row() for span in self.spans])
        frame.insert(0, "duration_s", frame["end_s"] - frame["start_s"])
        return frame

    def timeline(self) -> Timeline:
        """Return the timeline, drawn like `lab.timeline()`."""
        return timeline([span.row() for span in self.spans])

    def __repr__(self) -> str:
        return f"<Simulation of an iteration of {seconds_text(self.iteration_s)}>\n{self.timeline()!r}"

    def _repr_html_(self) -> str:
        return self.timeline()._repr_html_()


@checked_call("wb.mapping.simulate")
def simulate(plan: Plan, *, barriers: bool = False) -> Simulation:
    """Simulate one iteration of a plan: each call begins when its inputs exist and its devices are free, in the
    algorithm's order, as the workbench does with `overlap()`. barriers: calls also wait until all earlier stages have
    ended, as in the search (with `dependencies`; without them the search ignores waits within a stage). If the workload
    generates ahead, generation is for a later iteration, and no call waits for it.

    Only the first devices of a large set are drawn: all its devices do the same.
    """
    ends: dict[str, float] = {}
    free = [0.0] * len(plan.sets)
    stage_end = dict.fromkeys(STAGES, 0.0)
    spans: list[Span] = []
    order = [call.name for call in plan.workload.calls]
    places = [(n, one, role, call) for n, one in enumerate(plan.sets) for role in one.roles for call in role.calls]
    # moves of weights come right before the role's first call of their stage
    places.sort(key=lambda place: (_position(place[3], place[2], order), place[0]))
    inputs = {call.name: call.inputs for call in plan.workload.calls}
    waited = STAGES[1:] if plan.workload.ahead else STAGES
    first = list(accumulate((one.devices for one in plan.sets), initial=0))  # the first device of each set
    moved = {(n, stage): one.transfers[stage].seconds for n, one in enumerate(plan.sets) for stage in STAGES}
    for run, (n, one, role, call) in enumerate(places, 1):
        lanes = partial(_spans, plan.pools[n], min(one.devices, MOST_LANES), first[n], role.role, call.name, run)
        begins = max([free[n], *(ends[name] for name in inputs.get(call.name, ()) if name in ends)])
        if barriers and call.stage in waited[1:]:
            begins = max(begins, *(stage_end[stage] for stage in waited[: waited.index(call.stage)]))
        if call.name in inputs and (pulled := moved.pop((n, call.stage), 0.0)):
            spans += lanes("transfer", begins, begins + pulled)
            begins += pulled
        end = begins + call.seconds
        spans += lanes(KINDS.get(call.name, "compute"), begins, end)
        free[n] = end
        stage_end[call.stage] = max(stage_end[call.stage], end)
        if call.name in inputs and call.stage in waited:
            ends[call.name] = end
    stage_s, reached = dict[str, float](), 0.0
    for stage, ended in stage_end.items():
        stage_s[stage] = max(0.0, ended - reached)
        reached = max(reached, ended) if stage in waited else 0.0
    return Simulation(plan, tuple(sorted(spans, key=lambda span: (span.start_s, span.rank))), stage_s)


def _position(call: CallPlan, role: RolePlan, order: list[str]) -> tuple[int, int, int]:
    if call.name in order:
        return STAGES.index(call.stage), order.index(call.name), 1
    own = [order.index(c.name) for c in role.calls if c.name in order and c.stage == call.stage]
    return STAGES.index(call.stage), min(own, default=0), 0


def _spans(
    pool: str, lanes: int, first: int, role: str, stage: str, run: int, kind: str, start_s: float, end_s: float
) -> list[Span]:
    return [
        Span(stage=stage, run=run, role=role, pool=pool, kind=kind, rank=rank, device=f"gpu:{first + rank}",
             start_s=start_s, end_s=end_s)
        for rank in range(lanes)
    ]  # fmt: skip
