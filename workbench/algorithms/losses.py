"""Per-token losses of PPO and its kin, [B, T]; `aggregation` makes a scalar of them. Suffixes: see `arguments`."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from workbench.algorithms.arguments import full, same_shape, within
from workbench.algorithms.kl import MAX_LOG_RATIO


class PolicyStats(NamedTuple):
    """Per token and without gradient, so that masked sums of them add up over micro-batches and ranks.

    ratio_BT: rho = pi / pi_old. clipped_BT: True where a clip changed the objective, and thereby stopped the gradient.
    """

    ratio_BT: Tensor
    clipped_BT: Tensor


def policy_loss(
    log_prob_BT: Tensor,
    old_log_prob_BT: Tensor,
    advantages_BT: Tensor,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual_clip: float | None = None,
) -> tuple[Tensor, PolicyStats]:
    """PPO's clipped surrogate, negated, [B, T]. Gradients flow into `log_prob_BT` only.

        rho  = exp(log pi - log pi_old)
        J    = min(rho A, clip(rho, 1 - clip_low, 1 + clip_high) A)
        J    = max(J, dual_clip A)  where A < 0, if dual_clip is given
        loss = -J

    Sources: PPO, https://arxiv.org/abs/1707.06347, equation 7; unequal bounds ("clip-higher"): DAPO,
    https://arxiv.org/abs/2503.14476, section 3.1; dual clip: Ye et al. 2020, https://arxiv.org/abs/1912.09729.

    Before the first optimizer step pi = pi_old: rho is 1, nothing is clipped, the loss is -A. The log-ratio is clamped
    to [-20, 20], past which the gradient is 0.

    Raises `BadInput` on unequal shapes, clip_low outside [0, 1], clip_high < 0, dual_clip < 1.
    """
    same_shape(log_prob_BT=log_prob_BT, old_log_prob_BT=old_log_prob_BT, advantages_BT=advantages_BT)
    within("clip_low", clip_low, 0.0, 1.0)
    within("clip_high", clip_high, 0.0)
    advantages_BT = full(advantages_BT).detach()
    log_ratio_BT = full(log_prob_BT) - full(old_log_prob_BT).detach()
    ratio_BT = log_ratio_BT.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    unclipped_BT = ratio_BT * advantages_BT
    objective_BT = torch.minimum(unclipped_BT, ratio_BT.clamp(1 - clip_low, 1 + clip_high) * advantages_BT)
    if dual_clip is not None:
        within("dual_clip", dual_clip, 1.0)
        floor_BT = torch.maximum(objective_BT, dual_clip * advantages_BT)
        objective_BT = torch.where(advantages_BT < 0, floor_BT, objective_BT)
    return -objective_BT, PolicyStats(ratio_BT.detach(), (objective_BT != unclipped_BT).detach())


class ValueStats(NamedTuple):
    """Per token and without gradient. clipped_BT: True where the clip changed the error, and stopped the gradient."""

    clipped_BT: Tensor


def value_loss(
    values_BT: Tensor, old_values_BT: Tensor, returns_BT: Tensor, clip: float | None = None
) -> tuple[Tensor, ValueStats]:
    """The critic's squared error, optionally clipped around the values at the start of the update, [B, T].

        loss = 1/2 (V - G)^2
        loss = 1/2 max((V - G)^2, (clip(V, V_old - clip, V_old + clip) - G)^2)      if clip is given

    Source: the clipped form is that of https://github.com/openai/baselines, `ppo2/model.py`. Gradients flow into
    `values_BT` only. `old_values_BT` are the values that the advantages were made with; they serve the clip alone.

    Raises `BadInput` on unequal shapes or a negative clip.
    """
    same_shape(values_BT=values_BT, old_values_BT=old_values_BT, returns_BT=returns_BT)
    values_BT, old_values_BT, returns_BT = full(values_BT), full(old_values_BT).detach(), full(returns_BT).detach()
    unclipped_BT = error_BT = (values_BT - returns_BT).square()
    if clip is not None:
        within("clip", clip, 0.0)
        near_BT = values_BT.clamp(old_values_BT - clip, old_values_BT + clip)
        error_BT = torch.maximum(unclipped_BT, (near_BT - returns_BT).square())
    return 0.5 * error_BT, ValueStats((error_BT != unclipped_BT).detach())
