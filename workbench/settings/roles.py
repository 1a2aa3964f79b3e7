"""The names of the roles."""

from __future__ import annotations

from workbench.errors import BadInput
from workbench.support.named_fields import remedy_for

ROLES = ("actor", "critic", "reference", "reward", "cost", "cost_critic", "teacher")
# has no model of its own; if a placement has this role, it generates for the actor
ROLLOUT = "rollout"
# has no model and no device; if a placement has this role, its pool is processes for environments
ENVIRONMENT = "environment"
TRAINED_ROLES = ("actor", "critic", "cost_critic")
CRITICS = ("critic", "cost_critic")


def check_role(role: str, *, more: tuple[str, ...] = ()) -> str:
    """Return `role`, or raise `BadInput` if it is not a role or one of `more`."""
    roles = (*ROLES, ROLLOUT, *more)
    if role == ENVIRONMENT and role not in roles:
        raise BadInput(
            f"role {role!r}",
            "it has processes but no model: only a placement can have it",
            "lab.move(lab.placement.with_role('environment', 'environments', devices=4)), or .without('environment')",
        )
    if role not in roles:
        raise BadInput(f"unknown role {role!r}", f"a role is one of {', '.join(roles)}", remedy_for(role, roles, repr))
    return role
