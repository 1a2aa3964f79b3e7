"""The estimators against exact enumeration over a small categorical: every expectation is a finite sum."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.expected import expect_error
from tests.objectives.policies import normal
from workbench.errors import BadInput
from workbench.objectives.kl import KLKind, KLLoss, adaptive_kl_step, kl_estimate, kl_loss

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


def expected_loss_gradient(kind: KLLoss, logits: Tensor, log_pi: Tensor, log_old: Tensor) -> tuple[Tensor, Tensor]:
    """Value and gradient of E[loss] over actions of pi_old, enumerated."""
    loss = (log_old.exp() * kl_loss(log_pi, log_old, REF, kind)).sum()
    return loss.detach(), gradient(loss, logits)


def test_gradients_as_a_loss_on_policy() -> None:
    """The table: k1 0, k2 reverse, k3 forward, corrected k3 reverse."""
    logits, log_pi = policy()
    reverse, forward = gradient(divergence(log_pi, REF), logits), gradient(divergence(REF, log_pi), logits)
    assert not torch.allclose(reverse, forward, rtol=0.1)
    expected: dict[KLLoss, Tensor] = {
        "k1": torch.zeros_like(reverse), "k2": reverse, "k3": forward, "k3_corrected": reverse
    }  # fmt: skip
    for kind, slope in expected.items():
        torch.testing.assert_close(expected_loss_gradient(kind, logits, log_pi, log_pi.detach())[1], slope)


def test_only_the_corrected_one_stays_right_off_policy() -> None:
    logits, log_pi = policy()
    log_old = (log_pi.detach() + torch.tensor([0.5, -0.4, 0.3, 0.0, 0.8])).log_softmax(0)
    truth = divergence(log_pi, REF)
    value, slope = expected_loss_gradient("k3_corrected", logits, log_pi, log_old)
    torch.testing.assert_close(value, truth.detach())
    torch.testing.assert_close(slope, gradient(truth, logits))
    others: tuple[KLLoss, ...] = ("k1", "k2", "k3")
    for kind in others:
        assert not torch.allclose(expected_loss_gradient(kind, logits, log_pi, log_old)[1], slope, rtol=0.05)


@pytest.mark.parametrize("kind", ["k1", "k2", "k3", "k3_corrected"])
def test_loss_passes_gradcheck_and_moves_the_policy_alone(kind: KLLoss) -> None:
    now, old, ref = (normal(3, 4, seed=seed).requires_grad_() for seed in range(3))
    assert torch.autograd.gradcheck(lambda x: kl_loss(x, old, ref, kind), (now,))
    kl_loss(now, old, ref, kind).sum().backward()
    assert now.grad is not None
    assert old.grad is None
    assert ref.grad is None


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


def test_bad_input() -> None:
    with expect_error(BadInput, value=r"log_prob_BT has shape \[2, 3\], ref_log_prob_BT has shape \[2, 1\]"):
        kl_estimate(torch.zeros(2, 3), torch.zeros(2, 1))
    with expect_error(BadInput, value="'k4'"):
        kl_estimate(torch.zeros(2), torch.zeros(2), "k4")  # type: ignore[arg-type]
    with expect_error(BadInput, value="old_log_prob_BT has shape"):
        kl_loss(torch.zeros(2, 3), torch.zeros(2, 1), torch.zeros(2, 3))


class TestAdaptiveKL:
    def test_by_hand(self) -> None:
        assert adaptive_kl_step(0.1, kl=6.6, target=6.0, responses=1000, horizon=10_000) == pytest.approx(0.101)
        assert adaptive_kl_step(0.1, kl=60.0, target=6.0, responses=1000, horizon=10_000) == pytest.approx(0.102)
        assert adaptive_kl_step(0.1, kl=-3.0, target=6.0, responses=1000, horizon=10_000) == pytest.approx(0.098)
        assert adaptive_kl_step(0.1, kl=6.0, target=6.0, responses=1000, horizon=10_000) == 0.1

    def test_holds_the_kl_at_its_target(self) -> None:
        """The best policy of E[R] - c KL is ref exp(R / c): its KL, as c is stepped, settles at the target."""
        worth, coefficient, target, kl = torch.arange(5.0).double(), 10.0, 0.2, 0.0
        for _ in range(400):
            log_pi = (REF + worth / coefficient).log_softmax(0)
            kl = float(divergence(log_pi, REF))
            coefficient = adaptive_kl_step(coefficient, kl, target, responses=64, horizon=320)
        assert kl == pytest.approx(target, rel=1e-6)

    def test_bad_input(self) -> None:
        with expect_error(BadInput, value="kl=nan"):
            adaptive_kl_step(0.1, kl=float("nan"), target=6.0, responses=10, horizon=100)
