"""One rank fails: those that merely compute are waited for, those that wait for it are given up, and it is said."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch

import workbench as wb
from workbench.errors import HostDied, RewardError, StageError
from workbench.messages.calls import Output
from workbench.messages.shards import Shard
from workbench.stages import stage
from workbench.workers.roles.actor import ActorWorker


class MeetingActor(ActorWorker):
    """An actor whose ranks can be made to wait for one that never comes."""

    @wb.register(wb.PROTOCOLS["DP_PROTO"], reads=("prompt_ids",))
    def meet(self, batch: Shard) -> Output:
        if self.context.host.rank == 0:
            raise FloatingPointError("rank 0 stays away")
        self.context.communicator.all_reduce(torch.ones(1))
        return Output()


@pytest.fixture(scope="module")
def lab(two: wb.Workbench) -> wb.Workbench:
    return two


def test_a_slow_rank_is_not_a_stuck_one(lab: wb.Workbench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stage, "GRACE_S", 0.5)
    batch = lab.actor.generate_sequences(lab.prompts.next(4), max_new_tokens=4)
    first = batch.fetch(["prompt"], rows=[0])["prompt"][0]

    def slow_here_broken_there(prompt: str, response: str, **row: Any) -> float:
        if prompt == first:
            time.sleep(3)
            return 1.0
        raise ValueError("no")

    began = time.monotonic()
    with pytest.raises(RewardError, match="failed on rank"):
        lab.reward.compute_reward(batch, function=slow_here_broken_there, concurrency=1)
    assert time.monotonic() - began > 2.5
    assert lab.reward.compute_reward(batch).rows == 4  # the pool goes on


def test_ranks_that_wait_for_a_failed_one_are_given_up(lab: wb.Workbench, monkeypatch: pytest.MonkeyPatch) -> None:
    """Comes last: its pool is lost."""
    monkeypatch.setattr(stage, "GRACE_S", 2.0)
    with pytest.raises(StageError, match=r"failed on rank 0: FloatingPointError.*lab\.recover.*all_or_none"):
        lab.actor.meet(lab.prompts.next(2))
    with pytest.raises(HostDied, match="its ranks no longer have the same state"):
        lab.prompts.next(2)
