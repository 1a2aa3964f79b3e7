"""The stages of ReMax and Safe-RLHF in an inline workbench, against closed forms and against transformers' own loss."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import workbench as wb
from tests.cases import TINY, tiny_lab, vowels
from tests.expected import expect_error
from workbench.batches.columns import Ragged, Table
from workbench.errors import BadInput, UnknownColumn
from workbench.models import load_tokenizer
from workbench.models.loading import load_causal_lm
from workbench.objectives.estimators import moments, whiten

TEXTS = [
    "The tide is high.",
    "Salt<|eos|>",
    "",
    "A much longer line of text, so that rows of unequal length stand together.",
]


def length(prompt: str, response: str, **row: Any) -> float:
    """A cost: tenths of characters."""
    return len(response) / 10


ROLES: dict[str, Any] = {
    "actor": TINY, "critic": TINY, "reference": TINY, "reward": vowels, "cost": length, "cost_critic": TINY
}  # fmt: skip


def values_of(table: Table, name: str) -> Tensor:
    """A column's numbers, end to end."""
    column = table[name]
    assert not isinstance(column, list)
    return column.values if isinstance(column, Ragged) else column


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[wb.Workbench]:
    with tiny_lab("safe", tmp_path_factory.mktemp("runs"), models=ROLES, backend="inline") as lab:
        yield lab


@pytest.fixture(scope="module")
def scored(lab: wb.Workbench) -> wb.Batch:
    """Rollouts with everything that advantages are made of; the values are not all 0."""
    batch = lab.actor.generate_sequences(lab.prompts.next(6), max_new_tokens=8)
    batch = lab.reference.compute_ref_log_prob(lab.actor.compute_log_prob(batch))
    batch = lab.cost.compute_cost(lab.reward.compute_reward(batch))
    table = batch.fetch()
    ids = table["response_ids"]
    assert isinstance(ids, Ragged)
    generator = torch.Generator().manual_seed(0)
    for name in ("values", "cost_values"):
        table[name] = ids.like(torch.randn(len(ids.values), generator=generator))
    table["ref_log_prob"] = ids.like(values_of(table, "old_log_prob") - 0.5)  # a KL of 0.5 on each token
    table["baseline_rewards"] = torch.arange(6.0)
    return lab.put(table, meta=batch.meta)


def test_without_a_multiplier_it_is_ppo(lab: wb.Workbench, scored: wb.Batch) -> None:
    ppo = lab.compute_advantages(scored, kl_coefficient=0.1)
    zero = lab.compute_advantages(scored, kl_coefficient=0.1, multiplier=0.0)
    assert "cost_returns" not in ppo.columns
    for name in ("advantages", "returns", "token_rewards"):
        assert torch.equal(values_of(zero.fetch([name]), name), values_of(ppo.fetch([name]), name))


def test_advantages_are_combined_and_then_whitened(lab: wb.Workbench, scored: wb.Batch) -> None:
    raw = lab.compute_advantages(scored, kl_coefficient=0.1, multiplier=3.0, whiten_advantages=False).fetch()
    reward = lab.compute_advantages(scored, kl_coefficient=0.1, whiten_advantages=False).fetch()
    table = scored.fetch()
    # costs as rewards, whose penalty is turned round: beta k is added
    shifted = {**table, "rewards": table["costs"], "values": table["cost_values"]}
    ids = table["response_ids"]
    assert isinstance(ids, Ragged)
    shifted["ref_log_prob"] = ids.like(values_of(table, "old_log_prob") + 0.5)
    cost = lab.compute_advantages(
        lab.put(shifted, meta=scored.meta), kl_coefficient=0.1, whiten_advantages=False
    ).fetch()
    expected = (values_of(reward, "advantages") - 3 * values_of(cost, "advantages")) / 4
    torch.testing.assert_close(values_of(raw, "advantages"), expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(values_of(raw, "cost_returns"), values_of(cost, "returns"))
    whole = lab.compute_advantages(scored, kl_coefficient=0.1, multiplier=3.0)
    metrics = lab.last_metrics["compute_advantages"]
    flat, ones = expected[None], torch.ones(1, len(expected))
    white = whiten(flat, ones, moments(flat, ones))[0]
    torch.testing.assert_close(values_of(whole.fetch(), "advantages"), white, rtol=1e-4, atol=1e-5)
    assert metrics["multiplier"] == 3.0
    assert metrics["costs/mean"] == pytest.approx(float(values_of(table, "costs").mean()))


def test_remax_subtracts_the_greedy_score(lab: wb.Workbench, scored: wb.Batch) -> None:
    found = lab.compute_advantages(scored, estimator="remax").fetch()
    column = found["advantages"]
    assert isinstance(column, Ragged)
    rewards = values_of(scored.fetch(["rewards"]), "rewards")
    for i, row in enumerate(column.rows()):
        torch.testing.assert_close(row, (rewards[i] - i).expand(len(row)))
    assert lab.last_metrics["compute_advantages"]["baseline_rewards/mean"] == 2.5


def test_what_is_missing_is_named(lab: wb.Workbench, scored: wb.Batch) -> None:
    keep = [name for name in scored.columns if name not in ("cost_values", "baseline_rewards", "costs")]
    without = scored.select(*keep)
    with expect_error(UnknownColumn, value="baseline_rewards"):
        lab.compute_advantages(without, estimator="remax")
    with expect_error(UnknownColumn, value="'costs'", remedy=r"run cost\.compute_cost first"):
        lab.compute_advantages(without, multiplier=1.0)
    with expect_error(UnknownColumn, value="'cost_returns'", remedy="multiplier"):
        lab.cost_critic.update_cost_critic(scored)
    with expect_error(UnknownColumn, value="'pretrain_ids'", remedy=r"run actor\.compute_loss first"):
        lab.actor.update_actor(lab.compute_advantages(scored), pretrain_coefficient=1.0)
    with expect_error(BadInput, value="multiplier=-1"):
        lab.compute_advantages(scored, multiplier=-1.0)
    with expect_error(BadInput, value="column 'text' with 3"):
        lab.actor.compute_loss(lab.put({"text": ["a", 3]}))
    with expect_error(BadInput, value="without cost and cost_critic"):
        wb.SafeRLHF(_Without(lab, "cost", "cost_critic"))  # type: ignore[arg-type]
    settings: tuple[tuple[dict[str, Any], str], ...] = (
        ({"multiplier": 0.1, "multiplier_bounds": (1.0, 0.1)}, r"multiplier=0\.1.*within multiplier_bounds"),
        ({"multiplier_bounds": ("a", "b")}, "multiplier_bounds=.*two numbers"),
        ({"multiplier_bounds": (0.01, math.inf)}, "multiplier_bounds=.*infinity"),
        ({"multiplier": 11.0}, r"SafeRLHF\.multiplier=11\.0.*within multiplier_bounds"),
        ({"multiplier_rate": -1.0}, r"SafeRLHF\.multiplier_rate=-1"),
        ({"value_clip": -1.0}, r"SafeRLHF\.value_clip=-1"),
    )
    for wrong, message in settings:
        with pytest.raises(BadInput, match=message):
            wb.SafeRLHF(lab, **wrong)


class _Without:
    """A workbench whose other roles are asked for by name only."""

    def __init__(self, lab: wb.Workbench, *roles: str) -> None:
        self.groups = {name: group for name, group in lab.groups.items() if name not in roles}


def _documents() -> list[list[int]]:
    tokenizer: Any = load_tokenizer(TINY)
    start = tokenizer.eos_token_id if tokenizer.bos_token_id is None else tokenizer.bos_token_id
    tokens = [tokenizer.tokenize(text, split_special_tokens=True) for text in TEXTS]  # control tokens in it are text
    return [[start, *tokenizer.convert_tokens_to_ids(row), tokenizer.eos_token_id] for row in tokens]


def test_pretraining_loss_is_transformers_own(lab: wb.Workbench) -> None:
    model = load_causal_lm(TINY, dtype=torch.float32, device="cpu")
    batch = lab.actor.compute_loss(lab.put({"text": TEXTS}))
    metrics = lab.last_metrics["compute_loss"]
    found = batch.fetch(["pretrain_ids", "pretrain_loss"])
    ids = found["pretrain_ids"]
    assert isinstance(ids, Ragged)
    assert [row.tolist() for row in ids.rows()] == _documents()
    rows = [torch.tensor([document]) for document in _documents()]
    with torch.no_grad():
        losses = torch.stack([model(input_ids=row, labels=row).loss for row in rows])
    torch.testing.assert_close(values_of(found, "pretrain_loss"), losses, rtol=1e-5, atol=1e-5)
    counts = torch.tensor([row.shape[1] - 1 for row in rows])
    assert metrics["pretrain_loss/mean"] == pytest.approx(float((losses * counts).sum() / counts.sum()), rel=1e-5)
    cut = lab.actor.compute_loss(lab.put({"text": TEXTS}), max_tokens=2).fetch(["pretrain_ids"])["pretrain_ids"]
    assert isinstance(cut, Ragged)
    assert [row.tolist() for row in cut.rows()] == [document[:3] for document in _documents()]


@pytest.mark.parametrize("micro_batch_tokens", [24, 4096])
def test_pretraining_gradient_is_transformers_own(tmp_path: Path, micro_batch_tokens: int) -> None:
    """With advantages of 0 an update is one AdamW step on the texts alone, however they are cut."""
    coefficient, rate = 0.5, 1e-3
    model = load_causal_lm(TINY, dtype=torch.float32, device="cpu").eval()
    # eps as large as the gradients: a step then tells their size and not only their sign
    settings: dict[str, Any] = {"lr": rate, "betas": (0.9, 0.95), "eps": 1e-2, "weight_decay": 0.0}
    optimizer = torch.optim.AdamW(model.parameters(), **settings)
    rows = [torch.tensor([document]) for document in _documents()]
    tokens = sum(row.shape[1] - 1 for row in rows)
    for row in rows:
        share = coefficient * (row.shape[1] - 1) / tokens
        (share * model(input_ids=row, labels=row).loss).backward()
    norm = torch.nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
    optimizer.step()
    expected = sum(float(p.detach().double().abs().sum()) for p in model.parameters())
    training: dict[str, Any] = {
        "minibatches": 1, "micro_batch_tokens": micro_batch_tokens, "eps": 1e-2, "max_grad_norm": 0.0
    }  # fmt: skip
    with tiny_lab("ptx", tmp_path, models={"actor": TINY}, training=training, backend="inline") as lab:
        batch = lab.actor.compute_log_prob(lab.actor.generate_sequences(lab.prompts.next(4), max_new_tokens=6))
        ids = batch.fetch(["response_ids"])["response_ids"]
        assert isinstance(ids, Ragged)
        more: Table = {"advantages": ids.like(torch.zeros(len(ids.values))), "text": TEXTS}
        batch = lab.actor.compute_loss(batch.join(lab.put(more)))
        loss = lab.last_metrics["compute_loss"]["pretrain_loss/mean"]
        before = lab.actor.weights_checksum()[0]
        metrics = lab.actor.update_actor(batch, pretrain_coefficient=coefficient)
        after = lab.actor.weights_checksum()[0]
        lower = lab.actor.update_actor(batch, pretrain_coefficient=coefficient)["pretrain_loss"]
    assert metrics["pretrain_loss"] == pytest.approx(loss, rel=1e-6)
    assert metrics["loss"] == pytest.approx(coefficient * loss, rel=1e-6)
    assert metrics["grad_norm"] == pytest.approx(float(norm), rel=1e-4)
    assert lower < loss
    assert after - before == pytest.approx(expected - before, rel=1e-3)


def test_cost_critic_learns_the_cost_to_come(tmp_path: Path) -> None:
    with tiny_lab(
        "costs", tmp_path, models=ROLES, training={"minibatches": 1, "learning_rate": 1e-2}, backend="inline"
    ) as lab:
        batch = lab.actor.generate_sequences(lab.prompts.next(6), max_new_tokens=8)
        batch = lab.cost.compute_cost(lab.reward.compute_reward(batch))
        batch = lab.cost_critic.compute_cost_values(lab.critic.compute_values(batch))
        batch = lab.compute_advantages(batch, multiplier=1.0)
        critic = lab.critic.weights_checksum()
        first = lab.cost_critic.update_cost_critic(batch, clip=None)
        for _ in range(8):
            last = lab.cost_critic.update_cost_critic(batch, clip=None)
        assert last["value_error"] < 0.3 * first["value_error"]
        assert first["cost_returns/mean"] == pytest.approx(lab.last_metrics["compute_advantages"]["cost_returns/mean"])
        assert lab.critic.weights_checksum() == critic  # a model of its own
        again = lab.cost_critic.compute_cost_values(batch)
        near = values_of(again.fetch(["cost_values"]), "cost_values") - values_of(batch.fetch(), "cost_returns")
        assert near.square().mean() < 0.3 * first["value_error"]
