"""Options of compute_advantages and update_actor in an inline workbench, against closed forms."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import workbench as wb
from tests.cases import TINY, stored, tiny_lab, vowels
from tests.expected import expect_error
from workbench.batches.columns import Ragged
from workbench.errors import BadInput, UnknownColumn
from workbench.models.loading import load_causal_lm
from workbench.objectives.aggregation import aggregate, denominator
from workbench.objectives.correction import correct
from workbench.objectives.estimators import moments, whiten
from workbench.objectives.kl import kl_loss
from workbench.objectives.losses import policy_loss
from workbench.objectives.turns import fixed_ends, macro_gae, perplexity_ends

BETA = 0.1
GROUPS = [slice(0, 3), slice(3, 6)]


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[wb.Workbench]:
    models = {"actor": TINY, "critic": TINY, "reference": TINY, "reward": vowels}
    training = {"minibatches": 1, "learning_rate": 0.0, "max_grad_norm": 0.0}
    with tiny_lab("policy", tmp_path_factory.mktemp("runs"), models=models, training=training, backend="inline") as lab:
        yield lab


def ragged(batch: wb.Batch, name: str) -> Ragged:
    column = batch.fetch([name])[name]
    assert isinstance(column, Ragged)
    return column


@pytest.fixture(scope="module")
def scored(lab: wb.Workbench) -> wb.Batch:
    """Three responses to each of two prompts; rewards 0 to 5; a KL of 0.5 a token; engine and trainer apart."""
    batch = lab.actor.generate_sequences(lab.prompts.next(2), samples=3, max_new_tokens=8)
    table = lab.actor.compute_log_prob(batch).fetch()
    old = table["old_log_prob"]
    assert isinstance(old, Ragged)
    generator = torch.Generator().manual_seed(0)
    table["ref_log_prob"] = old.like(old.values - 0.5)
    table["rollout_log_prob"] = old.like(old.values - 0.3 * torch.randn(len(old.values), generator=generator))
    table["values"] = old.like(torch.randn(len(old.values), generator=generator))
    table["rewards"] = torch.arange(6.0) ** 2
    return lab.put(table, meta=batch.meta)


@pytest.fixture(scope="module")
def ready(lab: wb.Workbench, scored: wb.Batch) -> wb.Batch:
    """What an update reads, with one advantage a response."""
    return lab.compute_advantages(scored, estimator="dr_grpo")


def rewards_of(scored: wb.Batch) -> Tensor:
    rewards = scored.fetch(["rewards"])["rewards"]
    assert isinstance(rewards, Tensor)
    return rewards


def white(column: Ragged) -> Ragged:
    flat = column.values[None]
    return column.like(whiten(flat, torch.ones_like(flat), moments(flat, torch.ones_like(flat)))[0])


class TestAdvantages:
    def test_reinforce_pp_is_the_whitened_reward_to_go(self, lab: wb.Workbench, scored: wb.Batch) -> None:
        made = lab.compute_advantages(scored, estimator="reinforce_pp", gamma=0.9, kl_coefficient=BETA)
        rewards = rewards_of(scored)
        to_go = [0.9 ** torch.arange(len(row) - 1, -1, -1.0) for row in ragged(scored, "old_log_prob").rows()]
        expected = torch.cat(
            [rewards[i] * row - BETA * 0.5 * (1 - 0.9 * row) / (1 - 0.9) for i, row in enumerate(to_go)]
        )
        torch.testing.assert_close(ragged(made, "returns").values, expected, rtol=1e-5, atol=1e-5)
        column = ragged(made, "returns").like(expected)
        torch.testing.assert_close(ragged(made, "advantages").values, white(column).values, rtol=1e-4, atol=1e-5)

    def test_its_baseline_is_the_groups_mean(self, lab: wb.Workbench, scored: wb.Batch) -> None:
        made = lab.compute_advantages(scored, estimator="reinforce_pp_baseline")
        rewards = rewards_of(scored)
        centred = torch.cat([rewards[group] - rewards[group].mean() for group in GROUPS])
        old = ragged(scored, "old_log_prob")
        column = old.like(torch.repeat_interleave(centred, old.lengths))
        torch.testing.assert_close(ragged(made, "advantages").values, white(column).values, rtol=1e-4, atol=1e-5)
        of_group = lab.compute_advantages(scored, estimator="dr_grpo")
        torch.testing.assert_close(ragged(of_group, "advantages").values, column.values, rtol=1e-5, atol=1e-5)

    @pytest.mark.parametrize(
        "correction",
        [
            wb.Correction(level="sequence", high=1.1),
            wb.Correction(level="geometric", bound="mask", low=0.9, high=1.05),
            wb.Correction(level="token", high=1.2),
        ],
        ids=lambda correction: correction.level,
    )
    def test_off_policy_baseline(self, lab: wb.Workbench, scored: wb.Batch, correction: wb.Correction) -> None:
        """Of the weights before the update bounds them: w^2 |g|^2 is the sum of w_t^2 over the tokens."""
        made = lab.compute_advantages(scored, estimator="off_policy_baseline", correction=correction)
        old, rollout = ragged(scored, "old_log_prob"), ragged(scored, "rollout_log_prob")
        squares: list[Tensor] = []
        bounded = 0
        for a, b in zip(old.rows(), rollout.rows(), strict=True):
            log = (a - b).double()
            each = {"sequence": log.sum(), "geometric": log.mean(), "token": log}[correction.level].exp().expand(len(a))
            bounded += int((each > correction.high).sum())
            squares.append((each**2).sum())
        importance, rewards = torch.stack(squares), rewards_of(scored).double()
        assert 0 < bounded < len(old.values)
        for group in GROUPS:
            baseline = (importance[group] * rewards[group]).sum() / importance[group].sum()
            for i in range(group.start, group.stop):
                row = ragged(made, "advantages").rows()[i]
                advantage = (rewards[i] - baseline) / rewards[group].std(correction=0)
                torch.testing.assert_close(row.double(), advantage.expand(len(row)), rtol=1e-5, atol=1e-5)

    def test_gradient_norms_are_those_of_autograd(self, lab: wb.Workbench, scored: wb.Batch) -> None:
        """Through transformers' own logits, a response at a time; a row that is not valid, and a mask, cost no pass."""
        table = scored.fetch()
        mask = table["response_mask"]
        assert isinstance(mask, Ragged)
        values = mask.values.clone()
        values[:2] = 0
        table |= {"response_mask": mask.like(values), "valid": torch.tensor([1, 1, 0, 1, 1, 1])}
        made = lab.actor.compute_gradient_norm(lab.put(table, meta=scored.meta))
        norms = made.fetch(["gradient_norm"])["gradient_norm"]
        assert isinstance(norms, Tensor)
        model = load_causal_lm(TINY, dtype=torch.float32)
        chosen = mask.like(values).rows()
        expected: list[float] = []
        for i, (prompt, response) in enumerate(
            zip(ragged(scored, "prompt_ids").rows(), ragged(scored, "response_ids").rows(), strict=True)
        ):
            logits = model(input_ids=torch.cat([prompt, response]).long()[None]).logits[0, len(prompt) - 1 : -1]
            log_probs = logits.log_softmax(-1).gather(-1, response.long()[:, None])[:, 0]
            gradients = torch.autograd.grad((log_probs * chosen[i]).sum(), list(model.parameters()))
            expected.append(0.0 if i == 2 else float(sum(g.double().square().sum() for g in gradients)) ** 0.5)
        assert norms.tolist() == pytest.approx(expected, rel=1e-4)
        mean = lab.last_metrics["compute_gradient_norm"]["gradient_norm/mean"]
        assert mean == pytest.approx(sum(expected) / 5, rel=1e-4)

    def test_the_off_policy_baseline_takes_gradient_norms(self, lab: wb.Workbench, scored: wb.Batch) -> None:
        """b = sum w^2 |g|^2 R / sum w^2 |g|^2 of each prompt, as VCPO's authors write it."""
        table = scored.fetch()
        norms = torch.tensor([1.0, 2.0, 0.5, 3.0, 0.0, 1.5])
        table["gradient_norm"] = norms
        correction = wb.Correction(level="sequence", high=8.0)
        made = lab.compute_advantages(
            lab.put(table, meta=scored.meta), estimator="off_policy_baseline", correction=correction
        )
        old, rollout = ragged(scored, "old_log_prob"), ragged(scored, "rollout_log_prob")
        logs = [float((a - b).double().sum()) for a, b in zip(old.rows(), rollout.rows(), strict=True)]
        importance = (torch.tensor(logs, dtype=torch.float64).exp() * norms.double()) ** 2
        rewards = rewards_of(scored).double()
        for group in GROUPS:
            baseline = (importance[group] * rewards[group]).sum() / importance[group].sum()
            expected = (rewards[group] - baseline) / rewards[group].std(correction=0)
            found = [row[0] for row in ragged(made, "advantages").rows()[group]]
            torch.testing.assert_close(torch.stack(found).double(), expected, rtol=1e-5, atol=1e-5)

    def test_macro_actions_by_rules(self, lab: wb.Workbench, scored: wb.Batch) -> None:
        """By perplexity of the reference, by steps, and at random: the same for a row wherever it lies."""
        table = scored.fetch()
        old = table["old_log_prob"]
        assert isinstance(old, Ragged)
        draws = torch.randn(len(old.values), generator=torch.Generator().manual_seed(4))
        table |= {"ref_log_prob": old.like(draws), "step_ends": old.like((draws > 0.5).long())}
        batch = lab.put(table, meta=scored.meta)
        mask_BT, values_BT = ragged(batch, "response_mask").pad(), ragged(batch, "values").pad()
        ends: dict[Any, Tensor] = {
            3: fixed_ends(mask_BT, 3),
            "perplexity": perplexity_ends(old.like(draws).pad(), mask_BT),
            "steps": old.like((draws > 0.5).long()).pad(),
        }
        for rule, ends_BT in ends.items():
            made = lab.compute_advantages(batch, macro_tokens=rule, whiten_advantages=False)
            rewards_BT = ragged(made, "token_rewards").pad()
            advantages_BT, returns_BT = macro_gae(rewards_BT, values_BT, mask_BT, 1.0, 0.95, ends_BT)
            torch.testing.assert_close(ragged(made, "advantages").pad(), advantages_BT)
            of_errors, of_returns = ((x_BT[mask_BT].double().var()) for x_BT in (returns_BT - values_BT, returns_BT))
            explained = lab.last_metrics["compute_advantages"]["values/explained_variance"]
            assert explained == pytest.approx(float(1 - of_errors / of_returns), rel=1e-5)
        columns = [
            ragged(lab.compute_advantages(batch, macro_tokens="random", whiten_advantages=False), "advantages").values
            for _ in range(2)
        ]
        assert torch.equal(*columns)
        assert len(columns[0].unique()) > 6
        with expect_error(UnknownColumn, value="step_ends"):
            lab.compute_advantages(scored, macro_tokens="steps")
        with expect_error(BadInput, value="macro_tokens='sentence'"):
            lab.compute_advantages(scored, macro_tokens="sentence")

    @pytest.mark.parametrize("estimator", ["grpo", "reinforce_pp_baseline", "reinforce_pp", "remax"])
    def test_token_rewards_outside_the_mask_count_nowhere(
        self, lab: wb.Workbench, scored: wb.Batch, estimator: str
    ) -> None:
        """What an environment wrote may carry rewards: neither score nor advantage nor metric holds them."""
        table = scored.fetch()
        old = table["old_log_prob"]
        assert isinstance(old, Ragged)
        mask = torch.ones(len(old.values), dtype=torch.bool)
        mask[old.lengths.cumsum(0) - 2] = False
        table["response_mask"] = old.like(mask)
        clean = torch.randn(len(mask), generator=torch.Generator().manual_seed(1)) * mask
        table["baseline_rewards"] = torch.zeros(6)
        told = []
        for rewards in (clean, torch.where(mask, clean, 7.0 + torch.arange(len(mask)))):
            made = lab.compute_advantages(
                lab.put(table | {"rewards": old.like(rewards)}, meta=scored.meta), estimator=estimator
            )
            told.append((ragged(made, "advantages").values, lab.last_metrics["compute_advantages"]))
        assert told[0][0].any()
        assert torch.equal(told[0][0], told[1][0])
        assert told[0][1] == told[1][1]

    @pytest.mark.parametrize("estimator", ["grpo", "dr_grpo", "rloo", "reinforce_pp_baseline"])
    @pytest.mark.parametrize("score_a_token", [False, True])
    def test_a_masked_response_counts_with_its_score(
        self, lab: wb.Workbench, scored: wb.Batch, estimator: str, score_a_token: bool
    ) -> None:
        """Its loss is left out, as that of responses that were cut may be; the baseline of the others has it still."""
        table = scored.fetch()
        old = table["old_log_prob"]
        assert isinstance(old, Ragged)
        masks = [torch.ones(n, dtype=torch.bool) for n in old.lengths.tolist()]
        masks[2][:] = False
        table["response_mask"] = old.like(torch.cat(masks))
        for last, signal in ((1.0, False), (9.0, True)):
            scores = torch.tensor([1.0, 1.0, last, 0.0, 0.0, 0.0])
            table["rewards"] = scores
            if score_a_token:
                table["rewards"] = Ragged.of(
                    [s * torch.eye(1, n)[0].flip(0) for s, n in zip(scores, old.lengths.tolist(), strict=True)],
                    torch.float32,
                )
            batch = lab.put(table, meta=scored.meta)
            made = lab.compute_advantages(batch, estimator=estimator, whiten_advantages=False)
            first = ragged(made, "advantages").rows()[0]
            assert bool((first < 0).all() if signal else (first == 0).all())
            metrics = lab.last_metrics["compute_advantages"]
            assert metrics["without_variance/fraction"] == (0.5 if signal else 1.0)
            assert metrics["rewards/mean"] == pytest.approx(float(scores.mean()))

    def test_the_overlong_penalty_counts_the_longest_context_alone(self, lab: wb.Workbench, scored: wb.Batch) -> None:
        table = scored.fetch()
        old = table["old_log_prob"]
        assert isinstance(old, Ragged)
        firsts = old.lengths.cumsum(0) - old.lengths
        starts, mask = torch.zeros(len(old.values), dtype=torch.bool), torch.ones(len(old.values), dtype=torch.bool)
        long = int(old.lengths.argmax())
        starts[firsts[long] + 3], mask[firsts[long] + 3] = True, False  # three tokens, and four after a prompt of one
        table |= {"response_mask": old.like(mask), "context_starts": old.like(starts), "rewards": torch.zeros(6)}
        batch = lab.put(table, meta=scored.meta)
        made = lab.compute_advantages(batch, estimator="grpo", overlong_buffer=6, max_response_tokens=8)
        found = torch.stack([row.sum() for row in ragged(made, "token_rewards").rows()])
        assert old.lengths[long] == 8
        lengths = old.lengths.clone()
        lengths[long] = 4
        torch.testing.assert_close(found, ((2 - lengths) / 6).clamp(-1, 0))

    def test_groups_without_variance_are_counted(self, lab: wb.Workbench, scored: wb.Batch) -> None:
        table = scored.fetch()
        table["rewards"] = torch.tensor([0.1, 0.1, 0.1, 1.0, 2.0, 3.0])
        made = lab.compute_advantages(lab.put(table, meta=scored.meta), estimator="grpo")
        assert lab.last_metrics["compute_advantages"]["without_variance/fraction"] == 0.5
        assert all(not row.any() for row in ragged(made, "advantages").rows()[:3])

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            ({"estimator": "grpo", "macro_tokens": 2}, "macro_tokens=2 with estimator='grpo'"),
            ({"macro_tokens": 0}, "macro_tokens=0"),
            ({"overlong_buffer": 3}, "overlong_buffer=3 without max_response_tokens"),
            ({"overlong_buffer": 9, "max_response_tokens": 8}, "overlong_buffer=9"),
            ({"estimator": "reinforce"}, "'reinforce_pp'"),
            ({"estimator": "off_policy_baseline"}, "'off_policy_baseline' with correction=None"),
        ],
    )
    def test_bad_arguments(self, lab: wb.Workbench, scored: wb.Batch, arguments: Any, message: str) -> None:
        with pytest.raises(BadInput, match=message):
            lab.compute_advantages(scored, **arguments)

    def test_one_response_a_prompt(self, lab: wb.Workbench, scored: wb.Batch) -> None:
        with expect_error(BadInput, value="one response per prompt"):
            lab.compute_advantages(scored.take([0, 3]), estimator="reinforce_pp_baseline")
        with expect_error(UnknownColumn, value="rollout_log_prob"):
            lab.compute_advantages(
                scored.drop("rollout_log_prob"), estimator="off_policy_baseline", correction=wb.Correction()
            )


class TestUpdates:
    """The learning rate is 0: every call sees the same weights, and the gradient's norm tells what was minimised."""

    def with_weight(self, lab: wb.Workbench, ready: wb.Batch, weights: Tensor) -> wb.Batch:
        """The same rows, with pi_old / pi_rollout as given for each token."""
        table = ready.fetch()
        old = table["old_log_prob"]
        assert isinstance(old, Ragged)
        table["rollout_log_prob"] = old.like(old.values - weights.log())
        return lab.put(table, meta=ready.meta)

    @pytest.mark.parametrize(
        "form",
        [
            {"loss": "ppo", "clip": 0.2, "clip_high": 0.3, "correction": wb.Correction()},
            {"loss": "ppo", "aggregation": "sequence-mean-token-sum", "dual_clip": 1.5, "kl_coefficient": 0.1,
             "kl": "k3_corrected", "correction": wb.Correction(level="geometric", bound="mask")},
            {"loss": "gspo", "aggregation": "sequence-mean-token-mean", "clip": 0.1, "kl_coefficient": 0.1, "kl": "k2"},
            {"loss": "cispo", "aggregation": "fixed-length", "max_response_tokens": 16, "clip": 0.3, "clip_high": 0.4},
            {"loss": "sapo", "correction": wb.Correction(bound="second_moment", second_moment=0.02)},
        ],
        ids=lambda form: f"{form['loss']}-{form.get('aggregation', 'token-mean')}",
    )  # fmt: skip
    def test_a_loss_is_its_formula_over_the_whole_minibatch(
        self, lab: wb.Workbench, ready: wb.Batch, form: dict[str, Any]
    ) -> None:
        """For a policy that has moved by half a nat; tests/objectives has the formulas."""
        table, generator = ready.fetch(), torch.Generator().manual_seed(1)
        now = ragged(ready, "old_log_prob")
        for name in ("old_log_prob", "ref_log_prob", "rollout_log_prob", "advantages"):
            table[name] = now.like(now.values + 0.5 * torch.randn(len(now.values), generator=generator))
        table["response_mask"] = now.like(torch.rand(len(now.values), generator=generator) < 0.7)
        padded = {name: column.pad() for name, column in table.items() if isinstance(column, Ragged)}
        old, ref, mask = (padded[name] for name in ("old_log_prob", "ref_log_prob", "response_mask"))
        clips = (form.get("clip"), form.get("clip_high"), form.get("dual_clip"))
        loss, _ = policy_loss(form["loss"], now.pad(), old, padded["advantages"], mask, *clips)
        if "correction" in form:
            loss = loss * correct(old, padded["rollout_log_prob"], mask, form["correction"]).weight_BT
        if "kl" in form:
            loss = loss + form["kl_coefficient"] * kl_loss(now.pad(), old, ref, form["kl"])
        how, longest = form.get("aggregation", "token-mean"), form.get("max_response_tokens")
        expected = aggregate(loss, mask, how, denominator(mask, how, longest))
        found = lab.actor.update_actor(lab.put(table, meta=ready.meta), **form)["loss"]
        assert found == pytest.approx(float(expected), rel=1e-4, abs=1e-5)

    def test_each_loss_has_the_clips_of_its_paper(self, lab: wb.Workbench, ready: wb.Batch) -> None:
        """Log-ratios from -0.01 to 2 that differ from token to token, or (GSPO) from response to response."""
        table = ready.fetch()
        old, advantages = table["old_log_prob"], ragged(ready, "advantages")
        assert isinstance(old, Ragged)
        for loss, low, high in (("ppo", 0.2, 0.2), ("gspo", 3e-4, 4e-4), ("cispo", 1.0, 2.0)):
            logs = torch.linspace(-0.3, 2.0, len(old.values))
            if loss == "gspo":
                logs = torch.repeat_interleave(torch.tensor([-1e-3, -2e-4, 2e-4, 3.5e-4, 4.5e-4, 1e-3]), old.lengths)
            table["old_log_prob"] = old.like(old.values - logs)
            batch, ratio = lab.put(table, meta=ready.meta), logs.exp()
            plain, given = (
                lab.actor.update_actor(batch, loss=loss, **c) for c in ({}, {"clip": low, "clip_high": high})
            )
            assert {**plain, "optimizer_steps": 0} == {**given, "optimizer_steps": 0}
            bounded = (ratio > 1 + high) & ((advantages.values > 0) | (loss == "cispo"))
            bounded |= (ratio < 1 - low) & ((advantages.values < 0) | (loss == "cispo"))
            rows = [row.any() for row in old.like(advantages.values).rows()]
            counted = torch.repeat_interleave(torch.tensor(rows), old.lengths)
            share = float(bounded[counted].float().mean())
            assert 0 < share < 1
            assert plain["clip_fraction"] == pytest.approx(share, abs=1e-6)
        both = [
            lab.actor.update_actor(batch, loss="gspo", **c) for c in ({"clip": 0.1}, {"clip": 0.1, "clip_high": 0.1})
        ]
        assert both[0]["loss"] == both[1]["loss"] != plain["loss"]

    def test_a_critic_learns_faster_by_default(self, tmp_path: Path) -> None:
        models, cases = {"actor": TINY, "critic": TINY}, ((None, (1e-6, 1e-5)), (3e-6, (3e-6, 3e-6)))
        for number, (given, rates) in enumerate(cases):
            training = wb.Training(engine="torch", learning_rate=given)
            generation = wb.Generation(engine="transformers", max_model_tokens=64)
            options: dict[str, Any] = {"training": training, "generation": generation, "backend": "inline"}
            with wb.open(f"rates{number}", models=models, prompts="arithmetic/test", runs=tmp_path, **options) as lab:
                batch = lab.put(stored(4))
                found = [
                    update(batch)["learning_rate"] for update in (lab.actor.update_actor, lab.critic.update_critic)
                ]
                assert found == pytest.approx(rates)

    def test_a_constant_weight_scales_the_gradient(
        self, lab: wb.Workbench, ready: wb.Batch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        tokens = len(ragged(ready, "old_log_prob").values)
        plain = lab.actor.update_actor(ready)
        batch = self.with_weight(lab, ready, torch.full((tokens,), 1.5))
        assert lab.actor.update_actor(batch)["grad_norm"] == pytest.approx(plain["grad_norm"], rel=1e-5)
        for bound, factor in ((1.2, 1.2), (2.0, 1.5)):
            found = lab.actor.update_actor(batch, correction=wb.Correction(high=bound))
            assert found["grad_norm"] == pytest.approx(factor * plain["grad_norm"], rel=1e-4)
            assert found["correction/weight/mean"] == pytest.approx(factor, rel=1e-5)
            assert found["correction/bounded_fraction"] == float(bound < 1.5)
            assert found["correction/effective_sample_size"] == pytest.approx(1.0)
        assert "gradient of each step" not in capsys.readouterr().err
        masked = lab.actor.update_actor(batch, correction=wb.Correction(bound="mask", high=1.2))
        assert masked["grad_norm"] == 0
        assert "gives each token with an advantage weight 0" in capsys.readouterr().err
        assert masked["correction/effective_sample_size"] == pytest.approx(1.0)
        assert masked["correction/bounded_effective_sample_size"] == 0

    def test_metrics_are_those_of_the_whole_minibatch(self, lab: wb.Workbench, ready: wb.Batch) -> None:
        """Over all micro-batches: the share of an effective sample is no mean of the micro-batches' shares."""
        old = ragged(ready, "old_log_prob")
        weights = torch.linspace(0.2, 4.0, len(old.values))
        batch = self.with_weight(lab, ready, weights)
        found = lab.actor.update_actor(batch, correction=wb.Correction(bound="mask", low=0.5, high=3.0))
        kept = torch.where((weights >= 0.5) & (weights <= 3.0), weights, 0.0).double()
        assert found["correction/bounded_fraction"] == pytest.approx(float((kept == 0).double().mean()), rel=1e-4)
        for name, each in (("bounded_effective_sample_size", kept), ("effective_sample_size", weights.double())):
            share = float(each.sum() ** 2 / (len(each) * (each**2).sum()))
            assert found[f"correction/{name}"] == pytest.approx(share, rel=1e-4)
        found = lab.actor.update_actor(batch, correction=wb.Correction(level="geometric", high=100.0))
        rows = torch.stack([row.log().mean().exp() for row in old.like(weights).rows()]).double()
        share = float(rows.sum() ** 2 / (6 * (rows**2).sum()))
        assert found["correction/effective_sample_size"] == pytest.approx(share, rel=1e-4)

    def test_one_response_with_a_large_weight_makes_a_small_step(self, tmp_path: Path) -> None:
        """Of 64 responses one has weight exp(8): the bound is 8 (VCPO's) or 2, the rate sees the weight before it."""
        training = {"minibatches": 1, "learning_rate": 1e-3}
        with tiny_lab("large", tmp_path, models={"actor": TINY}, training=training, backend="inline") as lab:
            table = stored(64)
            old = table["old_log_prob"]
            assert isinstance(old, Ragged)
            logs = torch.where(torch.arange(64) == 40, 8.0, 0.0)
            shift = torch.repeat_interleave(logs / old.lengths, old.lengths)
            table |= {"rollout_log_prob": old.like(old.values - shift), "advantages": old.like(torch.ones_like(shift))}
            e8 = math.exp(8)
            for high in (2.0, 8.0):
                correction = wb.Correction(level="sequence", high=high, reference_size=0.9)
                metrics = lab.actor.update_actor(lab.put(table), correction=correction)
                share = (63 + e8) ** 2 / (64 * (63 + e8**2))
                assert metrics["correction/effective_sample_size"] == pytest.approx(share, rel=1e-4)
                assert metrics["learning_rate"] == pytest.approx(0.1345e-3, rel=2e-3)
                share = (63 + high) ** 2 / (64 * (63 + high**2))
                assert metrics["correction/bounded_effective_sample_size"] == pytest.approx(share, rel=1e-4)

    def test_few_effective_samples_make_small_steps(self, tmp_path: Path) -> None:
        """VCPO's scale, for each minibatch its own: the weights of the second one are equal."""
        training = {"minibatches": 2, "learning_rate": 1e-3}
        with tiny_lab("steps", tmp_path, models={"actor": TINY}, training=training, backend="inline") as lab:
            batch = lab.actor.generate_sequences(lab.prompts.next(4), max_new_tokens=6)
            table = lab.actor.compute_log_prob(batch).fetch()
            old = table["old_log_prob"]
            assert isinstance(old, Ragged)
            weights = torch.tensor([1.0, 3.0, 2.0, 2.0])
            shift = torch.repeat_interleave(weights.log() / old.lengths, old.lengths)
            table |= {"rollout_log_prob": old.like(old.values - shift), "advantages": old.like(torch.ones_like(shift))}
            correction = wb.Correction(level="sequence", high=10.0, reference_size=0.9)
            metrics = lab.actor.update_actor(lab.put(table, meta=batch.meta), correction=correction)
        scale = (0.8 / 0.9) ** 0.5
        assert metrics["first_minibatch/learning_rate"] == pytest.approx(scale * 1e-3, rel=1e-5)
        assert metrics["learning_rate"] == pytest.approx((scale + 1) / 2 * 1e-3, rel=1e-5)
        assert metrics["correction/effective_sample_size"] == pytest.approx(64 / (4 * 18), rel=1e-5)

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            ({"loss": "trpo"}, "loss='trpo'"),
            ({"loss": "gspo", "dual_clip": 3.0}, "dual_clip with loss='gspo'"),
            ({"kl": "k4"}, "kl='k4'"),
            ({"correction": "tis"}, "correction='tis'"),
            ({"clip": 1.5}, r"clip=1\.5"),
        ],
    )
    def test_bad_arguments(self, lab: wb.Workbench, ready: wb.Batch, arguments: Any, message: str) -> None:
        with pytest.raises(BadInput, match=message):
            lab.actor.update_actor(ready, **arguments)

    @pytest.mark.parametrize("settings", [{"top_p": 0.9}, {"top_k": 20}, {"min_p": 0.05}], ids=str)
    def test_a_correction_refuses_truncated_rollouts(
        self, lab: wb.Workbench, ready: wb.Batch, settings: dict[str, float]
    ) -> None:
        """Two updates and the baseline; also where other rows were sampled from all tokens. Without one: no refusal."""
        ((name, value),) = settings.items()
        prompts = lab.prompts.next(2)
        cut = lab.actor.generate_sequences(prompts, samples=3, max_new_tokens=8, **settings)
        assert cut.meta["truncation"] == settings
        scored = lab.actor.compute_log_prob(cut)
        given = {"advantages": scored.fetch(["rollout_log_prob"])["rollout_log_prob"]}
        batch = lab.put({**scored.fetch(), **given, "rewards": torch.arange(6.0)}, meta=scored.meta)
        lab.actor.update_actor(batch)
        both = wb.Batch.concat([ready.select(*batch.columns), batch])
        message = rf"sampled with {name}={value}.*sample with {name}="
        for refused in (batch, both):
            with pytest.raises(BadInput, match=message):
                lab.actor.update_actor(refused, correction=wb.Correction())
        with pytest.raises(BadInput, match=message):
            lab.compute_advantages(batch, estimator="off_policy_baseline", correction=wb.Correction())
        again = lab.actor.generate_sequences(scored, max_new_tokens=8)
        assert again.meta["truncation"] == {}
        greedy = lab.actor.generate_sequences(prompts, temperature=0.0, max_new_tokens=8, **settings)
        assert greedy.meta["truncation"] == {}


class TestOnPolicy:
    """An update that takes its own forward pass for `compute_log_prob`'s."""

    @pytest.fixture
    def fresh(self, tmp_path: Path) -> Iterator[wb.Workbench]:
        models = {"actor": TINY, "reference": TINY, "reward": vowels}
        with tiny_lab("fresh", tmp_path, models=models, training={"minibatches": 1}, backend="inline") as lab:
            yield lab

    @pytest.mark.parametrize(
        "arguments",
        [
            *({}, {"entropy_coefficient": 0.01}),
            *(pytest.param({"loss": loss}, marks=pytest.mark.thorough) for loss in ("gspo", "cispo")),
        ],
    )
    def test_its_step_is_that_after_a_scoring_pass(self, fresh: wb.Workbench, arguments: dict[str, Any]) -> None:
        batch = fresh.actor.generate_sequences(fresh.prompts.next(2), samples=3, max_new_tokens=8)
        batch = fresh.actor.compute_log_prob(batch)
        scored = fresh.last_metrics["compute_log_prob"]
        responses = ragged(batch, "response_ids")
        drawn = torch.randn(len(responses.values), generator=torch.Generator().manual_seed(0))
        ready = batch.drop("old_log_prob").join(fresh.put({"advantages": responses.like(drawn)}))
        checksums, told = [], []
        for given in ({"on_policy": True}, {}):
            with fresh.kept("actor"):
                which = ready if given else ready.join(batch.select("old_log_prob"))
                told.append(fresh.actor.update_actor(which, **arguments, **given))
                checksums.append(fresh.actor.weights_checksum())
        assert checksums[0] == checksums[1]
        assert checksums[0] != fresh.actor.weights_checksum()
        for name in ("loss", "grad_norm", "ratio/mean", "clip_fraction", "rollout_ratio/max_deviation"):
            assert told[0][name] == told[1][name], name
        assert told[0]["ratio/max_deviation"] == 0
        for name in ("entropy", "old_log_prob/mean", "rollout_gap/mean", "rollout_gap/max"):
            assert told[0][name] == pytest.approx(scored[name], rel=1e-5), name

    def test_algorithms_leave_out_the_scoring_pass(self, fresh: wb.Workbench) -> None:
        short = wb.Sampling(max_new_tokens=6)
        grpo = wb.GRPO(fresh, prompts=2, samples=2, sampling=short, kl_coefficient=0.1)
        assert "compute_log_prob" not in grpo.graph().names
        metrics = grpo.iterate()
        assert metrics["update_actor/rollout_gap/max"] < 1e-4 and metrics["update_actor/entropy"] > 0
        grpo.insert(fresh.actor.compute_log_prob, after="generate_sequences")
        assert grpo.iterate()["compute_log_prob/rollout_gap/max"] < 1e-4
        needing: dict[str, Any] = {"epochs": 2, "correction": wb.Correction(), "kl_coefficient": 0.1}
        for name, value in needing.items():
            changed = {"kl_coefficient": 0.0, name: value}
            rloo = wb.RLOO(fresh, prompts=2, samples=2, sampling=short, **changed)
            assert "compute_log_prob" in rloo.graph().names, name
        assert "compute_log_prob" not in wb.RLOO(fresh, prompts=2, samples=2, kl_coefficient=0.0).graph().names

    def test_several_steps_need_the_scoring_pass(self, lab: wb.Workbench, ready: wb.Batch, tmp_path: Path) -> None:
        for given in ({"epochs": 2}, {"correction": wb.Correction()}):
            with expect_error(BadInput, value="on_policy=True with ", remedy="compute_log_prob"):
                lab.actor.update_actor(ready, on_policy=True, **given)
        with tiny_lab("several", tmp_path, training={"minibatches": 2}, backend="inline") as several:
            assert "compute_log_prob" in wb.GRPO(several, prompts=2, samples=2).graph().names
            batch = several.actor.generate_sequences(several.prompts.next(2), samples=2, max_new_tokens=4)
            batch = several.compute_advantages(several.reward.compute_reward(batch), estimator="grpo")
            with expect_error(BadInput, value=r"on_policy=True with Training\(minibatches=2\)"):
                several.actor.update_actor(batch, on_policy=True)
