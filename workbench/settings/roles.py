"""The names of the roles."""

from __future__ import annotations

from workbench.errors import BadInput
from workbench.support.named_fields import meant

ROLES = ("actor", "critic", "reference", "reward", "cost", "cost_critic", "teacher")
# has no model of its own: it generates for the actor, where a placement names it
ROLLOUT = "rollout"
# has no model and no device: processes for environments, where a placement names it
ENVIRONMENT = "environment"
TRAINED_ROLES = ("actor", "critic", "cost_critic")
CRITICS = ("critic", "cost_critic")


def check_role(role: str, *, more: tuple[str, ...] = ()) -> str:
    """Return `role`, or raise `BadInput` naming the roles there are, and `more`."""
    roles = (*ROLES, ROLLOUT, *more)
    if role == ENVIRONMENT and role not in roles:
        raise BadInput(
            f"role {role!r}",
            "it has processes and no model: only pools of placements have it",
            "lab.move(lab.placement.with_role('environment', 'environments', devices=4)), or .without('environment')",
        )
    if role not in roles:
        raise BadInput(f"unknown role {role!r}", f"a role is one of {', '.join(roles)}", meant(role, roles, repr))
    return role
