"""KL-Cov and Clip-Cov against sums that are written out, and the theorem behind them by enumeration."""

from __future__ import annotations

import pytest
import torch

from tests.expected import expect_error
from workbench.errors import BadInput
from workbench.objectives.losses import ClipCov, KLCov, covariances, held_back, kl_cov_loss


def draws() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def test_the_entropy_falls_with_the_covariance() -> None:
    """A step of a softmax policy along each logit by step x advantage (natural policy gradient) lowers its entropy by
    step x the covariance of log pi and A under the policy, to first order."""
    logits, advantages, step = torch.randn(7, generator=draws()).double(), torch.randn(7).double(), 1e-6

    def entropy(x: torch.Tensor) -> float:
        return float(-(x.softmax(-1) * x.log_softmax(-1)).sum())

    pi, log_pi = logits.softmax(-1), logits.log_softmax(-1)
    covariance = float((pi * (log_pi - (pi * log_pi).sum()) * (advantages - (pi * advantages).sum())).sum())
    assert (entropy(logits + step * advantages) - entropy(logits)) / step == pytest.approx(-covariance, rel=1e-4)
    # over samples that come as often as the policy has them, the tokens' parts have that mean
    counts = torch.tensor([5, 1, 2, 4])
    log_prob, of_tokens = (counts / 12).double().log().repeat_interleave(counts), torch.arange(4.0).double()
    found = covariances(log_prob, of_tokens.repeat_interleave(counts))
    p, a = counts.double() / 12, of_tokens
    assert float(found.mean()) == pytest.approx(
        float((p * (p.log() - (p * p.log()).sum()) * (a - (p * a).sum())).sum())
    )


def test_which_tokens_are_held_back() -> None:
    values = torch.tensor([0.5, 3.0, -2.0, 1.5, 9.0, 4.0, 1.0, 5.0, 2.0, 0.0]).double()
    assert held_back(KLCov(share=0.35), values, draws()).nonzero()[:, 0].tolist() == [4, 5, 7]
    assert held_back(KLCov(share=1e-6), values, draws()).nonzero()[:, 0].tolist() == [4]  # at least one
    within = [1, 3, 5, 8]  # strictly between 1 and 5
    assert held_back(ClipCov(share=1.0), values, draws()).nonzero()[:, 0].tolist() == within
    seen = set()
    for seed in range(60):
        (one,) = held_back(ClipCov(share=0.1), values, torch.Generator().manual_seed(seed)).nonzero()[:, 0].tolist()
        seen.add(one)
    assert sorted(seen) == within
    assert not held_back(ClipCov(low=20, high=30), values, draws()).any()


def test_a_token_at_a_bound_changes_no_other_draw() -> None:
    values = torch.linspace(1.1, 4.9, 50).double()
    drawn = held_back(ClipCov(share=0.2), values, draws())
    left_out = int((~drawn).nonzero()[0])
    beyond = torch.where(torch.arange(50) == left_out, 5.1, values)
    assert torch.equal(held_back(ClipCov(share=0.2), beyond, draws()), drawn)


def test_the_loss_and_its_gradient() -> None:
    old = -torch.rand(2, 3, generator=draws())
    now = (old + torch.tensor([[0.3, -0.2, 0.0], [0.1, -0.4, 0.2]])).requires_grad_()
    advantages, held = torch.tensor([[1.0, -2.0, 0.5], [0.0, 1.0, -1.0]]), torch.tensor([[1, 0, 1], [1, 1, 0]]).bool()
    loss = kl_cov_loss(now, old, advantages, held, coefficient=0.7)
    gap = now.detach() - old
    torch.testing.assert_close(loss, -gap.exp() * advantages + 0.7 * gap.abs() * held)
    (gradient,) = torch.autograd.grad(loss.sum(), now)
    torch.testing.assert_close(
        gradient, -gap.exp() * advantages + 0.7 * torch.where(gap.abs() < 1e-6, 0, gap.sign()) * held
    )


def test_rounding_is_no_distance() -> None:
    """Log-probabilities of one policy, scored by other micro-batches or before a move, differ in their last bits."""
    old = -5 * torch.rand(2, 3, generator=draws())
    now = (old * (1 + torch.finfo(torch.float32).eps * torch.tensor([2.0, -2.0, 0.0]))).requires_grad_()
    loss = kl_cov_loss(now, old, torch.zeros(2, 3), torch.ones(2, 3, dtype=torch.bool), coefficient=1.0)
    assert not torch.autograd.grad(loss.sum(), now)[0].any()


def test_what_is_refused() -> None:
    for wrong in ({"share": 0}, {"share": 1.5}, {"coefficient": -1}):
        with pytest.raises(BadInput):
            KLCov(**wrong)
    with expect_error(BadInput, rule="low must be below high"):
        ClipCov(low=5, high=1)
