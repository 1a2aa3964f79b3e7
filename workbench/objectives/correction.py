"""Correct for rollouts whose distribution differs from the trainer's, because of the engine or of older weights.

The importance weight of a token (or sequence) is w = pi_old / pi_rollout. It has no gradient: it changes the
distribution over which the policy loss is an expectation, not the objective. Suffixes: see `arguments`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Literal, NamedTuple

import torch
from pydantic import Field
from torch import Tensor

from workbench.errors import BadInput
from workbench.objectives.arguments import same_shape, upcast
from workbench.objectives.kl import MAX_LOG_RATIO
from workbench.support.validation import Number, Rule, settings

Level = Literal["token", "sequence", "geometric"]
Bound = Literal["truncate", "mask", "second_moment"]
SECOND_MOMENT = 0.04  # the default of M2PO
MAX_RAW_LOG = 300.0  # exp(2 x 300) times any number of tokens is finite in float64


@settings()
class Correction:
    """How the importance weight of each token is computed and bounded.

    Both log-probabilities must be over the same set of tokens: rollouts sampled with top-p, top-k or min-p are refused
    unless their sampling mask is kept.

    level: "token": the token's own ratio (biased for sequences, low variance); "sequence": the product over the
        response (unbiased, high variance); "geometric": the geometric mean over the response's tokens.
    bound: "truncate": min(w, high), truncated importance sampling (TIS, Yao et al. 2025,
        https://fengyao.notion.site/off-policy-rl; for sequences Liu, Li et al. 2025, https://richardli.xyz/rl-collapse);
        "mask": w where low <= w <= high, else 0 (IcePop, Ring-1T, https://arxiv.org/abs/2510.18855);
        "second_moment": w, but 0 for the tokens of a minibatch with the largest (log w)^2: as many tokens are left out
        as needed so that the mean over the others is at most `second_moment` (M2PO, Zheng et al. 2025,
        https://arxiv.org/abs/2510.01161, in the form used by AReaL). Only for level="token". The authors' own code
        differs: it uses the ratio of the current policy to the rollout's, and counts and leaves out only tokens whose
        advantage drives that ratio further from 1.
    low, high: the bounds. `low` is only for "mask", None: 0.5. "second_moment" has neither. second_moment: only for
        bound="second_moment", None: 0.04.

    `old_log_prob` comes from the trainer's weights when the update begins, `rollout_log_prob` from the weights that
    generated the response. So with rollouts of older weights, PPO's loss with a correction is decoupled PPO's (AReaL,
    Fu et al. 2025, https://arxiv.org/abs/2505.24298): w min(u A, clip(u) A), u = pi / pi_old, which clips around the
    proximal policy pi_old and weights by its ratio to the behaviour policy.
    reference_size: the effective sample size below which the learning rate of the minibatch is scaled down, see
        `step_scale` (VCPO). The sample size is computed from the weights before they are bounded, because a bound hides
        the few large weights that make a gradient noisy. None: the rate is not scaled.
    """

    level: Level = "token"
    bound: Bound = "truncate"
    low: Annotated[Number, Field(ge=0, le=1), Rule("must be a number in [0, 1]")] | None = None
    high: Annotated[Number, Field(ge=1)] = 2.0
    reference_size: Annotated[Number, Field(gt=0, le=1), Rule("must be a share of the samples, in (0, 1]")] | None = (
        None
    )
    second_moment: Annotated[Number, Field(gt=0), Rule("must be a number above 0")] | None = None

    def __post_init__(self) -> None:
        if self.bound != "second_moment" and self.second_moment is not None:
            raise BadInput(
                f"Correction.second_moment={self.second_moment!r} with bound={self.bound!r}",
                "only bound='second_moment' uses it",
                "leave it out, or use bound='second_moment'",
            )
        if self.bound == "second_moment" and (self.level, self.low, self.high) != ("token", None, 2.0):
            raise BadInput(
                f"Correction(bound='second_moment', level={self.level!r}, low={self.low!r}, high={self.high!r})",
                "this bound leaves tokens out by their (log w)^2, and does not limit the other weights",
                "leave level, low and high out",
            )
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

    @property
    def largest_second_moment(self) -> float:
        return SECOND_MOMENT if self.second_moment is None else self.second_moment


class CorrectionWeights(NamedTuple):
    """weight_BT: the factor of the policy loss, 0 outside the mask. bounded_BT: True where a weight was truncated or
    masked. Neither has a gradient."""

    weight_BT: Tensor
    bounded_BT: Tensor


@torch.no_grad()
def log_weights(old_log_prob_BT: Tensor, rollout_log_prob_BT: Tensor, mask_BT: Tensor, level: Level) -> Tensor:
    """Return log w, [B, T], of each token or of its sequence; 0 outside the mask; clamped to [-20, 20].

    Raises `BadInput` on unequal shapes.
    """
    return _log_weights(old_log_prob_BT, rollout_log_prob_BT, mask_BT, level).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


@torch.no_grad()
def raw_weights(old_log_prob_BT: Tensor, rollout_log_prob_BT: Tensor, mask_BT: Tensor, level: Level) -> Tensor:
    """Return w before a correction bounds it, [B, T], float64; 0 outside the mask.

    log w is clamped to [-300, 300], so that sums of squares stay finite. Raises `BadInput` on unequal shapes.
    """
    log_BT = _log_weights(old_log_prob_BT.double(), rollout_log_prob_BT.double(), mask_BT, level)
    return torch.where(mask_BT.bool(), log_BT.clamp(-MAX_RAW_LOG, MAX_RAW_LOG).exp(), 0.0)


def _log_weights(old_log_prob_BT: Tensor, rollout_log_prob_BT: Tensor, mask_BT: Tensor, level: Level) -> Tensor:
    same_shape(mask_BT=mask_BT, old_log_prob_BT=old_log_prob_BT, rollout_log_prob_BT=rollout_log_prob_BT)
    mask_BT = mask_BT.bool()
    log_BT = torch.where(mask_BT, upcast(old_log_prob_BT) - upcast(rollout_log_prob_BT), 0.0)
    if level != "token":
        log_B1 = log_BT.sum(-1, keepdim=True)
        if level == "geometric":
            log_B1 = log_B1 / mask_BT.sum(-1, keepdim=True).clamp(min=1)
        log_BT = torch.where(mask_BT, log_B1, 0.0)
    return log_BT


@torch.no_grad()
def correct(
    old_log_prob_BT: Tensor, rollout_log_prob_BT: Tensor, mask_BT: Tensor, correction: Correction,
    cut_B1: Tensor | None = None,
) -> CorrectionWeights:  # fmt: skip
    """Return the bounded weights of complete responses, see `Correction`.

    rollout_log_prob_BT: under the sampled distribution, after temperature, top-p and top-k. cut_B1: only for
    bound="second_moment": the result of `second_moment_cut` for each row's minibatch; None: the rows are one minibatch.

    Raises `BadInput` on unequal shapes.
    """
    log_BT = log_weights(old_log_prob_BT, rollout_log_prob_BT, mask_BT, correction.level)
    weight_BT, mask_BT = log_BT.exp(), mask_BT.bool()
    if correction.bound == "second_moment":
        square_BT = log_BT.double().square()
        if cut_B1 is None:
            cut_B1 = second_moment_cut(square_BT[mask_BT], correction.largest_second_moment)
        bounded_BT = (square_BT > cut_B1) & mask_BT
        return CorrectionWeights(torch.where(mask_BT & ~bounded_BT, weight_BT, 0.0), bounded_BT)
    bounded_BT = weight_BT > correction.high
    if correction.bound == "mask":
        bounded_BT = bounded_BT | (weight_BT < correction.lowest)
        weight_BT = torch.where(bounded_BT, 0.0, weight_BT)
    weight_BT = torch.where(mask_BT, weight_BT.clamp(max=correction.high), 0.0)
    return CorrectionWeights(weight_BT, bounded_BT & mask_BT)


@torch.no_grad()
def second_moment_cut(
    square_N: Tensor, largest: float, summed: Callable[[Tensor], Tensor] = lambda sums: sums
) -> Tensor:
    """Return the largest c, shape [], for which the mean of all (log w)^2 <= c is at most `largest`.

    The mean grows with c, so an interval around c is narrowed. square_N: (log w)^2, float64, of the tokens of a
    minibatch, or of a rank's share of it. summed: sums a tensor over the ranks that share the minibatch.
    """
    ordered_N = square_N.sort().values
    total_N1 = torch.cat((ordered_N.new_zeros(1), ordered_N.cumsum(0)))
    low, high = 0.0, 2 * MAX_LOG_RATIO**2
    for _ in range(9):  # each narrows the interval by 255: in the end it is below the spacing of float64
        cuts_C = torch.linspace(low, high, 256, dtype=torch.float64, device=square_N.device)
        counts_C = torch.searchsorted(ordered_N, cuts_C, right=True)
        sums_2C = summed(torch.stack((total_N1[counts_C], counts_C.double())))
        kept = int((sums_2C[0] <= largest * sums_2C[1]).sum()) - 1
        low, high = float(cuts_C[max(kept, 0)]), float(cuts_C[min(kept + 1, 255)])
    return torch.tensor(low, dtype=torch.float64, device=square_N.device)


def effective_sample_size(total: float, squares: float, count: float) -> float:
    """Return (sum w)^2 / (n sum w^2): the effective share of n weighted samples, in (0, 1]; 0 if all weights are 0.

    Source: Kong 1992, "A note on importance sampling using standardized weights". Equal weights give 1; one weight far
    larger than the others gives 1 / n. total, squares, count: the sums of w, of w^2 and of 1, over all micro-batches
    and ranks.
    """
    return total**2 / (count * squares) if squares > 0 else 0.0


def step_scale(effective: float, reference: float) -> float:
    """Return VCPO's factor for the learning rate: sqrt(min(1, effective / reference)).

    Source: Huang et al. 2026, "Stable Asynchrony", https://arxiv.org/abs/2602.17616: the variance of the policy
    gradient scales with 1 / effective sample size, and Adam's step with the square root of the batch size.
    effective: the result of `effective_sample_size` for the `raw_weights` of a minibatch, one per token or per sequence
    according to the correction's `level`. reference: the same for fresh rollouts, where only the engine differs; above
    0 and at most 1.
    """
    return min(1.0, effective / reference) ** 0.5
