"""Correcting for rollouts that another distribution drew than the trainer's: the engine's, or older weights'.

The weight of a token (or sequence) is w = pi_old / pi_rollout, never differentiated: it changes over which tokens the
policy loss is an expectation, not what is minimised. Suffixes: see `arguments`.
"""

from __future__ import annotations

from typing import Annotated, Literal, NamedTuple

import torch
from pydantic import Field
from torch import Tensor

from workbench.errors import BadInput
from workbench.objectives.arguments import full, same_shape, tokenwise
from workbench.objectives.kl import MAX_LOG_RATIO
from workbench.support.checked_calls import checked_call
from workbench.support.validation import Number, Rule, settings

Level = Literal["token", "sequence", "geometric"]
Bound = Literal["truncate", "mask"]
MAX_RAW_LOG = 300.0  # exp(2 x 300) times any number of tokens is finite in float64


@settings()
class Correction:
    """How the importance weight of each token is made, and bounded.

    Both log-probabilities are over all tokens: rollouts sampled with top-p, top-k or min-p are refused.

    level: "token": of the token alone (biased for sequences, little variance); "sequence": the product over the
        response (unbiased, much variance); "geometric": its geometric mean, the typical token of the response.
    bound: "truncate": min(w, high), truncated importance sampling (TIS, Yao et al. 2025,
        https://fengyao.notion.site/off-policy-rl; for sequences Liu, Li et al. 2025, https://richardli.xyz/rl-collapse);
        "mask": w where low <= w <= high, else 0 (IcePop, Ring-1T, https://arxiv.org/abs/2510.18855).
    low, high: the bounds; `low` is for "mask" alone, None: 0.5.
    reference_size: the effective sample size from which on a step is taken whole; below it the learning rate of the
        minibatch is scaled down, see `step_scale` (VCPO). It is that of the weights before they are bounded: a bound
        hides the few large weights that make a gradient noisy. None: the rate is left alone.
    """

    level: Level = "token"
    bound: Bound = "truncate"
    low: Annotated[Number, Field(ge=0, le=1), Rule("must be a number in [0, 1]")] | None = None
    high: Annotated[Number, Field(ge=1)] = 2.0
    reference_size: Annotated[Number, Field(gt=0, le=1), Rule("must be a share of the samples, in (0, 1]")] | None = (
        None
    )

    def __post_init__(self) -> None:
        if self.bound == "truncate" and self.low is not None:
            raise BadInput(
                f"Correction.low={self.low!r} with bound='truncate'",
                "a truncated weight has no lower bound",
                "leave it out, or use bound='mask'",
            )

    @property
    def lowest(self) -> float:
        """`low`, or its default."""
        return 0.5 if self.low is None else self.low


class CorrectionWeights(NamedTuple):
    """weight_BT: what the policy loss is multiplied by, 0 outside the mask. bounded_BT: True where truncated or masked.
    Neither has a gradient."""

    weight_BT: Tensor
    bounded_BT: Tensor


@checked_call()
@torch.no_grad()
def log_weights(old_log_prob_BT: Tensor, rollout_log_prob_BT: Tensor, mask_BT: Tensor, level: Level) -> Tensor:
    """log w, [B, T], of each token or of its sequence; 0 outside the mask; clamped to [-20, 20].

    Raises `BadInput` on unequal shapes.
    """
    return _log_weights(old_log_prob_BT, rollout_log_prob_BT, mask_BT, level).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


@checked_call()
@torch.no_grad()
def raw_weights(old_log_prob_BT: Tensor, rollout_log_prob_BT: Tensor, mask_BT: Tensor, level: Level) -> Tensor:
    """w as it is before a correction bounds it, [B, T], float64; 0 outside the mask.

    log w is clamped to [-300, 300], so that sums of squares stay finite. Raises `BadInput` on unequal shapes.
    """
    log_BT = _log_weights(old_log_prob_BT.double(), rollout_log_prob_BT.double(), mask_BT, level)
    return torch.where(mask_BT.bool(), log_BT.clamp(-MAX_RAW_LOG, MAX_RAW_LOG).exp(), 0.0)


def _log_weights(old_log_prob_BT: Tensor, rollout_log_prob_BT: Tensor, mask_BT: Tensor, level: Level) -> Tensor:
    tokenwise(mask_BT)
    same_shape(mask_BT=mask_BT, old_log_prob_BT=old_log_prob_BT, rollout_log_prob_BT=rollout_log_prob_BT)
    mask_BT = mask_BT.bool()
    log_BT = torch.where(mask_BT, full(old_log_prob_BT) - full(rollout_log_prob_BT), 0.0)
    if level != "token":
        log_B1 = log_BT.sum(-1, keepdim=True)
        if level == "geometric":
            log_B1 = log_B1 / mask_BT.sum(-1, keepdim=True).clamp(min=1)
        log_BT = torch.where(mask_BT, log_B1, 0.0)
    return log_BT


@checked_call()
@torch.no_grad()
def correct(
    old_log_prob_BT: Tensor, rollout_log_prob_BT: Tensor, mask_BT: Tensor, correction: Correction
) -> CorrectionWeights:
    """The weights of a micro-batch of whole responses, see `Correction`.

    rollout_log_prob_BT: of the distribution that was sampled from, after temperature, top-p and top-k.

    Raises `BadInput` on unequal shapes.
    """
    weight_BT = log_weights(old_log_prob_BT, rollout_log_prob_BT, mask_BT, correction.level).exp()
    bounded_BT = weight_BT > correction.high
    if correction.bound == "mask":
        bounded_BT = bounded_BT | (weight_BT < correction.lowest)
        weight_BT = torch.where(bounded_BT, 0.0, weight_BT)
    mask_BT = mask_BT.bool()
    weight_BT = torch.where(mask_BT, weight_BT.clamp(max=correction.high), 0.0)
    return CorrectionWeights(weight_BT, bounded_BT & mask_BT)


def effective_sample_size(total: float, squares: float, count: float) -> float:
    """(sum w)^2 / (n sum w^2): the share of n weighted samples that counts, in (0, 1]; 0 where all weights are 0.

    Source: Kong 1992, "A note on importance sampling using standardized weights". With equal weights it is 1, with one
    weight that dwarfs the others 1 / n. total, squares, count: the sums of w, of w^2 and of 1, which add up over
    micro-batches and ranks.
    """
    return total**2 / (count * squares) if squares > 0 else 0.0


@checked_call()
def step_scale(effective: float, reference: float) -> float:
    """VCPO's factor of the learning rate: sqrt(min(1, effective / reference)).

    Source: Huang et al. 2026, "Stable Asynchrony", https://arxiv.org/abs/2602.17616: the variance of the policy
    gradient goes with 1 / effective sample size, and Adam's step with the square root of the batch.
    effective: the share from `effective_sample_size`, of the `raw_weights` of a minibatch, one a token or one a
    sequence as the correction's `level` says. reference: that share on fresh rollouts, where only the engine differs.

    Raises `BadInput` unless 0 < reference <= 1.
    """
    if not 0 < reference <= 1:
        raise BadInput(f"reference={reference!r}", "an effective sample size is a share of the samples, in (0, 1]")
    return min(1.0, effective / reference) ** 0.5
