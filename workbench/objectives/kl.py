"""KL(pi || ref) from log-probabilities of sampled tokens (estimates, losses, a controller for its coefficient), and
divergences of a student's next-token distribution from its teacher's. Suffixes: see `arguments`; N tokens, K outcomes.
"""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor

from workbench.errors import BadInput
from workbench.objectives.arguments import same_shape, upcast

KLKind = Literal["k1", "k2", "k3"]
KLLoss = Literal["k1", "k2", "k3", "k3_corrected"]

# Sums of exp(20) = 4.9e8 do not overflow in fp32. If two policies differ by 20 nats on a sampled token, something is
# wrong, and a larger difference has no further meaning.
MAX_LOG_RATIO = 20.0


def kl_estimate(log_prob_BT: Tensor, ref_log_prob_BT: Tensor, kind: KLKind = "k1") -> Tensor:
    """Return a per-token estimate of KL(pi || ref) in nats, at least fp32, [B, T] (any common shape is accepted).

    Source: J. Schulman, "Approximating KL divergence", http://joschu.net/blog/kl-approx.html. With d = log pi - log ref
    at tokens sampled from pi:

        k1 = d                  unbiased, can be negative
        k2 = d^2 / 2            biased, never negative
        k3 = exp(-d) - 1 + d    unbiased, never negative

    In the *reward* (detached) k1 is the right choice: its policy gradient is that of KL(pi || ref). As a *loss* the
    kinds behave differently, see `kl_loss`.

    k3 clamps d to at least -20, so that exp(-d) stays finite; below this bound its gradient is 0.

    Raises `BadInput` on unequal shapes or an unknown kind.
    """
    same_shape(log_prob_BT=log_prob_BT, ref_log_prob_BT=ref_log_prob_BT)
    d_BT = upcast(log_prob_BT) - upcast(ref_log_prob_BT)
    if kind == "k1":
        return d_BT
    if kind == "k2":
        return 0.5 * d_BT.square()
    if kind == "k3":
        # Clamp d, not only the exponent: beyond the bound, +d alone would give a gradient of the wrong sign.
        d_BT = d_BT.clamp(min=-MAX_LOG_RATIO)
        return (-d_BT).expm1() + d_BT
    raise BadInput(f"kind={kind!r}", "must be one of 'k1', 'k2', 'k3'")


def ratio_of(log_prob_BT: Tensor, old_log_prob_BT: Tensor) -> Tensor:
    """Return rho = pi / pi_old, differentiable in `log_prob_BT` only; its logarithm is clamped to [-20, 20].

    Raises `BadInput` on unequal shapes.
    """
    same_shape(log_prob_BT=log_prob_BT, old_log_prob_BT=old_log_prob_BT)
    log_ratio_BT = upcast(log_prob_BT) - upcast(old_log_prob_BT).detach()
    return log_ratio_BT.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def kl_loss(
    log_prob_BT: Tensor, old_log_prob_BT: Tensor, ref_log_prob_BT: Tensor, kind: KLLoss = "k3_corrected"
) -> Tensor:
    """Return a per-token loss whose gradient, over tokens sampled from pi_old, is a divergence's, [B, T].

    The expected gradient at pi = pi_old is the gradient of

        k1              nothing: it is 0, the loss has no effect
        k2              KL(pi || ref)
        k3              KL(ref || pi), the other direction
        k3_corrected    KL(pi || ref), also if pi differs from pi_old; the loss is rho k3, rho = pi / pi_old

    The expectation of k3_corrected is KL(pi || ref) itself for any pi. Gradients flow into `log_prob_BT` only.
    Sources: `kl_estimate` for the three estimators; DeepSeek-V3.2, https://arxiv.org/abs/2512.02556, section 3.1, for
    the correction.

    Raises `BadInput` on unequal shapes or an unknown kind.
    """
    same_shape(log_prob_BT=log_prob_BT, old_log_prob_BT=old_log_prob_BT)
    ref_log_prob_BT = ref_log_prob_BT.detach()
    if kind == "k3_corrected":
        return ratio_of(log_prob_BT, old_log_prob_BT) * kl_estimate(log_prob_BT, ref_log_prob_BT, "k3")
    return kl_estimate(log_prob_BT, ref_log_prob_BT, kind)


def adaptive_kl_step(coefficient: float, kl: float, target: float, responses: int, horizon: int) -> float:
    """Return the KL coefficient after a batch, moved towards the value at which the KL is `target`.

        e  = clip(KL / target - 1, -0.2, 0.2)
        c' = c (1 + e responses / horizon)

    Source: Ziegler et al. 2019, https://arxiv.org/abs/1909.08593, section 2.2 (K = 0.1 per batch in the paper, which is
    the gain responses / horizon in their code). kl: of the policy to the reference, in nats per complete response, mean
    over the batch. responses: in this batch. horizon: the number of responses after which a KL that is 20 % too high
    has raised the coefficient by about 20 %; a batch of 5 horizons or more could turn its sign.

    Raises `BadInput` on a KL that is not finite.
    """
    if not math.isfinite(kl):
        raise BadInput(f"kl={kl!r}", "must be a finite number")
    error = min(max(kl / target - 1, -0.2), 0.2)
    return coefficient * (1 + error * responses / horizon)


def divergence(teacher_NK: Tensor, student_NK: Tensor, beta: float = 1.0) -> Tensor:
    """Return the divergence of the student's distribution over K outcomes from the teacher's, [N], in nats.

        beta 0             KL(teacher || student): forward, mode-covering
        beta 1             KL(student || teacher): reverse, mode-seeking
        0 < beta < 1       beta KL(teacher || m) + (1 - beta) KL(student || m),  m = beta teacher + (1 - beta) student

    The last is the generalised Jensen-Shannon divergence; 0.5 is the usual one. It tends to 0 at both ends; there the
    KL is used instead, which is the limit of the divergence divided by beta, or by 1 - beta. The arguments are
    log-probabilities. Gradients flow into the student only.

    Source: GKD, Agarwal et al. 2023, https://arxiv.org/abs/2306.13649, section 2 and equation 1, with the same beta;
    TRL uses the same values at the ends.

    Raises `BadInput` on unequal shapes.
    """
    same_shape(teacher_NK=teacher_NK, student_NK=student_NK)
    teacher_NK, student_NK = upcast(teacher_NK).detach(), upcast(student_NK)
    if beta == 0:
        return _kl(teacher_NK, student_NK)
    if beta == 1:
        return _kl(student_NK, teacher_NK)
    mixture_NK = torch.logaddexp(teacher_NK + math.log(beta), student_NK + math.log1p(-beta))
    return beta * _kl(teacher_NK, mixture_NK) + (1 - beta) * _kl(student_NK, mixture_NK)


def _kl(p_NK: Tensor, q_NK: Tensor) -> Tensor:
    return (p_NK.exp() * (p_NK - q_NK)).sum(-1)


def merge_other_tokens(log_probs_NV: Tensor, ids_NK: Tensor) -> Tensor:
    """Merge all tokens but K chosen ones into one further outcome: log-probabilities [N, K + 1].

    log_probs_NV: over the whole vocabulary. ids_NK: distinct tokens in each row. If they are all tokens, there is no
    further outcome, and the result is [N, V]. The divergence of two distributions that were merged in the same way is
    at most the divergence of the full ones (data processing inequality), and equal to it if K is V.
    """
    chosen_NK = log_probs_NV.gather(-1, ids_NK)
    if ids_NK.shape[-1] == log_probs_NV.shape[-1]:
        return chosen_NK
    # sum the other tokens directly: 1 - (sum of the chosen) would be mostly rounding error if the others are unlikely
    others_NV = log_probs_NV.scatter(-1, ids_NK, -torch.inf)
    return torch.cat([chosen_NK, others_NV.logsumexp(-1, keepdim=True)], dim=-1)
