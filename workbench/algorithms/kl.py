"""Estimates of KL(pi || ref) from the log-probabilities of sampled tokens. Suffixes: see `arguments`."""

from __future__ import annotations

from typing import Literal

from torch import Tensor

from workbench.algorithms.arguments import full, same_shape
from workbench.errors import BadInput

KLKind = Literal["k1", "k2", "k3"]

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

    In the *reward* (detached) k1 is the right choice: its policy gradient is that of KL(pi || ref). As a differentiable
    *loss* on tokens sampled from pi, the expected gradient is 0 for k1, that of KL(pi || ref) for k2, and that of
    KL(ref || pi) for k3; for k3 times a differentiable ratio pi / pi_old it is that of KL(pi || ref) again.

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
