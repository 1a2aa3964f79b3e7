"""The placements that the editor offers. What ranks placements for a workbench adds its plans to `plans`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from workbench.errors import BadInput
from workbench.placement import Placement
from workbench.placement.named import named_placements


@dataclass(frozen=True)
class Plan:
    """A placement on offer. placement: None where there is none of that name here; why: the reason then."""

    name: str
    placement: Placement | None
    why: str = ""


def plans(lab: Any) -> list[Plan]:
    """For a workbench's roles and devices, in the order in which they are shown."""
    description = lab.description
    roles = [description.lead, *(role for role in lab.placement.roles if role != description.lead)]
    devices = 1 if description.backend == "inline" else description.devices or lab.placement.devices
    named = named_placements(roles, devices)
    return [
        Plan(name, None, f"{found.value}: {found.rule}") if isinstance(found, BadInput) else Plan(name, found)
        for name, found in named.items()
    ]
