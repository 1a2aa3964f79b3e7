"""Repeat a run from its log: the same draws, and how far the metrics differ."""

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
    """Make a run again from its log: as many iterations, each with the staleness, pauses and settings that it had then,
    so that each draws the same prompts, answered by the same weights. In one process the metrics have the same bits; in
    others they are the same within rounding. A frame with a row an iteration:

    same_draws: whether it drew the same prompts from `lab.buffer`, answered by equally old weights. largest_difference,
    of: of its metrics, relative to the larger value; 0 where all have the same bits. only_here, only_there: names of
    metrics of one of the runs.
    `frame.attrs["differs"]`: settings and data of the two openings that are not the same, as in `wb.diff`;
    `"left_out"`: what was changed on the way and is not repeated, which is also printed: what was assigned something
    else than a number or a text, stages that were put in or left out, edited code, placements. A change in the middle
    of an iteration is named too: it is made before the next one, but for `once`, which is not.

        lab = wb.open(...)  # as that run was opened
        wb.replay("lab/20261126-101500-000001", wb.PPO(lab, prompts=8))

    run: a workbench, a run folder, or "NAME/DATE" of `wb.runs(folder)`. algorithm: of a workbench at its beginning,
    made as the run's own was; what was changed later, its fields, arguments of its stages or `lab.actor.training`, is
    taken from the log, between two iterations. iterations: only so many.
    Stages that were called by hand are not repeated. Raises `BadInput` where the workbench is not at its beginning, or
    its training settings were assigned, or the log has not its first iteration, or iterations of other algorithms, and
    `NotFound` for no run.
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
                if part != "once":  # which was over then
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
                    return False  # it stands for something else
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
