"""Functions that hang, crash, fork or eat memory, on Ray: an error in the cell, hosts that go on, no process left."""

from __future__ import annotations

import os
import re
import threading
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

import workbench as wb
from tests.cases import TINY, tiny_lab
from tests.data.test_user_calls import gone, wait_until
from tests.expected import expect_error
from workbench.errors import BadInput, RewardError, RolloutError


@pytest.fixture(scope="module")
def lab(two: wb.Workbench) -> wb.Workbench:
    return two


@pytest.fixture(scope="module")
def batch(lab: wb.Workbench) -> wb.Batch:
    return lab.actor.generate_sequences(lab.prompts.next(4), max_new_tokens=4)


def hosts_of(lab: wb.Workbench) -> list[psutil.Process]:
    return [
        psutil.Process(lab.hosts.backend.ask(info.name, "describe").result()["process"]) for info in lab.hosts.infos
    ]


def test_attacks_fail_their_stage_and_hosts_go_on(lab: wb.Workbench, batch: wb.Batch, tmp_path: Path) -> None:
    expected = lab.reward.compute_reward(batch).fetch(["rewards"])["rewards"].tolist()
    hosts = hosts_of(lab)

    def holds(prompt: str, response: str, **row: Any) -> float:
        (tmp_path / str(os.getpid())).touch()
        return float(bool(re.match(r"(a+)+$", "a" * 60 + "b")))

    def leaves(prompt: str, response: str, **row: Any) -> float:
        (tmp_path / str(os.getpid())).touch()
        os._exit(7)

    @wb.limits(memory_bytes=2**29)
    def eats(prompt: str, response: str, **row: Any) -> float:
        return float(len(bytearray(2**30)))

    def forks(prompt: str, response: str, **row: Any) -> float:
        for _ in range(3):
            os.fork()
        (tmp_path / str(os.getpid())).touch()
        time.sleep(600)
        return 0.0

    for function, message in (
        (holds, "holds took more than 1 s for row"),
        (leaves, "leaves ended its process with exit code 7"),
        (eats, "eats raised MemoryError"),
        (forks, "forks took more than 1 s for row"),
    ):
        with pytest.raises(RewardError, match=rf"reward.compute_reward failed on rank .*{message}"):
            lab.reward.compute_reward(batch, function=function, call_timeout_s=1 if function in (holds, forks) else 300)
        assert lab.reward.compute_reward(batch).fetch(["rewards"])["rewards"].tolist() == expected
    assert hosts_of(lab) == hosts
    wait_until(lambda: all(gone(int(path.name)) for path in tmp_path.iterdir()))
    assert any(tmp_path.iterdir())


class Stuck:
    def step(self, response: str) -> tuple[str, float, bool]:
        re.match(r"(a+)+$", "a" * 60 + "b")
        return "", 0.0, True


def test_an_environment_that_holds_pythons_lock_is_ended(lab: wb.Workbench, batch: wb.Batch) -> None:
    options: dict[str, Any] = {"max_new_tokens": 40, "stop_token_ids": tuple(range(8, 264, 3))}
    with expect_error(RolloutError, value="step of environment Stuck took more than 1 s for row"):
        lab.actor.generate_sequences(batch, environment=Stuck, call_timeout_s=1, **options)
    assert lab.actor.generate_sequences(batch, **options).rows == 4


@pytest.mark.thorough
def test_what_a_host_started_ends_with_it(tmp_path: Path) -> None:
    """Comes last: its hosts are killed."""

    def stays(prompt: str, response: str, **row: Any) -> float:
        (tmp_path / str(os.getpid())).touch()
        if os.fork() == 0:
            (tmp_path / str(os.getpid())).touch()
            time.sleep(600)
        return 1.0

    with tiny_lab(
        "user_calls_killed",
        tmp_path / "runs",
        models={"actor": TINY, "reward": stays},
        placement=wb.Placement.colocate(1),
    ) as lab:
        lab.reward.compute_reward(lab.actor.generate_sequences(lab.prompts.next(2), max_new_tokens=2))
        pids = [int(path.name) for path in tmp_path.iterdir() if path.name.isdigit()]
        assert len(pids) > 1 and not any(map(gone, pids))
        for host in hosts_of(lab):
            host.kill()
        wait_until(lambda: all(map(gone, pids)))


def test_what_cannot_be_sent_to_a_host_is_refused(lab: wb.Workbench, batch: wb.Batch) -> None:
    lock = threading.Lock()

    @wb.limits(own_process=False)
    def held(prompt: str, response: str, **row: Any) -> float:
        with lock:
            return 1.0

    with expect_error(BadInput, value="cannot pickle '_thread.lock' object", rule="also with own_process=False"):
        lab.reward.compute_reward(batch, function=held)
    assert lab.reward.compute_reward(batch).rows == batch.rows


def test_hosts_of_this_machine_see_what_the_notebook_has_changed(
    lab: wb.Workbench, batch: wb.Batch, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def seen(prompt: str, response: str, **row: Any) -> float:
        return float(os.environ.get("JUDGE_KEY", "-1")) + 10 * (os.getcwd() == os.environ.get("JUDGE_FOLDER"))

    for function in (seen, wb.limits(own_process=False)(lambda **row: seen(**row))):
        for key, there in ((None, False), ("5", False), ("6", True), (None, False)):
            with monkeypatch.context() as now:
                if key is not None:
                    now.setenv("JUDGE_KEY", key)
                    now.setenv("JUDGE_FOLDER", str(tmp_path))
                if there:
                    now.chdir(tmp_path)
                scored = lab.reward.compute_reward(batch, function=function).fetch(["rewards"])["rewards"]
                assert set(scored.tolist()) == {float(key or -1) + 10 * there}
