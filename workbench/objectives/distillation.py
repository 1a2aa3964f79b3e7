"""Divergences of a student's next-token distribution from its teacher's. Suffixes: N tokens, K outcomes of each."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from workbench.objectives.arguments import full, same_shape, within


def divergence(teacher_NK: Tensor, student_NK: Tensor, beta: float = 1.0) -> Tensor:
    """How far the student's distribution over K outcomes is from the teacher's, [N], nats, from log-probabilities.

        beta 0             KL(teacher || student): forward, covers what the teacher does
        beta 1             KL(student || teacher): reverse, keeps to what the teacher does most
        0 < beta < 1       beta KL(teacher || m) + (1 - beta) KL(student || m),  m = beta teacher + (1 - beta) student

    The last is the generalised Jensen-Shannon divergence; 0.5 is the usual one. It tends to 0 at both ends, where the
    KL is taken in its place: divided by beta, or by 1 - beta, it tends to that. Gradients flow into the student alone.

    Source: GKD, Agarwal et al. 2023, https://arxiv.org/abs/2306.13649, section 2 and equation 1, where beta means
    the same; TRL takes the same values at the ends.

    Raises `BadInput` on unequal shapes, and on beta outside [0, 1].
    """
    same_shape(teacher_NK=teacher_NK, student_NK=student_NK)
    within("beta", beta, 0.0, 1.0)
    teacher_NK, student_NK = full(teacher_NK).detach(), full(student_NK)
    if beta == 0:
        return _kl(teacher_NK, student_NK)
    if beta == 1:
        return _kl(student_NK, teacher_NK)
    mixture_NK = torch.logaddexp(teacher_NK + math.log(beta), student_NK + math.log1p(-beta))
    return beta * _kl(teacher_NK, mixture_NK) + (1 - beta) * _kl(student_NK, mixture_NK)


def _kl(p_NK: Tensor, q_NK: Tensor) -> Tensor:
    return (p_NK.exp() * (p_NK - q_NK)).sum(-1)


def coarsened(log_probs_NV: Tensor, ids_NK: Tensor) -> Tensor:
    """The distribution over K chosen tokens and, as one more outcome, all others: log-probabilities [N, K + 1].

    log_probs_NV: over the whole vocabulary. ids_NK: different tokens in each row. Where they are all tokens there is no
    other outcome, and the result is [N, V]. A divergence of two distributions that are made coarser alike is at most
    that of the whole ones (data processing inequality), and equal to it where K is V.
    """
    chosen_NK = log_probs_NV.gather(-1, ids_NK)
    if ids_NK.shape[-1] == log_probs_NV.shape[-1]:
        return chosen_NK
    # summed over the others themselves: 1 - sum over the chosen would be rounding where the others have little
    others_NV = log_probs_NV.scatter(-1, ids_NK, -torch.inf)
    return torch.cat([chosen_NK, others_NV.logsumexp(-1, keepdim=True)], dim=-1)
