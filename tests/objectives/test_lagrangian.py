"""Against closed forms, autograd, and exact enumeration of a small policy."""

from __future__ import annotations

import math

import pytest
import torch

from tests.expected import expect_error
from tests.objectives.policies import expected_policy_gradient, log_probs_of, normal, sequences, true_gradient
from workbench.errors import BadInput
from workbench.objectives.estimators import gae, token_rewards
from workbench.objectives.lagrangian import dual_step, lagrangian


class TestLagrangian:
    def test_limits(self) -> None:
        reward, cost = normal(8, 11, seed=0), normal(8, 11, seed=1)
        assert torch.equal(lagrangian(reward, cost, 0.0), reward)
        torch.testing.assert_close(lagrangian(reward, cost, 1.0), (reward - cost) / 2)
        torch.testing.assert_close(lagrangian(reward, cost, 1e9), -cost, rtol=0, atol=2e-8)
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

    def test_bad_input(self) -> None:
        with expect_error(BadInput, value="cost_advantages_BT has shape"):
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
        with expect_error(BadInput, value="mean_cost=nan"):
            dual_step(1.0, math.nan, 0.0, 0.1, (0.1, 10.0))
