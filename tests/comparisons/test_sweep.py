"""`wb.sweep`: trials one after the other, a later kernel that goes on, and arms that are stopped."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import workbench as wb
from tests.cases import TINY, stored, tiny_lab, vowels
from tests.expected import expect_error
from workbench.checks.compare_evaluations import interval
from workbench.comparisons.sweep import Sweep, beaten, shared_level
from workbench.errors import BadInput, StageError

NOISE = [0.0, 0.02, -0.01, 0.015, -0.02]


class Made:
    """Which trials were made."""

    def __init__(self) -> None:
        self.calls: list[tuple[float, int]] = []

    def train(self) -> Any:
        calls = self.calls

        def train(seed: int, level: float, wobble: float = 0.0) -> float:
            calls.append((level, seed))
            return level + 10 * NOISE[seed] + wobble * NOISE[-seed]

        return train


def test_arms_take_turns_and_are_compared_by_seed(tmp_path: Path) -> None:
    made = Made()
    arms = {"low": {"level": 1.0}, "high": {"level": 1.1}}
    found = wb.sweep("levels", made.train(), arms, seeds=3, runs=str(tmp_path))
    assert made.calls == [(1.0, 0), (1.1, 0), (1.0, 1), (1.1, 1), (1.0, 2), (1.1, 2)]
    assert list(found.arms.index) == ["high", "low"]
    assert found.arms.loc["low", "difference"] == pytest.approx(-0.1)
    assert not found.arms["stopped"].any()  # three equal differences say nothing of their deviation
    assert "low: 1.033" in repr(found) and "to the best" in repr(found)


def test_an_arm_that_is_worse_gets_no_further_seeds(tmp_path: Path) -> None:
    made = Made()
    arms = {"bad": {"level": 0.0}, "good": {"level": 9.0, "wobble": 1.0}}
    found = wb.sweep("clear", made.train(), arms, seeds=5, runs=str(tmp_path))
    bad = [seed for level, seed in made.calls if level == 0.0]
    assert len(bad) < 5 and len(made.calls) - len(bad) == 5 and found.arms.loc["bad", "stopped"]
    everything = wb.sweep("all", Made().train(), arms, seeds=5, runs=str(tmp_path), early_stop=False)
    assert len(everything.df) == 10


def test_no_difference_stops_nothing_in_95_of_100_sweeps(tmp_path: Path) -> None:
    draws, wrong = np.random.default_rng(3), 0
    for _ in range(400):
        scores = {arm: draws.normal(size=5).tolist() for arm in "abc"}
        stopped: dict[str, str] = {}
        for seeds in range(2, 6):
            stopped |= beaten({arm: values[:seeds] for arm, values in scores.items()}, stopped, looks=4)
        wrong += bool(stopped)
    assert wrong <= 0.05 * 400 + 2 * (0.05 * 0.95 * 400) ** 0.5


STOPPED: list[tuple[float, int]] = []  # the trials that are interrupted
CALLED: list[tuple[float, int]] = []


def stoppable(seed: int, level: float) -> float:
    if (level, seed) in STOPPED:
        raise KeyboardInterrupt
    CALLED.append((level, seed))
    return level + NOISE[seed]


def test_a_sweep_goes_on_where_it_was_interrupted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arms: dict[str, Any] = {"a": {"level": 1.0}, "b": {"level": 2.0}}
    STOPPED[:], CALLED[:] = [(2.0, 1)], []
    with pytest.raises(KeyboardInterrupt):
        wb.sweep("s", stoppable, arms, seeds=2, runs=str(tmp_path))
    with (tmp_path / "sweeps" / "s.jsonl").open("ab") as file:
        file.write(b'{"event": "ended", "arm": "b", "se')  # of a kernel that was killed
    STOPPED.clear()
    found = wb.sweep("s", stoppable, arms, seeds=2, runs=str(tmp_path))
    assert CALLED == [(1.0, 0), (2.0, 0), (1.0, 1), (2.0, 1)] and len(found.df) == 4
    wb.sweep("s", stoppable, {**arms, "c": {"level": 3.0}}, seeds=2, runs=str(tmp_path))
    assert CALLED[4:] == [(3.0, 0), (3.0, 1)]
    capsys.readouterr()
    wb.sweep("s", stoppable, {**arms, "b": {"level": 2.5}}, seeds=2, runs=str(tmp_path))
    assert CALLED[6:] == [(2.5, 0), (2.5, 1)] and "2 trials of s had other settings" in capsys.readouterr().out


def test_a_trial_is_made_again_where_what_it_uses_has_changed(tmp_path: Path) -> None:
    cell: dict[str, Any] = {"__name__": "__main__", "wb": wb, "made": []}
    exec("RATE, HOW = 1.0, wb.Sampling(max_new_tokens=4)\ndef scaled(x):\n    return x * RATE", cell)
    exec("def train(seed):\n    made.append(seed)\n    return scaled(1.0) + HOW.max_new_tokens", cell)
    for change, score in (("", 5.0), ("RATE = 2.0", 6.0), ("HOW = wb.Sampling(max_new_tokens=8)", 10.0),
                          ("def scaled(x):\n    return -x", 7.0)):  # fmt: skip
        exec(change, cell)
        for _ in range(2):
            found = wb.sweep("s", cell["train"], {"a": {}}, seeds=1, runs=str(tmp_path))
            assert found.df["score"].tolist() == [score]
    assert cell["made"] == [0] * 4


def test_trials_side_by_side_have_the_scores_of_trials_one_after_the_other(tmp_path: Path) -> None:
    """In processes, each of which waits for the others; one that fails says why, and stops the others, also where a
    script in the background began them, which ignores interrupts."""
    folder = str(tmp_path)

    def train(seed: int, arm: str, others: str) -> Any:
        mine, waited = Path(folder, f"{arm}{seed}"), 0
        mine.touch()
        while not all(Path(folder, f"{other}{seed}").exists() for other in others):
            time.sleep(0.05)
            waited += 1
            assert waited < 1200, "it is alone"
        if arm == "c":
            raise ValueError("no such thing")
        with tiny_lab(f"side-{arm}", Path(folder), backend="inline", models={"actor": TINY, "reward": vowels}) as lab:
            columns = ("prompt_ids", "response_ids", "response_mask")
            lab.actor.update_sft(lab.put({name: stored(2)[name] for name in columns}))
            return lab.evaluate("arithmetic", n=2, samples=2, sampling=wb.Sampling(max_new_tokens=6))

    together = {arm: {"arm": arm, "others": "ab"} for arm in "ab"}
    found = wb.sweep("side", train, together, seeds=1, runs=folder, at_once=2)
    after = wb.sweep("after", train, together, seeds=1, runs=folder)
    assert found.df["score"].tolist() == after.df["score"].tolist()
    assert found.df["run"].str.startswith("side-").all() and (tmp_path / "sweeps/side/a-0.log").exists()
    stopping = {"c": {"arm": "c", "others": "d"}, "d": {"arm": "d", "others": "cz"}}
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with expect_error(StageError, value="trial c, seed 0", rule="ValueError: no such thing", remedy="c-0.log"):
            wb.sweep("fails", train, stopping, seeds=1, runs=folder, at_once=2)
    finally:
        signal.signal(signal.SIGINT, before)
    assert "KeyboardInterrupt" in (tmp_path / "sweeps/fails/d-0.log").read_text()


def test_a_score_that_is_no_number_is_refused(tmp_path: Path) -> None:
    with expect_error(BadInput, value="train gave nan"):
        wb.sweep("s", lambda seed: float("nan"), {"a": {}}, seeds=1, runs=str(tmp_path))
    assert wb.sweep("s", lambda seed: 1.0, {"a": {}}, seeds=1, runs=str(tmp_path)).df["score"].tolist() == [1.0]


def test_a_second_sweep_of_the_name_is_refused_while_the_first_lives(tmp_path: Path) -> None:
    def train(seed: int) -> float:
        with pytest.raises(BadInput, match=r"wb.sweep\('one'\).*another kernel"):
            wb.sweep("one", train, {"a": {}}, seeds=1, runs=str(tmp_path))
        wb.sweep("two", lambda seed: 1.0, {"a": {}}, seeds=1, runs=str(tmp_path))
        raise RuntimeError("the trial fails")

    with pytest.raises(RuntimeError, match="the trial fails"):
        wb.sweep("one", train, {"a": {}}, seeds=1, runs=str(tmp_path))
    assert wb.sweep("one", lambda seed: 2.0, {"a": {}}, seeds=1, runs=str(tmp_path)).df["score"].tolist() == [2.0]


def test_intervals_of_differences_hold_for_all_pairs_together(tmp_path: Path) -> None:
    """Of ten arms without a difference the best seems better than another one in many sweeps where each interval is one
    of 95 %, and rarely where the 5 % are shared out."""
    draws, wrong = np.random.default_rng(5), np.zeros(2)
    for _ in range(200):
        scores = draws.normal(size=(10, 4))
        best = scores[scores.mean(1).argmax()]
        for i, level in enumerate((0.95, shared_level(10, 1))):
            wrong[i] += any(interval(one - best, level)[1] < 0 for one in scores if one is not best)
    assert wrong[0] / 200 > 0.2 and wrong[1] / 200 < 0.05 + 3 * (0.05 * 0.95 / 200) ** 0.5
    given = {f"{n}": {"level": float(n)} for n in range(3)}
    found = wb.sweep("three", Made().train(), given, seeds=2, runs=str(tmp_path), early_stop=False).arms
    low, high = interval(np.full(2, -1.0), shared_level(3, 1))
    (first,) = found[found.index == "1"].itertuples()
    assert (first.difference_low, first.difference_high) == (low, high)


def test_wrong_arguments(tmp_path: Path) -> None:
    for arms, said in (({}, "at least one arm"), ({"a": {"seed": 1}}, "with a seed"), ({"a": {"b c": 1}}, "arguments")):
        with pytest.raises(BadInput, match=said):
            wb.sweep("x", Made().train(), arms, runs=str(tmp_path))
    with expect_error(BadInput, rule="slash"):
        wb.sweep("../x", Made().train(), {"a": {"level": 1.0}}, runs=str(tmp_path))
    with expect_error(BadInput, remedy="return the score"):
        wb.sweep("x", lambda seed: None, {"a": {}}, runs=str(tmp_path))
    with expect_error(BadInput, value=r"arm 'a': train\(seed=0, rat=1\)", rule="argument: 'rate'"):
        wb.sweep("x", lambda seed, rate: rate, {"a": {"rat": 1}}, runs=str(tmp_path), at_once=2)
    lock = threading.Lock()
    with expect_error(BadInput, value="lock is 'lock'", remedy="create it inside train"):
        wb.sweep("x", lambda seed: lock, {"a": {}}, runs=str(tmp_path), at_once=2)


def learn(folder: Path, seed: int, rate: float) -> Any:
    """Three iterations on a tiny model, and what came of them. A file "kill" ends the process after the second one."""
    models, kill = {"actor": TINY, "reward": vowels}, folder / "kill"
    lab = tiny_lab("swept", folder, backend="inline", models=models, seed=seed, training={"learning_rate": rate})
    algorithm = wb.RLOO(lab, prompts=2, samples=2, kl_coefficient=0.0, sampling=wb.Sampling(max_new_tokens=6))

    def after() -> None:
        if lab.iteration == 2 and kill.exists():
            kill.unlink()
            os.kill(os.getpid(), signal.SIGKILL)

    algorithm.run(3, evaluate=after)
    return lab.evaluate("arithmetic", n=2, samples=2, sampling=wb.Sampling(max_new_tokens=6))


def swept(folder: Path) -> Sweep:
    def train(seed: int, rate: float) -> Any:
        return learn(folder, seed, rate)

    arms = {"slow": {"rate": 1e-3}, "fast": {"rate": 1e-2}}
    return wb.sweep("rates", train, arms, seeds=1, runs=str(folder), save_every=1)


@pytest.mark.thorough
def test_a_kernel_that_is_killed_in_the_middle_of_a_trial(tmp_path: Path) -> None:
    expected, killed = swept(tmp_path / "whole"), tmp_path / "killed"
    killed.mkdir()
    (killed / "kill").touch()
    code = f"from tests.comparisons.test_sweep import swept; from pathlib import Path; swept(Path({str(killed)!r}))"
    assert subprocess.run([sys.executable, "-c", code], timeout=300).returncode == -signal.SIGKILL
    assert not (killed / "kill").exists()
    found = swept(killed)
    assert found.df["score"].tolist() == expected.df["score"].tolist()
    runs = wb.runs(str(killed))
    assert len(runs) == 3 and runs["iterations"].tolist()[0] == 2  # the second one went on from a checkpoint
    assert set(found.df["run"]) <= set(runs.index)
