"""Divergences of distributions by enumeration, finite differences, and the limits of the paper."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from workbench.errors import BadInput
from workbench.objectives.kl import divergence, merge_other_tokens

N, V = 5, 11


def draw(*shape: int, seed: int = 0) -> Tensor:
    return 2 * torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


TEACHER, LOGITS = draw(N, V).log_softmax(-1), draw(N, V, seed=1)
STUDENT = LOGITS.log_softmax(-1)


def enumerated(teacher: Tensor, student: Tensor, beta: float) -> list[float]:
    """By plain numbers, as equation 1 of the paper; at the ends the KL."""
    found = []
    for p, q in zip(teacher.exp().tolist(), student.exp().tolist(), strict=True):
        forward, reverse = (sum(a * math.log(a / b) for a, b in zip(*x, strict=True)) for x in ((p, q), (q, p)))
        m = [beta * a + (1 - beta) * b for a, b in zip(p, q, strict=True)]
        mixed = (sum(a * math.log(a / b) for a, b in zip(x, m, strict=True)) for x in (p, q))
        between = sum(w * d for w, d in zip((beta, 1 - beta), mixed, strict=True))
        found.append({0.0: forward, 1.0: reverse}.get(beta, between))
    return found


def test_it_is_the_divergence_with_its_gradient() -> None:
    for beta in [0.0, 0.1, 0.5, 0.9, 1.0]:
        logits = LOGITS.clone().requires_grad_()
        value = divergence(TEACHER, logits.log_softmax(-1), beta)
        assert value.tolist() == pytest.approx(enumerated(TEACHER, STUDENT, beta), rel=1e-9)
        (slopes,) = torch.autograd.grad(value.sum(), logits)
        step = 1e-6
        for i, j in ((0, 0), (2, 5), (4, 10)):
            moved = [LOGITS.clone(), LOGITS.clone()]
            for x, sign in zip(moved, (1, -1), strict=True):
                x[i, j] += sign * step
            up, down = (divergence(TEACHER, x.log_softmax(-1), beta).sum() for x in moved)
            assert slopes[i, j].item() == pytest.approx(float(up - down) / (2 * step), rel=1e-5, abs=1e-9)
        assert divergence(TEACHER, TEACHER, beta).tolist() == pytest.approx([0.0] * N, abs=1e-12)
        assert (value > 0).all()


@pytest.mark.parametrize("beta", [0.0, 0.5, 1.0])
def test_coarser_distributions_are_nearer_and_all_tokens_are_the_whole(beta: float) -> None:
    whole = divergence(TEACHER, STUDENT, beta)
    before = torch.zeros(N, dtype=torch.float64)
    for k in range(1, V + 1):
        ids = TEACHER.topk(k, dim=-1).indices
        teacher, student = merge_other_tokens(TEACHER, ids), merge_other_tokens(STUDENT, ids)
        assert teacher.shape == (N, k + 1 if k < V else V)
        torch.testing.assert_close(student.exp().sum(-1), torch.ones(N, dtype=torch.float64))
        now = divergence(teacher, student, beta)
        assert (now >= before - 1e-12).all()  # finer is further: the data processing inequality
        before = now
    torch.testing.assert_close(before, whole)


def test_the_others_are_summed_without_cancellation() -> None:
    """A tail of 1e-30 in float32, where 1 - sum over the chosen tokens is 0."""
    logits = torch.tensor([[0.0, -69.0, -70.0, -71.0]])
    tail = merge_other_tokens(logits.log_softmax(-1), torch.tensor([[0]]))[0, 1]
    assert tail.item() == pytest.approx(math.log(math.exp(-69) + math.exp(-70) + math.exp(-71)), rel=1e-5)


def test_the_teacher_gets_no_gradient_and_half_precision_is_computed_in_full() -> None:
    teacher, student = (x.bfloat16().requires_grad_() for x in (TEACHER, STUDENT))
    value = divergence(teacher, student, 0.5)
    value.sum().backward()
    assert value.dtype == torch.float32
    assert teacher.grad is None and student.grad is not None


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(BadInput, match=r"student_NK has shape \[5, 3\]"):
        divergence(TEACHER, STUDENT[:, :3])
