"""What a stage does with its arguments, its rows and its leftovers: the controller on the inline backend."""

from __future__ import annotations

import math
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import pytest
import torch

import workbench as wb
from tests.cases import TINY, tiny_lab, vowels
from tests.expected import expect_error
from workbench.config.description import Description
from workbench.errors import BadInput, RewardError, StageError, StageInterrupted, UnknownColumn
from workbench.messages.calls import Output
from workbench.messages.shards import Shard
from workbench.stages.group import GroupOperation
from workbench.stages.run import Run
from workbench.workers.roles.actor import ActorWorker
from workbench.workers.roles.critic import CriticWorker


class CountingActor(ActorWorker):
    """An actor that also counts."""

    @wb.register(wb.PROTOCOLS["DP_PROTO"], reads=("prompt_ids", "prompt"), writes=("count",))
    def count_tokens(self, batch: Shard, *, unit: Literal["tokens", "characters"] = "tokens") -> Output:
        prompts = batch.columns["prompt"] if unit == "characters" else batch.ragged("prompt_ids").rows()
        assert isinstance(prompts, list)
        return Output(columns={"count": torch.tensor([len(prompt) for prompt in prompts])})

    @wb.register(wb.PROTOCOLS["ONE_TO_ALL"], reads=("prompt_ids",))
    def rows_here(self, batch: Shard) -> Output:
        return Output(columns={"count": torch.ones(len(batch))}, value=len(batch))


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[wb.Workbench]:
    models = {"actor": TINY, "critic": TINY, "reference": TINY, "reward": vowels}
    with tiny_lab("stages", tmp_path_factory.mktemp("runs"), backend="inline", models=models) as lab:
        yield lab


def responses(batch: wb.Batch) -> list[list[int]]:
    return list(batch.df(["response_ids"])["response_ids"])


def shards(lab: wb.Workbench) -> int:
    lab.runner.batches.release_unused()
    return int(lab.hosts.backend.ask(lab.actor.hosts[0], "describe").result()["shards"])


def test_copies_of_a_row_are_different_samples(lab: wb.Workbench) -> None:
    prompts = lab.prompts.next(2)
    asked = responses(lab.actor.generate_sequences(prompts, samples=2, seed=3, max_new_tokens=8))
    repeated = responses(lab.actor.generate_sequences(prompts.repeat(2), seed=3, max_new_tokens=8))
    assert asked == repeated
    assert asked[0] != asked[1]
    # the first copy of each row comes first here: samples 0, 0, 1, 1
    shuffled = responses(lab.actor.generate_sequences(prompts.take([0, 1, 0, 1]), seed=3, max_new_tokens=8))
    assert shuffled == [asked[0], asked[2], asked[1], asked[3]]


def test_ratios_are_taken_at_the_temperature_of_old_log_prob(lab: wb.Workbench) -> None:
    batch = lab.actor.generate_sequences(lab.prompts.next(2), samples=2, temperature=0.7, max_new_tokens=6)
    batch = lab.actor.compute_log_prob(batch, temperature=1.3)
    batch = lab.compute_advantages(lab.reward.compute_reward(batch), estimator="grpo")
    metrics = lab.actor.update_actor(batch)
    assert metrics["first_minibatch/ratio/max_deviation"] == 0
    assert (batch.meta["temperature"], batch.meta["log_prob_temperature"]) == (0.7, 1.3)


def test_the_reference_scores_at_the_temperature_of_the_rollout(lab: wb.Workbench) -> None:
    batch = lab.actor.generate_sequences(lab.prompts.next(2), samples=2, temperature=0.7, max_new_tokens=6)
    before, after, told = (
        lab.reference.compute_ref_log_prob(given, temperature=temperature).fetch(["ref_log_prob"])["ref_log_prob"]
        for given, temperature in (
            (batch, None),
            (lab.actor.compute_log_prob(batch, temperature=1.3), None),
            (batch, 1.3),
        )
    )
    assert after.values.equal(before.values)
    assert not told.values.equal(before.values)


def test_an_update_that_skips_all_rows_reports_numbers_only(lab: wb.Workbench) -> None:
    batch = lab.actor.generate_sequences(lab.prompts.next(2), samples=2, max_new_tokens=6)
    batch = lab.reward.compute_reward(lab.actor.compute_log_prob(batch), function=lambda prompt, response, **row: 1.0)
    metrics = lab.actor.update_actor(lab.compute_advantages(batch, estimator="grpo"))
    assert metrics["skipped_rows/fraction"] == 1
    assert all(math.isfinite(value) for value in metrics.values())
    assert "ratio/mean" not in metrics


def test_an_update_is_not_made_again_where_an_interrupt_kept_its_metrics(
    lab: wb.Workbench, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = lab.actor.generate_sequences(lab.prompts.next(2), samples=2, max_new_tokens=6)
    ready = lab.actor.compute_log_prob(lab.reward.compute_reward(made))
    ready, received = lab.compute_advantages(ready, estimator="grpo"), lab.runner.interrupted.received

    def interrupted(run: Run) -> None:
        signal.raise_signal(signal.SIGINT)  # the ranks have ended it, the caller does not have its metrics
        received(run)

    with monkeypatch.context() as patch:
        patch.setattr(lab.runner.interrupted, "received", interrupted)
        with pytest.raises(StageInterrupted, match="the update is done"):
            lab.actor.update_actor(ready)
    weights, reported = lab.actor.weights_checksum(), len(lab.metrics("update_actor"))
    assert "optimizer_steps" in lab.actor.update_actor(ready)
    assert (lab.actor.weights_checksum(), len(lab.metrics("update_actor"))) == (weights, reported)


@pytest.mark.parametrize(("owner", "step"), [(GroupOperation, "code"), (Description, "placed")])
def test_an_interrupt_of_what_a_call_checks_says_that_nothing_was_done(
    lab: wb.Workbench, monkeypatch: pytest.MonkeyPatch, owner: type, step: str
) -> None:
    batch, call = lab.prompts.next(2), lab.actor.generate_sequences

    def pressed(*args: Any, **kwargs: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(owner, step, pressed)
    with expect_error(StageInterrupted, rule="as before the stage" if owner is GroupOperation else "unchanged"):
        call(batch, max_new_tokens=6) if owner is GroupOperation else lab.move(wb.Placement.colocate(devices=1))


def test_what_is_held_out_is_reported_under_the_iteration_in_which_it_is_measured(lab: wb.Workbench) -> None:
    rows = [{"prompt": f"Question {i}?", "chosen": f"yes {i}", "rejected": "no"} for i in range(8)]
    pairs = lab.pairs(rows, held_out=2)
    iterations = []
    for _ in range(2):
        pairs.next(2)
        iterations.append(lab.iteration)
        lab.actor.compute_pair_log_prob(lab.reference.compute_ref_pair_log_prob(pairs.held_out))
    assert iterations[0] != iterations[1]
    assert lab.metrics("compute_pair_log_prob")["iteration"].tolist() == iterations


def test_shards_of_a_stage_that_failed_are_dropped_but_for_rows_that_were_finished(lab: wb.Workbench) -> None:
    batch = lab.actor.generate_sequences(lab.prompts.next(2), max_new_tokens=4)
    before = shards(lab)

    def broken(prompt: str, response: str, **row: Any) -> float:
        raise ZeroDivisionError

    def mixed(prompt: str, response: str, **row: Any) -> Any:
        return lab  # cannot be sent

    with pytest.raises(BadInput):
        lab.reward.compute_reward(batch, function=mixed)
    assert shards(lab) == before
    with expect_error(RewardError, value="ZeroDivisionError") as caught:
        lab.reward.compute_reward(batch, function=broken)
    assert shards(lab) == before + 1 and caught.value.batch.failed().row.tolist() == [0, 1]
    before += 1  # held by the error
    scored = lab.reward.compute_reward(batch)
    assert shards(lab) == before + 1
    lab.release(scored)
    assert shards(lab) == before + 1  # held here
    del scored
    assert shards(lab) == before


WRONG_ARGUMENTS: list[tuple[str, dict[str, Any], str]] = [
    ("actor.update_actor", {"epochs": 0}, "epochs=0"),
    ("actor.update_actor", {"clip": -0.1}, "clip=-0.1"),
    ("actor.update_actor", {"dual_clip": 0.5}, "dual_clip=0.5"),
    ("actor.update_actor", {"aggregation": "mean"}, "aggregation='mean'.*'token-mean'"),
    ("actor.update_actor", {"aggregation": "fixed-length"}, "give max_response_tokens"),
    ("actor.update_actor", {"kl": "k4"}, "kl='k4'"),
    ("actor.compute_log_prob", {"temperature": 0}, "temperature=0"),
    ("reference.compute_ref_log_prob", {"temperature": -1}, "temperature=-1"),
    ("critic.update_critic", {"clip": 0}, "clip=0"),
    ("reward.compute_reward", {"concurrency": 0}, "concurrency=0"),
    ("reward.compute_reward", {"timeout_s": 0}, "timeout_s=0"),
    ("reward.compute_reward", {"function": "vowels"}, "must be a function"),
    ("compute_advantages", {"gamma": 1.5}, "gamma=1.5"),
    ("compute_advantages", {"estimator": "gea"}, "estimator='gea'"),
]


def test_arguments_are_checked_before_anything_is_sent(lab: wb.Workbench, subtests: pytest.Subtests) -> None:
    for stage, arguments, message in WRONG_ARGUMENTS:
        with subtests.test(stage=stage, arguments=arguments):
            batch = lab.prompts.next(2)  # lacks every column that the stages read: arguments come first
            role, _, name = stage.rpartition(".")
            operation = getattr(getattr(lab, role) if role else lab, name)
            with pytest.raises(BadInput, match=message):
                operation(batch, **arguments)


def test_a_penalty_in_the_loss_needs_the_reference(lab: wb.Workbench) -> None:
    batch = lab.actor.compute_log_prob(lab.actor.generate_sequences(lab.prompts.next(2), samples=2, max_new_tokens=4))
    batch = lab.compute_advantages(lab.reward.compute_reward(batch), estimator="grpo")
    with expect_error(UnknownColumn, value="'ref_log_prob'", remedy="run reference.compute_ref_log_prob"):
        lab.actor.update_actor(batch, kl_coefficient=0.1)
    lab.actor.update_actor(batch)
    with expect_error(UnknownColumn, value="'reward'", remedy=r"write 'rewards' \(the nearest\)"):
        batch.df(["reward"])


def test_rows_that_are_not_there(lab: wb.Workbench) -> None:
    batch = lab.prompts.next(3)
    with expect_error(BadInput, rule="row numbers from 0 to 2"):
        batch.fetch(rows=[99])
    with expect_error(BadInput, rule="row numbers from 0 to 2"):
        batch.df(rows=[0.5])  # type: ignore[list-item]
    with expect_error(BadInput, value="n=0"):
        batch.peek(0)


def test_a_worker_of_ones_own(tmp_path: Path) -> None:
    """A notebook-defined operation, checked like ours; what it returns for no batch leaves nothing behind."""
    models = {"actor": wb.Model(TINY, worker=CountingActor)}
    with tiny_lab("own", tmp_path, backend="inline", models=models) as lab:
        batch = lab.prompts.next(4)
        counted = lab.actor.count_tokens(batch, unit="characters")
        assert counted.fetch(["count"])["count"].tolist() == [len(p) for p in batch.df(["prompt"])["prompt"]]
        with expect_error(BadInput, value="unit='bytes'", rule="'tokens', 'characters'"):
            lab.actor.count_tokens(batch, unit="bytes")
        before = shards(lab)
        assert lab.actor.rows_here(batch) == [4]
        assert shards(lab) == before


def test_after_closing_everything_says_so(tmp_path: Path) -> None:
    lab = tiny_lab("closed", tmp_path, backend="inline", models={"actor": TINY})
    batch = lab.prompts.next(2)
    lab.close()
    for use in (
        batch.df,
        lab.topology,
        lambda: lab.actor.compute_log_prob(batch),
        lambda: lab.prompts.next(1),
        lambda: lab.kept("actor").__enter__(),
    ):
        with expect_error(wb.errors.NotFound, value="is closed", remedy="open it again"):
            use()


class Exploding(CriticWorker):
    """A critic with a stage that fails."""

    @wb.register("3D_PROTO", reads=("prompt_ids",), writes=("boom",))
    def explode(self, batch: Any) -> None:
        raise ValueError("no such luck")


def test_what_a_failed_stage_did_not_make_takes_nothing_along(tmp_path: Path) -> None:
    models = {"actor": TINY, "critic": wb.Model(TINY, worker=Exploding), "reward": vowels}
    with tiny_lab("beside", tmp_path, backend="inline", models=models) as lab:
        batch = lab.actor.generate_sequences(lab.prompts.next(2), max_new_tokens=4)
        scored = lab.actor.compute_log_prob.submit(lab.critic.explode.submit(batch)).result()
        assert len(scored.df(["old_log_prob"])) == 2
        assert lab.reward.compute_reward(scored.drop("boom")).peek()["rewards"].notna().all()
        for read in (scored.df, lambda: scored.take([0]), lambda: scored.select("boom")):
            with expect_error(StageError, value="critic.explode failed on rank 0: ValueError: no such luck"):
                read()
