from __future__ import annotations

import json
import math
import sqlite3
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.cases import tiny_lab
from tests.expected import expect_error
from workbench.errors import BadInput, MissingDependency
from workbench.telemetry import TelemetryStore, sinks
from workbench.telemetry.sinks import TrackedRun

REWARDS = {1: 0.25, 2: 0.5, 3: 0.75}


@pytest.fixture
def store(tmp_path: Path) -> TelemetryStore:
    return TelemetryStore(tmp_path / "run")


@pytest.fixture
def run(tmp_path: Path) -> TrackedRun:
    return TrackedRun(name="first-20260101", folder=tmp_path / "run", config={"seed": 3, "models/actor": "tiny-llama"})


class Failing:
    """A tracker whose server went away after the first row."""

    rows: list[Mapping[str, float]] = []  # noqa: RUF012 (of all that were made)

    def __init__(self, project: str | None, run: TrackedRun, **options: Any) -> None:
        Failing.rows = []

    def log(self, values: Mapping[str, float], iteration: int, time_s: float) -> None:
        self.rows.append(values)
        if len(self.rows) > 1:
            raise ConnectionError("the server is gone")

    def close(self, failed: bool) -> None:
        raise AssertionError("a tracker that was given up is not closed")


def report(store: TelemetryStore) -> None:
    for iteration, reward in REWARDS.items():
        store.append_metrics("compute_reward", iteration, iteration, {"rewards/mean": reward})
        store.append_metrics("evaluate", iteration, iteration, {"test/pass@1": reward / 2})
        store.aside = True
        store.append_metrics("update_actor", iteration, iteration, {"loss": math.nan})
        store.aside = False


def optional(tracker: str) -> None:
    """Skip where a tracker is not installed: none of these is in the locked environment, and `make` installs none."""
    pytest.importorskip(tracker, reason=f"{tracker} is an optional extra that the locked environment does not have")


def scalars(folder: Path) -> dict[str, list[tuple[int, float]]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder)).Reload()
    return {tag: [(e.step, e.value) for e in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


def test_tensorboard_has_the_metrics_of_a_real_run(tmp_path: Path):
    with tiny_lab("tracked", tmp_path, backend="inline", track="tensorboard") as lab:
        for _ in range(2):
            batch = lab.actor.generate_sequences(lab.prompts.next(2), max_new_tokens=4)
            lab.reward.compute_reward(batch)
        with lab.kept("actor"):
            lab.actor.compute_log_prob(batch)  # aside
    found, frame = scalars(lab.run_folder / "tensorboard"), lab.metrics()
    stages = frame["stage"].unique().tolist()
    assert stages == ["generate_sequences", "compute_reward", "compute_log_prob"]
    for stage in stages[:2]:
        rows = lab.metrics(stage)
        for name in rows.columns.drop(["time_s", "iteration", "stage", "run"]):
            steps, values = zip(*found.pop(f"{stage}/{name}"), strict=True)
            assert steps == (1, 2)
            assert values == pytest.approx(rows[name].to_list())
    assert found == {}


def test_tensorboard_in_a_folder_of_its_own(store: TelemetryStore, run: TrackedRun, tmp_path: Path):
    store.sinks.add(f"tensorboard={tmp_path / 'boards'}", None, run, {})
    report(store)
    store.sinks.close()
    assert scalars(tmp_path / "boards" / run.name) == {
        "compute_reward/rewards/mean": list(REWARDS.items()),
        "evaluate/test/pass@1": [(iteration, reward / 2) for iteration, reward in REWARDS.items()],
    }


def test_a_tracker_is_started_once(store: TelemetryStore, run: TrackedRun):
    for _ in range(2):
        store.sinks.add("tensorboard", None, run, {})
    report(store)
    store.sinks.close()
    assert len(list((run.folder / "tensorboard").iterdir())) == 1


def test_one_that_fails_is_given_up_with_one_warning_and_nothing_is_lost(
    store: TelemetryStore, run: TrackedRun, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(sinks, "TRACKERS", {**sinks.TRACKERS, "json": Failing})
    store.sinks.add("json", None, run, {})
    store.sinks.add("tensorboard", None, run, {})
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        report(store)
        store.sinks.close()
    assert [str(w.message) for w in caught if "json" in str(w.message)] == [
        "json gets no more metrics: ConnectionError: the server is gone. The run continues, and lab.metrics() has "
        "all metrics."
    ]
    assert Failing.rows == [{"compute_reward/rewards/mean": 0.25}, {"evaluate/test/pass@1": 0.125}]
    assert len(scalars(run.folder / "tensorboard")["compute_reward/rewards/mean"]) == 3
    assert len(store.metrics()) == 9


def test_a_tracker_that_there_is_not_or_that_is_not_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    with expect_error(BadInput, rule="trackers are tensorboard, wandb, mlflow, trackio", remedy="write 'tensorboard'"):
        tiny_lab("wrong", tmp_path, backend="inline", track="tensorbord")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with expect_error(MissingDependency, value="track='wandb' without the package 'wandb'", remedy="pip install wandb"):
        sinks.check_tracker("wandb=mine")


def test_one_that_does_not_start_is_heard_of_before_anything_is(tmp_path: Path):
    (tmp_path / "file").write_text("")
    with expect_error(BadInput, value="track='tensorboard'", rule="it did not start: .*Error"):
        tiny_lab("unstarted", tmp_path, backend="inline", track=[f"tensorboard={tmp_path / 'file'}"])


@pytest.mark.thorough
def test_wandb_offline(store: TelemetryStore, run: TrackedRun, monkeypatch: pytest.MonkeyPatch):
    optional("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    store.sinks.add("wandb=arithmetic", None, run, {})
    report(store)
    (tracker,) = store.sinks._trackers.values()
    summary = dict(tracker._run.summary)  # type: ignore[attr-defined]
    assert (tracker._run.project, dict(tracker._run.config)) == ("arithmetic", dict(run.config))  # type: ignore[attr-defined]
    store.sinks.close(failed=True)
    assert {
        "iteration": 3,
        "compute_reward/rewards/mean": 0.75,
        "evaluate/test/pass@1": 0.375,
    }.items() <= summary.items()
    assert len(list(run.folder.glob("wandb/offline-run-*/*.wandb"))) == 1


@pytest.mark.thorough
@pytest.mark.filterwarnings("ignore")  # of its own database layer
def test_mlflow(store: TelemetryStore, run: TrackedRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    optional("mlflow")
    database = tmp_path / "mlflow.db"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{database}")
    store.sinks.add("mlflow=arithmetic", None, run, {})
    report(store)
    store.sinks.close(failed=True)
    with sqlite3.connect(database) as read:
        rows = set(read.execute("select key, step, value from metrics"))
        assert set(read.execute("select key, value from params")) == {("seed", "3"), ("models/actor", "tiny-llama")}
        assert list(read.execute("select name, status from runs")) == [(run.name, "FAILED")]
    read.close()
    assert rows == {("compute_reward/rewards/mean", i, r) for i, r in REWARDS.items()} | {
        ("evaluate/test/pass_at_1", i, r / 2) for i, r in REWARDS.items()
    }


@pytest.mark.thorough
def test_trackio(store: TelemetryStore, run: TrackedRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    optional("trackio")
    store.sinks.add("trackio=arithmetic", None, run, {"auto_log_cpu": False})
    report(store)
    store.sinks.close()
    with sqlite3.connect(tmp_path / "trackio" / "arithmetic.db") as read:
        rows = [
            (name, step, json.loads(text))
            for name, step, text in read.execute("select run_name, step, metrics from metrics")
        ]
    read.close()
    assert rows == [
        (run.name, iteration, values)
        for iteration, reward in REWARDS.items()
        for values in ({"compute_reward/rewards/mean": reward}, {"evaluate/test/pass@1": reward / 2})
    ]
