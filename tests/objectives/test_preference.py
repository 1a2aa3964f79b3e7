"""Losses on pairs against closed forms, finite differences and direct enumeration."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from workbench.errors import BadInput
from workbench.objectives.preference import binomial_interval, dpo_loss, pairwise_loss


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def finite_difference(function: Callable[[Tensor], Tensor], x: Tensor, step: float = 1e-6) -> Tensor:
    """The gradient of a sum, by central differences."""
    out = torch.zeros_like(x)
    for i in range(len(x)):
        up, down = x.clone(), x.clone()
        up[i] += step
        down[i] -= step
        out[i] = (function(up).sum() - function(down).sum()) / (2 * step)
    return out


def test_equal_scores_cost_log_2() -> None:
    r = draw(5).float()
    torch.testing.assert_close(pairwise_loss(r, r), torch.full((5,), math.log(2)))


def test_pairwise_loss_is_the_formula() -> None:
    chosen, rejected, margin = draw(6), draw(6, seed=1), draw(6, seed=2).abs()
    expected = [-math.log(1 / (1 + math.exp(-(c - r - m)))) for c, r, m in zip(chosen, rejected, margin, strict=True)]
    torch.testing.assert_close(pairwise_loss(chosen, rejected, margin), torch.tensor(expected, dtype=torch.float64))
    assert (pairwise_loss(chosen, rejected, margin) > pairwise_loss(chosen, rejected)).all()


@pytest.mark.parametrize("gap", [-1e4, -100.0, 100.0, 1e4])
def test_large_gaps_are_finite_with_the_right_gradient(gap: float) -> None:
    chosen = torch.tensor([gap], requires_grad=True)
    loss = pairwise_loss(chosen, torch.zeros(1))
    loss.sum().backward()
    assert loss.item() == pytest.approx(max(0.0, -gap), abs=1e-6)
    assert chosen.grad is not None
    assert chosen.grad.item() == pytest.approx(-1.0 if gap < 0 else 0.0, abs=1e-6)


def test_gradients_are_finite_differences() -> None:
    chosen, rejected = draw(4).requires_grad_(), draw(4, seed=1).requires_grad_()
    margin, ref_c, ref_r = draw(4, seed=2), draw(4, seed=3), draw(4, seed=4)
    losses: list[Callable[[Tensor, Tensor], Tensor]] = [
        lambda c, r: pairwise_loss(c, r, margin),
        lambda c, r: dpo_loss(c, r, ref_c, ref_r, beta=0.7)[0],
        lambda c, r: dpo_loss(c, r, ref_c, ref_r, beta=0.7, label_smoothing=0.2)[0],
    ]
    for loss in losses:
        found = torch.autograd.grad(loss(chosen, rejected).sum(), (chosen, rejected))
        c, r = chosen.detach(), rejected.detach()
        torch.testing.assert_close(found[0], finite_difference(lambda x, f=loss, r=r: f(x, r), c), rtol=1e-6, atol=1e-8)  # type: ignore[misc]
        torch.testing.assert_close(found[1], finite_difference(lambda x, f=loss, c=c: f(c, x), r), rtol=1e-6, atol=1e-8)  # type: ignore[misc]


def test_dpo_at_the_reference_is_log_2_with_the_gradient_of_the_paper() -> None:
    chosen, rejected = draw(3).requires_grad_(), draw(3, seed=1).requires_grad_()
    loss, stats = dpo_loss(chosen, rejected, chosen.detach(), rejected.detach(), beta=0.3)
    torch.testing.assert_close(loss, torch.full((3,), math.log(2), dtype=torch.float64))
    assert not stats.chosen_rewards_P.any() and not stats.rejected_rewards_P.any()
    up, down = torch.autograd.grad(loss.sum(), (chosen, rejected))
    # -beta sigma(reward(rejected) - reward(chosen)), and sigma(0) is 1/2
    torch.testing.assert_close(up, torch.full_like(up, -0.15))
    torch.testing.assert_close(down, -up)


def test_smoothed_dpo_is_least_where_the_model_believes_the_labels_that_much() -> None:
    """The minimum of the smoothed loss is at sigma(h) = 1 - label_smoothing."""
    h = torch.linspace(-5, 5, 20_001, dtype=torch.float64)
    zero = torch.zeros_like(h)
    loss, _ = dpo_loss(h, zero, zero, zero, beta=1.0, label_smoothing=0.1)
    assert torch.sigmoid(h[loss.argmin()]).item() == pytest.approx(0.9, abs=1e-3)


def test_the_reference_gets_no_gradient_and_half_precision_is_computed_in_full() -> None:
    chosen, rejected, ref = (draw(2).bfloat16().requires_grad_() for _ in range(3))
    loss, stats = dpo_loss(chosen, rejected, ref, ref)
    loss.sum().backward()
    assert loss.dtype == stats.chosen_rewards_P.dtype == torch.float32
    assert ref.grad is None and chosen.grad is not None
    assert pairwise_loss(chosen, rejected).dtype == torch.float32


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: pairwise_loss(draw(2), draw(3)), r"chosen_P has shape \[2\], rejected_P has shape \[3\]"),
        (lambda: pairwise_loss(draw(2), draw(2), draw(1)), "margin_P has shape"),
        (lambda: dpo_loss(draw(2), draw(2), draw(2), draw(1)), "ref_rejected_P"),
        (lambda: dpo_loss(draw(2), draw(2), draw(2), draw(2), beta=-1.0), "beta=-1.0"),
        (lambda: dpo_loss(draw(2), draw(2), draw(2), draw(2), label_smoothing=0.6), "label_smoothing=0.6"),
        (lambda: binomial_interval(1, 0), "trials=0"),
        (lambda: binomial_interval(3, 2), "successes=3"),
    ],
)
def test_what_cannot_be_is_refused(call: Callable[[], object], message: str) -> None:
    with pytest.raises(BadInput, match=message):
        call()


@pytest.mark.parametrize(("rate", "trials"), [(0.5, 20), (0.9, 50), (0.97, 100), (0.65, 300)])
def test_the_interval_covers_the_true_rate_about_19_times_in_20(rate: float, trials: int) -> None:
    """Exactly, by summing the binomial distribution over the counts whose interval holds the rate."""
    covered = 0.0
    for k in range(trials + 1):
        low, high = binomial_interval(k, trials)
        assert 0 <= low < k / trials + 1e-12 and k / trials - 1e-12 < high <= 1
        covered += math.comb(trials, k) * rate**k * (1 - rate) ** (trials - k) * (low <= rate <= high)
    assert 0.92 < covered < 0.98


def test_the_interval_of_a_known_case() -> None:
    """Newcombe 1998, table I, case (a): 81 of 263 by Wilson's score method without continuity correction."""
    assert binomial_interval(81, 263) == pytest.approx((0.2553, 0.3662), abs=5e-5)
