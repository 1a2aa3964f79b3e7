"""Attributes of a workbench: errors for an unknown `lab.name`, and for `lab.name = value` that no stage would read."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from workbench.errors import BadInput
from workbench.errors.plain_text import shown
from workbench.placement import ROLLOUT
from workbench.stages.group import GroupOperation
from workbench.support.named_fields import remedy_for
from workbench.workers.roles import ROLE_WORKERS

_OWN = ("attached", "stays")  # attributes that opening and scripts set
_REMEDIES = {
    **{role: f"declare a role in models= of wb.open, or add it: lab.add({role!r}, ...)" for role in ROLE_WORKERS},
    "prompts": "for other prompts open another workbench: wb.open(..., prompts=source); pass held-out ones to "
    "lab.evaluate(source); lab.prompts.order = function chooses among the present ones",
    "training": "assign a role's: lab.actor.training.learning_rate = 1e-6, or lab.actor.training = wb.Training(...)",
    "generation": "set it when the workbench opens: wb.open(..., generation=wb.Generation(...))",
    "sampling": "pass it to a call or an algorithm: wb.PPO(lab, sampling=wb.Sampling(temperature=0.7))",
    "reward": "declare a role in models= of wb.open, or add it: lab.add('reward', function)",
    "seed": "set it when the workbench opens: wb.open(..., seed=1)",
    "placement": "move to it: lab.move(placement)",
    "name": "set it when the workbench opens: wb.open('name', ...)",
}


class AdvantagesOperation:
    """`lab.compute_advantages`. A descriptor, not a property: for a property, `?` shows no arguments."""

    def __get__(self, lab: Any, kind: type) -> GroupOperation:
        return self if lab is None else lab.runner.groups.compute_advantages  # type: ignore[return-value]


def no_attribute(name: str, roles: Collection[str], known: Collection[str]) -> AttributeError:
    """Return the error for an unknown `lab.name`. known: the names that exist."""
    if name == ROLLOUT:
        rule = "the actor generates. Put 'rollout' into a pool, or lab.add('rollout', pool=...)"
        return AttributeError(f"this workbench has no rollout workers: {rule}")
    if name in ROLE_WORKERS:
        remedy = f"Declare it in models=, or lab.add({name!r}, ...)"
        return AttributeError(f"this workbench has no {name}; it has {', '.join(roles)}. {remedy}")
    near = remedy_for(name, [*roles, *(one for one in known if not one.startswith("_"))], str)
    return AttributeError(f"a Workbench has no attribute {name!r}" + (f": {near}" if near else ""))


def set_attribute(lab: Any, name: str, value: Any) -> None:
    """Carry out `lab.name = value`. Accepts every name while the workbench is being made; afterwards only names with a
    setter and names that begin with an underscore. Raises `BadInput` for all others."""
    setter = getattr(getattr(type(lab), name, None), "fset", None)
    if "prompts" in vars(lab) and not (name.startswith("_") or name in _OWN or setter is not None):
        known = [one for one in dir(lab) if not one.startswith("_")]
        remedy = _REMEDIES.get(name, "") or ("" if name in known else remedy_for(name, known, str))
        remedy = remedy or "keep your own values in variables"
        raise BadInput(
            f"lab.{name} = {shown(value)}", "a workbench has no such setting: no stage would read it", remedy
        )
    object.__setattr__(lab, name, value)
