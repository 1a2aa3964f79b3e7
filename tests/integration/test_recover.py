"""Processes that are killed, ranks that never answer: `lab.recover()`, and the numbers of a run without it."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import workbench as wb
from tests.cases import TINY, tiny_lab, vowels
from workbench.errors import BadInput, HostDied, StageInterrupted
from workbench.messages.calls import Output
from workbench.messages.shards import Shard
from workbench.stages import stage
from workbench.workers.roles.actor import ActorWorker


class WaitingActor(ActorWorker):
    """An actor whose first rank waits for one that never comes."""

    @wb.register(wb.PROTOCOLS["DP_PROTO"], reads=("prompt_ids",))
    def meet(self, batch: Shard) -> Output:
        if self.context.host.rank == 0:
            self.context.communicator.all_reduce(torch.ones(1))
        return Output()


MODELS = {"actor": wb.Model(TINY, worker=WaitingActor), "critic": TINY, "reference": TINY, "reward": vowels}
PLACEMENT = wb.Placement.of({"policy": (2, ["actor", "reference"]), "scorers": (1, ["critic", "reward"])})


def opened(name: str, runs: Path) -> wb.Workbench:
    return tiny_lab(name, runs, models=MODELS, placement=PLACEMENT, devices=3)


def ppo(lab: wb.Workbench) -> wb.PPO:
    return wb.PPO(lab, prompts=4, sampling=wb.Sampling(max_new_tokens=8), epochs=2)


def kill(lab: wb.Workbench, host: str) -> None:
    """A host's process ends as one that is out of memory does."""
    os.kill(lab.hosts.backend.processes[host].pid, signal.SIGKILL)  # type: ignore[attr-defined]


def once_in(lab: wb.Workbench, host: str, stage: str, steps: int, do: Callable[[], None]) -> None:
    """Do something as soon as a host has done so many steps of a stage."""

    def watch() -> None:
        while True:
            busy, done, *_ = lab.hosts.backend.ask(host, "status").result()
            if busy.endswith(stage) and done >= steps:
                return do()
            time.sleep(0.01)

    threading.Thread(target=watch, daemon=True).start()


@pytest.mark.slow
def test_the_next_iterations_are_those_of_a_run_without_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with opened("killed", tmp_path) as lab:
        algorithm, actor = ppo(lab), lab.actor
        algorithm.iterate()
        lab.critic.training.learning_rate = 5e-4  # which the process that is started below has too
        lab.save(tmp_path / "first")
        expected = algorithm.iterate()
        scorer = lab.critic.hosts[0]
        while algorithm.next_stage != "update_critic":
            algorithm.step()
        once_in(lab, scorer, "update_critic", 2, lambda: kill(lab, scorer))
        batch = lab.batch(lab.batches().iloc[-1]["batch"])
        with pytest.raises(HostDied, match=r"lab\.recover\(\)"):
            lab.critic.update_critic(batch, epochs=1000)
        checkpoint = lab.recover()
        assert checkpoint is not None
        assert checkpoint.iteration == 1
        said = capsys.readouterr().out
        assert "pool scorers restarted; everything is as after iteration 1" in said
        assert lab.actor is actor
        assert algorithm.iterate() == expected
        assert algorithm.iteration == 2
        assert (lab.telemetry.events()["event"] == "recovered").sum() == 1
        assert lab.telemetry.lives()["because"].tolist() == ["opened", "recovered"]
        with pytest.raises(BadInput, match=r"inside lab\.kept"), lab.kept("critic"):
            lab.recover()


@pytest.mark.slow
@pytest.mark.thorough  # the same from what was opened, and of a rank that waits for good
def test_without_a_checkpoint_and_from_a_stuck_rank(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with opened("stuck", tmp_path) as lab:
        algorithm = ppo(lab)
        expected = [algorithm.iterate()]
        kill(lab, lab.actor.hosts[1])  # between two stages
        with pytest.raises(HostDied, match=r"lab\.recover\(\)"):
            algorithm.iterate()
        assert lab.recover() is None
        assert "everything is as it was opened" in capsys.readouterr().out
        assert algorithm.iterate() == expected[0]
        lab.autosave(1)
        algorithm.iterate()
        monkeypatch.setattr(stage, "GRACE_S", 2.0)
        batch = lab.prompts.more(2)
        once_in(lab, lab.actor.hosts[0], "meet", 0, lambda: os.kill(os.getpid(), signal.SIGINT))
        with pytest.raises(StageInterrupted, match=r"rank 0 showed no progress for 2 s.*lab\.recover\(\)"):
            lab.actor.meet(batch)
        lab.recover()
        assert "pool policy restarted; everything is as after iteration 2" in capsys.readouterr().out
        algorithm.iterate()
        assert algorithm.iteration == 3


def test_inline_there_is_nothing_to_start_again(tmp_path: Path) -> None:
    with tiny_lab("inline", tmp_path, backend="inline") as lab:
        algorithm: Any = ppo(lab)
        with pytest.raises(BadInput, match="without a checkpoint, inline"):
            lab.recover()
        lab.save(tmp_path / "first")
        first = algorithm.iterate()
        lab.recover()
        again = algorithm.iterate()
        assert again.pop("generate_sequences/sync_gap/mean") == 0  # the engine is given the weights anew
        assert again == first
