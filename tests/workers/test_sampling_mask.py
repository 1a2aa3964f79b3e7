"""With a sampling mask the trainer's distribution is the one that was sampled from: over the same tokens, and exact."""

from __future__ import annotations

import math
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import workbench as wb
from tests.cases import TINY, tiny_lab, vowels
from tests.engines.training_ranks import everyone, run_ranks
from tests.expected import expect_error
from tests.workers.mask_ranks import Masked, masked_shard, run_masked
from workbench.batches.columns import Ragged
from workbench.engines.generation.vllm_engine import _sets
from workbench.errors import BadInput, StageError
from workbench.models.heads import ChosenLogProbs, TokenLogProbs
from workbench.models.loading import load_causal_lm
from workbench.models.logits import TokenSets
from workbench.placement import Layout
from workbench.settings.engines import check_mask
from workbench.workers.micro_batches import each_minibatch
from workbench.workers.sampling_mask import MASK_COLUMNS, SamplingMask

SAMPLED = {"top_p": 0.9, "temperature": 0.8, "max_new_tokens": 64, "seed": 3, "keep_mask": True}
SEQUENCES = wb.Correction(level="sequence", high=1e9)


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[wb.Workbench]:
    models = {"actor": TINY, "reference": TINY, "reward": vowels}
    with tiny_lab("mask", tmp_path_factory.mktemp("runs"), models=models, backend="inline") as lab:
        yield lab


@pytest.fixture(scope="module")
def batch(lab: wb.Workbench) -> wb.Batch:
    return lab.actor.compute_log_prob(lab.actor.generate_sequences(lab.prompts.next(8), samples=2, **SAMPLED))


def column(batch: wb.Batch, name: str) -> Ragged:
    found = batch.fetch([name])[name]
    assert isinstance(found, Ragged)
    return found


def with_advantages(lab: wb.Workbench, batch: wb.Batch, **others: Any) -> wb.Batch:
    table = batch.fetch()
    old = table["old_log_prob"]
    assert isinstance(old, Ragged)
    draws = torch.Generator().manual_seed(5)
    table["advantages"] = old.like(torch.randn(len(old.values), generator=draws))
    return lab.put({**table, **others}, meta=batch.meta)


class TestFormula:
    """Enumerated: the softmax over the tokens of a set, with zero for all others."""

    def setup_method(self) -> None:
        draws = torch.Generator().manual_seed(0)
        self.logits = torch.randn(5, 11, generator=draws, dtype=torch.float64)
        self.sets = [[0, 3, 7], [], [10], [2, 4], list(range(1, 11))]
        self.targets = torch.tensor([3, 9, 10, 2, 6])
        ids = torch.tensor([token for row in self.sets for token in row], dtype=torch.int32)
        self.given = TokenSets(ids, torch.tensor([len(row) for row in self.sets], dtype=torch.int32))

    def expected(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        found = []
        for row, ids, target in zip(logits, self.sets, self.targets.tolist(), strict=True):
            weights = {token: (row[token] / 0.7).exp() for token in (ids or range(11))}
            total = torch.stack(list(weights.values())).sum()
            shares = torch.stack([weight / total for weight in weights.values()])
            found.append(torch.stack(((weights[target] / total).log(), -(shares * shares.log()).sum())))
        chosen, entropy = torch.stack(found).unbind(-1)
        return chosen, entropy

    def test_values_and_gradient(self) -> None:
        logits = self.logits.float().requires_grad_()
        chosen, entropy = ChosenLogProbs.apply(logits, self.targets, 0.7, True, self.given)
        exact = self.logits.clone().requires_grad_()
        expected = self.expected(exact)
        torch.testing.assert_close(chosen.double(), expected[0], rtol=0, atol=1e-5)
        torch.testing.assert_close(entropy.double(), expected[1], rtol=0, atol=1e-5)
        weights = torch.tensor([1.0, -2.0, 3.0, 0.5, 1.5]), torch.tensor([0.3, 1.0, -1.0, 2.0, 0.7])
        (chosen @ weights[0] + entropy @ weights[1]).backward()
        (expected[0] @ weights[0].double() + expected[1] @ weights[1].double()).backward()
        assert logits.grad is not None
        torch.testing.assert_close(logits.grad.double(), exact.grad, rtol=0, atol=1e-5)
        outside = [token for token in range(11) if token not in self.sets[0]]
        assert (logits.grad[0, outside] == 0).all()

    def test_parts(self) -> None:
        for parts in (1, 2, 5):
            pairs = zip(self.given.tensor_split(parts), self.logits.tensor_split(parts), strict=True)
            pieces = [sets.masked(logits) for sets, logits in pairs]
            assert torch.equal(torch.cat(pieces), self.given.masked(self.logits))
        halves = [self.given.masked(self.logits[:, :6]), self.given.masked(self.logits[:, 6:], 6)]
        assert torch.equal(torch.cat(halves, 1), self.given.masked(self.logits))


def test_the_first_ratio_is_one_and_so_is_the_weight_of_a_sequence(lab: wb.Workbench, batch: wb.Batch) -> None:
    sizes, ids = (column(batch, name) for name in reversed(MASK_COLUMNS))
    assert 1 < sizes.values.float().mean() < 264 and len(ids.values) == sizes.values.sum()
    gap = column(batch, "old_log_prob").values - column(batch, "rollout_log_prob").values
    assert gap.abs().max() < 1e-4
    metrics = lab.actor.update_actor(with_advantages(lab, batch), correction=SEQUENCES)
    assert metrics["correction/weight/mean"] == pytest.approx(1, abs=1e-3)
    assert metrics["first_minibatch/ratio/max_deviation"] < 1e-6


def from_logits(
    log_prob: torch.Tensor, old_log_prob: torch.Tensor, advantages: torch.Tensor, mask: torch.Tensor, logits: Any,
    entropy: torch.Tensor, response_ids: torch.Tensor,
) -> Any:  # fmt: skip
    """PPO without a clip and with a bonus, of log-probabilities and entropies that are made from logits."""

    def of_part(x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        log_probs = torch.log_softmax(x, dim=-1)
        chosen = log_probs.gather(-1, ids.long()[:, None])[:, 0]
        return torch.stack((chosen, -(log_probs.exp() * log_probs).sum(-1)), dim=-1)

    mine, own_entropy = logits.map(of_part, response_ids).unbind(-1)
    later = torch.arange(mask.shape[1], device=mask.device)[None].expand_as(mask) % 3 == 1  # a part of the tokens
    again = logits.map(of_part, response_ids, where=later)[..., 0]
    gaps = {
        "gap": torch.where(mask, (mine - log_prob).abs(), 0.0).detach(),
        "entropy_gap": torch.where(mask, (own_entropy - entropy).abs(), 0.0).detach(),
        "part_gap": torch.where(mask & later, (again - log_prob).abs(), 0.0).detach(),
    }
    return -torch.exp(mine - old_log_prob) * advantages - 0.01 * own_entropy, gaps


def built_in(log_prob: Any, old_log_prob: Any, advantages: Any, entropy: Any, mask: Any) -> Any:
    return -torch.exp(log_prob - old_log_prob) * advantages - 0.01 * entropy


def test_a_loss_from_logits_is_over_the_same_tokens(lab: wb.Workbench, batch: wb.Batch) -> None:
    given, found = with_advantages(lab, batch), []
    for loss in (from_logits, built_in):
        with lab.kept("actor"):
            found.append(lab.actor.update_actor(given, loss=loss))
    for gap in ("gap", "entropy_gap", "part_gap"):
        assert found[0][f"first_minibatch/{gap}"] < 1e-5
    for name in ("loss", "grad_norm"):
        assert found[0][name] == pytest.approx(found[1][name], rel=1e-4)


def test_without_the_mask_a_correction_is_refused_and_would_be_wrong(lab: wb.Workbench, batch: wb.Batch) -> None:
    table = {name: values for name, values in batch.fetch().items() if name not in MASK_COLUMNS}
    bare = lab.actor.compute_log_prob(lab.put(table, meta={**batch.meta, "log_prob_over_sampling_mask": False}))
    with expect_error(BadInput, value=r"top_p=0\.9", remedy="keep_mask=True"):
        lab.actor.update_actor(with_advantages(lab, bare), correction=SEQUENCES)

    def from_rollouts(log_prob: torch.Tensor, rollout_log_prob: torch.Tensor, advantages: torch.Tensor) -> torch.Tensor:
        return -(log_prob - rollout_log_prob).exp() * advantages

    with expect_error(BadInput, value=r"takes 'rollout_log_prob'.*top_p=0\.9", remedy="keep_mask=True"):
        lab.actor.update_actor(with_advantages(lab, bare), loss=from_rollouts)
    with lab.kept("actor"):
        assert lab.actor.update_actor(with_advantages(lab, batch), loss=from_rollouts)["loss"] != 0
    old, rollout = column(bare, "old_log_prob"), column(bare, "rollout_log_prob")
    weights = [float((a - b).sum().exp()) for a, b in zip(old.rows(), rollout.rows(), strict=True) if len(a) == 64]
    assert 0 < sum(weights) / len(weights) < 0.05  # 0.9^64 is 0.00118
    kept = {name: values for name, values in batch.fetch().items() if name not in MASK_COLUMNS}
    with expect_error(BadInput, remedy="call compute_log_prob on this batch again"):
        lab.actor.update_actor(with_advantages(lab, lab.put(kept, meta=batch.meta)))


def test_a_correction_is_refused_where_tokens_were_banned_and_allowed_with_finite_biases(lab: wb.Workbench) -> None:
    """They are taken from the engine's distribution alone, as top_p takes others; no mask tells them."""
    for given, value in (
        ({"logit_bias": {5: -math.inf, 6: 1.0}}, "a logit_bias of -inf for 1 token"),
        ({"min_new_tokens": 3, "keep_mask": True}, "min_new_tokens=3"),
        ({"logit_bias": {5: -math.inf}, "temperature": 0.0}, "a logit_bias of -inf"),
        ({"logit_bias": {5: -1.0}, "repetition_penalty": 1.1}, ""),
        ({"logit_bias": {5: -math.inf}, "top_k": 20, "keep_mask": True}, ""),
    ):
        made = lab.actor.generate_sequences(lab.prompts.next(4), max_new_tokens=6, seed=3, **given)
        made = with_advantages(lab, lab.actor.compute_log_prob(made))
        if value:
            with expect_error(BadInput, value=value, remedy="leave it out"):
                lab.actor.update_actor(made, correction=wb.Correction())
            continue
        with lab.kept("actor"):
            assert lab.actor.update_actor(made, correction=wb.Correction())["correction/weight/mean"] > 0
    with expect_error(BadInput, value="min_new_tokens=2"):
        wb.GRPO(lab, samples=2, sampling=wb.Sampling(min_new_tokens=2), correction=wb.Correction())


def test_the_reference_is_over_the_same_tokens_unless_asked_otherwise(lab: wb.Workbench, batch: wb.Batch) -> None:
    inside = column(lab.reference.compute_ref_log_prob(batch), "ref_log_prob").values
    outside = column(lab.reference.compute_ref_log_prob(batch, sampling_mask=False), "ref_log_prob").values
    assert (inside >= outside).all() and (inside - outside).mean() > 0.05


@pytest.mark.parametrize("damage", ["shorter", "another token", "too large"])
def test_a_mask_of_other_responses_is_refused(lab: wb.Workbench, batch: wb.Batch, damage: str) -> None:
    table = batch.fetch()
    ids, sizes = (table[name] for name in MASK_COLUMNS)
    assert isinstance(ids, Ragged) and isinstance(sizes, Ragged)
    if damage == "shorter":
        first = int(ids.lengths[0])
        lengths = torch.cat([ids.lengths[:1] - 1, ids.lengths[1:]])
        table[MASK_COLUMNS[0]] = Ragged(torch.cat([ids.values[: first - 1], ids.values[first:]]), lengths)
    elif damage == "another token":
        table[MASK_COLUMNS[0]] = ids.like(torch.zeros_like(ids.values))
    else:
        table[MASK_COLUMNS[0]] = ids.like(ids.values + 1000)
    with expect_error(BadInput, rule="the response's own token among them"):
        lab.actor.compute_log_prob(lab.put(table, meta=batch.meta))


def test_nothing_is_kept_where_nothing_is_left_out(lab: wb.Workbench) -> None:
    prompts = lab.prompts.next(2)
    for settings in ({}, {"top_p": 0.5, "temperature": 0.0}):
        made = lab.actor.generate_sequences(prompts, max_new_tokens=3, keep_mask=True, **settings)
        assert not set(MASK_COLUMNS) & set(made.names)


class Listener:
    def step(self, response: str) -> tuple[str, float, bool]:
        return "mm", 0.0, False


def test_what_an_environment_wrote_has_no_set(lab: wb.Workbench) -> None:
    settings = {**SAMPLED, "max_new_tokens": 24, "stop": ("e", "a")}
    made = lab.actor.compute_log_prob(
        lab.actor.generate_sequences(lab.prompts.next(4), environment=Listener, max_turns=3, **settings)
    )
    mask, sizes = column(made, "response_mask").values, column(made, MASK_COLUMNS[1]).values
    assert not mask.all() and torch.equal(sizes > 0, mask)
    gap = column(made, "old_log_prob").values - column(made, "rollout_log_prob").values
    assert gap[mask].abs().max() < 1e-4


def test_vllm_needs_a_bound_on_the_tokens_that_are_left() -> None:
    fields = {"temperature": 1.0, "top_p": 0.9, "top_k": 0, "min_p": 0.0, "keep_mask": True}
    with expect_error(BadInput, remedy="add a top_k"):
        check_mask(fields, wb.Generation(engine="vllm"))
    check_mask({**fields, "top_k": 64}, wb.Generation(engine="vllm"))
    check_mask({**fields, "keep_mask": False}, wb.Generation(engine="vllm"))
    check_mask(fields, wb.Generation(engine="transformers"))


def test_more_ties_than_vllm_was_asked_for_are_no_mask() -> None:
    told = SimpleNamespace(logprob_token_ids=np.array([[5, 5, 3]]), logprobs=np.array([[-0.7, -0.7, -0.8]]))
    assert _sets(told, 2) == [[3, 5]]  # of the whole vocabulary
    with expect_error(StageError, value="more than 2 tokens could be sampled"):
        _sets(told, 100)


def test_banned_tokens_are_not_in_a_set(lab: wb.Workbench) -> None:
    made = lab.actor.generate_sequences(
        lab.prompts.next(2), max_new_tokens=8, min_p=1e-6, logit_bias={70: -math.inf}, keep_mask=True
    )
    assert 70 not in column(made, MASK_COLUMNS[0]).values and (column(made, MASK_COLUMNS[1]).values > 0).all()


CASES = [Masked(), Masked(rows=1), Masked(engine="zero3")]
CUT = [Masked(layout=Layout(1, 2, 1)), Masked(layout=Layout(2, 1, 1), rows=2)]


@pytest.mark.slow
def test_a_step_with_the_mask_is_the_same_in_every_layout() -> None:
    """1 and 2 ranks, vocabulary or layers cut over 2, packed and one row a pass."""
    ((expected, *alone),) = run_ranks(run_masked, 1, CASES)
    both = run_ranks(run_masked, 2, [*CASES, *CUT])
    rows = dict(zip(expected["mine"], expected["rows"], strict=True))
    largest = max(float(moved.abs().max()) for moved in expected["moved"].values())
    for found in (*alone, *(outcome for rank in both for outcome in rank)):
        if found["counts"]:
            for number, values in zip(found["mine"], found["rows"], strict=True):
                torch.testing.assert_close(values, rows[number], rtol=0, atol=2e-5)
            assert found["metrics"]["ratio/max_deviation"] < 1e-5
        assert found["metrics"]["grad_norm"] == pytest.approx(expected["metrics"]["grad_norm"], rel=1e-5)
        for name, moved in expected["moved"].items():
            assert float((found["moved"][name] - moved).abs().max()) < 1e-4 * largest, name


def test_the_gradient_is_that_of_finite_differences() -> None:
    """Of the mean log-probability over the sets, in the direction of each weight's own gradient."""
    worker_module = TokenLogProbs(load_causal_lm(TINY)).double()
    shard = masked_shard([0, 1])
    mask = SamplingMask(shard.ragged(MASK_COLUMNS[0]), shard.ragged(MASK_COLUMNS[1]))
    ((micro,),) = each_minibatch(shard, 1000, everyone(), torch.device("cpu"))

    def objective() -> torch.Tensor:
        log_probs, entropy = worker_module(**micro.scored(0.7, with_entropy=True, sets=mask))
        total: torch.Tensor = log_probs.double().mean() + 0.3 * entropy.double().mean()
        return total

    objective().backward()
    weights = [p for p in worker_module.parameters() if p.grad is not None]
    squared = sum(float(p.grad.square().sum()) for p in weights if p.grad is not None)
    step = 2e-3 / squared**0.5
    ends = []
    for sign in (1, -2):
        with torch.no_grad():
            for parameter in weights:
                assert parameter.grad is not None
                parameter.add_(parameter.grad, alpha=sign * step)
            ends.append(float(objective()))
    assert (ends[0] - ends[1]) / (2 * step) == pytest.approx(squared, rel=1e-3)
