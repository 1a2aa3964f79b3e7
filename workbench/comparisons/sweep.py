"""`wb.sweep`: compare several settings, with several seeds each; trials run one after the other or side by side."""

from __future__ import annotations

import ctypes
import inspect
import json
import math
import os
import pickle
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any
from urllib.parse import quote

import numpy as np
import pandas as pd
from filelock import FileLock, Timeout

from workbench.backends import registry
from workbench.checks.compare_evaluations import LEVEL, Evaluation, interval
from workbench.display.html import seconds_text, table
from workbench.errors import BadInput, NotFound, StageError
from workbench.errors.plain_text import shown
from workbench.launch import arguments
from workbench.session.checkpoint import find_checkpoint
from workbench.support import files
from workbench.support.calls.pickling import by_value, pickled
from workbench.support.checked_calls import checked_call
from workbench.support.files import path_of
from workbench.support.fingerprint import code_behind, fingerprint
from workbench.support.machine import computing_threads, read_gpus
from workbench.support.replaced import replaced
from workbench.support.validation import PositiveInt, Rule
from workbench.telemetry.store import json_rows

if TYPE_CHECKING:
    from workbench.controller import Workbench


@dataclass(frozen=True)
class TrialKey:
    """arm, seed; digest: of the arm's settings and of the training function, so that trials of other
    code do not count."""

    arm: str
    seed: int
    digest: str


@dataclass(frozen=True)
class Ended:
    """A finished trial. score: its result. run: the name of its newest run folder, "" for none."""

    score: float
    seconds: float
    run: str


class Ledger:
    """The trials of one sweep, in an append-only file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @contextmanager
    def owned(self) -> Iterator[None]:
        """Lock the file against other kernels. Raises `BadInput` while another kernel holds the lock; a lock ends with
        its kernel."""
        files.private_folder(self.path.parent)
        try:
            held = FileLock(self.path.with_suffix(".lock"), timeout=0).acquire()
        except Timeout:
            name = self.path.stem
            rule = "another kernel, or another cell of this one, is running its trials"
            raise BadInput(f"wb.sweep({name!r})", rule, "wait for it or stop it, or choose another name") from None
        with held:
            yield

    def begun(self, key: TrialKey, run_folder: Path) -> None:
        self._append({"event": "begun", "folder": str(run_folder)}, key)

    def end(self, key: TrialKey, ended: Ended) -> None:
        self._append({"event": "ended", **vars(ended)}, key)

    def ended(self, key: TrialKey) -> Ended | None:
        rows = [row for row in self._rows(key) if row["event"] == "ended"]
        return Ended(rows[-1]["score"], rows[-1]["seconds"], rows[-1]["run"]) if rows else None

    def left_behind(self, key: TrialKey) -> list[Path]:
        """The run folders of a trial that has begun and not finished, oldest first."""
        return [Path(row["folder"]) for row in self._rows(key) if row["event"] == "begun"]

    def of_other_code(self, keys: Mapping[tuple[str, int], TrialKey]) -> int:
        """The number of finished trials of these arms and seeds whose settings or function were different."""
        found = {(row["arm"], row["seed"], row["digest"]) for row in self._all() if row["event"] == "ended"}
        ours = {(key.arm, key.seed, key.digest) for key in keys.values()}
        return sum((arm, seed) in keys for arm, seed, _ in found - ours)

    def _rows(self, key: TrialKey) -> list[dict[str, Any]]:
        return [row for row in self._all() if vars(key).items() <= row.items()]

    def _all(self) -> list[dict[str, Any]]:
        try:
            return json_rows(files.read_bytes(self.path))
        except FileNotFoundError:
            return []

    def _append(self, row: Mapping[str, Any], key: TrialKey) -> None:
        files.private_folder(self.path.parent)
        line = json.dumps({"time_s": time.time(), **vars(key), **row}).encode()
        with files.disk_errors(self.path, len(line)):
            descriptor = files.open_to_append(self.path)
            try:
                os.write(descriptor, b"\n" + line + b"\n")
                os.fsync(descriptor)
            finally:
                os.close(descriptor)


def check_name(name: str) -> None:
    """Raise `BadInput` unless the sweep's name can be a file name."""
    if not name or name.startswith(".") or any(c in name for c in "/\\\0") or len(name.encode()) > 200:
        raise BadInput(f"name={name!r}", "must be a file name: no slash, and no dot in front", 'such as "kl"')


Train = Annotated[Callable[..., Any], Rule("must be a function", "def train(seed, **settings): ... return a score")]
Arms = Annotated[
    Mapping[str, Mapping[str, Any]],
    Rule("must map names of arms to settings", 'write {"low": {"kl_coefficient": 0.01}, "high": {...}}'),
]


CAPTION = "arms, best first; 95 % intervals of Student's t over seeds; those of differences hold for all pairs together"


@dataclass(frozen=True)
class Sweep:
    """df: a row a trial: arm, seed, score, seconds, run (its name in `wb.runs()`). arms: a row an arm, the best mean
    first: seeds, mean, `low` and `high` of its 95 % interval, `difference` to the best arm over the seeds that both
    have with its interval, and whether it was `stopped` before its last seed.

    All intervals of differences hold together with a probability of 95 %: their 5 % is divided among all pairs of arms,
    because the best arm is known only afterwards, and among all looks of `early_stop` (Bonferroni).
    """

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
    save_every: PositiveInt | None = None, at_once: PositiveInt = 1,
) -> Sweep:  # fmt: skip
    """Train with several settings and seeds, one trial after the other: `wb.sweep("kl", train, arms, seeds=3)`.

    train: called as `train(seed=seed, **settings)` for each trial. It opens a workbench, trains, and returns the result
    of `lab.evaluate`, or a number; more is better. Workbenches that it leaves open are closed.
    arms: the settings of each arm by its name, such as `{"low": {"kl_coefficient": 0.01}, "high": {...}}`.
    seeds: 0, 1, ... of each arm; all arms run the first seed before any arm runs the second.

    Finished trials are kept in RUNS/sweeps/NAME.jsonl: the same call in a later kernel runs only the missing trials,
    and seeds or arms can be added. A second kernel is refused while the first one lives. A trial whose settings or code
    have changed runs again; its code is train, with the functions, classes, numbers, texts and settings of the notebook
    that train uses by name. Functions of modules, and lists, do not count.

    save_every: iterations between a trial's automatic checkpoints; an unfinished trial continues from its newest one.

    early_stop: an arm gets no further seed once another arm is better, by a paired test over the seeds that both have:
    Student's t, with its 5 % divided among all pairs of arms and all looks (Bonferroni), so that the chance of a wrong
    stop in the whole sweep is at most 5 % if differences are about normal. It needs at least two seeds, and with three
    a difference that is many times its deviation.

    at_once: the number of trials of a seed that run side by side, each in its own process with an equal share of this
    machine's GPUs, or of its cores if it has none; its output goes to RUNS/sweeps/NAME/ARM-SEED.log. For workbenches on
    Ray the cluster assigns the devices. Workbenches of parallel trials get names of their own.
    """
    check_name(name)
    _check(train, arms)
    if at_once > 1:
        pickled(train, ("each trial runs in a process of its own", "create it inside train, or leave at_once out"))
    ledger = Ledger(path_of(runs, "runs").absolute() / "sweeps" / f"{name}.jsonl")
    code = code_behind(train)
    keys = {
        (arm, seed): TrialKey(arm, seed, fingerprint((code, dict(settings)))[:16])
        for arm, settings in arms.items() for seed in range(seeds)
    }  # fmt: skip
    with ledger.owned():
        if others := ledger.of_other_code(keys):
            print(f"{others} trials of {name} had other settings or another function: they do not count")
        scores: dict[str, list[float]] = {arm: [] for arm in arms}
        rows, stopped = [], dict[str, str]()
        for seed in range(seeds):
            racing = {arm: settings for arm, settings in arms.items() if arm not in stopped}
            if at_once > 1:
                missing = {key: racing[arm] for arm in racing if not ledger.ended(key := keys[arm, seed])}
                _side_by_side(ledger, missing, train, save_every, at_once)
            for arm, settings in racing.items():
                key = keys[arm, seed]
                ended = ledger.ended(key) or _made(ledger, key, train, settings, save_every)
                scores[arm].append(ended.score)
                rows.append({"arm": arm, "seed": seed, **vars(ended)})
            if early_stop:
                stopped |= beaten(scores, stopped, looks=seeds - 1)
    return _sweep(rows, scores, stopped, seeds, shared_level(len(arms), seeds - 1 if early_stop else 1))


def _check(train: Callable[..., Any], arms: Mapping[str, Mapping[str, Any]]) -> None:
    if not arms:
        raise BadInput("arms={}", "needs at least one arm", 'write {"usual": {}}')
    for arm, settings in arms.items():
        if "seed" in settings:
            raise BadInput(f"arm {arm!r} with a seed", "each arm gets the seeds 0, 1, ...", "give their number: seeds=")
        if wrong := [setting for setting in settings if not isinstance(setting, str) or not setting.isidentifier()]:
            raise BadInput(f"arm {arm!r} with {shown(wrong[0])}", "settings are arguments of train", "rename it")
        try:
            inspect.signature(train).bind(seed=0, **settings)
        except TypeError as error:
            called = f"train({', '.join(['seed=0', *(f'{name}={shown(value)}' for name, value in settings.items())])})"
            raise BadInput(
                f"arm {arm!r}: {called}", str(error), "give arguments of train, which also takes seed"
            ) from None


def _made(ledger: Ledger, key: TrialKey, train: Train, settings: Mapping[str, Any], save_every: int | None) -> Ended:
    began = time.monotonic()
    print(f"{key.arm}, seed {key.seed}: ", end="", flush=True)
    with _trial(ledger, key, save_every) as labs:
        score = _score(train(seed=key.seed, **settings), key)
    run = f"{labs[-1].run_folder.parent.name}/{labs[-1].run_folder.name}" if labs else ""
    ended = Ended(score, time.monotonic() - began, run)
    ledger.end(key, ended)
    print(f"{score:.4g} in {seconds_text(ended.seconds)}")
    return ended


def _side_by_side(
    ledger: Ledger, trials: Mapping[TrialKey, Mapping[str, Any]], train: Train, save_every: int | None, at_once: int
) -> None:
    """Run trials in processes, `at_once` at a time. Raises `StageError` if one failed; the others are stopped."""
    waiting, slots, running = deque(trials), [*range(at_once)], dict[TrialKey, tuple[int, subprocess.Popen[bytes]]]()
    folder = ledger.path.with_suffix("")
    files.private_folder(folder)
    places = [place for place in sys.path if isinstance(place, str)]  # Python leaves out others, such as Paths
    code = f"import sys; sys.path[:] = {places!r}; from {__name__} import _in_process; _in_process()"
    try:
        while waiting or running:
            while waiting and slots:
                key, slot = waiting.popleft(), slots.pop(0)
                sent = by_value((ledger.path, key, train, dict(trials[key]), save_every))
                with _log(folder, key).open("wb") as log:
                    process = subprocess.Popen(
                        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=log, stderr=log,
                        start_new_session=True, env={**os.environ, **_share(slot, at_once)},
                    )  # fmt: skip
                running[key] = slot, process
                assert process.stdin is not None
                with suppress(BrokenPipeError), process.stdin as pipe:  # one that has ended is seen below
                    pipe.write(sent)
            time.sleep(0.1)
            for key, (slot, process) in list(running.items()):
                if process.poll() is None:
                    continue
                del running[key]
                slots.append(slot)
                if (ended := ledger.ended(key)) is None:
                    path = _log(folder, key)
                    last = path.read_text(errors="replace").strip().rpartition("\n")[2]
                    rule = f"its process ended without a score: {shown(last or process.returncode, 400)}"
                    raise StageError(f"trial {key.arm}, seed {key.seed}", rule, f"see {path}")
                print(f"{key.arm}, seed {key.seed}: {ended.score:.4g} in {seconds_text(ended.seconds)}")
    finally:
        for _, process in running.values():
            process.send_signal(signal.SIGINT)  # it closes its workbenches
        for _, process in running.values():
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _log(folder: Path, key: TrialKey) -> Path:
    return folder / f"{quote(key.arm, safe='')}-{key.seed}.log"


def _share(slot: int, of: int) -> dict[str, str]:
    """The environment variables that give a process its share of this machine's devices."""
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    gpus = [gpu for gpu in named.split(",") if gpu] if named is not None else [str(n) for n in range(len(read_gpus()))]
    if not gpus:
        return {"OMP_NUM_THREADS": str(computing_threads(of))}
    return {"CUDA_VISIBLE_DEVICES": ",".join(gpus[slot::of] or [gpus[slot % len(gpus)]])}


def _in_process() -> None:
    """Run the trial that is read from standard input. It is interrupted if the parent process ends."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a script in the background ignores it
    ctypes.CDLL(None).prctl(1, signal.SIGINT)  # PR_SET_PDEATHSIG
    path, key, train, settings, save_every = pickle.loads(sys.stdin.buffer.read())
    _made(Ledger(path), key, train, settings, save_every)


@contextmanager
def _trial(ledger: Ledger, key: TrialKey, save_every: int | None) -> Iterator[list[Workbench]]:
    """Open workbenches as those of a trial, inside this block; yields their list, and closes them at the end."""
    left, labs = ledger.left_behind(key), list[Any]()
    if left:
        print("continues, ", end="", flush=True)

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

    try:
        with replaced(arguments, "trial", arguments.Trial(opening=opening, opened=opened)):
            yield labs
    finally:
        for lab in labs:
            if not lab.ownership.closed:
                lab.close()


def _newest(folders: list[Path]) -> Path | None:
    """The newest checkpoint in the newest of these run folders that has any."""
    for folder in reversed(folders):
        try:
            return find_checkpoint(folder).folder
        except (NotFound, BadInput):
            continue
    return None


def _score(value: Any, key: TrialKey) -> float:
    """The score; for an evaluation, the mean reward over its data sets."""
    try:
        score = float(value["reward_mean"].mean() if isinstance(value, Evaluation) else value)
    except (TypeError, ValueError):
        score = math.nan
    if not math.isfinite(score):
        rule = "it must return a result of lab.evaluate, or a finite number; higher is better"
        raise BadInput(f"train gave {shown(value)} for {key.arm!r}, seed {key.seed}", rule, "return the score")
    return score


def shared_level(arms: int, looks: int) -> float:
    """The confidence level of one interval, such that those of all pairs of arms hold together at each of the looks."""
    return 1 - (1 - LEVEL) / max(1, arms * (arms - 1) // 2 * looks)


def beaten(scores: Mapping[str, list[float]], stopped: Mapping[str, str], looks: int) -> dict[str, str]:
    """The arms that another arm beats, and which arm that is."""
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
