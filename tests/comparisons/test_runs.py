"""`wb.runs()` and its curves."""

from __future__ import annotations

import json
import os
import warnings
from pathlib import Path

import numpy as np
import pytest

import workbench as wb
from tests.cases import TINY, tiny_lab, vowels
from tests.comparisons.folders import write_run
from tests.expected import expect_error
from workbench.checks.compare_evaluations import interval
from workbench.comparisons.run_folder import RunFolder
from workbench.errors import BadInput, NotFound
from workbench.telemetry.store import TelemetryStore

SHORT = wb.Sampling(max_new_tokens=6)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for seed, rewards in enumerate([[0.0, 1.0, 2.0], [0.0, 3.0, 4.0], [0.0, 2.0, 6.0]]):
        write_run(
            tmp_path, "low", f"2026-{seed}", rewards, settings={"seed": seed, "actor/training/learning_rate": 1e-5}
        )
    write_run(
        tmp_path, "high", "2026-7", [5.0, 5.0], settings={"seed": 0, "actor/training/learning_rate": 1e-3}, rows=8
    )
    return tmp_path


def test_a_frame_of_all_runs(folder: Path) -> None:
    frame = wb.runs(str(folder))
    assert list(frame.index) == ["low/2026-0", "low/2026-1", "low/2026-2", "high/2026-7"]
    assert frame["iterations"].tolist() == [3, 3, 3, 2]
    assert frame["compute_reward/rewards/mean"].tolist() == [2.0, 4.0, 6.0, 5.0]
    assert frame["settings/PPO/clip"].tolist() == [0.2] * 4
    assert frame.differing() == ["settings/seed", "settings/actor/training/learning_rate"]
    assert frame.arms().tolist() == ["learning_rate=1e-05"] * 3 + ["learning_rate=0.001"]
    printed = repr(frame)
    assert "reward" in printed and "learning_rate" in printed and "low/2026-0" in printed and "clip" not in printed
    assert len(wb.runs(str(folder), name="high")) == 1


def test_curves_have_the_mean_and_interval_of_an_arm(folder: Path) -> None:
    curves = wb.runs(str(folder)).curves("reward")
    low = curves.df[curves.df["arm"] == "learning_rate=1e-05"]
    assert low["x"].tolist() == [1, 2, 3] and low["mean"].tolist() == [0.0, 2.0, 4.0] and set(low["runs"]) == {3}
    assert low.iloc[-1][["low", "high"]].tolist() == pytest.approx(interval(np.array([2.0, 4.0, 6.0])))
    one = curves.df[curves.df["arm"] == "learning_rate=0.001"]
    assert one["low"].isna().all()
    spread = wb.runs(str(folder)).curves("reward", band="range").df.iloc[2]
    assert (spread["low"], spread["high"]) == (2.0, 6.0)
    assert [one.get("fill") for one in curves.figure()["data"]].count("tonexty") == 1 and "learning_rate=0.001" in repr(
        curves
    )


def test_curves_over_samples_tokens_and_seconds(folder: Path) -> None:
    runs = wb.runs(str(folder))
    assert runs.curves("reward", "samples").df["x"].tolist() == [4, 8, 12, 8, 16]
    assert runs.curves("reward", "tokens").df["x"].tolist() == [40, 80, 120, 80, 160]
    seconds = runs.curves("reward", "seconds").df["x"]
    assert (seconds >= 0).all() and seconds.max() < 60


def test_rollouts_that_were_drawn_ahead_make_no_iteration(tmp_path: Path) -> None:
    with tiny_lab("ahead", tmp_path, backend="inline", models={"actor": TINY, "reward": vowels}) as lab:
        wb.RLOO(lab, prompts=2, samples=2, kl_coefficient=0.0, sampling=SHORT).run(3, staleness=1)
    frame = wb.runs(str(tmp_path))
    assert frame["iterations"].tolist() == [3]
    series = RunFolder(Path(frame["folder"].iloc[0])).series()
    assert list(series.index) == [1, 2, 3] and series["samples"].tolist() == [4, 8, 12]


def test_an_iteration_that_was_made_again_counts_once(tmp_path: Path) -> None:
    """The kernel saved after iteration 1 with rollouts for 3 drawn ahead, lost its hosts in iteration 2, went on."""
    folder = write_run(tmp_path, "mine", "2026-0", [1.0], settings={})
    store = TelemetryStore(folder)

    def generate(iteration: int) -> None:
        store.append_metrics("generate_sequences", 1, iteration, {"response_tokens/mean": 10.0}, rows=4)

    generate(3)
    store.append_event("saved", folder="one", iteration=1)
    store.append_event("iteration", iteration=2)
    for number in (2, 4):
        generate(number)
    store.append_metrics("compute_reward", 2, 2, {"rewards/mean": 5.0}, rows=4)
    store.append_metrics("evaluate", 2, 2, {"test/reward_mean": 0.5})
    store.append_event("recovered", folder="one", iteration=1)
    assert RunFolder(folder).last_metrics()[0] == 1 and RunFolder(folder).series()["samples"].tolist() == [4]
    for number in (2, 3):
        store.append_event("iteration", iteration=number)
    generate(2)
    series = RunFolder(folder).series()
    assert series["samples"].tolist() == [4, 8, 12] and series["tokens"].tolist() == [40, 80, 120]
    assert series["evaluate/test/reward_mean"].dropna().tolist() == [0.5]
    assert series["compute_reward/rewards/mean"].dropna().tolist() == [1.0]


def test_smoothing_is_that_of_each_run(folder: Path) -> None:
    found = wb.runs(str(folder), name="low").curves("compute_reward/rewards/mean", smooth=0.5).df["mean"]
    # m_3 = (0.125 * 0 + 0.25 * 2 + 0.5 * 4) / 0.875, as the mean of smoothed curves is the smoothed mean
    assert found.iloc[-1] == pytest.approx(2.5 / 0.875)


def test_what_cannot_be_drawn_is_named(folder: Path) -> None:
    runs = wb.runs(str(folder))
    with expect_error(NotFound, value="rewards/maen"):
        runs.curves("compute_reward/rewards/maen")
    with expect_error(BadInput, value="by='nothing'"):
        runs.curves(by="nothing")
    with expect_error(BadInput, value="smooth"):
        runs.curves(smooth=1.0)
    with expect_error(NotFound, value="nowhere"):
        wb.runs(str(folder / "nowhere"))


def test_runs_that_cannot_be_read_are_left_out(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    link = folder / "low" / "2026-9"
    link.symlink_to(write_run(tmp_path_factory.mktemp("elsewhere"), "a", "b", [1.0], settings={}))
    (folder / "high" / "2026-7" / "run.json").write_text('{"format": 2}')
    (folder / "low" / "2026-0" / "metrics.jsonl").write_bytes(b'{"iteration": \nnonsense\n[[[\n')
    os.mkfifo(folder / "low" / "2026-1" / "fifo")
    with pytest.warns(UserWarning, match="run high/2026-7: .*has format 2; this version reads 1"):
        frame = wb.runs(str(folder))
    assert list(frame.index) == ["low/2026-0", "low/2026-1", "low/2026-2"]
    assert frame["iterations"].tolist() == [0, 3, 3]
    (folder / "low" / "2026-2" / "run.json").write_text("[]")
    with expect_error(BadInput, value="low/2026-2/run.json' has format None"):
        wb.diff("low/2026-1", "low/2026-2", folder=str(folder))


def test_a_real_run_records_what_it_was(tmp_path: Path) -> None:
    for seed in (0, 1):
        models = {"actor": TINY, "reward": vowels}
        with tiny_lab("mine", tmp_path, backend="inline", models=models, seed=seed) as lab:
            algorithm = wb.RLOO(lab, prompts=2, samples=2, kl_coefficient=0.0, sampling=SHORT)
            algorithm.run(1)
            algorithm.clip = 0.3
            results = algorithm.run(1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        frame = wb.runs(str(tmp_path))
    assert frame["algorithm"].tolist() == ["RLOO", "RLOO"] and frame["settings/seed"].tolist() == [0, 1]
    reward = "compute_reward/rewards/mean"
    assert frame[reward].iloc[1] == results[reward].iloc[0]
    assert frame["settings/RLOO/samples"].tolist() == [2, 2]
    curves = frame.curves("reward", "samples").df
    assert curves["x"].tolist() == [4, 8] and set(curves["runs"]) == {2}
    found = wb.diff(frame.index[0], frame.index[1], folder=str(tmp_path))
    assert list(found.settings.index) == ["seed"] and found.code.empty
    assert found.changes["change"].tolist() == ["RLOO/clip=0.3", "RLOO/clip=0.3"]
    record = json.loads((Path(frame["folder"].iloc[0]) / "run.json").read_text())
    assert "share of vowels" in record["code"]["functions"]["reward"]["source"]
