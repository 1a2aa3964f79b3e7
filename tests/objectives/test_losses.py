"""Against numbers by hand, finite differences, and the definitions case by case."""

from __future__ import annotations

import math
from typing import get_args

import pytest
import torch
from torch import Tensor

from tests.expected import expect_error
from workbench.errors import BadInput
from workbench.objectives.aggregation import Aggregation, aggregate, denominator
from workbench.objectives.losses import (
    PolicyLoss,
    cispo_loss,
    gspo_loss,
    policy_loss,
    ppo_loss,
    sapo_loss,
    value_loss,
)


def normal(*shape: int, seed: int, scale: float = 1.0) -> Tensor:
    return scale * torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def of_ratio(
    ratios: list[float], advantages: list[float], **options: float
) -> tuple[list[float], list[float], list[bool]]:
    """Loss, its derivative by the ratio, and the clip flags at the given ratios."""
    log_prob = torch.tensor([ratios], dtype=torch.float64).log().requires_grad_()
    a = torch.tensor([advantages], dtype=torch.float64)
    loss, stats = ppo_loss(log_prob, torch.zeros_like(log_prob), a, **options)
    (slope,) = torch.autograd.grad(loss.sum(), log_prob)
    return loss[0].tolist(), (slope / stats.ratio_BT)[0].tolist(), stats.clipped_BT[0].tolist()


class TestPPO:
    def test_clips_only_against_the_advantage(self) -> None:
        loss, slope, clipped = of_ratio([1.5, 1.5, 0.5, 0.5, 1.1], [2.0, -2.0, 2.0, -2.0, 2.0])
        assert loss == pytest.approx([-2.4, 3.0, -1.0, 1.6, -2.2])
        assert slope == pytest.approx([0.0, 2.0, -2.0, 0.0, -2.0])
        assert clipped == [True, False, False, True, False]

    def test_unequal_bounds(self) -> None:
        loss, slope, clipped = of_ratio([1.25, 1.5, 0.7, 0.95], [1.0, 1.0, -1.0, -1.0], clip_low=0.1, clip_high=0.3)
        assert loss == pytest.approx([-1.25, -1.3, 0.9, 0.95])
        assert slope == pytest.approx([-1.0, 0.0, 0.0, 1.0])
        assert clipped == [False, True, True, False]

    def test_dual_clip_bounds_the_loss_of_bad_tokens(self) -> None:
        loss, slope, clipped = of_ratio([10.0, 2.0, 10.0, 0.5], [-1.0, -1.0, 1.0, -1.0], dual_clip=3.0)
        assert loss == pytest.approx([3.0, 2.0, -1.2, 0.8])
        assert slope == pytest.approx([0.0, 1.0, 0.0, 0.0])
        assert clipped == [True, False, True, True]

    def test_only_the_policy_learns(self) -> None:
        log_prob, old, advantages = (normal(2, 3, seed=seed).requires_grad_() for seed in range(3))
        loss, stats = ppo_loss(log_prob, old, advantages)
        loss.sum().backward()
        assert log_prob.grad is not None
        assert old.grad is None
        assert advantages.grad is None
        assert not stats.ratio_BT.requires_grad

    def test_far_apart_policies_stay_finite(self) -> None:
        log_prob = torch.tensor([[-0.1, -900.0]], requires_grad=True)
        loss, stats = ppo_loss(log_prob, torch.tensor([[-900.0, -0.1]]), torch.tensor([[-1.0, 1.0]]))
        (slope,) = torch.autograd.grad(loss.sum(), log_prob)
        assert loss.isfinite().all()
        assert slope.tolist() == [[0.0, 0.0]]
        assert stats.ratio_BT[0].tolist() == pytest.approx([math.exp(20), math.exp(-20)])

    def test_bad_input(self) -> None:
        x = torch.zeros(2, 3)
        with expect_error(BadInput, value=r"log_prob_BT has shape \[2, 3\], advantages_BT has shape \[2\]"):
            ppo_loss(x, x, torch.zeros(2))


MASK = torch.tensor([[1, 1, 1, 1, 1], [1, 0, 1, 1, 0], [1, 0, 0, 0, 0], [0, 0, 0, 0, 0]])


class TestGSPO:
    def test_by_hand(self) -> None:
        log_prob = torch.tensor([[0.3, 0.1, 5.0], [-0.6, 0.0, 0.0]])
        mask = torch.tensor([[1, 1, 0], [1, 1, 1]])
        advantages = torch.tensor([[2.0, 2.0, 2.0], [2.0, 2.0, 2.0]])
        loss, stats = gspo_loss(log_prob, torch.zeros(2, 3), advantages, mask, 0.1, 0.1)
        # geometric means exp(0.2), over the upper bound, and exp(-0.2), which no bound stops for a good answer
        torch.testing.assert_close(stats.ratio_BT[0, :2], torch.tensor([0.2, 0.2]).exp())
        torch.testing.assert_close(stats.ratio_BT[1], torch.tensor([-0.2] * 3).exp())
        torch.testing.assert_close(loss[0, :2], torch.tensor([-2.2, -2.2]))
        torch.testing.assert_close(loss[1], torch.tensor([-2 * math.exp(-0.2)] * 3))
        assert stats.clipped_BT[:, :2].tolist() == [[True, True], [False, False]]

    @pytest.mark.parametrize("how", get_args(Aggregation))
    def test_with_one_advantage_a_sequence_it_is_the_plain_form(self, how: Aggregation) -> None:
        """Value and gradient of min(s A, clip(s) A), where s is differentiated itself, under every aggregation."""
        log_prob, old = normal(4, 5, seed=0, scale=0.3).requires_grad_(), normal(4, 5, seed=1, scale=0.3)
        advantages = normal(4, 1, seed=2).expand(4, 5)
        divisor = denominator(MASK, how, 8)
        loss, stats = gspo_loss(log_prob, old, advantages, MASK, 0.1, 0.2)
        share = aggregate(loss, MASK, how, divisor)
        s = ((log_prob - old) * MASK).sum(-1).div(MASK.sum(-1).clamp(min=1)).exp()[:, None]
        plain = -torch.minimum(s * advantages, s.clamp(0.9, 1.2) * advantages).expand(4, 5)
        expected = aggregate(plain, MASK, how, divisor)
        torch.testing.assert_close(share, expected)
        found, slope = (torch.autograd.grad(x, log_prob)[0] for x in (share, expected))
        torch.testing.assert_close(found, slope)
        assert 0 < stats.clipped_BT[MASK.bool()].double().mean() < 1  # both branches are under test
        # a sequence is clipped as a whole
        assert all(len(set(row[keep].tolist())) <= 1 for row, keep in zip(stats.clipped_BT, MASK.bool(), strict=True))

    def test_padding_cannot_leak(self) -> None:
        log_prob, old, advantages = (normal(4, 5, seed=seed) for seed in range(3))
        loss, _ = gspo_loss(log_prob, old, advantages, MASK)
        far, _ = gspo_loss(torch.where(MASK.bool(), log_prob, 300.0), old, advantages, MASK)
        assert torch.equal(loss[MASK.bool()], far[MASK.bool()])


class TestCISPO:
    def test_by_hand(self) -> None:
        ratio, advantages = torch.tensor([[0.1, 1.0, 2.5, 9.0]]), torch.tensor([[1.0, -1.0, 2.0, 2.0]])
        log_prob = (ratio.log() - 1).requires_grad_()
        loss, stats = cispo_loss(log_prob, torch.full((1, 4), -1.0), advantages)
        (slope,) = torch.autograd.grad(loss.sum(), log_prob)
        # epsilons are distances from 1: no lower bound, and weights up to 3
        torch.testing.assert_close(slope, torch.tensor([[-0.1, 1.0, -5.0, -6.0]]))
        torch.testing.assert_close(loss, slope * log_prob)
        assert stats.clipped_BT.tolist() == [[False, False, False, True]]
        loss, stats = cispo_loss(log_prob, torch.full((1, 4), -1.0), advantages, 0.2, 0.5)
        (slope,) = torch.autograd.grad(loss.sum(), log_prob)
        torch.testing.assert_close(slope, torch.tensor([[-0.8, 1.0, -3.0, -3.0]]))
        assert stats.clipped_BT.tolist() == [[True, False, True, True]]


class TestSAPO:
    def test_by_hand(self) -> None:
        ratio, advantages = torch.tensor([[0.5, 1.0, 2.0, 2.0]]), torch.tensor([[1.0, 1.0, 2.0, -2.0]])
        log_prob = (ratio.double().log() - 1).requires_grad_()
        loss, stats = sapo_loss(log_prob, torch.full((1, 4), -1.0).double(), advantages.double())
        taus = (1.0, 1.0, 1.0, 1.05)
        expected = [
            -4 / tau / (1 + math.exp(-tau * (r - 1))) * a
            for tau, r, a in zip(taus, ratio[0].tolist(), advantages[0].tolist(), strict=True)
        ]
        torch.testing.assert_close(loss[0].detach(), torch.tensor(expected).double(), rtol=1e-6, atol=0)
        (slope,) = torch.autograd.grad(loss.sum(), log_prob)
        gates = [1 / (1 + math.exp(-tau * (r - 1))) for tau, r in zip(taus, ratio[0].tolist(), strict=True)]
        gate = torch.tensor(gates).double()
        by_hand = -4 * gate * (1 - gate) * ratio[0].double() * advantages[0].double()
        torch.testing.assert_close(slope[0], by_hand, rtol=1e-6, atol=0)
        assert not stats.clipped_BT.any() and torch.allclose(stats.ratio_BT[0].float(), ratio[0])


class TestPolicyLoss:
    @pytest.mark.parametrize("kind", ["ppo", "gspo", "cispo", "sapo"])
    def test_first_step_is_reinforce(self, kind: PolicyLoss) -> None:
        """At pi = pi_old every one has the gradient of -A log pi, with one advantage a sequence."""
        log_prob, advantages = normal(4, 5, seed=0).requires_grad_(), normal(4, 1, seed=1).expand(4, 5)
        loss, stats = policy_loss(kind, log_prob, log_prob.detach().clone(), advantages, MASK)
        (slope,) = torch.autograd.grad((loss * MASK).sum(), log_prob)
        torch.testing.assert_close(slope, -advantages * MASK)
        assert (stats.ratio_BT == 1).all()
        assert not stats.clipped_BT.any()
        assert not stats.ratio_BT.requires_grad

    def test_bad_input(self) -> None:
        x = torch.zeros(2, 3)
        with expect_error(BadInput, value="loss='trpo'"):
            policy_loss("trpo", x, x, x, x)  # type: ignore[arg-type]
        with expect_error(BadInput, value="mask_BT has shape"):
            gspo_loss(x, x, x, torch.ones(2, 2))
        with expect_error(BadInput, value="max_response_tokens=None", rule="fixed-length"):
            denominator(x, "fixed-length")


class TestValueLoss:
    def test_by_hand(self) -> None:
        values, old, returns = (
            torch.tensor([[1.0, 3.0, -2.0]]),
            torch.tensor([[1.0, 1.0, 0.0]]),
            torch.tensor([[2.0, 4.0, -3.0]]),
        )
        loss, clipped_BT = value_loss(values, old, returns)
        assert loss.tolist() == [[0.5, 0.5, 0.5]]
        assert not clipped_BT.any()
        # clipped values: 1, 1.5, -0.5; their errors: 1, 2.5, 2.5
        loss, clipped_BT = value_loss(values, old, returns, clip=0.5)
        assert loss.tolist() == [[0.5, 3.125, 3.125]]
        assert clipped_BT.tolist() == [[False, True, True]]

    def test_clip_never_lowers_the_loss(self) -> None:
        values, old, returns = (normal(20, 20, seed=seed) for seed in range(3))
        free, _ = value_loss(values, old, returns)
        assert (value_loss(values, old, returns, clip=0.2)[0] >= free).all()
        at_start, clipped_BT = value_loss(values, values, returns, clip=0.2)
        assert torch.equal(at_start, free)
        assert not clipped_BT.any()

    def test_clipped_is_where_the_gradient_is_0(self) -> None:
        values, old, returns = (normal(20, 20, seed=seed) for seed in range(3))
        values.requires_grad_()
        loss, clipped_BT = value_loss(values, old, returns, clip=0.2)
        loss.sum().backward()
        assert values.grad is not None
        assert torch.equal(clipped_BT, values.grad == 0)
        assert 0.1 < clipped_BT.float().mean() < 0.9

    def test_only_the_critic_learns(self) -> None:
        values, old, returns = (normal(2, 3, seed=seed).requires_grad_() for seed in range(3))
        value_loss(values, old, returns, clip=0.2)[0].sum().backward()
        assert values.grad is not None
        assert old.grad is None
        assert returns.grad is None

    def test_bad_input(self) -> None:
        x = torch.zeros(2, 3)
        with expect_error(BadInput, value="returns_BT has shape"):
            value_loss(x, x, torch.zeros(2, 1))
