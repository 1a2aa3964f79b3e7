"""A stage that fails on two ranks: what is said, what is kept, and that it can be run again in this process."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import workbench as wb
from tests.expected import expect_error
from workbench.errors import RewardError, RolloutError, StageError, StageTimeout
from workbench.messages.calls import Output
from workbench.messages.shards import Shard
from workbench.workers.roles.critic import CriticWorker


class Fragile(CriticWorker):
    """A critic with a stage that fails on the ranks that it is told to."""

    @wb.register("DP_PROTO", reads=("prompt_ids", "response_ids"), writes=("total",))
    def score(self, batch: Shard, *, ranks: tuple[int, ...] = ()) -> Output:
        values = self.compute_values(batch).columns["values"].rows()  # type: ignore[union-attr]
        totals = torch.stack([row.sum() for row in values])
        if self.context.host.rank in ranks:
            raise FloatingPointError(f"rank {self.context.host.rank}: {totals.tolist()}")
        return Output(columns={"total": totals})

    @wb.register("DP_PROTO", reads=("prompt_ids",), writes=("lingered",))
    def linger(self, batch: Shard, *, gate: str) -> Output:
        """Takes until that file is there, and comes to no place where it could be left."""
        last = time.monotonic() + 300
        while not os.path.exists(gate) and time.monotonic() < last:
            time.sleep(0.02)
        return Output(columns={"lingered": torch.zeros(len(batch.rows))})

    @wb.register(
        "DP_PROTO",
        reads=("prompt_ids", "response_ids", "response_mask", "values", "returns"),
        minibatched=True,
        updates=True,
    )
    def learn(self, batch: Shard) -> Output:
        self.update_critic(batch)
        raise FloatingPointError(f"learned, after {self.engine.steps} steps")


class Breaks:
    """An environment that does not answer."""

    def step(self, response: str) -> tuple[str, float, bool]:
        raise LookupError(f"after {response!r}")


@pytest.fixture(scope="module")
def lab(two: wb.Workbench) -> wb.Workbench:
    return two


@pytest.fixture(scope="module")
def batch(lab: wb.Workbench) -> wb.Batch:
    batch = lab.actor.generate_sequences(lab.prompts.next(4), max_new_tokens=4)
    batch = lab.compute_advantages(lab.reward.compute_reward(lab.critic.compute_values(batch)))
    lab.critic.update_critic(batch)  # its weights are no longer those of the model
    return batch


def test_equal_errors_of_ranks_are_one_and_others_are_told_apart(lab: wb.Workbench, batch: wb.Batch) -> None:
    with expect_error(StageError, value="critic.score failed on rank 0, 1: FloatingPointError: rank 0") as caught:
        lab.critic.score(batch, ranks=(0, 1))
    assert caught.value.failure is not None
    text = "\n".join(caught.value.failure.lines())
    assert text.count("raise FloatingPointError") == 1
    assert "on ranks 0, 1:" in text and "on rank 1: rank 1: [" in text
    with expect_error(StageError, value="critic.score failed on rank 1: FloatingPointError") as caught:
        lab.critic.score(batch, ranks=(1,))
    (note,) = caught.value.__notes__
    assert "in score" in note and "host.py" not in note
    last = lab.last_error()
    assert (last.role, last.stage, last.ranks, last.error) == ("critic", "score", (1,), caught.value)
    assert last.arguments == {"ranks": (1,)} and last.batch is not None and last.batch.id == batch.id
    assert "FloatingPointError" in last._repr_html_()


@pytest.mark.parametrize("when", ["rehearsed", "in a pass"])
def test_a_loss_that_raises_on_one_rank_alone(lab: wb.Workbench, batch: wb.Batch, when: str) -> None:
    """The other does not wait for it in a collective: the pool lives, and nothing has changed."""
    first = batch.df(["prompt"])["prompt"][0]
    digests = lab.critic.weight_digests()

    def breaks(values: torch.Tensor, returns: torch.Tensor, prompt: list[str]) -> torch.Tensor:
        if first in prompt and (when == "rehearsed" or values.any()):  # in the rehearsal they are 0
            raise ZeroDivisionError("of these rows")
        return (values - returns) ** 2

    with expect_error(StageError, value="critic.update_critic failed on rank 0: loss=breaks raised ZeroDiv"):
        lab.critic.update_critic(batch, loss=breaks)
    assert lab.critic.weight_digests() == digests


def test_a_rank_is_replayed_here_with_the_live_weights_and_the_live_ones_stay(
    lab: wb.Workbench, batch: wb.Batch
) -> None:
    digests, group = lab.critic.weight_digests(), torch.distributed.is_initialized()
    with pytest.raises(StageError) as caught:
        lab.critic.score(batch, ranks=(0, 1))
    with pytest.raises(StageError) as ranked:
        lab.critic.score(batch, ranks=(1,))
    told = str(ranked.value).partition("rank 1: [")[2].partition("]")[0]
    lab.critic.score(batch)  # what succeeds meanwhile is not the last error
    printed = lab.debug(rank=0)  # here it is rank 0 of 1, which is not among those that fail
    whole = printed.columns["total"]
    assert whole.all()  # a critic that has learned nothing gives 0 everywhere
    first = str(caught.value).partition("rank 0: [")[2].partition("]")[0]
    torch.testing.assert_close(whole, torch.tensor([float(x) for x in first.split(",")]))
    other = lab.debug().columns["total"]
    torch.testing.assert_close(other, torch.tensor([float(x) for x in told.split(",")]))
    assert lab.critic.weight_digests() == digests
    assert torch.distributed.is_initialized() == group
    seen = lab.hosts.backend.ask(lab.critic.hosts[0], "describe").result()
    assert seen["published_bytes"] == 0


def test_a_function_an_environment_and_an_update_are_replayed(lab: wb.Workbench, batch: wb.Batch) -> None:
    prompts = batch.fetch(["prompt"])["prompt"]
    assert isinstance(prompts, list)

    def broken(prompt: str, response: str, **row: Any) -> float:
        return 1 / 0 if prompt == prompts[3] else 1.0

    with expect_error(RewardError, value="failed on rank 1: .*ZeroDivisionError"):
        lab.reward.compute_reward(batch, function=broken)
    with pytest.raises(ZeroDivisionError) as caught:
        lab.debug()
    frames = []
    trace = caught.value.__traceback__
    while trace is not None:
        frames.append(trace.tb_frame.f_code.co_name)
        trace = trace.tb_next
    assert frames[-1] == "broken"
    with expect_error(RolloutError, value="step of environment Breaks"):
        lab.actor.generate_sequences(
            batch, environment=Breaks, max_new_tokens=40, stop_token_ids=tuple(range(8, 264, 3))
        )
    with pytest.raises(LookupError, match="after"):
        lab.debug()
    digests = lab.critic.weight_digests()
    with expect_error(StageError, value="FloatingPointError: learned") as learned:
        lab.critic.learn(batch)
    assert lab.critic.weight_digests() != digests
    with pytest.raises(FloatingPointError, match="learned") as again:
        lab.debug()
    steps = [str(error.value).partition("after ")[2].partition(" steps")[0] for error in (learned, again)]
    assert int(steps[1]) == int(steps[0]) + 2  # from the state as it is now, optimizer and all
    lab.forget_error()
    with expect_error(wb.errors.NotFound, value="no stage of 'two' has failed"):
        lab.debug()


def test_a_stage_past_its_time_is_given_up_and_the_pool_goes_on(
    lab: wb.Workbench, batch: wb.Batch, tmp_path: Path
) -> None:
    def hangs(prompt: str, response: str, **row: Any) -> float:
        time.sleep(60)
        return 1.0

    with expect_error(
        StageTimeout, value="compute_reward took longer than timeout_s=5", rule="rank 0 was at .*; rank 1"
    ):
        lab.reward.compute_reward(batch, function=hangs, concurrency=1, timeout_s=5)
    assert lab.last_error().stage == "compute_reward"
    assert lab.reward.compute_reward(batch).rows == 4  # its ranks have left the calls of the function
    gate = tmp_path / "gate"
    late = lab.critic.linger.submit(batch, gate=str(gate), timeout_s=0.5)
    behind = lab.reward.compute_reward.submit(batch, timeout_s=0.2)
    with expect_error(StageTimeout, value=r"timeout_s=0\.5"):
        late.result()
    with expect_error(StageTimeout, rule="it waited for pool .* cancelled"):
        behind.result()
    gate.touch()
    assert lab.reward.compute_reward(batch).rows == 4
