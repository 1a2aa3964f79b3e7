"""`lab.refresh_reference()`: the reference takes over the actor's weights, from host to host."""

from __future__ import annotations

from typing import TYPE_CHECKING

from workbench.dataflow.aside import aside
from workbench.errors import BadInput

if TYPE_CHECKING:
    from workbench.controller import Workbench


def refresh_reference(lab: Workbench) -> None:
    """A batch with a row for each weight: the actor's ranks write its column of weights, the reference's ranks pull it.

    So weights move as rows of any other batch do, and none of them comes here.
    """
    if lab.description.actor_is_reference:
        raise BadInput(
            "refresh_reference() with an adapter", "the reference is the actor without it, and stays so",
            "declare a reference of its own in models=",
        )  # fmt: skip
    for role, operation in (("reference", "take_weights"), ("actor", "share_weights")):
        if role not in lab.groups or operation not in lab.groups[role].operations:
            raise BadInput(
                "refresh_reference() here", f"the workbench needs a {role} with the operation {operation}",
                "open it with a reference, and with workers derived from workbench's own",
            )  # fmt: skip
    with aside(lab, "refresh_reference"):
        names = lab.actor.weight_names()[0]
        lab.reference.take_weights(lab.actor.share_weights(lab.put({"parameter": names})))
    lab.weights["reference"] = lab.weights["actor"]
    lab._save_state()
