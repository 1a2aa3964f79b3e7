"""Supervised stages in an inline workbench: against transformers' own loss, closed forms, and themselves reloaded."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForSequenceClassification

import workbench as wb
from tests.cases import TINY, tiny_lab, vowels
from tests.expected import expect_error
from tests.tolerances import rounding
from workbench.batches.columns import Ragged
from workbench.errors import BadInput, UnknownColumn
from workbench.models.loading import load_causal_lm
from workbench.models.resolve import quiet_transformers

PAIRS: list[dict[str, Any]] = [
    {"prompt": f"Question {i}?", "chosen": f"yes, {'very ' * (i % 3)}gladly", "rejected": f"no{'!' * (i % 4)} {i}"}
    for i in range(8)
]
DEMONSTRATIONS: list[dict[str, Any]] = [{"prompt": row["prompt"], "response": row["chosen"]} for row in PAIRS]
FAST: dict[str, Any] = {"engine": "torch", "learning_rate": 3e-3, "minibatches": 1, "micro_batch_tokens": 4096}


def trainable(name: Any = TINY, **changed: Any) -> wb.Model:
    return wb.Model(name, training=wb.Training(**{**FAST, **changed}))


def numbers(batch: wb.Batch, name: str) -> Tensor:
    column = batch.fetch([name])[name]
    assert not isinstance(column, list)
    return column.values if isinstance(column, Ragged) else column


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[wb.Workbench]:
    models = {"actor": TINY, "reference": TINY, "reward": trainable(), "cost": trainable()}
    runs = tmp_path_factory.mktemp("runs")
    with tiny_lab("pairs", runs, models=models, training=FAST, backend="inline", prompts=None) as lab:
        yield lab


def test_sft_loss_is_transformers_own_and_falls(lab: wb.Workbench) -> None:
    demonstrations = lab.demonstrations(DEMONSTRATIONS, shuffle=False)
    batch = demonstrations.next(8)
    model = load_causal_lm(TINY, dtype=torch.float32, device="cpu")
    table, losses, tokens = batch.fetch(), 0.0, 0
    prompts, responses = table["prompt_ids"], table["response_ids"]
    assert isinstance(prompts, Ragged) and isinstance(responses, Ragged)
    for prompt, response in zip(prompts.rows(), responses.rows(), strict=True):
        ids = torch.cat([prompt, response])[None]
        labels = torch.cat([torch.full_like(prompt, -100), response])[None]
        with torch.no_grad():
            losses += float(model(input_ids=ids, labels=labels).loss) * len(response)
        tokens += len(response)
    with lab.kept("actor"):
        first = lab.actor.update_sft(batch)
        assert first["loss"] == pytest.approx(losses / tokens, rel=1e-5)
        for _ in range(10):
            last = lab.actor.update_sft(batch)
        held = lab.actor.compute_log_prob(batch)
        assert lab.last_metrics["compute_log_prob"]["old_log_prob/mean"] > -last["loss"]
        assert "old_log_prob" in held.columns
    assert last["loss"] < 0.5 * first["loss"]


def test_dpo_starts_at_log_2_and_learns_a_handful(lab: wb.Workbench) -> None:
    batch = lab.reference.compute_ref_pair_log_prob(lab.pairs(PAIRS).next(8))
    with lab.kept("actor"):
        scored = lab.actor.compute_pair_log_prob(batch)
        assert torch.equal(numbers(scored, "chosen_log_prob"), numbers(batch, "ref_chosen_log_prob"))
        assert torch.equal(numbers(scored, "rejected_log_prob"), numbers(batch, "ref_rejected_log_prob"))
        first = lab.actor.update_dpo(batch, beta=0.5)
        assert first["loss"] == pytest.approx(math.log(2), abs=rounding(4))
        assert first["preference_loss"] == pytest.approx(math.log(2), abs=rounding(4))
        assert first["margin"] == first["accuracy"] == 0
        for _ in range(8):
            last = lab.actor.update_dpo(batch, beta=0.5)
        assert last["accuracy"] == 1
        assert last["margin"] > 1
        lab.actor.compute_pair_log_prob(batch, beta=0.5)
        after = lab.last_metrics["compute_pair_log_prob"]
        assert after["accuracy"] == 1
        assert 0.5 < after["accuracy/low"] < 1
        # -(1 - s) log sigmoid(m) - s log sigmoid(-m) is the plain loss and s m
        lab.actor.compute_pair_log_prob(batch, beta=0.5, label_smoothing=0.1)
        smoothed = lab.last_metrics["compute_pair_log_prob"]["preference_loss"]
        assert smoothed == pytest.approx(after["preference_loss"] + 0.1 * after["margin"], rel=1e-5)


def test_answer_log_probabilities_are_sums_over_the_response_only(lab: wb.Workbench) -> None:
    batch = lab.pairs(PAIRS, shuffle=False).next(4)
    scored = lab.actor.compute_pair_log_prob(batch)
    for name in ("chosen", "rejected"):
        alone = lab.actor.compute_log_prob(batch.rename(**{f"{name}_ids": "response_ids"}))
        column = alone.fetch(["old_log_prob"])["old_log_prob"]
        assert isinstance(column, Ragged)
        sums = torch.stack([row.sum() for row in column.rows()])
        torch.testing.assert_close(numbers(scored, f"{name}_log_prob"), sums, rtol=1e-5, atol=1e-4)


def test_reward_model_learns_a_handful_and_its_scores_survive_saving(
    lab: wb.Workbench, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    batch = lab.pairs(PAIRS).next(8)
    with lab.kept("reward"):
        for _ in range(30):
            last = lab.reward.update_reward(batch)
        assert last["accuracy"] == 1
        assert last["loss"] < 0.2
        before = lab.reward.center(batch, answers="chosen_ids")["before/mean"]
        scored = lab.reward.compute_pair_rewards(batch)
        assert lab.last_metrics["compute_pair_rewards"]["accuracy"] == 1
        assert abs(before) > 1e-3
        assert float(numbers(scored, "chosen_rewards").mean()) == pytest.approx(0, abs=1e-5)
        # the margin is what it was: a shift moves both
        answers = batch.rename(chosen_ids="response_ids")
        # in a pair the answers share their prompt, so that micro-batches differ
        torch.testing.assert_close(
            numbers(lab.reward.compute_reward(answers), "rewards"),
            numbers(scored, "chosen_rewards"),
            rtol=0,
            atol=rounding(128),
        )
        path = lab.reward.save_model(str(tmp_path / "rm"))[0]
        with expect_error(BadInput, value="is not empty"):
            lab.reward.save_model(path)
        assert "add config.score_bias" in capsys.readouterr().out
        expected = {name: numbers(scored, name) for name in ("chosen_rewards", "rejected_rewards")}
        checksum = lab.reward.save_model(str(tmp_path / "rm2"))[0]
        assert checksum != path
    # outside: the class that the configuration names, on plain rows
    with quiet_transformers():
        outside: Any = AutoModelForSequenceClassification.from_pretrained(path)
    assert type(outside).__name__ == outside.config.architectures[0]
    assert abs(outside.config.score_bias) > 1e-3
    for ids, name in (("chosen_ids", "chosen_rewards"), ("rejected_ids", "rejected_rewards")):
        pairs = zip(*(column.rows() for column in batch.fetch(["prompt_ids", ids]).values()), strict=True)  # type: ignore[union-attr]
        with torch.no_grad():
            logits = torch.cat([outside(input_ids=torch.cat(pair)[None]).logits[0] for pair in pairs])
        torch.testing.assert_close(logits + outside.config.score_bias, expected[name], rtol=0, atol=1e-5)
    # a reward model alone, read again: trained or only run, to the last bit
    for number, model in enumerate((path, trainable(path))):
        options: dict[str, Any] = {"models": {"reward": model}, "training": FAST, "prompts": None}
        with tiny_lab(f"again{number}", tmp_path, backend="inline", **options) as again:
            found = again.reward.compute_pair_rewards(again.put(batch.fetch()))
            for name, values in expected.items():
                assert torch.equal(numbers(found, name), values)


def test_costs_learn_the_other_way_round(lab: wb.Workbench) -> None:
    batch = lab.pairs(PAIRS).next(8)
    with lab.kept("cost"):
        for _ in range(30):
            last = lab.cost.update_cost(batch)
        assert last["accuracy"] == 1
        scored = lab.cost.compute_pair_costs(batch)
    assert (numbers(scored, "chosen_costs") < numbers(scored, "rejected_costs")).all()


@pytest.mark.parametrize("role", ["actor", "critic"])
def test_saved_models_load_as_they_were(tmp_path: Path, role: str) -> None:
    models = {"actor": TINY, "critic": TINY, "reference": TINY, "reward": vowels}
    with tiny_lab("saved", tmp_path, models=models, training=FAST, backend="inline", prompts=None) as lab:
        batch = lab.demonstrations(DEMONSTRATIONS).next(8)
        lab.actor.update_sft(batch, epochs=3)
        table = lab.critic.compute_values(lab.actor.compute_log_prob(batch)).fetch()
        table["returns"] = table["old_log_prob"]
        lab.critic.update_critic(lab.put(table), clip=None, epochs=3)
        expected = lab.critic.compute_values(lab.actor.compute_log_prob(batch))
        path = lab.groups[role].save_model(str(tmp_path / role))[0]
        with tiny_lab("loaded", tmp_path, models={**models, role: path}, training=FAST, backend="inline") as again:
            found = again.critic.compute_values(again.actor.compute_log_prob(again.put(batch.fetch())))
            name = {"actor": "old_log_prob", "critic": "values"}[role]
            assert torch.equal(numbers(found, name), numbers(expected, name))
            assert again.prompts.next(1).rows == 1


def test_algorithms_run_their_lines(lab: wb.Workbench) -> None:
    pairs = lab.pairs(PAIRS, held_out=2)
    algorithms: list[tuple[Any, str, list[str]]] = [
        (wb.SFT(lab, lab.demonstrations(DEMONSTRATIONS), rows=4), "actor", ["demonstrations", "update_sft"]),
        (wb.RewardModeling(lab, pairs, rows=3), "reward", ["pairs", "update_reward"]),
        (wb.RewardModeling(lab, pairs, role="cost", rows=3), "cost", ["pairs", "update_cost"]),
        (wb.DPO(lab, pairs, rows=3), "actor", ["pairs", "compute_ref_pair_log_prob", "update_dpo"]),
    ]
    for algorithm, role, stages in algorithms:
        assert algorithm.graph().names == stages
        with lab.kept(role):
            frame = algorithm.run(2)
        assert len(frame) == 2
        assert frame[f"{stages[-1]}/loss"].notna().all()
    dpo = algorithms[-1][0]
    dpo.replace("pairs", n=2)
    with lab.kept("actor"):
        made = [dpo.step() for _ in stages]
    assert made[0].rows == 2
    with expect_error(BadInput, rule="must be demonstrations"):
        wb.SFT(lab, pairs)
    with expect_error(BadInput, value=r"RewardModeling\.role='critic'"):
        wb.RewardModeling(lab, pairs, role="critic")  # type: ignore[arg-type]
    with expect_error(BadInput, value="would read column 'ref_chosen_log_prob'"):
        wb.DPO(lab, pairs, rows=3).remove("compute_ref_pair_log_prob")


def test_what_is_missing_is_named(lab: wb.Workbench, tmp_path: Path) -> None:
    pairs = lab.pairs(PAIRS).next(4)
    with expect_error(
        UnknownColumn, value="'ref_chosen_log_prob'", remedy="run reference.compute_ref_pair_log_prob first"
    ):
        lab.actor.update_dpo(pairs)
    with expect_error(UnknownColumn, value="'chosen_ids'"):
        lab.reward.update_reward(lab.demonstrations(DEMONSTRATIONS).next(4))
    with expect_error(BadInput, value=r"label_smoothing=0\.7"):
        lab.actor.update_dpo(lab.reference.compute_ref_pair_log_prob(pairs), label_smoothing=0.7)
    with expect_error(BadInput, value="epochs=0"):
        lab.reward.update_reward(pairs, epochs=0)
    table = pairs.fetch()
    table["rejected_ids"] = Ragged.of([[2], [], [2], [2]], torch.int64)
    with expect_error(BadInput, value="'rejected_ids' has no token in row 1"):
        lab.reward.update_reward(lab.put(table))
    with tiny_lab("frozen", tmp_path, models={"reward": TINY}, training=FAST, backend="inline", prompts=None) as frozen:
        batch = frozen.pairs(PAIRS).next(4)
        frozen.reward.compute_pair_rewards(batch)
        for update in (
            lambda: frozen.reward.update_reward(batch),
            lambda: frozen.reward.center(batch, answers="chosen_ids"),
        ):
            with expect_error(BadInput, value="is not trained", remedy="training=wb.Training"):
                update()
        assert not frozen.weights
