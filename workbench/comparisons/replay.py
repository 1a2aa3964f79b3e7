"""`wb.replay`: repeat a run from its log, and compare the metrics."""

from __future__ import annotations

from contextlib import suppress
from functools import reduce
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from workbench.comparisons.diff import diff
from workbench.comparisons.run_folder import RunFolder, run_folder
from workbench.errors import BadInput, WorkbenchError
from workbench.errors.plain_text import shown
from workbench.support.checked_calls import checked_call
from workbench.support.validation import PositiveInt

if TYPE_CHECKING:
    from workbench.algorithms.loop import Algorithm

OF_RUN = ("staleness", "pause_after")  # among the recorded settings of an algorithm: arguments of its `run`


@checked_call("wb.replay")
def replay(
    run: Any, algorithm: Algorithm, *, iterations: PositiveInt | None = None, folder: str = "runs"
) -> pd.DataFrame:
    """Repeat a run from its log: `wb.replay("lab/20261126-101500-000001", wb.PPO(lab, prompts=8))`, on a workbench that
    was opened with that run's settings and has not begun. Returns a frame with a row an iteration.

    Each iteration has the staleness, pauses and settings that it had in that run, so that it draws the same prompts,
    and responses of the same weights. In one process the metrics are equal to the last bit, else within rounding.

    run: a workbench, a run folder, or "NAME/DATE" of `wb.runs(folder)`. algorithm: created with the arguments of the
    run's own. Later changes of its fields, its stages' arguments and `lab.actor.training` come from the log, and are
    made between two iterations. iterations: how many to repeat; None: all. Stages that were called by hand are not
    repeated.

    Columns: same_draws: whether the iteration drew the same prompts and equally old responses from `lab.buffer`.
    largest_difference, of: the largest relative difference of a metric, and that metric; 0: all are equal to the last
    bit. only_here, only_there: metrics that only one of the runs has.
    `frame.attrs["differs"]`: the settings and data in which the two openings differ, as in `wb.diff`. `"left_out"`
    (also printed): changes that are not repeated: assigned values other than numbers and texts, inserted and removed
    stages, edited code, placements. It also names changes in the middle of an iteration: they are made before the next
    one, and those by `once` are not made.

    Raises `BadInput` if the workbench has begun or its training settings were changed, or if the log lacks the first
    iteration or has iterations of another algorithm; `NotFound` if there is no such run.
    """
    if not hasattr(algorithm, "lab"):
        raise BadInput(f"algorithm={shown(algorithm)}", "must be an algorithm", "wb.replay(run, wb.PPO(lab, ...))")
    lab = algorithm.lab
    there, here, title = run_folder(run, folder), run_folder(lab), type(algorithm).__name__
    wanted = there.series()
    if there.folder == here.folder or title not in there.algorithms or wanted.empty:
        known = ", ".join(there.algorithms) or "none"
        raise BadInput(
            f"replay of run {there.name} by {title}",
            f"needs another run, with iterations of {title}; that run has algorithms: {known}",
            "create the algorithm with which it ran",
        )
    assigned = [one["change"] for one in here.changes() if ".training." in one["change"].partition(" ")[0]]
    if lab.iteration or len(lab.buffer) or assigned:
        raise BadInput(
            f"replay in iteration {lab.iteration}" + (f", after {assigned[0]}" if assigned else ""),
            "a replay starts at the beginning of a run",
            "open a workbench with the settings of that run, and replay before anything else",
        )
    # an iteration of stages called by hand, after those of the algorithm, lacks one of its updates
    updates = [wanted.filter(regex=f"^{stage}/") for stage in algorithm.graph().names if stage.startswith("update_")]
    ended = np.logical_and.reduce([columns.notna().any(axis=1) for columns in updates if len(columns.columns)])
    last = int((wanted.index[ended] if np.any(ended) else wanted.index).max())
    last = min(last, iterations or last)
    others = [
        one for one in there.algorithms if one != title and min(there.changed_settings(one), default=(0,))[0] <= last
    ]
    if others or wanted.index.min() > 1:
        raise BadInput(
            f"replay of run {there.name} by {title}",
            f"{others[0]} ran some of its {last} iterations" if others else "it began at another run's checkpoint",
            "replay a run of one algorithm from its first iteration",
        )
    recorded, how, left_out = there.changed_settings(title), dict[str, Any](), list[str]()
    if any("others" not in row for rows in recorded.values() for row, _ in rows):
        raise BadInput(
            f"replay of run {there.name}", "its log lacks the arguments of stages, as in earlier versions",
            "replay a run of this version",
        )  # fmt: skip
    for number in range(1, last + 1):
        for row, changes in recorded.get((number, False), ()):
            how = row["values"]
            left_out += [_in_words(title, *one) for one in changes if not _made(algorithm, *one)]
        inside = recorded.get((number, True), ())
        # the `run` call that generated furthest ahead
        furthest = max([how, *(row["values"] for row, _ in inside)], key=lambda values: values.get("staleness") or 0)
        algorithm.run(1, staleness=furthest.get("staleness") or 0, pause_after=furthest.get("pause_after"))
        for row, changes in inside:
            how = row["values"]
            for part, name, value in changes:
                if name != "staleness":
                    left_out.append(f"{_in_words(title, part, name, value)} in the middle of iteration {number}")
                if part != "once":  # `once` was for that iteration only
                    _made(algorithm, part, name, value)
    if left_out := list(dict.fromkeys(left_out)):
        print(f"not repeated exactly: {', '.join(left_out)}")
    found = diff(there.folder, lab)
    frame = _compared(here, there)
    frame["same_draws"] &= "prompts/token ids" not in found.data.index
    differs = pd.concat([found.settings, found.data])
    frame.attrs |= {"differs": differs[~differs.index.str.endswith(OF_RUN)], "left_out": left_out}
    return frame


def _in_words(title: str, part: str, name: str, value: Any) -> str:
    return {
        "values": f"{title}.{name}={value}", "training": f"lab.{name}.training with {value}", "others": name,
        "replace": f"{title}.{name} with {value}", "once": f"{title}.{name} with {value} once",
    }[part]  # fmt: skip


def _made(algorithm: Algorithm, part: str, name: str, value: Any) -> bool:
    """Make a recorded change; returns whether that was possible."""
    with suppress(WorkbenchError, AttributeError):
        match part:
            case "values" if name not in OF_RUN:
                *path, last = name.split("/")
                target = reduce(getattr, path, algorithm)
                if not isinstance(getattr(target, last), str) and isinstance(value, str):
                    return False  # the log has the name of a function, say
                setattr(target, last, value)
            case "training" if value:
                algorithm.lab.runner.live.retrain(name, value)
            case "replace" | "once":
                getattr(algorithm, part)(name, **value)
        return part != "others"
    return False


def _compared(here: RunFolder, there: RunFolder) -> pd.DataFrame:
    # without stages called by hand, and without counters
    (one, two), rows = (run.series().filter(regex="^(?!evaluate).*/") for run in (here, there)), []
    drawn = [run.draws() for run in (here, there)]
    for number in one.index.intersection(two.index):
        mine, theirs = one.loc[number].dropna(), two.loc[number].dropna()
        both = mine.index.intersection(theirs.index)
        gaps = (mine[both] - theirs[both]).abs() / pd.concat([mine[both].abs(), theirs[both].abs()], axis=1).max(axis=1)
        gaps = gaps.fillna(0.0)  # both are 0
        rows.append({
            "iteration": number,
            "same_draws": drawn[0].get(number) == drawn[1].get(number),
            "largest_difference": float(gaps.max()) if len(gaps) else 0.0,
            "of": gaps.idxmax() if len(gaps) and gaps.max() else "",
            "only_here": sorted(mine.index.difference(both)),
            "only_there": sorted(theirs.index.difference(both)),
        })  # fmt: skip
    return pd.DataFrame(rows).set_index("iteration")
