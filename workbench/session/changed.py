"""`lab.changed()`: what updates changed in the trainer's weights, and how much of that generation sees."""

from __future__ import annotations

import warnings

import pandas as pd

from workbench.display.html import bytes_text
from workbench.display.progress import note
from workbench.errors import BadInput
from workbench.stages.runner import StageRunner
from workbench.support.validation import PositiveInt
from workbench.telemetry.syncs import newest

BARELY, LAST = 1e-3, 5  # a share of elements, of so many notes; the learning rates of RL leave about 0.01 visible


def changed(runner: StageRunner, last: PositiveInt | None = None) -> pd.DataFrame:
    """What updates of the actor changed: one row a weight and note, in order. last: only so many of the newest notes.

    The first call takes a copy of the float32 weights, in host memory: 4 bytes a parameter, over all ranks together.
    From then on each weight sync notes, and each call where updates ran since. After `lab.move`, `lab.recover` and what
    else puts weights back the copy is taken anew: `since` is then not the `version` before it.

    since, version: optimizer steps before and after. elements: of the weight; with an adapter, of the adapter's.
    trained, visible: shares of them, 0 to 1, whose bits changed in float32, and after rounding to the role's dtype.
    norm: of the change. Warns where less than 0.1 % is visible. A closed workbench, and a kernel that only looks, give
    what was noted. Raises `BadInput` without an actor that workbench trains.
    """
    actor = runner.groups.by_role.get("actor")
    if actor is None or "watch_weights" not in actor.operations:
        raise BadInput("changed() without an actor that workbench trains", "its worker compares the weights",
                       "open it with an actor whose worker derives from workbench's own")  # fmt: skip
    if runner.ownership.drives and not runner.ownership.closed:
        with runner.isolated("changed"):
            taken = sum(actor.watch_weights())
        if taken:
            note(f"lab.changed(): updates are noted from here on, against a copy of {bytes_text(taken)} in host memory")
    found = runner.telemetry.changed()
    if doubt := barely_visible(found, actor.spec.dtype):
        warnings.warn(doubt, stacklevel=4)
    return newest(found, last)


def barely_visible(changed: pd.DataFrame, dtype: str | None) -> str:
    """What to warn of where the last updates are hardly seen in `dtype`, the one of generation; else ""."""
    recent = newest(changed, LAST)
    shares = recent[["trained", "visible"]].mul(recent["elements"], axis=0).sum() / max(recent["elements"].sum(), 1)
    if not shares["visible"] < min(BARELY, shares["trained"]):
        return ""
    return (
        f"{100 * shares['visible']:.2g} % of the actor's weights changed in {dtype} in each of the last updates "
        f"(versions {recent['since'].iloc[0]} to {recent['version'].iloc[-1]}), {100 * shares['trained']:.3g} % in "
        "float32: rollouts come from almost the same policy; float32 masters keep the rest"
    )
