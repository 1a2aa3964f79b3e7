"""Against numbers by hand, finite differences, and the definitions case by case."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from workbench.algorithms.losses import policy_loss, value_loss
from workbench.errors import BadInput


def normal(*shape: int, seed: int, scale: float = 1.0) -> Tensor:
    return scale * torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def of_ratio(
    ratios: list[float], advantages: list[float], **options: float
) -> tuple[list[float], list[float], list[bool]]:
    """Loss, its derivative by the ratio, and the clip flags at the given ratios."""
    log_prob = torch.tensor([ratios], dtype=torch.float64).log().requires_grad_()
    a = torch.tensor([advantages], dtype=torch.float64)
    loss, stats = policy_loss(log_prob, torch.zeros_like(log_prob), a, **options)
    (slope,) = torch.autograd.grad(loss.sum(), log_prob)
    return loss[0].tolist(), (slope / stats.ratio_BT)[0].tolist(), stats.clipped_BT[0].tolist()


class TestPolicyLoss:
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

    @pytest.mark.parametrize("options", [{}, {"clip_low": 0.0, "clip_high": 0.0}, {"dual_clip": 1.0}])
    def test_first_minibatch(self, options: dict[str, float]) -> None:
        """pi = pi_old: the ratio is 1, nothing is clipped, the gradient is that of -A log pi."""
        log_prob, advantages = normal(4, 5, seed=0).requires_grad_(), normal(4, 5, seed=1)
        loss, stats = policy_loss(log_prob, log_prob.detach().clone(), advantages, **options)
        assert torch.equal(loss, -advantages)
        assert (stats.ratio_BT == 1).all()
        assert not stats.clipped_BT.any()
        if not options:
            assert torch.equal(torch.autograd.grad(loss.sum(), log_prob)[0], -advantages)

    @pytest.mark.parametrize("dual_clip", [None, 1.5])
    def test_gradcheck(self, dual_clip: float | None) -> None:
        log_prob = normal(6, 7, seed=0, scale=0.5).requires_grad_()
        old, advantages = normal(6, 7, seed=1, scale=0.5), normal(6, 7, seed=2)
        clipped = policy_loss(log_prob, old, advantages, dual_clip=dual_clip)[1].clipped_BT
        assert 0.1 < clipped.double().mean() < 0.9  # both branches are under test
        assert torch.autograd.gradcheck(lambda x: policy_loss(x, old, advantages, dual_clip=dual_clip)[0], (log_prob,))

    def test_only_the_policy_learns(self) -> None:
        log_prob, old, advantages = (normal(2, 3, seed=seed).requires_grad_() for seed in range(3))
        loss, stats = policy_loss(log_prob, old, advantages)
        loss.sum().backward()
        assert log_prob.grad is not None
        assert old.grad is None
        assert advantages.grad is None
        assert not stats.ratio_BT.requires_grad

    def test_far_apart_policies_stay_finite(self) -> None:
        log_prob = torch.tensor([[-0.1, -900.0]], requires_grad=True)
        loss, stats = policy_loss(log_prob, torch.tensor([[-900.0, -0.1]]), torch.tensor([[-1.0, 1.0]]))
        (slope,) = torch.autograd.grad(loss.sum(), log_prob)
        assert loss.isfinite().all()
        assert slope.tolist() == [[0.0, 0.0]]
        assert stats.ratio_BT[0].tolist() == pytest.approx([math.exp(20), math.exp(-20)])

    def test_half_precision_is_widened(self) -> None:
        x = torch.zeros(1, 2).bfloat16()
        loss, stats = policy_loss(x, x, x)
        assert loss.dtype == stats.ratio_BT.dtype == torch.float32

    def test_bad_input(self) -> None:
        x = torch.zeros(2, 3)
        with pytest.raises(BadInput, match=r"log_prob_BT has shape \[2, 3\], advantages_BT has shape \[2\]"):
            policy_loss(x, x, torch.zeros(2))
        for options in ({"clip_low": 1.5}, {"clip_high": -0.1}, {"dual_clip": 0.5}):
            with pytest.raises(BadInput, match=next(iter(options))):
                policy_loss(x, x, x, **options)


class TestValueLoss:
    def test_by_hand(self) -> None:
        values, old, returns = (
            torch.tensor([[1.0, 3.0, -2.0]]),
            torch.tensor([[1.0, 1.0, 0.0]]),
            torch.tensor([[2.0, 4.0, -3.0]]),
        )
        loss, stats = value_loss(values, old, returns)
        assert loss.tolist() == [[0.5, 0.5, 0.5]]
        assert not stats.clipped_BT.any()
        # clipped values: 1, 1.5, -0.5; their errors: 1, 2.5, 2.5
        loss, stats = value_loss(values, old, returns, clip=0.5)
        assert loss.tolist() == [[0.5, 3.125, 3.125]]
        assert stats.clipped_BT.tolist() == [[False, True, True]]

    def test_clip_never_lowers_the_loss(self) -> None:
        values, old, returns = (normal(20, 20, seed=seed) for seed in range(3))
        free, _ = value_loss(values, old, returns)
        assert (value_loss(values, old, returns, clip=0.2)[0] >= free).all()
        at_start, stats = value_loss(values, values, returns, clip=0.2)
        assert torch.equal(at_start, free)
        assert not stats.clipped_BT.any()

    def test_clipped_is_where_the_gradient_is_0(self) -> None:
        values, old, returns = (normal(20, 20, seed=seed) for seed in range(3))
        values.requires_grad_()
        loss, stats = value_loss(values, old, returns, clip=0.2)
        loss.sum().backward()
        assert values.grad is not None
        assert torch.equal(stats.clipped_BT, values.grad == 0)
        assert 0.1 < stats.clipped_BT.float().mean() < 0.9

    @pytest.mark.parametrize("clip", [None, 0.3])
    def test_gradcheck(self, clip: float | None) -> None:
        values = normal(6, 7, seed=0).requires_grad_()
        old, returns = normal(6, 7, seed=1), normal(6, 7, seed=2)
        assert torch.autograd.gradcheck(lambda x: value_loss(x, old, returns, clip)[0], (values,))

    def test_only_the_critic_learns(self) -> None:
        values, old, returns = (normal(2, 3, seed=seed).requires_grad_() for seed in range(3))
        value_loss(values, old, returns, clip=0.2)[0].sum().backward()
        assert values.grad is not None
        assert old.grad is None
        assert returns.grad is None

    def test_bad_input(self) -> None:
        x = torch.zeros(2, 3)
        with pytest.raises(BadInput, match="returns_BT has shape"):
            value_loss(x, x, torch.zeros(2, 1))
        with pytest.raises(BadInput, match="clip=-1"):
            value_loss(x, x, x, clip=-1.0)
