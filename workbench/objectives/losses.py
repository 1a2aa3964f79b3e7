"""Token losses, [B, T], of PPO and related methods; `aggregation` combines them into one number.

`arguments` explains the suffixes of names; N is the number of tokens of a minibatch inside the mask.

KL-Cov and Clip-Cov are policy losses that hold back the few tokens which lower the entropy most. The entropy of a
softmax policy falls with the covariance of log pi and A over its actions (Cui et al. 2025,
https://arxiv.org/abs/2505.22617, theorem 1). Both losses select tokens with a large share of this covariance.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, NamedTuple

import torch
from pydantic import Field
from torch import Tensor

from workbench.errors import BadInput
from workbench.objectives.arguments import same_shape, upcast
from workbench.objectives.kl import MAX_LOG_RATIO, ratio_of
from workbench.support.validation import NonNegativeFloat, Number, Rule, settings

PolicyLoss = Literal["ppo", "gspo", "cispo", "sapo"]
# the default (clip_low, clip_high) of each loss, from its paper
CLIPS: dict[PolicyLoss, tuple[float, float]] = {"ppo": (0.2, 0.2), "gspo": (3e-4, 4e-4), "cispo": (1.0, 2.0)}


class PolicyStats(NamedTuple):
    """Statistics per token, without gradient, so that their masked sums add up over micro-batches and ranks.

    ratio_BT: pi / pi_old, of the token or (GSPO) of the sequence. clipped_BT: True where a clip changed the objective;
    in PPO and GSPO this stops the gradient, in CISPO it bounds the gradient's weight.
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
    """Compute the named loss, [B, T]. dual_clip: only for "ppo". mask_BT: read by "gspo" only.

    clip_low, clip_high: see `clips`; "sapo" has none. Raises `BadInput` as the loss does, and on an unknown name.
    """
    if kind == "sapo":
        return sapo_loss(log_prob_BT, old_log_prob_BT, advantages_BT)
    clip_low, clip_high = clips(kind, clip_low, clip_high)
    if kind == "ppo":
        return ppo_loss(log_prob_BT, old_log_prob_BT, advantages_BT, clip_low, clip_high, dual_clip)
    if kind == "gspo":
        return gspo_loss(log_prob_BT, old_log_prob_BT, advantages_BT, mask_BT, clip_low, clip_high)
    if kind == "cispo":
        return cispo_loss(log_prob_BT, old_log_prob_BT, advantages_BT, clip_low, clip_high)
    raise BadInput(f"loss={kind!r}", "must be one of 'ppo', 'gspo', 'cispo', 'sapo'")


def clips(kind: PolicyLoss, clip_low: float | None = None, clip_high: float | None = None) -> tuple[float, float]:
    """Return both clip bounds of a loss: its paper's if both are None; clip_low for both sides if given alone."""
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
    """Compute PPO's negated clipped surrogate, [B, T]. Gradients flow into `log_prob_BT` only.

        rho  = exp(log pi - log pi_old)
        J    = min(rho A, clip(rho, 1 - clip_low, 1 + clip_high) A)
        J    = max(J, dual_clip A)  where A < 0, if dual_clip is given
        loss = -J

    Sources: PPO, https://arxiv.org/abs/1707.06347, equation 7; unequal bounds ("clip-higher"): DAPO,
    https://arxiv.org/abs/2503.14476, section 3.1; dual clip: Ye et al. 2020, https://arxiv.org/abs/1912.09729.

    Before the first optimizer step pi = pi_old: rho is 1, nothing is clipped, the loss is -A. The log-ratio is clamped
    to [-20, 20]; outside, the gradient is 0.

    Raises `BadInput` on unequal shapes.
    """
    advantages_BT = _checked(log_prob_BT, old_log_prob_BT, advantages_BT)
    ratio_BT = ratio_of(log_prob_BT, old_log_prob_BT)
    unclipped_BT = ratio_BT * advantages_BT
    objective_BT = torch.minimum(unclipped_BT, ratio_BT.clamp(1 - clip_low, 1 + clip_high) * advantages_BT)
    if dual_clip is not None:
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
    """Compute GSPO's loss, with ratio and clip per sequence, [B, T]. Gradients flow into `log_prob_BT` only.

        s_i  = exp(mean_t (log pi - log pi_old))
        s_it = sg(s_i) pi / sg(pi)              has the value of s_i and the gradient of token t
        loss = -min(s_it A_t, clip(s_it, 1 - clip_low, 1 + clip_high) A_t)

    Source: Zheng et al. 2025, https://arxiv.org/abs/2507.18071, in the form that the paper calls GSPO-token
    (sg: stop-gradient). With one advantage per sequence, its gradient equals plain GSPO's under every aggregation, and
    a sequence is clipped as a whole. The mean is over tokens inside the mask. The paper's bounds (the defaults here)
    are small because s is a geometric mean, which stays near 1.

    Raises `BadInput` on unequal shapes.
    """
    same_shape(mask_BT=mask_BT, log_prob_BT=log_prob_BT)
    advantages_BT = _checked(log_prob_BT, old_log_prob_BT, advantages_BT)
    mask_BT, log_prob_BT = mask_BT.bool(), upcast(log_prob_BT)
    log_ratio_BT = torch.where(mask_BT, log_prob_BT.detach() - upcast(old_log_prob_BT).detach(), 0.0)
    mean_B1 = log_ratio_BT.sum(-1, keepdim=True) / mask_BT.sum(-1, keepdim=True).clamp(min=1)
    sequence_B1 = mean_B1.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    # exp(0) is exactly 1, so all tokens of a sequence have the same ratio and are clipped together
    ratio_BT = sequence_B1 * (log_prob_BT - log_prob_BT.detach()).exp()
    unclipped_BT = ratio_BT * advantages_BT
    objective_BT = torch.minimum(unclipped_BT, ratio_BT.clamp(1 - clip_low, 1 + clip_high) * advantages_BT)
    return -objective_BT, PolicyStats(ratio_BT.detach(), (objective_BT != unclipped_BT).detach())


def cispo_loss(
    log_prob_BT: Tensor, old_log_prob_BT: Tensor, advantages_BT: Tensor, clip_low: float = 1.0, clip_high: float = 2.0
) -> tuple[Tensor, PolicyStats]:
    """Compute CISPO's loss, [B, T]: REINFORCE with a clipped importance weight, so that no token loses its gradient.

        loss = -sg(clip(rho, 1 - clip_low, 1 + clip_high)) A log pi

    Source: MiniMax-M1, https://arxiv.org/abs/2506.13585, equations 4 and 5. As in the paper, the epsilons are distances
    from 1: clip_high=2 allows weights up to 3. (If a library calls the cap itself epsilon, give cap - 1.) clip_low=1
    means no lower bound, as in the paper's training. At pi = pi_old, the loss does not have the value -A, as PPO's
    does, but its gradient equals PPO's.

    Raises `BadInput` on unequal shapes.
    """
    advantages_BT = _checked(log_prob_BT, old_log_prob_BT, advantages_BT)
    ratio_BT = ratio_of(log_prob_BT, old_log_prob_BT).detach()
    weight_BT = ratio_BT.clamp(1 - clip_low, 1 + clip_high)
    return -weight_BT * advantages_BT * upcast(log_prob_BT), PolicyStats(ratio_BT, weight_BT != ratio_BT)


def sapo_loss(
    log_prob_BT: Tensor,
    old_log_prob_BT: Tensor,
    advantages_BT: Tensor,
    temperature_positive: float = 1.0,
    temperature_negative: float = 1.05,
) -> tuple[Tensor, PolicyStats]:
    """Compute SAPO's loss, [B, T]: a smooth gate instead of PPO's clip. Gradients flow into `log_prob_BT` only.

        loss = -4 / tau sigmoid(tau (rho - 1)) A        tau: temperature_positive if A > 0, else temperature_negative

    Source: Soft Adaptive Policy Optimization, https://arxiv.org/abs/2511.20347, in TRL's form (`loss_type="sapo"`).
    At pi = pi_old its gradient is that of -A log pi; farther away it shrinks smoothly, faster where A <= 0. Nothing is
    clipped.

    Raises `BadInput` on unequal shapes.
    """
    advantages_BT = _checked(log_prob_BT, old_log_prob_BT, advantages_BT)
    ratio_BT = ratio_of(log_prob_BT, old_log_prob_BT)
    tau_BT = torch.where(advantages_BT > 0, temperature_positive, temperature_negative).to(ratio_BT)
    gate_BT = 4 / tau_BT * torch.sigmoid(tau_BT * (ratio_BT - 1))
    return -gate_BT * advantages_BT, PolicyStats(ratio_BT.detach(), torch.zeros_like(ratio_BT, dtype=torch.bool))


def _checked(log_prob_BT: Tensor, old_log_prob_BT: Tensor, advantages_BT: Tensor) -> Tensor:
    """Check the shapes of a policy loss; return the advantages without gradient, in at least fp32."""
    same_shape(log_prob_BT=log_prob_BT, old_log_prob_BT=old_log_prob_BT, advantages_BT=advantages_BT)
    return upcast(advantages_BT).detach()


def value_loss(
    values_BT: Tensor, old_values_BT: Tensor, returns_BT: Tensor, clip: float | None = None
) -> tuple[Tensor, Tensor]:
    """Return the critic's squared error, [B, T], optionally clipped around the values at the start of the update; and
    True where the clip changed the error and stopped the gradient.

        loss = 1/2 (V - G)^2
        loss = 1/2 max((V - G)^2, (clip(V, V_old - clip, V_old + clip) - G)^2)      if clip is given

    Source: the clipped form is from https://github.com/openai/baselines, `ppo2/model.py`. Gradients flow into
    `values_BT` only. old_values_BT: the values used for the advantages; they are needed for the clip only.

    Raises `BadInput` on unequal shapes.
    """
    same_shape(values_BT=values_BT, old_values_BT=old_values_BT, returns_BT=returns_BT)
    values_BT, old_values_BT, returns_BT = map(upcast, (values_BT, old_values_BT.detach(), returns_BT.detach()))
    unclipped_BT = error_BT = (values_BT - returns_BT).square()
    if clip is not None:
        near_BT = values_BT.clamp(old_values_BT - clip, old_values_BT + clip)
        error_BT = torch.maximum(unclipped_BT, (near_BT - returns_BT).square())
    return 0.5 * error_BT, (error_BT != unclipped_BT).detach()


Share = Annotated[Number, Field(gt=0, le=1), Rule("must be a share of the tokens, in (0, 1]")]


@settings()
class KLCov:
    """`update_actor(loss=KLCov())`: tokens with the largest covariances get a penalty; nothing is clipped.

        loss = -rho A + (coefficient |log pi - log pi_old| at the chosen tokens)

    share: the share of a minibatch's tokens to choose, at least one token; the authors use 0.002 for 7B parameters and
    0.0002 for 32B. The penalty's gradient is 0 at pi = pi_old, so it acts from the rollouts' second optimizer step on.
    """

    share: Share = 0.002
    coefficient: NonNegativeFloat = 1.0


@settings()
class ClipCov:
    """`update_actor(loss=ClipCov())`: a few tokens, drawn from those with a covariance within the bounds, have no
    gradient; the others have PPO's clipped loss.

    share: the share of a minibatch's tokens to draw, at least one token. low, high: the bounds of the covariance. The
    default clip is 1, as in the authors' code: the ratio stays within [0, 2].
    """

    share: Share = 0.0002
    low: Number = 1.0
    high: Number = 5.0

    def __post_init__(self) -> None:
        if not self.low < self.high:
            raise BadInput(f"ClipCov(low={self.low}, high={self.high})", "low must be below high")


CovarianceLoss = KLCov | ClipCov
CLIP = 1.0  # the default clip of ClipCov
SAME = 1e-5  # nats: in float32, log-probabilities this near are one number, rounded in two ways


def clips_in_effect(values: Mapping[str, Any]) -> dict[str, float]:
    """Return the clips that an update uses, by name. values: its `loss`, `clip` and `clip_high`; the clips may be None.
    {} if the loss has no clip or is a user's function."""
    loss, clip = values.get("loss"), values.get("clip")
    if isinstance(loss, ClipCov):
        loss, clip = "ppo", CLIP if clip is None else clip
    if not isinstance(loss, str) or loss not in CLIPS:  # a function may be an object without a hash
        return {}
    low, high = clips(loss, clip, values.get("clip_high"))
    return {"clip": low, "clip_high": high}


def covariances(log_prob_N: Tensor, advantages_N: Tensor) -> Tensor:
    """Return (log pi - mean log pi) (A - mean A) per token, float64 [N]: its part of N times the covariance.

    Source: Cui et al. 2025, equation 10. Raises `BadInput` on unequal shapes.
    """
    same_shape(log_prob_N=log_prob_N, advantages_N=advantages_N)
    log_prob_N, advantages_N = log_prob_N.detach().double(), advantages_N.detach().double()
    return (log_prob_N - log_prob_N.mean()) * (advantages_N - advantages_N.mean())


def held_back(loss: CovarianceLoss, covariances_N: Tensor, draws: torch.Generator) -> Tensor:
    """Return which tokens a loss holds back, bool [N]. KLCov: its share with the largest covariances; ClipCov: its
    share, drawn from tokens strictly within the bounds."""
    chosen_N = torch.zeros(len(covariances_N), dtype=torch.bool)
    count = max(1, int(len(covariances_N) * loss.share))
    if isinstance(loss, KLCov):
        among_N = covariances_N.topk(min(count, len(covariances_N))).indices
    else:
        within_N = (covariances_N > loss.low) & (covariances_N < loss.high)
        # an order of all tokens: one that rounding puts beyond a bound does not change the draws of the others
        order_N = torch.randperm(len(covariances_N), generator=draws)
        among_N = order_N[within_N[order_N]][:count]
    chosen_N[among_N] = True
    return chosen_N


def kl_cov_loss(
    log_prob_BT: Tensor, old_log_prob_BT: Tensor, advantages_BT: Tensor, held_back_BT: Tensor, coefficient: float = 1.0
) -> Tensor:
    """Compute the loss of `KLCov`, [B, T]. Gradients flow into `log_prob_BT` only; `BadInput` on unequal shapes."""
    same_shape(
        log_prob_BT=log_prob_BT, old_log_prob_BT=old_log_prob_BT, advantages_BT=advantages_BT, held_back_BT=held_back_BT
    )
    distance_BT = (upcast(log_prob_BT) - upcast(old_log_prob_BT).detach()).abs()
    apart_BT = held_back_BT.bool() & (distance_BT > SAME)  # else the sign of the gradient would be a rounding error
    penalty_BT = torch.where(apart_BT, coefficient * distance_BT, 0.0)
    return penalty_BT - ratio_of(log_prob_BT, old_log_prob_BT) * upcast(advantages_BT).detach()
