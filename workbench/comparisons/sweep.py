"""`wb.sweep`: several settings, with several seeds each, one trial after the other, until it is decided."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np

from workbench.backends import registry
from workbench.checks.compare_evaluations import LEVEL, interval
from workbench.checks.evaluation_frame import Evaluation
from workbench.comparisons.trials import Ended, Ledger, TrialKey, check_name
from workbench.display.html import seconds_text, table
from workbench.errors import BadInput, NotFound
from workbench.errors.plain_text import shown
from workbench.launch import arguments
from workbench.session.checkpoint import find_checkpoint
from workbench.support.checked_calls import checked_call
from workbench.support.files import path_of
from workbench.support.fingerprint import code_behind, fingerprint
from workbench.support.validation import PositiveInt, Rule

if TYPE_CHECKING:
    import pandas as pd

    from workbench.controller import Workbench

Train = Annotated[Callable[..., Any], Rule("must be a function", "def train(seed, **settings): ... return a score")]
Arms = Annotated[
    Mapping[str, Mapping[str, Any]],
    Rule("must be settings by name of an arm", 'write {"low": {"kl_coefficient": 0.01}, "high": {...}}'),
]


CAPTION = "arms, the best first; 95 % intervals of Student's t over seeds, those of differences for all pairs together"


@dataclass(frozen=True)
class Sweep:
    """df: a row a trial: arm, seed, score, seconds, run (its name in `wb.runs()`). arms: a row an arm, the best mean
    first: seeds, mean, `low` and `high` of its 95 % interval, `difference` to the best over the seeds that both have
    with its interval, and whether it was `stopped` before its last seed.

    The intervals of differences hold together with a probability of 95 %: their 5 % is shared out over all pairs of
    arms, as which arm is the best is known only afterwards, and over all looks of `early_stop` (Bonferroni)."""

    df: pd.DataFrame
    arms: pd.DataFrame

    def __repr__(self) -> str:
        return "\n".join(_sentence(str(arm), row) for arm, row in self.arms.iterrows())

    def _repr_html_(self) -> str:
        rows = [{"arm": str(arm), **row} for arm, row in self.arms.iterrows()]
        return table(rows, caption=CAPTION, max_rows=len(rows))


@checked_call("wb.sweep")
def sweep(
    name: str, train: Train, arms: Arms, *, seeds: PositiveInt = 3, runs: str = "runs", early_stop: bool = True,
    save_every: PositiveInt | None = None,
) -> Sweep:  # fmt: skip
    """Train with several settings and seeds, one trial after the other: `wb.sweep("kl", train, arms, seeds=3)`.

    train: called as `train(seed=seed, **settings)` for each trial. It opens a workbench, trains, and returns what
    `lab.evaluate` gave, or a number; more is better. Workbenches that it leaves open are closed.
    arms: the settings of each arm by its name, such as `{"low": {"kl_coefficient": 0.01}, "high": {...}}`.
    seeds: 0, 1, ... of each arm; the arms take turns, so that all have the first seed before one has the second.

    What has ended is kept in RUNS/sweeps/NAME.jsonl: the same call in a later kernel makes only what is missing, and
    more seeds or arms go on from there. A second kernel is refused while the first one lives. A trial that did not end
    goes on from its newest checkpoint, where there is one: save_every gives its workbenches automatic ones. A trial
    whose settings or code have changed is made again; its code is train, and what of the notebook train uses by name:
    functions, classes, numbers, texts and settings. Functions of modules, and lists, do not count.

    early_stop: an arm gets no further seed once another one is better, by a paired test over the seeds that both have:
    Student's t, its 5 % shared out over all pairs of arms and all looks (Bonferroni), so that the chance of a wrong
    stop in the whole sweep is at most 5 % where differences are about normal. It takes two seeds at least, and with
    three a difference that is many times its deviation.
    """
    check_name(name)
    _check(arms)
    ledger = Ledger(path_of(runs, "runs").absolute() / "sweeps" / f"{name}.jsonl")
    with ledger.owned():
        return _swept(name, ledger, train, arms, seeds, early_stop, save_every)


def _swept(
    name: str, ledger: Ledger, train: Train, arms: Arms, seeds: int, early_stop: bool, save_every: int | None
) -> Sweep:
    code = code_behind(train)
    keys = {
        (arm, seed): TrialKey(arm, seed, fingerprint((code, dict(settings)))[:16])
        for arm, settings in arms.items() for seed in range(seeds)
    }  # fmt: skip
    if others := ledger.of_other_code(keys):
        print(f"{others} trials of {name} had other settings or another function: they do not count")
    scores: dict[str, list[float]] = {arm: [] for arm in arms}
    rows, stopped = [], dict[str, str]()
    for seed in range(seeds):
        for arm, settings in arms.items():
            if arm in stopped:
                continue
            key = keys[arm, seed]
            ended = ledger.ended(key) or _made(ledger, key, train, settings, save_every)
            scores[arm].append(ended.score)
            rows.append({"arm": arm, "seed": seed, **vars(ended)})
        if early_stop:
            stopped |= beaten(scores, stopped, looks=seeds - 1)
    return _sweep(rows, scores, stopped, seeds, shared_level(len(arms), seeds - 1 if early_stop else 1))


def _check(arms: Mapping[str, Mapping[str, Any]]) -> None:
    if not arms:
        raise BadInput("arms={}", "needs an arm at least", 'write {"usual": {}}')
    for arm, settings in arms.items():
        if "seed" in settings:
            raise BadInput(f"arm {arm!r} with a seed", "each arm gets the seeds 0, 1, ...", "say how many: seeds=")
        if wrong := [setting for setting in settings if not isinstance(setting, str) or not setting.isidentifier()]:
            raise BadInput(f"arm {arm!r} with {shown(wrong[0])}", "settings are arguments of train", "name them so")


def _made(ledger: Ledger, key: TrialKey, train: Train, settings: Mapping[str, Any], save_every: int | None) -> Ended:
    """Make a trial, or its rest."""
    began = time.monotonic()
    print(f"{key.arm}, seed {key.seed}: ", end="", flush=True)
    with _trial(ledger, key, save_every) as labs:
        score = _score(train(seed=key.seed, **settings), key)
    run = f"{labs[-1].run_folder.parent.name}/{labs[-1].run_folder.name}" if labs else ""
    ended = Ended(score, time.monotonic() - began, run)
    ledger.end(key, ended)
    print(f"{score:.4g} in {seconds_text(ended.seconds)}")
    return ended


@contextmanager
def _trial(ledger: Ledger, key: TrialKey, save_every: int | None) -> Iterator[list[Workbench]]:
    """Inside, workbenches are opened as those of a trial; the list of them. Afterwards they are closed."""
    left, labs = ledger.left_behind(key), list[Any]()
    if left:
        print("goes on, ", end="", flush=True)

    def opening(name: str) -> Mapping[str, Any]:
        given: dict[str, Any] = {"save_every": save_every} if save_every is not None else {}
        record = registry.find(name)
        mine = record is not None and Path(record.run_folder) in left  # of the kernel that was killed
        given["if_exists"] = "replace" if mine else "error"
        if not labs and (checkpoint := _newest([folder for folder in left if folder.parent.name == name])):
            given["resume"] = checkpoint
        return given

    def opened(lab: Workbench) -> None:
        labs.append(lab)
        ledger.begun(key, lab.run_folder)

    before, arguments.trial = arguments.trial, arguments.Trial(opening=opening, opened=opened)
    try:
        yield labs
    finally:
        arguments.trial = before
        for lab in labs:
            if not lab.ownership.closed:
                lab.close()


def _newest(folders: list[Path]) -> Path | None:
    """The newest checkpoint in the newest of these run folders that has one."""
    for folder in reversed(folders):
        try:
            return find_checkpoint(folder).folder
        except (NotFound, BadInput):
            continue
    return None


def _score(value: Any, key: TrialKey) -> float:
    """Of an evaluation the mean reward, over its data sets."""
    try:
        score = float(value["reward_mean"].mean() if isinstance(value, Evaluation) else value)
    except (TypeError, ValueError):
        score = math.nan
    if not math.isfinite(score):
        rule = "it returns what lab.evaluate gave, or a finite number; more is better"
        raise BadInput(f"train gave {shown(value)} for {key.arm!r}, seed {key.seed}", rule, "return the score")
    return score


def shared_level(arms: int, looks: int) -> float:
    """The level of one interval with which those of all pairs of arms hold together, at each of the looks."""
    return 1 - (1 - LEVEL) / max(1, arms * (arms - 1) // 2 * looks)


def beaten(scores: Mapping[str, list[float]], stopped: Mapping[str, str], looks: int) -> dict[str, str]:
    """The arms that another one is better than, and which."""
    level = shared_level(len(scores), looks)
    racing = [arm for arm in scores if arm not in stopped]
    found: dict[str, str] = {}
    for one, two in combinations(racing, 2):
        low, high = interval(np.array(scores[one]) - np.array(scores[two]), level)
        if low > 0:
            found.setdefault(two, one)
        elif high < 0:
            found.setdefault(one, two)
    for worse, better in found.items():
        print(f"{worse}: no further seeds, {better} is better")
    return found


def _sweep(
    rows: list[dict[str, Any]], scores: Mapping[str, list[float]], stopped: Mapping[str, str], seeds: int, level: float
) -> Sweep:
    import pandas as pd

    best = max(scores, key=lambda arm: (arm not in stopped, float(np.mean(scores[arm]))))
    found = {}
    for arm, values in scores.items():
        low, high = interval(np.array(values))
        both = min(len(values), len(scores[best]))
        gaps = np.array(values[:both]) - np.array(scores[best][:both])
        ends = interval(gaps, level) if arm != best else (0.0, 0.0)
        found[arm] = {
            "seeds": len(values), "mean": float(np.mean(values)), "low": low, "high": high,
            "difference": float(gaps.mean()), "difference_low": ends[0], "difference_high": ends[1],
            "stopped": arm in stopped and len(values) < seeds,
        }  # fmt: skip
    arms = pd.DataFrame.from_dict(found, orient="index").rename_axis("arm").sort_values("mean", ascending=False)
    return Sweep(pd.DataFrame(rows, columns=["arm", "seed", "score", "seconds", "run"]), arms)


def _sentence(arm: str, row: Any) -> str:
    ends = f" [{row['low']:.4g}, {row['high']:.4g}]" if math.isfinite(row["high"] - row["low"]) else ""
    said = f"{arm}: {row['mean']:.4g}{ends} over {row['seeds']} seeds"
    if row["difference"]:
        low, high = row["difference_low"], row["difference_high"]
        gap = f", {row['difference']:+.4g} to the best"
        said += gap + (f" [{low:+.4g}, {high:+.4g}]" if math.isfinite(high - low) else "")
    return said + (", stopped early" if row["stopped"] else "")
