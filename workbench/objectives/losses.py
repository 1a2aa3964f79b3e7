"""Losses of each token, [B, T], of PPO and related methods; `aggregation` makes one number of them.

`arguments` explains the suffixes of names; N is the number of tokens of a minibatch inside the mask.

KL-Cov and Clip-Cov are policy losses that hold back the few tokens which lower the entropy most. The entropy of a
softmax policy falls with the covariance of log pi and A over its actions (Cui et al. 2025,
https://arxiv.org/abs/2505.22617, theorem 1). Both losses look for the tokens with a large share of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, NamedTuple

import torch
from pydantic import Field
from torch import Tensor

from workbench.errors import BadInput
from workbench.objectives.arguments import full, same_shape, tokenwise, within
from workbench.objectives.kl import MAX_LOG_RATIO, ratio_of
from workbench.support.validation import FINITE, NonNegativeFloat, Number, Rule, settings

PolicyLoss = Literal["ppo", "gspo", "cispo", "sapo"]
# (clip_low, clip_high) of each loss where none is given: those of its paper
CLIPS: dict[PolicyLoss, tuple[float, float]] = {"ppo": (0.2, 0.2), "gspo": (3e-4, 4e-4), "cispo": (1.0, 2.0)}


class PolicyStats(NamedTuple):
    """Per token and without gradient, so that masked sums of them add up over micro-batches and ranks.

    ratio_BT: pi / pi_old, of the token or (GSPO) of the sequence. clipped_BT: True where a clip changed the objective;
    for PPO and GSPO it thereby stopped the gradient, for CISPO it bounds the gradient's weight.
    """

    ratio_BT: Tensor
    clipped_BT: Tensor


def policy_loss(
    kind: PolicyLoss,
    log_prob_BT: Tensor,
    old_log_prob_BT: Tensor,
    advantages_BT: Tensor,
    mask_BT: Tensor,
    clip_low: float | None = None,
    clip_high: float | None = None,
    dual_clip: float | None = None,
) -> tuple[Tensor, PolicyStats]:
    """The loss of that name, [B, T]. dual_clip is for "ppo" alone, the mask is read by "gspo" alone.

    clip_low, clip_high: see `clips`. Raises `BadInput` as the loss does, on an unknown name, on a dual clip for another
    loss than "ppo", and on a clip for "sapo".
    """
    if kind == "sapo":
        for name, value in (("clip_low", clip_low), ("clip_high", clip_high), ("dual_clip", dual_clip)):
            if value is not None:
                raise BadInput(
                    f"{name}={value} with loss='sapo'", "SAPO has no clip: its gate is smooth", "leave it out"
                )
        return sapo_loss(log_prob_BT, old_log_prob_BT, advantages_BT)
    clip_low, clip_high = clips(kind, clip_low, clip_high)
    if kind == "ppo":
        return ppo_loss(log_prob_BT, old_log_prob_BT, advantages_BT, clip_low, clip_high, dual_clip)
    if dual_clip is not None:
        raise BadInput(f"dual_clip={dual_clip} with loss={kind!r}", "a dual clip is one of PPO's", "leave it out")
    if kind == "gspo":
        return gspo_loss(log_prob_BT, old_log_prob_BT, advantages_BT, mask_BT, clip_low, clip_high)
    if kind == "cispo":
        return cispo_loss(log_prob_BT, old_log_prob_BT, advantages_BT, clip_low, clip_high)
    raise BadInput(f"loss={kind!r}", "must be one of 'ppo', 'gspo', 'cispo', 'sapo'")


def clips(kind: PolicyLoss, clip_low: float | None = None, clip_high: float | None = None) -> tuple[float, float]:
    """Both bounds: None, None: those of the loss's paper; clip_low alone holds for both sides."""
    low, high = CLIPS.get(kind, CLIPS["ppo"])
    if clip_low is not None:
        low = high = clip_low
    return low, high if clip_high is None else clip_high


def ppo_loss(
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
    advantages_BT = _checked(log_prob_BT, old_log_prob_BT, advantages_BT, clip_low, clip_high)
    ratio_BT = ratio_of(log_prob_BT, old_log_prob_BT)
    unclipped_BT = ratio_BT * advantages_BT
    objective_BT = torch.minimum(unclipped_BT, ratio_BT.clamp(1 - clip_low, 1 + clip_high) * advantages_BT)
    if dual_clip is not None:
        within("dual_clip", dual_clip, 1.0)
        floor_BT = torch.maximum(objective_BT, dual_clip * advantages_BT)
        objective_BT = torch.where(advantages_BT < 0, floor_BT, objective_BT)
    return -objective_BT, PolicyStats(ratio_BT.detach(), (objective_BT != unclipped_BT).detach())


def gspo_loss(
    log_prob_BT: Tensor,
    old_log_prob_BT: Tensor,
    advantages_BT: Tensor,
    mask_BT: Tensor,
    clip_low: float = 3e-4,
    clip_high: float = 4e-4,
) -> tuple[Tensor, PolicyStats]:
    """GSPO: the ratio and the clip belong to the sequence, [B, T]. Gradients flow into `log_prob_BT` only.

        s_i  = exp(mean_t (log pi - log pi_old))
        s_it = sg(s_i) pi / sg(pi)              the value of s_i; the gradient of token t
        loss = -min(s_it A_t, clip(s_it, 1 - clip_low, 1 + clip_high) A_t)

    Source: Zheng et al. 2025, https://arxiv.org/abs/2507.18071, in the form that the paper calls GSPO-token
    (sg: without gradient). With one advantage a sequence its gradient, under every aggregation, is that of
    the plain form, and a sequence is clipped as a whole. The mean is over the tokens of the mask. The paper's bounds
    (the defaults here) are small because s is a geometric mean, which stays near 1.

    Raises `BadInput` on unequal shapes, clip_low outside [0, 1], clip_high < 0.
    """
    tokenwise(mask_BT)
    same_shape(mask_BT=mask_BT, log_prob_BT=log_prob_BT)
    advantages_BT = _checked(log_prob_BT, old_log_prob_BT, advantages_BT, clip_low, clip_high)
    mask_BT, log_prob_BT = mask_BT.bool(), full(log_prob_BT)
    log_ratio_BT = torch.where(mask_BT, log_prob_BT.detach() - full(old_log_prob_BT).detach(), 0.0)
    mean_B1 = log_ratio_BT.sum(-1, keepdim=True) / mask_BT.sum(-1, keepdim=True).clamp(min=1)
    sequence_B1 = mean_B1.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    # exp(0) = 1 exactly, so tokens of a sequence are clipped together, at the same value
    ratio_BT = sequence_B1 * (log_prob_BT - log_prob_BT.detach()).exp()
    unclipped_BT = ratio_BT * advantages_BT
    objective_BT = torch.minimum(unclipped_BT, ratio_BT.clamp(1 - clip_low, 1 + clip_high) * advantages_BT)
    return -objective_BT, PolicyStats(ratio_BT.detach(), (objective_BT != unclipped_BT).detach())


def cispo_loss(
    log_prob_BT: Tensor,
    old_log_prob_BT: Tensor,
    advantages_BT: Tensor,
    clip_low: float = 1.0,
    clip_high: float = 2.0,
) -> tuple[Tensor, PolicyStats]:
    """CISPO: REINFORCE whose importance weight is clipped, so that no token loses its gradient, [B, T].

        loss = -sg(clip(rho, 1 - clip_low, 1 + clip_high)) A log pi

    Source: MiniMax-M1, https://arxiv.org/abs/2506.13585, equations 4 and 5. Here, as there, the epsilons are distances
    from 1: clip_high=2 lets weights reach 3. (Where a library calls the cap itself epsilon, give cap - 1.)
    clip_low=1 is no lower bound, which is what the paper trains with. The value of the loss is not -A at pi = pi_old,
    as PPO's is; its gradient is the same there.

    Raises `BadInput` on unequal shapes, clip_low outside [0, 1], clip_high < 0.
    """
    advantages_BT = _checked(log_prob_BT, old_log_prob_BT, advantages_BT, clip_low, clip_high)
    ratio_BT = ratio_of(log_prob_BT, old_log_prob_BT).detach()
    weight_BT = ratio_BT.clamp(1 - clip_low, 1 + clip_high)
    return -weight_BT * advantages_BT * full(log_prob_BT), PolicyStats(ratio_BT, weight_BT != ratio_BT)


def sapo_loss(
    log_prob_BT: Tensor,
    old_log_prob_BT: Tensor,
    advantages_BT: Tensor,
    temperature_positive: float = 1.0,
    temperature_negative: float = 1.05,
) -> tuple[Tensor, PolicyStats]:
    """SAPO: a smooth gate in place of PPO's clip, [B, T]. Gradients flow into `log_prob_BT` only.

        loss = -4 / tau sigmoid(tau (rho - 1)) A        tau: of positive advantages, or of the others

    Source: Soft Adaptive Policy Optimization, https://arxiv.org/abs/2511.20347, in the form that TRL has it
    (`loss_type="sapo"`). At pi = pi_old its gradient is that of -A log pi; away from there it falls smoothly, faster
    where A <= 0. Nothing is clipped.

    Raises `BadInput` on unequal shapes, and on temperatures that are not above 0.
    """
    advantages_BT = _checked(log_prob_BT, old_log_prob_BT, advantages_BT, 0.0, 0.0)
    for name, value in (("temperature_positive", temperature_positive), ("temperature_negative", temperature_negative)):
        if not value > 0:
            raise BadInput(f"{name}={value}", "must be above 0")
    ratio_BT = ratio_of(log_prob_BT, old_log_prob_BT)
    tau_BT = torch.where(advantages_BT > 0, temperature_positive, temperature_negative).to(ratio_BT)
    gate_BT = 4 / tau_BT * torch.sigmoid(tau_BT * (ratio_BT - 1))
    return -gate_BT * advantages_BT, PolicyStats(ratio_BT.detach(), torch.zeros_like(ratio_BT, dtype=torch.bool))


def _checked(
    log_prob_BT: Tensor, old_log_prob_BT: Tensor, advantages_BT: Tensor, clip_low: float, clip_high: float
) -> Tensor:
    """The advantages, without gradient and in full precision, once all is as a policy loss needs it."""
    same_shape(log_prob_BT=log_prob_BT, old_log_prob_BT=old_log_prob_BT, advantages_BT=advantages_BT)
    within("clip_low", clip_low, 0.0, 1.0)
    within("clip_high", clip_high, 0.0)
    return full(advantages_BT).detach()


def value_loss(
    values_BT: Tensor, old_values_BT: Tensor, returns_BT: Tensor, clip: float | None = None
) -> tuple[Tensor, Tensor]:
    """The critic's squared error, optionally clipped around the values at the start of the update, [B, T]; and where
    the clip changed the error, and stopped the gradient.

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
    return 0.5 * error_BT, (error_BT != unclipped_BT).detach()


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
    loss, clip = values.get("loss"), values.get("clip")
    if isinstance(loss, ClipCov):
        loss, clip = "ppo", CLIP if clip is None else clip
    if loss not in CLIPS:
        return {}
    low, high = clips(loss, clip, values.get("clip_high"))
    return {"clip": low, "clip_high": high}


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
