"""The estimators against exact enumeration over a small categorical: every expectation is a finite sum."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from workbench.algorithms.kl import KLKind, kl_estimate
from workbench.errors import BadInput

REF = torch.tensor([0.3, -1.2, 0.8, 0.1, -0.4], dtype=torch.float64).log_softmax(0)


def policy() -> tuple[Tensor, Tensor]:
    """Logits that carry gradients, and the log-probability of each of the five actions."""
    logits = torch.tensor([1.0, 0.2, -0.7, 0.5, -2.0], dtype=torch.float64, requires_grad=True)
    return logits, logits.log_softmax(0)


def divergence(log_p: Tensor, log_q: Tensor) -> Tensor:
    return (log_p.exp() * (log_p - log_q)).sum()


def gradient(objective: Tensor, logits: Tensor) -> Tensor:
    return torch.autograd.grad(objective, logits, retain_graph=True)[0]


def test_values_by_hand() -> None:
    d = torch.tensor([0.5, -0.5, 0.0])
    assert kl_estimate(d, torch.zeros(3), "k1").tolist() == [0.5, -0.5, 0.0]
    assert kl_estimate(d, torch.zeros(3), "k2").tolist() == [0.125, 0.125, 0.0]
    torch.testing.assert_close(kl_estimate(d, torch.zeros(3), "k3"), torch.tensor([0.10653066, 0.14872127, 0.0]))


@pytest.mark.parametrize("kind", ["k1", "k3"])
def test_k1_and_k3_are_unbiased(kind: KLKind) -> None:
    _, log_pi = policy()
    torch.testing.assert_close((log_pi.exp() * kl_estimate(log_pi, REF, kind)).sum(), divergence(log_pi, REF))


def test_k2_is_biased_yet_close() -> None:
    _, log_pi = policy()
    near = REF + 0.05 * (log_pi.detach() - REF)
    near = near.log_softmax(0)
    for log_p, relative_error in ((log_pi, 0.5), (near, 0.05)):
        error = (log_p.exp() * kl_estimate(log_p, REF, "k2")).sum() / divergence(log_p, REF) - 1
        assert 1e-4 < error.abs() < relative_error


def test_gradients_as_a_loss_on_policy() -> None:
    logits, log_pi = policy()
    weights = log_pi.detach().exp()  # the sampling distribution, which a loss does not differentiate
    reverse, forward = gradient(divergence(log_pi, REF), logits), gradient(divergence(REF, log_pi), logits)
    assert not torch.allclose(reverse, forward, rtol=0.1)
    expected: dict[KLKind, Tensor] = {"k1": torch.zeros_like(reverse), "k2": reverse, "k3": forward}
    for kind, slope in expected.items():
        torch.testing.assert_close(gradient((weights * kl_estimate(log_pi, REF, kind)).sum(), logits), slope)
    ratio = (log_pi - log_pi.detach()).exp()
    torch.testing.assert_close(gradient((weights * ratio * kl_estimate(log_pi, REF, "k3")).sum(), logits), reverse)


def test_k1_in_the_reward_gives_the_gradient_of_the_reverse_kl() -> None:
    logits, log_pi = policy()
    reverse = gradient(divergence(log_pi, REF), logits)
    score_function = log_pi.detach().exp() * kl_estimate(log_pi, REF, "k1").detach() * log_pi
    torch.testing.assert_close(gradient(score_function.sum(), logits), reverse)


@pytest.mark.parametrize("kind", ["k1", "k2", "k3"])
def test_far_apart_policies_stay_finite(kind: KLKind) -> None:
    log_prob = torch.tensor([-1000.0, 0.0, -30.0], requires_grad=True)
    estimate = kl_estimate(log_prob, torch.tensor([0.0, -1000.0, -2.0]), kind)
    (slope,) = torch.autograd.grad(estimate.sum(), log_prob)
    assert estimate.isfinite().all()
    assert slope.isfinite().all()
    if kind == "k3":
        assert slope[0] == 0  # no push that lowers a log-probability which is too low already


def test_k3_keeps_small_differences_in_single_precision() -> None:
    d = 1e-4
    estimate = kl_estimate(torch.tensor([d]), torch.tensor([0.0]), "k3")
    torch.testing.assert_close(estimate, torch.tensor([d * d / 2]), rtol=1e-2, atol=0)


def test_half_precision_is_widened_before_the_subtraction() -> None:
    log_prob, ref = torch.tensor([-8.25]).bfloat16(), torch.tensor([-8.1875]).bfloat16()
    assert kl_estimate(log_prob, ref).dtype == torch.float32
    assert kl_estimate(log_prob, ref).item() == -0.0625


def test_bad_input() -> None:
    with pytest.raises(BadInput, match=r"log_prob_BT has shape \[2, 3\], ref_log_prob_BT has shape \[2, 1\]"):
        kl_estimate(torch.zeros(2, 3), torch.zeros(2, 1))
    with pytest.raises(BadInput, match="'k4'"):
        kl_estimate(torch.zeros(2), torch.zeros(2), "k4")  # type: ignore[arg-type]
