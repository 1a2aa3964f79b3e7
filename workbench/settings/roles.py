"""The names of the roles."""

from __future__ import annotations

from workbench.errors import BadInput

ROLES = ("actor", "critic", "reference", "reward", "cost", "cost_critic", "teacher")
# has no model of its own: it generates for the actor, where a placement names it
ROLLOUT = "rollout"
TRAINED_ROLES = ("actor", "critic", "cost_critic")
CRITICS = ("critic", "cost_critic")


def check_role(role: str) -> str:
    """Return `role`, or raise `BadInput` naming the roles there are."""
    if role not in (*ROLES, ROLLOUT):
        raise BadInput(f"unknown role {role!r}", f"a role is one of {', '.join((*ROLES, ROLLOUT))}")
    return role
