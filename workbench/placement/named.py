"""The placements that have names, for the roles and the devices that there are."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from workbench.errors import BadInput
from workbench.placement.placement import Placement
from workbench.settings.roles import ROLLOUT


def named_placements(roles: Sequence[str], devices: int) -> dict[str, Placement | BadInput]:
    """By name: all roles colocated, policy and scorers split, each role on its own; or the `BadInput` that says which
    devices or roles are missing.

    roles: those that are placed, the one that gets most devices first; rollout workers are left out: the actor
    generates. devices: all of them are used, as evenly as possible.
    """
    placed = [role for role in roles if role != ROLLOUT]

    def standalone() -> Placement:
        if devices < len(placed):
            raise BadInput(
                f"{len(placed)} roles on {devices} device{'s' if devices > 1 else ''}",
                "each role on its own needs a device for each",
                "give the workbench more devices",
            )
        each, more = divmod(devices, len(placed))
        return Placement.of({role: (each + (n < more), (role,)) for n, role in enumerate(placed)})

    ways: dict[str, Callable[[], Placement]] = {
        "colocate": lambda: Placement.colocate(devices),
        "split": lambda: Placement.split(devices),
        "standalone": standalone,
    }
    found: dict[str, Placement | BadInput] = {}
    for name, way in ways.items():
        try:
            found[name] = way().restrict(placed)
        except BadInput as error:
            found[name] = error
    return found
