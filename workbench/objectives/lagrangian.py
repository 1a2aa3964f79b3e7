"""Safe-RLHF's Lagrangian: advantages of reward and cost, and the multiplier's step. Suffixes: see `arguments`."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from workbench.errors import BadInput
from workbench.objectives.arguments import same_shape, upcast

# In fp32, advantages at this multiplier equal those at infinity, but one can still divide by it.
MAX_MULTIPLIER = 1e9


@torch.no_grad()
def lagrangian(advantages_BT: Tensor, cost_advantages_BT: Tensor, multiplier: float) -> Tensor:
    """Combine the advantages of reward and cost, as in Safe-RLHF, [B, T].

        A = (A_r - lambda A_c) / (1 + lambda)

    Source: Dai et al. 2023, https://arxiv.org/abs/2310.12773. The policy gradient with A is the gradient of the
    Lagrangian J_r - lambda (J_c - limit), divided by 1 + lambda so that a large multiplier does not make large steps.
    At lambda = 0, A is A_r; as lambda grows, A tends to -A_c.

    Raises `BadInput` on unequal shapes.
    """
    same_shape(advantages_BT=advantages_BT, cost_advantages_BT=cost_advantages_BT)
    return (upcast(advantages_BT) - multiplier * upcast(cost_advantages_BT)) / (1 + multiplier)


def dual_step(
    multiplier: float, mean_cost: float, limit: float, learning_rate: float, bounds: tuple[float, float]
) -> float:
    """Return the multiplier after one step of gradient ascent on its logarithm, clamped to `bounds`.

        ln lambda' = ln lambda + learning_rate * lambda * (J_c - limit)

    Source: Dai et al. 2023, https://arxiv.org/abs/2310.12773, equation 31: d/d(ln lambda) of lambda (J_c - limit).
    The step is proportional to lambda itself, so the lower bound also sets how fast a multiplier grows again after it
    was not needed for a long time. mean_cost: per response, over the rollouts of the current policy.

    bounds: 0 < low <= multiplier <= high. Raises `BadInput` on a cost that is not finite.
    """
    low, high = bounds
    if not math.isfinite(mean_cost):
        raise BadInput(f"mean_cost={mean_cost!r}", "must be a finite number")
    log = math.log(multiplier) + learning_rate * multiplier * (mean_cost - limit)
    # exp(log(bound)) may differ from the bound in the last bit
    return low if log <= math.log(low) else high if log >= math.log(high) else math.exp(log)
