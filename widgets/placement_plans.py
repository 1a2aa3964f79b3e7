"""The placements that the editor offers: those with a name, and the quickest that the mapping search finds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from workbench.errors import BadInput, WorkbenchError
from workbench.placement import Placement
from workbench.placement.named import named_placements

SUGGESTED = ("quickest", "second", "third")


@dataclass(frozen=True)
class Plan:
    """A placement on offer. placement: None where there is none of that name here; why: the reason then, or of a
    suggestion what decides its time. predicted_s: of an iteration; None where it is not predicted, and
    unpredicted says why."""

    name: str
    placement: Placement | None
    why: str = ""
    predicted_s: float | None = None
    unpredicted: str = ""


def plans(lab: Any) -> list[Plan]:
    """For a workbench's roles and devices, in the order in which they are shown."""
    description = lab.description
    roles = [description.lead, *(role for role in lab.placement.roles if role != description.lead)]
    devices = 1 if description.backend == "inline" else description.devices or lab.placement.devices
    found = []
    for name, placement in named_placements(roles, devices).items():
        if isinstance(placement, BadInput):
            found.append(Plan(name, None, f"{placement.value}: {placement.rule}"))
        else:
            seconds, unpredicted = _predicted(lab, placement)
            found.append(Plan(name, placement, predicted_s=seconds, unpredicted=unpredicted))
    return found + suggested(lab, devices)


def suggested(lab: Any, devices: int) -> list[Plan]:
    """The quickest placements by the cost model that is fitted to this workbench; none before `lab.calibrate()`."""
    if lab.placement.has_rollout:  # the search does not place rollout workers
        return []
    try:
        quickest = lab.suggest(devices=devices, top=len(SUGGESTED))
    except WorkbenchError:
        return []
    # by the same simulation as the others: calls of different pools overlap, which the search does not count on
    found = [(plan, _predicted(lab, plan.placement)[0]) for plan in quickest]
    found.sort(key=lambda pair: pair[1] or 0.0)
    return [
        Plan(name, plan.placement, plan.why, predicted_s)
        for name, (plan, predicted_s) in zip(SUGGESTED, found, strict=False)
    ]


def _predicted(lab: Any, placement: Placement) -> tuple[float | None, str]:
    """Seconds of an iteration, or why they are not known."""
    try:
        return float(lab.predict(placement).iteration_s), ""
    except WorkbenchError as error:
        return None, str(error)
