"""A run made again from its log: the same draws, and how far its metrics are apart."""

from __future__ import annotations

from contextlib import suppress
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

NUMBERS = (bool, int, float)
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
            f"it is another run, which has iterations of such an algorithm; there: {known}",
            "make the algorithm with which it ran",
        )
    assigned = [one["change"] for one in here.changes() if ".training." in one.get("setting", "")]
    if lab.iteration or len(lab.buffer) or assigned:
        raise BadInput(
            f"replay in iteration {lab.iteration}" + (f", after {assigned[0]}" if assigned else ""),
            "a run is made again from its beginning",
            "open a workbench with the settings of that run, and replay before anything else",
        )
    # an iteration that stages by hand began, behind those of the algorithm, lacks one of its updates
    updates = [wanted.filter(regex=f"^{stage}/") for stage in algorithm.graph().names if stage.startswith("update_")]
    ended = np.logical_and.reduce([columns.notna().any(axis=1) for columns in updates if len(columns.columns)])
    last = int((wanted.index[ended] if np.any(ended) else wanted.index).max())
    last = min(last, iterations or last)
    others = [one for one in there.algorithms if one != title and min(there.changed_settings(one), default=0) <= last]
    if others or wanted.index.min() > 1:
        raise BadInput(
            f"replay of run {there.name} by {title}",
            f"{others[0]} had iterations among its {last}" if others else "it went on from a checkpoint of another run",
            "only iterations of one algorithm, from the first on, can be made again",
        )
    settings, how = there.changed_settings(title), dict[str, Any].fromkeys(OF_RUN)
    changes, left_out = _changes(there, algorithm, last)
    for number in range(1, last + 1):
        changed = settings.get(number, {})
        how |= {name: changed[name] for name in OF_RUN if name in changed}
        if number > 1:
            left_out += [
                name for name in changed if name not in OF_RUN and not _assigned(algorithm, name, changed[name])
            ]
        left_out += [one["change"] for one in changes.get(number, ()) if not _repeated(algorithm, one)]
        algorithm.run(1, staleness=how["staleness"] or 0, pause_after=how["pause_after"])
    if left_out:
        print(f"not repeated as it was: {', '.join(left_out)}")
    found = diff(there.folder, lab)
    frame = _compared(here, there)
    frame["same_draws"] &= "prompts/token ids" not in found.data.index
    differs = pd.concat([found.settings, found.data])
    frame.attrs |= {"differs": differs[~differs.index.str.endswith(OF_RUN)], "left_out": left_out}
    return frame


def _assigned(algorithm: Algorithm, name: str, value: Any) -> bool:
    """Assign a recorded setting, such as "clip" or "sampling/temperature"; whether it could be."""
    *path, last = name.split("/")
    target: Any = algorithm
    for part in path:
        target = getattr(target, part, None)
    if not hasattr(target, last) or not (
        value is None or isinstance(value, NUMBERS) or isinstance(getattr(target, last), str)
    ):
        return False
    setattr(target, last, value)
    return True


def _changes(there: RunFolder, algorithm: Algorithm, last: int) -> tuple[dict[int, list[dict[str, Any]]], list[str]]:
    """What else than fields was changed, by the number of the iteration before which it was; and what was changed in
    the middle of an iteration, where stages of it came behind."""
    begun, stages = there.begun(), {*algorithm.graph().names}
    reported = [one for one in there.reported() if one[2] in stages]
    found, inside = dict[int, list[dict[str, Any]]](), list[str]()
    for change in there.changes(fields_too=True):
        at, once = change["time_s"], change.get("setting", "").endswith(" once")
        behind = [(number, counts) for time, number, counts in begun if time >= at]
        since, now, counted = next((one for one in reversed(begun) if one[0] < at), (0.0, 0, False))
        until = min((time for time, _, _ in begun if time >= at), default=np.inf)
        rows = [(time, stage) for time, number, stage in reported if number == now and since < time < until]
        # stages that a cell calls again behind the iteration are none of it
        later = {stage for time, stage in rows if time > at} - {stage for time, stage in rows if time <= at}
        if later and counted and now <= last:
            inside.append(f"{change['change']} in the middle of iteration {now}")
        if once and ((change["setting"].split(".")[1] in later and now) or not (behind and behind[0][1])):
            continue  # its run was in that iteration, or was taken back
        if not change["field"]:
            number = next((number for number, counts in behind if counts), last + 1)
            found.setdefault(number, []).append(change)
    return found, inside


def _repeated(algorithm: Algorithm, change: dict[str, Any]) -> bool:
    """Make a change of a role's settings, "lab.actor.training.learning_rate", or of an argument of a stage,
    "PPO.update_actor.epochs" (with " once" behind it), again; whether it could be."""
    path, _, once = change.get("setting", "").partition(" ")
    if not change.get("exact"):
        return False
    with suppress(WorkbenchError, KeyError):
        match path.split("."):
            case ["lab", role, "training", name]:
                setattr(algorithm.lab.groups[role].training, name, change["after"])
                return True
            case [title, stage, name] if title == type(algorithm).__name__:
                (algorithm.once if once else algorithm.replace)(stage, **{name: change["after"]})
                return True
    return False


def _compared(here: RunFolder, there: RunFolder) -> pd.DataFrame:
    # without what was called by hand, and the columns that count up
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
