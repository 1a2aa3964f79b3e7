"""KL(pi || ref) from the log-probabilities of sampled tokens: as an estimate, as a loss, and held near a target; and
divergences of a student's next-token distribution from its teacher's. Suffixes: see `arguments`; N tokens, K outcomes.
"""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor

from workbench.errors import BadInput
from workbench.objectives.arguments import full, same_shape, within

KLKind = Literal["k1", "k2", "k3"]
KLLoss = Literal["k1", "k2", "k3", "k3_corrected"]

# exp(20) = 4.9e8 sums without overflow in fp32. Where one policy finds a sampled token 20 nats likelier than the other,
# something is wrong, and the size of the gap says nothing more.
MAX_LOG_RATIO = 20.0


def kl_estimate(log_prob_BT: Tensor, ref_log_prob_BT: Tensor, kind: KLKind = "k1") -> Tensor:
    """Per-token estimate of KL(pi || ref), nats, at least fp32, shape [B, T] (any common shape is taken).

    Source: J. Schulman, "Approximating KL divergence", http://joschu.net/blog/kl-approx.html. With d = log pi - log ref
    at tokens sampled from pi:

        k1 = d                  unbiased, can be negative
        k2 = d^2 / 2            biased, never negative
        k3 = exp(-d) - 1 + d    unbiased, never negative

    In the *reward* (detached) k1 is the right choice: its policy gradient is that of KL(pi || ref). As a *loss* they
    behave otherwise, see `kl_loss`.

    k3 takes d as no less than -20, so that exp(-d) stays finite; past that bound its gradient is 0.

    Raises `BadInput` on unequal shapes or an unknown kind.
    """
    same_shape(log_prob_BT=log_prob_BT, ref_log_prob_BT=ref_log_prob_BT)
    d_BT = full(log_prob_BT) - full(ref_log_prob_BT)
    if kind == "k1":
        return d_BT
    if kind == "k2":
        return 0.5 * d_BT.square()
    if kind == "k3":
        # Clamping d, not only the exponent: past the bound the lone +d would give a gradient of the wrong sign.
        d_BT = d_BT.clamp(min=-MAX_LOG_RATIO)
        return (-d_BT).expm1() + d_BT
    raise BadInput(f"kind={kind!r}", "must be one of 'k1', 'k2', 'k3'")


def ratio_of(log_prob_BT: Tensor, old_log_prob_BT: Tensor) -> Tensor:
    """rho = pi / pi_old, differentiable in `log_prob_BT` only; its logarithm is clamped to [-20, 20].

    Raises `BadInput` on unequal shapes.
    """
    same_shape(log_prob_BT=log_prob_BT, old_log_prob_BT=old_log_prob_BT)
    log_ratio_BT = full(log_prob_BT) - full(old_log_prob_BT).detach()
    return log_ratio_BT.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def kl_loss(
    log_prob_BT: Tensor, old_log_prob_BT: Tensor, ref_log_prob_BT: Tensor, kind: KLLoss = "k3_corrected"
) -> Tensor:
    """A per-token loss whose gradient, over tokens sampled from pi_old, is that of a divergence, [B, T].

    What the expected gradient is at pi = pi_old:

        k1              0: it does nothing
        k2              that of KL(pi || ref)
        k3              that of KL(ref || pi), the other direction
        k3_corrected    rho k3, rho = pi / pi_old: that of KL(pi || ref), and still so when pi has left pi_old

    The last one's expectation is KL(pi || ref) itself wherever pi is. Gradients flow into `log_prob_BT` only.
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
    """The KL coefficient after a batch, moved towards the value at which the KL is `target`.

        e  = clip(KL / target - 1, -0.2, 0.2)
        c' = c (1 + e responses / horizon)

    Source: Ziegler et al. 2019, https://arxiv.org/abs/1909.08593, section 2.2 (there K = 0.1 a batch, which is the
    gain responses / horizon of their code). kl: of the policy to the reference, nats a whole response, mean over the
    batch. responses: of this batch. horizon: responses after which a KL of 20 % too much has raised the coefficient
    by about 20 %. A coefficient that is left alone is the fixed controller.

    Raises `BadInput` on a coefficient or target that is not more than 0, a KL that is not finite, or a batch of more
    than 5 horizons, which could turn the coefficient's sign.
    """
    for name, value in (("coefficient", coefficient), ("target", target)):
        if not 0 < value < math.inf:
            raise BadInput(f"{name}={value!r}", "must be more than 0", "leave the target out for a fixed coefficient")
    if not math.isfinite(kl):
        raise BadInput(f"kl={kl!r}", "must be a finite number")
    within("horizon", horizon, 1)
    within("responses", responses, 1, 5 * horizon - 1)
    error = min(max(kl / target - 1, -0.2), 0.2)
    return coefficient * (1 + error * responses / horizon)


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
