"""`lab.changed()`: which weights the updates changed, and how much of that change generation sees."""

from __future__ import annotations

import warnings

import pandas as pd

from workbench.display.html import bytes_text
from workbench.display.progress import note
from workbench.errors import BadInput
from workbench.stages.runner import StageRunner
from workbench.support.validation import PositiveInt
from workbench.telemetry.syncs import newest

BARELY, LAST = 1e-3, 5  # a share of elements, over the LAST notes; RL's learning rates leave about 0.01 visible


def changed(runner: StageRunner, last: PositiveInt | None = None) -> pd.DataFrame:
    """Return what updates of the actor changed: one row per weight and note, in order. last: how many of the newest
    notes.

    The first call copies the float32 weights to host memory: 4 bytes per parameter, over all ranks together. From then
    on each weight sync adds a note, and so does each call after new updates. `lab.move`, `lab.recover` and all else
    that puts weights back renew the copy: `since` is then not the previous `version`.

    since, version: optimizer steps before and after. elements: the size of the weight, or of its adapter. trained,
    visible: the shares of elements, 0 to 1, whose bits changed in float32, and after rounding to the role's dtype.
    norm: of the change. Warns where less than 0.1 % is visible. A closed workbench, or a kernel that only looks, has
    the notes so far. Raises `BadInput` without an actor whose worker derives from `ActorWorker`.
    """
    actor = runner.groups.by_role.get("actor")
    if actor is None or "watch_weights" not in actor.operations:
        raise BadInput("changed() without an actor that workbench trains", "the actor's worker compares the weights",
                       "open it with an actor whose worker derives from workbench's own")  # fmt: skip
    if runner.ownership.drives and not runner.ownership.closed:
        with runner.isolated("changed"):
            taken = sum(actor.watch_weights())
        if taken:
            note(f"lab.changed(): updates are recorded from now on, with a copy of {bytes_text(taken)} in host memory")
    found = runner.telemetry.changed()
    if doubt := barely_visible(found, actor.spec.dtype):
        warnings.warn(doubt, stacklevel=4)
    return newest(found, last)


def barely_visible(changed: pd.DataFrame, dtype: str | None) -> str:
    """Return a warning where the last updates hardly show in `dtype`, the dtype of generation; "" otherwise."""
    recent = newest(changed, LAST)
    shares = recent[["trained", "visible"]].mul(recent["elements"], axis=0).sum() / max(recent["elements"].sum(), 1)
    if not shares["visible"] < min(BARELY, shares["trained"]):
        return ""
    return (
        f"{100 * shares['visible']:.2g} % of the actor's weights changed in {dtype} in each of the last updates "
        f"(versions {recent['since'].iloc[0]} to {recent['version'].iloc[-1]}), {100 * shares['trained']:.3g} % in "
        "float32: rollouts come from almost the same policy; float32 masters keep the other changes"
    )
