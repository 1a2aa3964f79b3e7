"""Against numbers by hand, and against the definitions written out as double sums in float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.expected import expect_error
from tests.objectives.policies import (
    expected_policy_gradient,
    log_probs_of,
    normal,
    random_masks,
    sequences,
    true_gradient,
)
from workbench.errors import BadInput
from workbench.objectives.estimators import (
    explained_variance,
    gae,
    moments,
    overlong_penalty,
    reinforce,
    response_scores,
    token_rewards,
    whiten,
)


class TestResponseScores:
    mask = torch.tensor([[1, 1, 0], [0, 0, 0], [1, 0, 1]])

    def test_tokens_inside_the_mask_or_all_where_there_are_none(self) -> None:
        scores = torch.tensor([[1.0, 2.0, 4.0], [1.0, 2.0, 4.0], [1.0, 2.0, 4.0]])
        assert response_scores(scores, self.mask).tolist() == [3.0, 7.0, 5.0]
        assert response_scores(torch.tensor([1.0, 9.0, 2.0]), self.mask).tolist() == [1.0, 9.0, 2.0]

    def test_equal_rewards_in_another_order_are_equal(self) -> None:
        rewards = torch.tensor([0.1, 0.7, 0.2, 0.3, 0.6, 0.9, 0.4, 1.1])
        orders = torch.stack(
            [rewards[torch.randperm(8, generator=torch.Generator().manual_seed(i))] for i in range(64)]
        )
        assert len(orders.sum(-1).unique()) > 1  # in fp32 they are not
        assert len(response_scores(orders, torch.ones(64, 8)).float().unique()) == 1


class TestExplainedVariance:
    def test_by_hand(self) -> None:
        mask, returns = torch.ones(1, 4), torch.tensor([[0.0, 1.0, 2.0, 3.0]])

        def of(values: Tensor) -> float:
            return explained_variance(moments(returns, mask), moments(returns - values, mask))

        assert of(returns) == 1
        assert of(returns + 5) == 1  # an offset explains as much
        assert of(torch.full((1, 4), 1.5)) == pytest.approx(0)
        assert of(-returns) == pytest.approx(-3)
        assert explained_variance(moments(mask, mask), moments(returns, mask)) != 0  # not a number


class TestTokenRewards:
    log_prob = torch.tensor([[-1.0, -2.0, -3.0], [-1.0, -1.0, -1.0]])
    ref = torch.tensor([[-1.5, -1.0, -3.0], [-2.0, -1.0, 0.0]])
    mask = torch.tensor([[1, 1, 0], [1, 0, 1]])

    def test_score_sits_on_the_last_valid_token(self) -> None:
        rewards = token_rewards(torch.tensor([10.0, -4.0]), self.log_prob, self.ref, self.mask, beta=0.1)
        torch.testing.assert_close(rewards, torch.tensor([[-0.05, 10.1, 0.0], [-0.1, 0.0, -3.9]]))

    def test_scores_per_token(self) -> None:
        scores = torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]])
        rewards = token_rewards(scores, self.log_prob, self.ref, self.mask, beta=0.1, kind="k2")
        torch.testing.assert_close(rewards, torch.tensor([[1 - 0.0125, 2 - 0.05, 0.0], [4 - 0.05, 0.0, 6 - 0.05]]))

    def test_without_reference(self) -> None:
        rewards = token_rewards(torch.tensor([10.0, -4.0]), self.log_prob, None, self.mask, beta=0.0)
        assert rewards.tolist() == [[0.0, 10.0, 0.0], [0.0, 0.0, -4.0]]

    def test_row_without_valid_tokens_gets_nothing(self) -> None:
        mask = torch.tensor([[False] * 3, [True, False, False]])
        rewards = token_rewards(torch.tensor([10.0, -4.0]), self.log_prob, None, mask, beta=0.0)
        assert rewards.tolist() == [[0.0, 0.0, 0.0], [-4.0, 0.0, 0.0]]

    def test_padding_cannot_leak(self) -> None:
        log_prob = self.log_prob.masked_fill(self.mask == 0, float("nan"))
        rewards = token_rewards(torch.tensor([10.0, -4.0]), log_prob, self.ref, self.mask, beta=0.1)
        torch.testing.assert_close(rewards, torch.tensor([[-0.05, 10.1, 0.0], [-0.1, 0.0, -3.9]]))

    @pytest.mark.parametrize("scores", [torch.zeros(3), torch.zeros(2, 1), torch.zeros(())])
    def test_bad_shapes(self, scores: Tensor) -> None:
        with expect_error(BadInput, value="scores_B"):
            token_rewards(scores, self.log_prob, self.ref, self.mask, beta=0.1)

    def test_a_penalty_needs_a_reference(self) -> None:
        with expect_error(BadInput, value="ref_log_prob_BT=None", rule="beta=0.1 needs"):
            token_rewards(torch.zeros(2), self.log_prob, None, self.mask, beta=0.1)


def gae_by_double_sum(
    rewards: Tensor, values: Tensor, mask: Tensor, gamma: float, lam: float, bootstrap: Tensor
) -> tuple[Tensor, Tensor]:
    """A_t = sum_l (gamma lambda)^l delta_{t+l} and G = A + V on each row's valid tokens, closed up."""
    advantages, returns = torch.zeros_like(rewards), torch.zeros_like(rewards)
    for i in range(len(rewards)):
        where = mask[i].nonzero().flatten().tolist()
        v = [values[i, t].item() for t in where] + [bootstrap[i].item()]
        r = [rewards[i, t].item() for t in where]
        deltas = [r[j] + gamma * v[j + 1] - v[j] for j in range(len(where))]
        for j, t in enumerate(where):
            advantages[i, t] = sum((gamma * lam) ** (k - j) * deltas[k] for k in range(j, len(where)))
            returns[i, t] = advantages[i, t] + values[i, t]
    return advantages, returns


class TestGAE:
    def test_by_hand(self) -> None:
        # deltas: 1 + 0.5*2 - 1 = 1, 0 + 0.5*4 - 2 = 0, 3 - 4 = -1; gamma lambda = 0.25
        advantages, returns = gae(
            torch.tensor([[1.0, 0.0, 3.0]]), torch.tensor([[1.0, 2.0, 4.0]]), torch.ones(1, 3), gamma=0.5, lam=0.5
        )
        assert advantages.tolist() == [[0.9375, -0.25, -1.0]]
        assert returns.tolist() == [[1.9375, 1.75, 3.0]]

    def test_is_the_double_sum(self) -> None:
        for bootstrapped in [False, True]:
            for lam in [0.0, 0.95, 1.0]:
                for gamma in [0.0, 0.9, 1.0]:
                    rewards, values, mask = normal(8, 11, seed=0), normal(8, 11, seed=1), random_masks(8, 11, seed=2)
                    bootstrap = normal(8, seed=3) if bootstrapped else torch.zeros(8, dtype=torch.float64)
                    found = gae(rewards, values, mask, gamma, lam, bootstrap if bootstrapped else None)
                    expected = gae_by_double_sum(rewards, values, mask, gamma, lam, bootstrap)
                    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)

    def test_padding_cannot_leak(self) -> None:
        rewards, values, mask = normal(8, 11, seed=0), normal(8, 11, seed=1), random_masks(8, 11, seed=2)
        clean = gae(rewards, values, mask, 0.9, 0.8)
        dirty = gae(rewards.masked_fill(~mask, torch.nan), values.masked_fill(~mask, torch.inf), mask, 0.9, 0.8)
        for a, b in zip(clean, dirty, strict=True):
            assert torch.equal(a, b)
            assert (a[~mask] == 0).all()

    def test_inputs_stay_and_precision_is_single_at_least(self) -> None:
        rewards, values = torch.ones(1, 2).bfloat16(), torch.ones(1, 2).bfloat16().requires_grad_()
        advantages, returns = gae(rewards, values, torch.ones(1, 2).bool(), 1.0, 0.95)
        assert advantages.dtype == returns.dtype == torch.float32
        assert not returns.requires_grad
        assert rewards.tolist() == values.tolist() == [[1.0, 1.0]]

    def test_bad_input(self) -> None:
        x, mask = torch.zeros(2, 3), torch.ones(2, 3)
        with expect_error(BadInput, value=r"mask_BT has shape \[2, 3\], values_BT has shape \[2, 4\]"):
            gae(x, torch.zeros(2, 4), mask, 1.0, 1.0)
        with expect_error(BadInput, value=r"bootstrap_B has shape \[3\]"):
            gae(x, x, mask, 1.0, 1.0, torch.zeros(3))


def test_reward_to_go_by_hand() -> None:
    rewards, mask = (
        torch.tensor([[1.0, 7.0, 2.0, 4.0], [3.0, 9.0, 9.0, 9.0]]),
        torch.tensor([[1, 0, 1, 1], [1, 0, 0, 0]]),
    )
    assert reinforce(rewards, mask, 0.5)[1].tolist() == [[3.0, 0.0, 4.0, 4.0], [3.0, 0.0, 0.0, 0.0]]


class TestWhiten:
    def test_is_torch_std_mean_on_valid_tokens(self) -> None:
        x, mask = 3 + 2 * normal(8, 11, seed=0), random_masks(8, 11, seed=1)
        white = whiten(x, mask, moments(x, mask))
        variance, mean = torch.var_mean(x[mask], correction=1)
        torch.testing.assert_close(white[mask], (x[mask] - mean) / (variance + 1e-8).sqrt())
        assert (white[~mask] == 0).all()

    def test_moments_add_up_over_ranks(self) -> None:
        x, mask = 3 + 2 * normal(8, 11, seed=0), random_masks(8, 11, seed=1)
        whole = moments(x, mask)
        parts = sum(moments(x[rows], mask[rows]) for rows in (slice(0, 1), slice(1, 5), slice(5, 8)))
        assert whole[0] == mask.sum()
        assert whole.dtype == torch.float64
        torch.testing.assert_close(parts, whole, rtol=1e-14, atol=0)
        own = torch.cat([whiten(x[rows], mask[rows], whole) for rows in (slice(0, 5), slice(5, 8))])
        assert torch.equal(own, whiten(x, mask, whole))

    def test_large_mean_does_not_cancel(self) -> None:
        x, mask = (1e4 + normal(4, 50, seed=0)).float(), torch.ones(4, 50).bool()
        white = whiten(x, mask, moments(x, mask))
        variance, mean = torch.var_mean(x.double())
        expected = ((x.double() - mean) / (variance + 1e-8).sqrt()).float()
        torch.testing.assert_close(white, expected, rtol=1e-5, atol=1e-5)

    def test_degenerate_batches(self) -> None:
        x = torch.full((2, 3), 0.1)
        for valid in (0, 1, 6):
            mask = torch.arange(6).view(2, 3) < valid
            torch.testing.assert_close(whiten(x, mask, moments(x, mask)), torch.zeros_like(x))

    def test_bad_input(self) -> None:
        with expect_error(BadInput, value="mask_BT has shape"):
            moments(torch.zeros(2, 3), torch.ones(2, 1))


class TestReinforce:
    def test_by_hand(self) -> None:
        rewards = torch.tensor([[0.0, -0.5, 2.0, 9.0], [4.0, 9.0, 9.0, 9.0]])
        mask = torch.tensor([[1, 1, 1, 0], [1, 0, 0, 0]])
        advantages, returns = reinforce(rewards, mask, 1.0, torch.tensor([1.0, 5.0]))
        assert returns.tolist() == [[1.5, 1.5, 2.0, 0.0], [4.0, 0.0, 0.0, 0.0]]
        assert advantages.tolist() == [[0.5, 0.5, 1.0, 0.0], [-1.0, 0.0, 0.0, 0.0]]

    def test_gradient_is_the_true_one_with_less_variance(self) -> None:
        """Over all sequences of a small policy, with a KL penalty in the reward: the baseline takes no part of it."""
        actions, logits = sequences()
        scores, beta = normal(9, seed=8) + 3, 0.3
        reference = log_probs_of(actions, normal(4, 3, seed=9))
        log_probs = log_probs_of(actions, logits).detach()
        mask = torch.ones(9, 2)
        greedy = scores[log_probs.sum(-1).argmax()].expand(9)
        rewards = token_rewards(scores, log_probs, reference, mask, beta)
        advantages, returns = reinforce(rewards, mask, 1.0, greedy)
        truth = true_gradient(lambda now: scores - beta * (now - reference).sum(-1), actions, logits)
        torch.testing.assert_close(expected_policy_gradient(advantages, actions, logits), truth)
        weight = log_probs.sum(-1).exp()
        assert (weight * advantages[:, 0] ** 2).sum() < (weight * returns[:, 0] ** 2).sum()

    def test_bad_input(self) -> None:
        x = torch.zeros(2, 3)
        with expect_error(BadInput, value=r"baseline_B has shape \[3\]"):
            reinforce(x, x, 1.0, torch.zeros(3))

    def test_without_a_baseline_it_is_the_reward_to_go(self) -> None:
        """REINFORCE++ before whitening, with the token KL in it: its gradient is the true one."""
        actions, logits = sequences()
        scores, beta, mask = normal(9, seed=8) + 3, 0.3, torch.ones(9, 2)
        reference = log_probs_of(actions, normal(4, 3, seed=9))
        rewards = token_rewards(scores, log_probs_of(actions, logits).detach(), reference, mask, beta)
        advantages, returns = reinforce(rewards, mask, 1.0)
        assert torch.equal(advantages, returns)
        torch.testing.assert_close(returns[:, 0], rewards.sum(-1))
        torch.testing.assert_close(returns[:, 1], rewards[:, 1])
        truth = true_gradient(lambda now: scores - beta * (now - reference).sum(-1), actions, logits)
        torch.testing.assert_close(expected_policy_gradient(advantages, actions, logits), truth)


class TestOverlongPenalty:
    def test_by_hand(self) -> None:
        lengths = torch.tensor([1, 16, 17, 18, 20, 21])
        assert overlong_penalty(lengths, longest=20, buffer=4).tolist() == [0.0, 0.0, -0.25, -0.5, -1.0, -1.0]
