"""KL-Cov and Clip-Cov: policy losses that hold back the few tokens which lower the entropy most. Suffixes: N tokens of
a minibatch inside the mask; otherwise see `arguments`.

The entropy of a softmax policy falls with the covariance of log pi and A over its actions (Cui et al. 2025,
https://arxiv.org/abs/2505.22617, theorem 1). Both losses look for the tokens with a large share of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import torch
from pydantic import Field
from torch import Tensor

from workbench.errors import BadInput
from workbench.objectives.arguments import full, same_shape
from workbench.objectives.kl import ratio_of
from workbench.objectives.losses import CLIPS
from workbench.support.validation import FINITE, NonNegativeFloat, Number, Rule, settings

Share = Annotated[Number, Field(gt=0, le=1), Rule("must be a share of the tokens, in (0, 1]")]


@settings()
class KLCov:
    """`update_actor(loss=KLCov())`: the tokens with the largest covariances get a penalty, and nothing is clipped.

        loss = -rho A + (coefficient |log pi - log pi_old| at the chosen tokens)

    share: of a minibatch's tokens, at least one; the authors take 0.002 for 7B parameters and 0.0002 for 32B. The
    penalty has no gradient where pi = pi_old: it acts from the second optimizer step on the same rollouts on.
    """

    share: Share = 0.002
    coefficient: Annotated[NonNegativeFloat, FINITE] = 1.0


@settings()
class ClipCov:
    """`update_actor(loss=ClipCov())`: a few tokens, drawn among those whose covariance is within the bounds, have no
    gradient; the others have PPO's clipped loss.

    share: of a minibatch's tokens, at least one, to draw. low, high: the bounds of the covariance. The authors' clip is
    1, the default here: the ratio stays within [0, 2].
    """

    share: Share = 0.0002
    low: Number = 1.0
    high: Number = 5.0

    def __post_init__(self) -> None:
        if not self.low < self.high:
            raise BadInput(f"ClipCov(low={self.low}, high={self.high})", "low must be below high")


CovarianceLoss = KLCov | ClipCov
CLIP = 1.0  # of ClipCov, where none is given


def clips_in_effect(values: Mapping[str, Any]) -> dict[str, float]:
    """By name, the clips of an update with such values of `loss`, `clip` and `clip_high`, of which the clips may be
    None; empty for a loss that has none, or that is a user's function."""
    loss: Any = values.get("loss")
    clip, clip_high = values.get("clip"), values.get("clip_high")
    if isinstance(loss, ClipCov):
        low = high = CLIP
    elif loss in CLIPS:
        low, high = CLIPS[loss]
    else:
        return {}
    low, high = (low, high) if clip is None else (clip, clip)
    return {"clip": low, "clip_high": high if clip_high is None else clip_high}


def covariances(log_prob_N: Tensor, advantages_N: Tensor) -> Tensor:
    """(log pi - mean log pi) (A - mean A) of each token, float64 [N]: its part of N times the covariance.

    Source: Cui et al. 2025, equation 10. Raises `BadInput` on unequal shapes.
    """
    same_shape(log_prob_N=log_prob_N, advantages_N=advantages_N)
    log_prob_N, advantages_N = log_prob_N.detach().double(), advantages_N.detach().double()
    return (log_prob_N - log_prob_N.mean()) * (advantages_N - advantages_N.mean())


def held_back(loss: CovarianceLoss, covariances_N: Tensor, draws: torch.Generator) -> Tensor:
    """Which tokens a loss holds back, bool [N]: the share with the largest covariances, or that share drawn from those
    strictly within the bounds. Raises `BadInput` unless the covariances are [N]."""
    if covariances_N.ndim != 1:
        raise BadInput(f"covariances_N of shape {list(covariances_N.shape)}", "must be [tokens]")
    chosen_N = torch.zeros(len(covariances_N), dtype=torch.bool)
    count = max(1, int(len(covariances_N) * loss.share))
    if isinstance(loss, KLCov):
        among_N = covariances_N.topk(min(count, len(covariances_N))).indices
    else:
        within_N = ((covariances_N > loss.low) & (covariances_N < loss.high)).nonzero()[:, 0]
        among_N = within_N[torch.randperm(len(within_N), generator=draws)[:count]]
    chosen_N[among_N] = True
    return chosen_N


def kl_cov_loss(
    log_prob_BT: Tensor, old_log_prob_BT: Tensor, advantages_BT: Tensor, held_back_BT: Tensor, coefficient: float = 1.0
) -> Tensor:
    """The loss of `KLCov`, [B, T]. Gradients flow into `log_prob_BT` only. Raises `BadInput` on unequal shapes."""
    same_shape(
        log_prob_BT=log_prob_BT, old_log_prob_BT=old_log_prob_BT, advantages_BT=advantages_BT, held_back_BT=held_back_BT
    )
    distance_BT = (full(log_prob_BT) - full(old_log_prob_BT).detach()).abs()
    penalty_BT = torch.where(held_back_BT.bool(), coefficient * distance_BT, 0.0)
    return penalty_BT - ratio_of(log_prob_BT, old_log_prob_BT) * full(advantages_BT).detach()
