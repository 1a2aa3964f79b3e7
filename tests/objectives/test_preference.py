"""Losses on pairs against closed forms, finite differences and direct enumeration."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from workbench.errors import BadInput
from workbench.objectives.preference import dpo_loss, ipo_loss, kto_loss, orpo_loss, pairwise_loss


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
    tokens = torch.tensor([1, 2, 5, 9])
    losses: list[Callable[[Tensor, Tensor], Tensor]] = [
        lambda c, r: pairwise_loss(c, r, margin),
        lambda c, r: dpo_loss(c, r, ref_c, ref_r, beta=0.7)[0],
        lambda c, r: dpo_loss(c, r, ref_c, ref_r, beta=0.7, label_smoothing=0.2)[0],
        lambda c, r: ipo_loss(c, r, ref_c, ref_r, tokens, 2 * tokens, beta=0.7)[0],
        lambda c, r: orpo_loss(-c.abs() - 0.1, -r.abs() - 0.1, tokens, 2 * tokens, beta=0.7)[0],
        lambda c, r: kto_loss(c, ref_c, torch.tensor([1, 0, 1, 0]), 0.3, 0.7, 1.5, 0.5)[0] + 0 * r,
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


def test_ipo_is_the_equation_and_is_least_at_its_margin() -> None:
    """Equation 17 with sums (tokens of 1); at the reference 1 / (4 beta^2); its minimum over h is at 1 / (2 beta)."""
    chosen, rejected, ref_c, ref_r = (draw(4, seed=seed) for seed in range(4))
    one = torch.ones(4)
    loss, _ = ipo_loss(chosen, rejected, ref_c, ref_r, one, one, beta=0.4)
    h = chosen - rejected - ref_c + ref_r
    torch.testing.assert_close(loss, (h - 1 / 0.8) ** 2)
    start, stats = ipo_loss(chosen, rejected, chosen, rejected, 3 * one, 5 * one, beta=0.4)
    torch.testing.assert_close(start, torch.full_like(start, 1 / 0.64))
    assert not stats.chosen_rewards_P.any()
    # the tokens of an answer, each repeated, change nothing
    twice, _ = ipo_loss(2 * chosen, rejected, 2 * ref_c, ref_r, 2 * one, one, beta=0.4)
    torch.testing.assert_close(twice, loss)
    margins = torch.linspace(-5, 5, 20_001, dtype=torch.float64)
    zero, ones = torch.zeros_like(margins), torch.ones_like(margins)
    over, _ = ipo_loss(margins, zero, zero, zero, ones, ones, beta=0.4)
    assert margins[over.argmin()].item() == pytest.approx(1.25, abs=1e-3)


def test_orpo_is_fine_tuning_and_the_odds_ratio() -> None:
    """By probabilities: P is the geometric mean of an answer's token probabilities, odds P / (1 - P)."""
    tokens = {"chosen": [[0.5, 0.8], [0.1]], "rejected": [[0.3], [0.2, 0.9, 0.4]]}
    sums = {
        k: torch.tensor([sum(map(math.log, row)) for row in rows], dtype=torch.float64) for k, rows in tokens.items()
    }
    counts = {k: torch.tensor([len(row) for row in rows]) for k, rows in tokens.items()}
    loss, stats = orpo_loss(sums["chosen"], sums["rejected"], counts["chosen"], counts["rejected"], beta=0.3)
    for i in range(2):
        p, q = (math.prod(tokens[k][i]) ** (1 / len(tokens[k][i])) for k in ("chosen", "rejected"))
        ratio = (p / (1 - p)) / (q / (1 - q))
        assert loss[i].item() == pytest.approx(-math.log(p) - 0.3 * math.log(ratio / (1 + ratio)))
        assert stats.chosen_log_odds_P[i].item() == pytest.approx(math.log(p / (1 - p)))
        assert stats.sft_loss_P[i].item() == pytest.approx(-math.log(p))
    even, _ = orpo_loss(sums["chosen"], sums["chosen"], counts["chosen"], counts["chosen"], beta=0.3)
    torch.testing.assert_close(even, -sums["chosen"] / counts["chosen"] + 0.3 * math.log(2))


@pytest.mark.parametrize("sums", [0.0, -1e-9, -1e5])
def test_orpo_of_certain_and_impossible_answers_is_finite(sums: float) -> None:
    chosen, rejected = torch.tensor([sums], requires_grad=True), torch.tensor([-1.0], requires_grad=True)
    for one, other in ((chosen, rejected), (rejected, chosen)):
        loss, _ = orpo_loss(one, other, torch.ones(1), torch.ones(1))
        assert loss.isfinite().all()
        assert all(g.isfinite().all() for g in torch.autograd.grad(loss.sum(), (one, other)))


def test_kto_is_the_formula_with_the_gradient_of_the_paper() -> None:
    """Enumerated; d loss / d log pi is -+ weight beta sigma(z) (1 - sigma(z)): largest where r is kl."""
    now, ref, good = draw(6), draw(6, seed=1), torch.tensor([1, 0, 1, 0, 0, 1])
    now.requires_grad_()
    loss, rewards_B = kto_loss(now, ref, good, 0.4, beta=0.5, desirable_weight=1.5, undesirable_weight=0.7)
    (slopes,) = torch.autograd.grad(loss.sum(), now)
    for i, (a, b, y) in enumerate(zip(now.tolist(), ref.tolist(), good.tolist(), strict=True)):
        sign, weight = (1, 1.5) if y else (-1, 0.7)
        value = 1 / (1 + math.exp(-sign * 0.5 * (a - b - 0.4)))
        assert loss[i].item() == pytest.approx(weight * (1 - value))
        assert slopes[i].item() == pytest.approx(-sign * weight * 0.5 * value * (1 - value))
        assert rewards_B[i].item() == pytest.approx(0.5 * (a - b))
    start, _ = kto_loss(ref, ref, good.bool(), 0.0)
    torch.testing.assert_close(start, torch.full_like(start, 0.5))


@pytest.mark.parametrize("ratio", [-1e4, 1e4])
def test_kto_of_large_ratios_is_finite(ratio: float) -> None:
    now = torch.tensor([ratio, ratio], requires_grad=True)
    loss, _ = kto_loss(now, torch.zeros(2), torch.tensor([True, False]), 1.0)
    loss.sum().backward()
    assert loss.tolist() == pytest.approx([float(ratio < 0), float(ratio > 0)], abs=1e-6)
    assert now.grad is not None and now.grad.isfinite().all()


def test_the_reference_gets_no_gradient_and_half_precision_is_computed_in_full() -> None:
    chosen, rejected, ref = (draw(2).bfloat16().requires_grad_() for _ in range(3))
    loss, stats = dpo_loss(chosen, rejected, ref, ref)
    loss.sum().backward()
    assert loss.dtype == stats.chosen_rewards_P.dtype == torch.float32
    assert ref.grad is None and chosen.grad is not None
    assert pairwise_loss(chosen, rejected).dtype == torch.float32


REFUSED: list[tuple[Callable[[], object], str]] = [
    (lambda: pairwise_loss(draw(2), draw(3)), r"chosen_P has shape \[2\], rejected_P has shape \[3\]"),
    (lambda: dpo_loss(draw(2), draw(2), draw(2), draw(1)), "ref_rejected_P"),
    (lambda: ipo_loss(draw(2), draw(2), draw(2), draw(2), torch.ones(2), torch.ones(3)), "rejected_tokens_P"),
    (lambda: kto_loss(draw(2), draw(1), torch.ones(2), kl=0.1), "ref_log_prob_B"),
]


def test_what_cannot_be_is_refused(subtests: pytest.Subtests) -> None:
    for call, message in REFUSED:
        with subtests.test(call=call, message=message), pytest.raises(BadInput, match=message):
            call()
