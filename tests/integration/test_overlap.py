"""Three forms of a call on two pools: what may run at once does, what must wait waits, and a failure is told on."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import workbench as wb
from tests.cases import TINY, tiny_lab, vowels
from tests.expected import expect_error
from workbench.batches.columns import Ragged
from workbench.errors import RewardError, StageInterrupted, UnknownColumn, UpstreamError

SPLIT = wb.Placement.of({"policy": (1, ["actor", "reference"]), "scorers": (1, ["critic", "reward"])})


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[wb.Workbench]:
    models = {"actor": TINY, "critic": TINY, "reference": TINY, "reward": vowels}
    with tiny_lab("overlap", tmp_path_factory.mktemp("runs"), models=models, placement=SPLIT, devices=2) as lab:
        yield lab


def slow_until(gate: Path) -> Callable[..., float]:
    """A reward function that takes until this file is there, for each row."""

    def slow(prompt: str, response: str, **row: Any) -> float:
        last = time.monotonic() + 240
        while not gate.exists() and time.monotonic() < last:
            time.sleep(0.02)
        return vowels(prompt, response)

    return slow


def stage_spans(lab: wb.Workbench, after_run: int) -> dict[str, tuple[float, float]]:
    """When each stage since a run began and ended."""
    spans = lab.spans()
    rows = spans[(spans["kind"] == "compute") & (spans["run"] > after_run)]
    return {row["stage"]: (row["start_s"], row["end_s"]) for row in rows.to_dict("records")}


def test_a_submitted_run_is_passed_on_at_once(lab: wb.Workbench, tmp_path: Path) -> None:
    before = lab.runner.counters.run
    prompts = lab.prompts.next(4)
    gate = tmp_path / "gate"
    generated = lab.actor.generate_sequences.submit(prompts, max_new_tokens=8, seed=1)
    scored = lab.reward.compute_reward.submit(generated, function=slow_until(gate), concurrency=1, call_timeout_s=300)
    logged = lab.actor.compute_log_prob.submit(generated.batch)
    valued = lab.critic.compute_values.submit(generated)
    assert scored.state in ("waiting", "running")
    assert "is waiting" in repr(valued.batch) or "is running" in repr(valued.batch)
    batch = logged.result()
    assert scored.state == "running"  # another pool: the log-probabilities did not wait for it
    gate.touch()
    assert {"old_log_prob", "response_ids"} <= set(batch.columns)
    assert "values" in valued.result().columns
    spans = stage_spans(lab, before)
    assert spans["compute_log_prob"][0] < spans["compute_reward"][1]
    assert spans["compute_values"][0] >= spans["compute_reward"][1]  # same pool: in call order
    # the same numbers as one by one
    again = lab.actor.compute_log_prob(lab.actor.generate_sequences(prompts, max_new_tokens=8, seed=1))
    mine, theirs = (b.fetch(["old_log_prob"])["old_log_prob"] for b in (batch, again))
    assert isinstance(mine, Ragged)
    assert isinstance(theirs, Ragged)
    assert mine.values.equal(theirs.values)


def test_the_same_lines_overlap_and_agree(lab: wb.Workbench) -> None:
    """An iteration line by line, and the same lines inside `overlap()`: the update of one pool is sent before that of
    the other is over."""

    def lines(batch: wb.Batch) -> None:
        batch = lab.actor.compute_log_prob(batch)
        batch = lab.reference.compute_ref_log_prob(batch)
        batch = lab.critic.compute_values(batch)
        batch = lab.reward.compute_reward(batch)
        batch = lab.compute_advantages(batch, kl_coefficient=0.1)
        lab.critic.update_critic(batch, epochs=8)
        lab.actor.update_actor(batch, epochs=8)

    prompts = lab.actor.generate_sequences(lab.prompts.next(16), max_new_tokens=32)
    before = lab.runner.counters.run
    lines(prompts)
    spans = stage_spans(lab, before)
    assert spans["update_critic"][1] < spans["update_actor"][0]
    before = lab.runner.counters.run
    with lab.overlap():
        lines(prompts)
        assert "update_actor" not in stage_spans(lab, before)
    sent = lab.runs().set_index("stage").loc[["update_critic", "update_actor"]].groupby("stage").last()
    assert sent["started_s"].max() < sent["ended_s"].min()
    assert lab.last_metrics["update_actor"]["first_minibatch/ratio/max_deviation"] <= 1e-5


def test_a_further_draw_of_dynamic_sampling_goes_on_where_its_stage_never_came(lab: wb.Workbench) -> None:
    def alike(prompt: str, response: str, **row: Any) -> float:
        return 0.0

    def broken(prompt: str, response: str, **row: Any) -> float:
        raise ZeroDivisionError

    sampling = wb.Sampling(max_new_tokens=4)
    algorithm = wb.DAPO(lab, prompts=2, samples=2, sampling=sampling, reward=alike, rounds=1)
    while algorithm.next_stage != "dynamic_sampling":
        algorithm.step()
    prompts = lab.prompts.more(2)
    drawn = lab.actor.generate_sequences(prompts, samples=2, max_new_tokens=4)
    with expect_error(RewardError, value="ZeroDivisionError"), lab.overlap():
        scored = lab.reward.compute_reward(drawn, function=broken)
    made = {"prompts": prompts, "generate_sequences": drawn, "compute_reward": scored}
    algorithm.made.update({f"{stage} (draw 2)": batch for stage, batch in made.items()})
    before = lab.prompts.drawn
    assert algorithm.step().rows == 4
    assert lab.prompts.drawn == before


def test_await(lab: wb.Workbench) -> None:
    async def cells() -> tuple[wb.Batch, float]:
        prompts = lab.prompts.next(2)
        generated = await lab.actor.generate_sequences.submit(prompts, max_new_tokens=4)
        both = await asyncio.gather(
            lab.reward.compute_reward.submit(generated), lab.actor.compute_log_prob.submit(generated)
        )
        return both[0], both[1].meta["temperature"]

    batch, temperature = asyncio.run(cells())
    assert batch.df(["rewards"])["rewards"].between(0, 1).all()
    assert temperature == 1.0


def test_what_needs_a_failed_stage_names_the_first_cause(lab: wb.Workbench) -> None:
    def broken(prompt: str, response: str, **row: Any) -> float:
        raise LookupError("no such verifier")

    generated = lab.actor.generate_sequences(lab.prompts.next(2), max_new_tokens=4)
    scored = lab.reward.compute_reward.submit(lab.critic.compute_values.submit(generated), function=broken)
    advantages = lab.compute_advantages.submit(lab.actor.compute_log_prob.submit(scored))
    with expect_error(
        UpstreamError, value="compute_advantages was not run", rule="reward.compute_reward .*LookupError"
    ):
        advantages.result()
    assert scored.batch is not None
    with expect_error(RewardError, value="no such verifier"):
        scored.batch.df()
    with expect_error(UnknownColumn, value="'values'"):  # known before anything runs
        lab.compute_advantages.submit(lab.reward.compute_reward.submit(generated))
    with expect_error(RewardError, value="no such verifier"), lab.overlap():
        lab.actor.compute_log_prob(lab.reward.compute_reward(generated, function=broken))
    assert lab.scheduler.open_runs() == ()


def test_what_was_cancelled_is_not_begun(lab: wb.Workbench, tmp_path: Path) -> None:
    generated = lab.reward.compute_reward(lab.actor.generate_sequences(lab.prompts.next(4), max_new_tokens=4))
    gate = tmp_path / "gate"
    under_way = lab.reward.compute_reward.submit(
        generated, function=slow_until(gate), concurrency=1, call_timeout_s=300
    )
    waiting = lab.critic.compute_values.submit(generated)
    consumer = lab.compute_advantages.submit(waiting)
    bystander = lab.actor.compute_log_prob.submit(waiting)  # does not read what is being made
    assert waiting.cancel()
    assert waiting.state == "cancelled"
    with expect_error(UpstreamError, value="compute_advantages was not run", rule="compute_values was cancelled"):
        consumer.result()
    assert bystander.result().finished_columns(["old_log_prob"])[0]["old_log_prob"].owner == "actor"
    for read in (waiting.result, lambda: waiting.batch and waiting.batch.df()):
        with expect_error(UpstreamError, value="compute_values was not run: it was cancelled"):
            read()
    assert under_way.cancel()  # its ranks leave it, in the middle of a call of the function
    with expect_error(StageInterrupted, value="compute_reward was interrupted", rule="state is as before the stage"):
        under_way.result()
    gate.touch()
    assert not under_way.cancel()
    assert "values" in lab.critic.compute_values(generated).columns


def test_shards_are_dropped_with_their_batches(lab: wb.Workbench) -> None:
    def held() -> int:
        lab.runner.batches.release_unused()
        return sum(int(lab.hosts.backend.ask(i.name, "describe").result()["shards"]) for i in lab.hosts.infos)

    before = held()
    with lab.overlap():
        batch = lab.actor.generate_sequences(lab.prompts.next(2), max_new_tokens=4)
        batch = lab.reward.compute_reward(lab.critic.compute_values(batch))
    assert held() == before + 4
    lab.release(batch.name)
    assert held() == before + 4  # the notebook has it
    del batch
    deadline = time.monotonic() + 300  # hosts are told, and not waited for
    while held() > before and time.monotonic() < deadline:
        time.sleep(0.05)
    assert held() == before


def test_closing_wakes_who_waits(lab: wb.Workbench, tmp_path: Path) -> None:
    """Comes last."""
    generated = lab.actor.generate_sequences(lab.prompts.next(4), max_new_tokens=4)
    under_way = lab.reward.compute_reward.submit(generated, function=slow_until(tmp_path / "never"), concurrency=1)
    waiting = lab.critic.compute_values.submit(generated)
    lab.close()
    with expect_error(UpstreamError, value="the workbench was closed"):
        under_way.result()
    with expect_error(UpstreamError, value="was cancelled"):
        waiting.result()
