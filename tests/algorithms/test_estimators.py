"""Against numbers by hand, and against the definitions written out as double sums in float64."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from workbench.algorithms.estimators import (
    discounted_returns,
    dual_step,
    gae,
    grpo,
    lagrangian,
    moments,
    remax,
    rloo,
    token_rewards,
    whiten,
)
from workbench.errors import BadInput


def random_masks(rows: int, tokens: int, seed: int) -> Tensor:
    """Right padding, holes inside, one row without a valid token, one with a single one, one full."""
    generator = torch.Generator().manual_seed(seed)
    mask = torch.rand(rows, tokens, generator=generator) < 0.7
    lengths = torch.randint(1, tokens + 1, (rows, 1), generator=generator)
    mask &= torch.arange(tokens) < lengths
    mask[0], mask[1], mask[2] = False, False, True
    mask[1, tokens // 2] = True
    return mask


def normal(*shape: int, seed: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


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
        with pytest.raises(BadInput, match="reference"):
            token_rewards(torch.tensor([10.0, -4.0]), self.log_prob, None, self.mask, beta=0.1)

    def test_row_without_valid_tokens_gets_nothing(self) -> None:
        mask = torch.tensor([[False] * 3, [True, False, False]])
        rewards = token_rewards(torch.tensor([10.0, -4.0]), self.log_prob, None, mask, beta=0.0)
        assert rewards.tolist() == [[0.0, 0.0, 0.0], [-4.0, 0.0, 0.0]]

    def test_padding_cannot_leak(self) -> None:
        log_prob = self.log_prob.masked_fill(self.mask == 0, float("nan"))
        rewards = token_rewards(torch.tensor([10.0, -4.0]), log_prob, self.ref, self.mask, beta=0.1)
        torch.testing.assert_close(rewards, torch.tensor([[-0.05, 10.1, 0.0], [-0.1, 0.0, -3.9]]))

    def test_is_detached(self) -> None:
        log_prob = self.log_prob.clone().requires_grad_()
        assert not token_rewards(torch.zeros(2), log_prob, self.ref, self.mask, beta=0.1).requires_grad

    @pytest.mark.parametrize("scores", [torch.zeros(3), torch.zeros(2, 1), torch.zeros(())])
    def test_bad_shapes(self, scores: Tensor) -> None:
        with pytest.raises(BadInput, match="scores_B"):
            token_rewards(scores, self.log_prob, self.ref, self.mask, beta=0.1)

    def test_negative_beta(self) -> None:
        with pytest.raises(BadInput, match=r"beta=-0\.1"):
            token_rewards(torch.zeros(2), self.log_prob, self.ref, self.mask, beta=-0.1)


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

    @pytest.mark.parametrize("gamma", [0.0, 0.9, 1.0])
    @pytest.mark.parametrize("lam", [0.0, 0.95, 1.0])
    @pytest.mark.parametrize("bootstrapped", [False, True])
    def test_is_the_double_sum(self, gamma: float, lam: float, bootstrapped: bool) -> None:
        rewards, values, mask = normal(8, 11, seed=0), normal(8, 11, seed=1), random_masks(8, 11, seed=2)
        bootstrap = normal(8, seed=3) if bootstrapped else torch.zeros(8, dtype=torch.float64)
        found = gae(rewards, values, mask, gamma, lam, bootstrap if bootstrapped else None)
        expected = gae_by_double_sum(rewards, values, mask, gamma, lam, bootstrap)
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)

    def test_masked_tokens_take_no_time(self) -> None:
        rewards, values = normal(3, 6, seed=0), normal(3, 6, seed=1)
        chosen = torch.tensor([0, 1, 4, 5])
        mask = torch.zeros(3, 6, dtype=torch.bool)
        mask[:, chosen] = True
        wide = gae(rewards, values, mask, 0.9, 0.8)
        narrow = gae(rewards[:, chosen], values[:, chosen], mask[:, chosen], 0.9, 0.8)
        for a, b in zip(wide, narrow, strict=True):
            assert torch.equal(a[:, chosen], b)
            assert (a[:, [2, 3]] == 0).all()

    def test_padding_cannot_leak(self) -> None:
        rewards, values, mask = normal(8, 11, seed=0), normal(8, 11, seed=1), random_masks(8, 11, seed=2)
        clean = gae(rewards, values, mask, 0.9, 0.8)
        dirty = gae(rewards.masked_fill(~mask, torch.nan), values.masked_fill(~mask, torch.inf), mask, 0.9, 0.8)
        for a, b in zip(clean, dirty, strict=True):
            assert torch.equal(a, b)
            assert (a[~mask] == 0).all()

    def test_limits(self) -> None:
        """lambda = 1 makes the return the reward to go; lambda = 0 makes the advantage the one-step error."""
        rewards, values, mask = normal(8, 11, seed=0), normal(8, 11, seed=1), random_masks(8, 11, seed=2)
        torch.testing.assert_close(gae(rewards, values, mask, 0.9, 1.0)[1], discounted_returns(rewards, mask, 0.9))
        full = torch.ones(8, 10, dtype=torch.bool)
        one_step = rewards[:, :10] + 0.9 * torch.cat((values[:, 1:10], torch.zeros(8, 1)), 1) - values[:, :10]
        torch.testing.assert_close(gae(rewards[:, :10], values[:, :10], full, 0.9, 0.0)[0], one_step)

    def test_exact_values_leave_no_advantage(self) -> None:
        rewards, mask = normal(8, 11, seed=0), random_masks(8, 11, seed=2)
        values = discounted_returns(rewards, mask, 0.9)
        advantages, returns = gae(rewards, values, mask, 0.9, 0.95)
        torch.testing.assert_close(advantages, torch.zeros_like(advantages), rtol=0, atol=1e-12)
        torch.testing.assert_close(returns, values)

    def test_inputs_stay_and_precision_is_single_at_least(self) -> None:
        rewards, values = torch.ones(1, 2).bfloat16(), torch.ones(1, 2).bfloat16().requires_grad_()
        advantages, returns = gae(rewards, values, torch.ones(1, 2).bool(), 1.0, 0.95)
        assert advantages.dtype == returns.dtype == torch.float32
        assert not returns.requires_grad
        assert rewards.tolist() == values.tolist() == [[1.0, 1.0]]

    def test_bad_input(self) -> None:
        x, mask = torch.zeros(2, 3), torch.ones(2, 3)
        with pytest.raises(BadInput, match=r"mask_BT has shape \[2, 3\], values_BT has shape \[2, 4\]"):
            gae(x, torch.zeros(2, 4), mask, 1.0, 1.0)
        with pytest.raises(BadInput, match=r"bootstrap_B has shape \[3\]"):
            gae(x, x, mask, 1.0, 1.0, torch.zeros(3))
        with pytest.raises(BadInput, match=r"gamma=1\.1"):
            gae(x, x, mask, 1.1, 1.0)
        with pytest.raises(BadInput, match="lam=-1"):
            gae(x, x, mask, 1.0, -1.0)
        with pytest.raises(BadInput, match=r"mask_BT has shape \[3\]"):
            gae(x[0], x[0], mask[0], 1.0, 1.0)


def test_discounted_returns_by_hand() -> None:
    rewards, mask = (
        torch.tensor([[1.0, 7.0, 2.0, 4.0], [3.0, 9.0, 9.0, 9.0]]),
        torch.tensor([[1, 0, 1, 1], [1, 0, 0, 0]]),
    )
    assert discounted_returns(rewards, mask, 0.5).tolist() == [[3.0, 0.0, 4.0, 4.0], [3.0, 0.0, 0.0, 0.0]]


class TestWhiten:
    def test_is_torch_std_mean_on_valid_tokens(self) -> None:
        x, mask = 3 + 2 * normal(8, 11, seed=0), random_masks(8, 11, seed=1)
        white = whiten(x, mask, moments(x, mask))
        variance, mean = torch.var_mean(x[mask], correction=1)
        torch.testing.assert_close(white[mask], (x[mask] - mean) / (variance + 1e-8).sqrt())
        assert (white[~mask] == 0).all()
        torch.testing.assert_close(whiten(x, mask, moments(x, mask), shift_mean=False)[mask], white[mask] + mean)

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

    @pytest.mark.parametrize("shift_mean", [True, False])
    def test_degenerate_batches(self, shift_mean: bool) -> None:
        x = torch.full((2, 3), 0.1)
        for valid, mean in ((0, 0.0), (1, 0.1), (6, 0.1)):
            mask = torch.arange(6).view(2, 3) < valid
            white = whiten(x, mask, moments(x, mask), shift_mean)
            torch.testing.assert_close(white, torch.where(mask, 0.0 if shift_mean else mean, 0.0))

    def test_bad_input(self) -> None:
        with pytest.raises(BadInput, match="moments has shape"):
            whiten(torch.zeros(2, 3), torch.ones(2, 3), torch.zeros(2))
        with pytest.raises(BadInput, match="mask_BT has shape"):
            moments(torch.zeros(2, 3), torch.ones(2, 1))


class TestGroups:
    scores = torch.tensor([1.0, 5.0, 3.0, 7.0, 0.1, 0.1, 0.1, 2.0])
    group = torch.tensor([900, -4, 900, -4, 7, 7, 7, 900])

    def test_grpo_by_hand(self) -> None:
        # group 900: 1, 3, 2 with mean 2 and deviation 1; group -4: 5, 7 with mean 6 and deviation sqrt(2)
        expected = torch.tensor([-1.0, -(0.5**0.5), 1.0, 0.5**0.5, 0.0, 0.0, 0.0, 0.0])
        torch.testing.assert_close(grpo(self.scores, self.group, eps=0.0)[[0, 1, 2, 3, 7]], expected[[0, 1, 2, 3, 7]])
        torch.testing.assert_close(grpo(self.scores, self.group), expected, rtol=2e-6, atol=0)
        assert grpo(self.scores, self.group, scale_by_std=False)[:4].tolist() == [-1.0, -1.0, 1.0, 1.0]

    def test_rloo_by_hand(self) -> None:
        assert rloo(self.scores, self.group).tolist() == [-1.5, -2.0, 1.5, 2.0, 0.0, 0.0, 0.0, 0.0]

    def test_rloo_is_the_mean_of_the_others(self) -> None:
        scores, group = normal(24, seed=0), torch.arange(24) % 5
        expected = [
            scores[i] - torch.stack([scores[j] for j in range(24) if j != i and group[j] == group[i]]).mean()
            for i in range(24)
        ]
        torch.testing.assert_close(rloo(scores, group), torch.stack(expected))

    def test_order_and_ids_do_not_matter(self) -> None:
        scores, group = normal(24, seed=0), torch.arange(24) % 5
        order = torch.randperm(24, generator=torch.Generator().manual_seed(1))
        for advantage in (grpo, rloo):
            torch.testing.assert_close(
                advantage(scores[order], 10**9 - 3 * group[order]), advantage(scores, group)[order]
            )

    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
    @pytest.mark.parametrize("score", [0.1, -1e6 / 3, 1e-30])
    def test_equal_scores_give_exactly_nothing(self, score: float, dtype: torch.dtype) -> None:
        scores = torch.tensor([-1e7 / 7, score] * 7, dtype=dtype)
        group = torch.tensor([1, 0] * 7, dtype=torch.int32)
        for advantages in (grpo(scores, group), grpo(scores, group, scale_by_std=False), rloo(scores, group)):
            assert torch.equal(advantages, torch.zeros(14, dtype=dtype))

    def test_group_of_one(self) -> None:
        scores, group = torch.tensor([5.0, 1.0, 2.0]), torch.tensor([3, 8, 8])
        assert grpo(scores, group)[0] == 0
        assert grpo(scores, group, scale_by_std=False)[0] == 0
        with pytest.raises(BadInput, match="group 3"):
            rloo(scores, group)

    def test_no_samples(self) -> None:
        empty = torch.zeros(0)
        assert grpo(empty, empty.long()).shape == rloo(empty, empty.long()).shape == (0,)

    def test_rloo_is_unbiased_where_the_group_mean_shrinks(self) -> None:
        """Enumerated over all pairs of samples of a 3-armed bandit: the expected policy gradient is the true one."""
        reward = torch.tensor([1.0, 0.0, 4.0], dtype=torch.float64)
        logits = torch.tensor([0.3, -0.2, 0.9], dtype=torch.float64, requires_grad=True)
        (truth,) = torch.autograd.grad((logits.softmax(0) * reward).sum(), logits)
        found = {"rloo": torch.zeros_like(truth), "mean": torch.zeros_like(truth)}
        for actions in itertools.product(range(3), repeat=2):
            pair, group = torch.tensor(actions), torch.zeros(2, dtype=torch.long)
            weight = logits.detach().softmax(0)[pair].prod()
            for name, advantage in (("rloo", rloo(reward[pair], group)), ("mean", grpo(reward[pair], group, False))):
                objective = (advantage * logits.log_softmax(0)[pair]).mean()
                found[name] += weight * torch.autograd.grad(objective, logits)[0]
        torch.testing.assert_close(found["rloo"], truth)
        torch.testing.assert_close(found["mean"], truth / 2)  # (n - 1) / n of it

    def test_bad_input(self) -> None:
        for advantage in (grpo, rloo):
            with pytest.raises(BadInput, match=r"scores_N has shape \[3\], group_N has shape \[2\]"):
                advantage(torch.zeros(3), torch.zeros(2, dtype=torch.long))
            with pytest.raises(BadInput, match="integer"):
                advantage(torch.zeros(3), torch.zeros(3))
            with pytest.raises(BadInput, match="one score a sample"):
                advantage(torch.zeros(3, 2), torch.zeros(3, 2, dtype=torch.long))


def sequences() -> tuple[Tensor, Tensor]:
    """All responses of two tokens out of three, [9, 2], and logits that choose the second token by the first."""
    actions = torch.tensor(list(itertools.product(range(3), repeat=2)))
    logits = normal(4, 3, seed=7).requires_grad_()  # row 0: the first token; row 1 + a: the second, after a
    return actions, logits


def log_probs_of(actions: Tensor, logits: Tensor) -> Tensor:
    """[9, 2]"""
    tables = logits.log_softmax(-1)
    return torch.stack((tables[0, actions[:, 0]], tables[1 + actions[:, 0], actions[:, 1]]), 1)


def expected_policy_gradient(advantages: Tensor, actions: Tensor, logits: Tensor) -> Tensor:
    """E[sum_t A_t grad log pi_t], enumerated."""
    log_probs = log_probs_of(actions, logits)
    weight = log_probs.sum(-1).exp().detach()
    (gradient,) = torch.autograd.grad((weight[:, None] * advantages * log_probs).sum(), logits)
    return gradient


def true_gradient(scores: Callable[[Tensor], Tensor], actions: Tensor, logits: Tensor) -> Tensor:
    """grad E[score], where the score may itself depend on the log-probabilities [9, 2]."""
    log_probs = log_probs_of(actions, logits)
    (gradient,) = torch.autograd.grad((log_probs.sum(-1).exp() * scores(log_probs)).sum(), logits)
    return gradient


class TestReMax:
    def test_by_hand(self) -> None:
        rewards = torch.tensor([[0.0, -0.5, 2.0, 9.0], [4.0, 9.0, 9.0, 9.0]])
        mask = torch.tensor([[1, 1, 1, 0], [1, 0, 0, 0]])
        advantages, returns = remax(rewards, torch.tensor([1.0, 5.0]), mask, gamma=1.0)
        assert returns.tolist() == [[1.5, 1.5, 2.0, 0.0], [4.0, 0.0, 0.0, 0.0]]
        assert advantages.tolist() == [[0.5, 0.5, 1.0, 0.0], [-1.0, 0.0, 0.0, 0.0]]

    def test_one_score_gives_the_difference_on_every_chosen_token(self) -> None:
        scores, greedy, mask = normal(8, seed=0), normal(8, seed=1), random_masks(8, 11, seed=2)
        rewards = token_rewards(scores, torch.zeros(8, 11), None, mask, beta=0.0)
        advantages, _ = remax(rewards, greedy, mask, gamma=1.0)
        for i in range(8):
            torch.testing.assert_close(advantages[i, mask[i]], (scores[i] - greedy[i]).expand(int(mask[i].sum())))
        assert (advantages[~mask] == 0).all()

    def test_gradient_is_the_true_one_with_less_variance(self) -> None:
        """Over all sequences of a small policy, with a KL penalty in the reward: the baseline takes no part of it."""
        actions, logits = sequences()
        scores, beta = normal(9, seed=8) + 3, 0.3
        reference = log_probs_of(actions, normal(4, 3, seed=9))
        log_probs = log_probs_of(actions, logits).detach()
        mask = torch.ones(9, 2)
        greedy = scores[log_probs.sum(-1).argmax()].expand(9)
        rewards = token_rewards(scores, log_probs, reference, mask, beta)
        advantages, returns = remax(rewards, greedy, mask, gamma=1.0)
        truth = true_gradient(lambda now: scores - beta * (now - reference).sum(-1), actions, logits)
        torch.testing.assert_close(expected_policy_gradient(advantages, actions, logits), truth)
        weight = log_probs.sum(-1).exp()
        assert (weight * advantages[:, 0] ** 2).sum() < (weight * returns[:, 0] ** 2).sum()

    def test_bad_input(self) -> None:
        x = torch.zeros(2, 3)
        with pytest.raises(BadInput, match=r"greedy_score_B has shape \[3\]"):
            remax(x, torch.zeros(3), x, 1.0)
        with pytest.raises(BadInput, match="gamma=2"):
            remax(x, torch.zeros(2), x, 2.0)


class TestLagrangian:
    def test_limits(self) -> None:
        reward, cost = normal(8, 11, seed=0), normal(8, 11, seed=1)
        assert torch.equal(lagrangian(reward, cost, 0.0), reward)
        torch.testing.assert_close(lagrangian(reward, cost, 1.0), (reward - cost) / 2)
        torch.testing.assert_close(lagrangian(reward, cost, 1e9), -cost, rtol=0, atol=1e-8)
        assert lagrangian(torch.tensor([[3.0]]), torch.tensor([[2.0]]), 0.5).item() == pytest.approx(2 / 1.5)

    def test_gradient_is_that_of_the_lagrangian(self) -> None:
        """Over all sequences of a small policy: (1 + lambda) times the expected gradient is J_r - lambda J_c's."""
        actions, logits = sequences()
        rewards, costs, multiplier, beta = normal(9, seed=1), normal(9, seed=2), 0.7, 0.3
        reference = log_probs_of(actions, normal(4, 3, seed=9))
        log_probs, mask = log_probs_of(actions, logits).detach(), torch.ones(9, 2)
        values = normal(4, seed=3)  # any critic: of the first state, and of the second after each first token
        values_BT = torch.stack((values[0].expand(9), values[1 + actions[:, 0]]), 1)
        # the penalty lowers rewards and raises costs, and so keeps its weight whatever the multiplier
        token_costs = -token_rewards(-costs, log_probs, reference, mask, beta)
        reward_advantages, _ = gae(token_rewards(rewards, log_probs, reference, mask, beta), values_BT, mask, 1.0, 1.0)
        cost_advantages, _ = gae(token_costs, -2 * values_BT, mask, 1.0, 1.0)
        combined = lagrangian(reward_advantages, cost_advantages, multiplier)
        truth = true_gradient(
            lambda now: (rewards - multiplier * costs) / (1 + multiplier) - beta * (now - reference).sum(-1),
            actions,
            logits,
        )
        torch.testing.assert_close(expected_policy_gradient(combined, actions, logits), truth)

    @pytest.mark.parametrize("multiplier", [-0.1, math.inf, math.nan])
    def test_bad_input(self, multiplier: float) -> None:
        with pytest.raises(BadInput, match="multiplier="):
            lagrangian(torch.zeros(1, 1), torch.zeros(1, 1), multiplier)
        with pytest.raises(BadInput, match="cost_advantages_BT has shape"):
            lagrangian(torch.zeros(1, 2), torch.zeros(1, 1), 1.0)


class TestDualStep:
    @pytest.mark.parametrize("cost", [-3.0, 0.5, 0.6, 4.0])
    def test_is_gradient_descent_on_the_log(self, cost: float) -> None:
        log = torch.tensor(math.log(0.8), dtype=torch.float64, requires_grad=True)
        optimizer = torch.optim.SGD([log], lr=0.1)
        multiplier = 0.8
        for _ in range(5):
            optimizer.zero_grad()
            (-(cost - 0.5) * log.exp()).backward()
            optimizer.step()
            multiplier = dual_step(multiplier, cost, 0.5, 0.1, (1e-3, 100.0))
        assert multiplier == pytest.approx(log.exp().item(), rel=1e-12)

    def test_moves_up_above_the_limit_and_down_below(self) -> None:
        assert dual_step(1.0, 2.1, 2.0, 0.1, (0.1, 10.0)) > 1.0
        assert dual_step(1.0, 1.9, 2.0, 0.1, (0.1, 10.0)) < 1.0
        assert dual_step(1.0, 2.0, 2.0, 0.1, (0.1, 10.0)) == 1.0

    def test_stays_in_its_bounds_and_comes_back(self) -> None:
        bounds = (0.05, 5.0)
        assert dual_step(1.0, 1e12, 0.0, 1.0, bounds) == 5.0
        assert dual_step(1.0, -1e12, 0.0, 1.0, bounds) == 0.05
        assert dual_step(5.0, -1.0, 0.0, 0.1, bounds) < 5.0
        assert dual_step(0.05, 1.0, 0.0, 0.1, bounds) > 0.05

    def test_holds_the_cost_at_its_limit(self) -> None:
        """One action is worth more and costs more. Policy steps on combined advantages, dual steps on the mean cost."""
        worth, beta, limit = torch.tensor([[1.0, 0.0]], dtype=torch.float64), 0.5, 0.3  # reward and cost of each action
        logits, multiplier = torch.zeros(2, dtype=torch.float64, requires_grad=True), 0.5
        for _ in range(800):
            log_policy = logits.log_softmax(-1)
            policy = log_policy.exp().detach()
            penalty = beta * log_policy.detach()  # KL to the uniform policy, which keeps the game from circling
            advantage = lagrangian(worth - penalty, worth + penalty, multiplier)[0]
            (gradient,) = torch.autograd.grad((policy * advantage * log_policy).sum(), logits)
            logits = (logits + 0.5 * gradient).detach().requires_grad_()
            multiplier = dual_step(multiplier, float((policy * worth).sum()), limit, 0.2, (0.01, 10.0))
        assert float(policy[0]) == pytest.approx(limit, abs=1e-4)
        # there the policy's gradient is 0: beta ln(0.3 / 0.7) = (1 - lambda) / (1 + lambda)
        slope = beta * math.log(limit / (1 - limit))
        assert multiplier == pytest.approx((1 - slope) / (1 + slope), rel=1e-3)

    def test_bad_input(self) -> None:
        with pytest.raises(BadInput, match="mean_cost=nan"):
            dual_step(1.0, math.nan, 0.0, 0.1, (0.1, 10.0))
        with pytest.raises(BadInput, match="multiplier=20"):
            dual_step(20.0, 0.0, 0.0, 0.1, (0.1, 10.0))
        with pytest.raises(BadInput, match="more than 0"):
            dual_step(1.0, 0.0, 0.0, 0.1, (0.0, 10.0))
        with pytest.raises(BadInput, match="bounds"):
            dual_step(1.0, 0.0, 0.0, 0.1, (2.0, 1.0))
