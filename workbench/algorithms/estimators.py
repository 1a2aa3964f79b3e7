"""From scores to advantages: token rewards, GAE, whitening, group baselines. Suffixes: see `arguments`.

Pure functions, without gradient, in at least fp32. What needs the whole global batch says so: `moments` are summed over
ranks by the caller, `grpo` and `rloo` take the scores of all samples. Variances are unbiased: over n - 1.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from workbench.algorithms.arguments import full, one_per_row, same_shape, tokenwise, within
from workbench.algorithms.kl import KLKind, kl_estimate
from workbench.errors import BadInput

# Far past what can be told from infinity in fp32, and still a number to divide by.
MAX_MULTIPLIER = 1e9


@torch.no_grad()
def token_rewards(
    scores: Tensor,
    log_prob_BT: Tensor,
    ref_log_prob_BT: Tensor | None,
    mask_BT: Tensor,
    beta: float,
    kind: KLKind = "k1",
) -> Tensor:
    """Rewards with a KL penalty, [B, T]; 0 outside the mask.

        r_t = -beta k_t + [t is the last valid token] R

    Sources: Ziegler et al. 2019, https://arxiv.org/abs/1909.08593; Ouyang et al. 2022, https://arxiv.org/abs/2203.02155.

    scores: [B], one score a response (a row without valid tokens has no place for it and drops it); or [B, T], a score
        for each token, added where the mask is 1.
    log_prob_BT: of the policy at the start of the update, `old_log_prob`.
    ref_log_prob_BT: of the reference; None is allowed with beta = 0.

    Raises `BadInput` on shapes that do not fit, a negative beta, or a missing reference.
    """
    tokenwise(mask_BT)
    same_shape(mask_BT=mask_BT, log_prob_BT=log_prob_BT)
    within("beta", beta, 0.0)
    mask_BT = mask_BT.bool()
    if scores.ndim == 2:
        same_shape(mask_BT=mask_BT, scores_BT=scores)
        rewards_BT = full(scores)
    else:
        one_per_row("scores_B", scores, mask_BT)
        valid_from_here_BT = mask_BT.flip(-1).cumsum(-1).flip(-1)
        rewards_BT = torch.where(valid_from_here_BT == 1, full(scores)[:, None], 0.0)
    if beta:
        if ref_log_prob_BT is None:
            raise BadInput(
                f"beta={beta} without ref_log_prob_BT",
                "a KL penalty needs the log-probabilities of a reference",
                "run compute_ref_log_prob, or set beta=0",
            )
        rewards_BT = rewards_BT - beta * kl_estimate(log_prob_BT, ref_log_prob_BT, kind)
    return torch.where(mask_BT, rewards_BT, 0.0)


@torch.no_grad()
def gae(
    token_rewards_BT: Tensor,
    values_BT: Tensor,
    mask_BT: Tensor,
    gamma: float,
    lam: float,
    bootstrap_B: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimates and returns, both [B, T]; 0 outside the mask.

        delta_t = r_t + gamma V_{t+1} - V_t
        A_t     = delta_t + gamma lambda A_{t+1}
        G_t     = A_t + V_t

    Source: Schulman et al. 2016, https://arxiv.org/abs/1506.02438, equation 16.

    t + 1 means the next token that the policy chose: tokens outside the mask (tool output) take no time, so they cost
    no factor gamma lambda, and rewards or values on them do not count.
    bootstrap_B: V after the last valid token, 0 for responses that ended; without it all are 0, cut or not.

    Raises `BadInput` on shapes that do not fit, or gamma or lambda outside [0, 1].
    """
    tokenwise(mask_BT)
    same_shape(mask_BT=mask_BT, token_rewards_BT=token_rewards_BT, values_BT=values_BT)
    within("gamma", gamma, 0.0, 1.0)
    within("lam", lam, 0.0, 1.0)
    rewards_BT, values_BT, mask_BT = full(token_rewards_BT), full(values_BT), mask_BT.bool()
    if bootstrap_B is None:
        next_value_B = values_BT.new_zeros(len(values_BT))
    else:
        one_per_row("bootstrap_B", bootstrap_B, mask_BT)
        next_value_B = bootstrap_B.to(values_BT)
    next_advantage_B = torch.zeros_like(next_value_B)
    advantages_BT = torch.zeros_like(values_BT)
    for t in reversed(range(values_BT.shape[1])):
        delta_B = rewards_BT[:, t] + gamma * next_value_B - values_BT[:, t]
        advantage_B = delta_B + gamma * lam * next_advantage_B
        next_value_B = torch.where(mask_BT[:, t], values_BT[:, t], next_value_B)
        next_advantage_B = torch.where(mask_BT[:, t], advantage_B, next_advantage_B)
        advantages_BT[:, t] = torch.where(mask_BT[:, t], advantage_B, 0.0)
    return advantages_BT, torch.where(mask_BT, advantages_BT + values_BT, 0.0)


def discounted_returns(token_rewards_BT: Tensor, mask_BT: Tensor, gamma: float) -> Tensor:
    """Reward to go, G_t = r_t + gamma G_{t+1}, [B, T]; 0 outside the mask, whose tokens take no time (as in `gae`)."""
    # With V = 0 and lambda = 1 the advantage is the return.
    advantages_BT, _ = gae(token_rewards_BT, torch.zeros_like(token_rewards_BT), mask_BT, gamma, 1.0)
    return advantages_BT


@torch.no_grad()
def remax(token_rewards_BT: Tensor, greedy_score_B: Tensor, mask_BT: Tensor, gamma: float) -> tuple[Tensor, Tensor]:
    """ReMax's advantages and returns, both [B, T]; 0 outside the mask.

        A_t = G_t - R(greedy response to the same prompt)

    Source: Li et al. 2023, https://arxiv.org/abs/2310.10505. With one score a response and gamma = 1, A is
    R(sampled) - R(greedy) on every token. A penalty in the token rewards counts from where it stands, and is none of
    the baseline, which is the plain score.

    greedy_score_B: one number a row. It does not depend on the sampled tokens, so the policy gradient stays unbiased.

    Raises `BadInput` on shapes that do not fit, or gamma outside [0, 1].
    """
    returns_BT = discounted_returns(token_rewards_BT, mask_BT, gamma)
    one_per_row("greedy_score_B", greedy_score_B, mask_BT)
    return torch.where(mask_BT.bool(), returns_BT - full(greedy_score_B)[:, None], 0.0), returns_BT


@torch.no_grad()
def lagrangian(advantages_BT: Tensor, cost_advantages_BT: Tensor, multiplier: float) -> Tensor:
    """Safe-RLHF's advantages for reward and cost in one, [B, T].

        A = (A_r - lambda A_c) / (1 + lambda)

    Source: Dai et al. 2023, https://arxiv.org/abs/2310.12773. Its policy gradient is that of the
    Lagrangian J_r - lambda (J_c - limit), divided by 1 + lambda so that a large multiplier makes no large steps.
    At lambda = 0 it is A_r; as lambda grows it goes to -A_c.

    Raises `BadInput` on unequal shapes or a multiplier that is negative or infinite.
    """
    same_shape(advantages_BT=advantages_BT, cost_advantages_BT=cost_advantages_BT)
    within("multiplier", multiplier, 0.0, MAX_MULTIPLIER)
    return (full(advantages_BT) - multiplier * full(cost_advantages_BT)) / (1 + multiplier)


def dual_step(
    multiplier: float, mean_cost: float, limit: float, learning_rate: float, bounds: tuple[float, float]
) -> float:
    """The multiplier after one step of gradient ascent on its logarithm; it never leaves `bounds`.

        ln lambda' = ln lambda + learning_rate * lambda * (J_c - limit)

    Source: Dai et al. 2023, https://arxiv.org/abs/2310.12773, equation 31: d/d(ln lambda) of lambda (J_c - limit).
    The step is proportional to lambda itself, so the lower bound also says how fast a multiplier that was not needed
    for long comes back. mean_cost: of one response, over the rollouts of the policy as it is now.

    Raises `BadInput` on a cost that is not finite, a multiplier outside the bounds, or bounds that are not
    0 < low <= high.
    """
    low, high = bounds
    within("bounds[1]", high, low, MAX_MULTIPLIER)
    if not low > 0:
        raise BadInput(f"bounds={bounds!r}", "the logarithm is stepped, so the lower bound must be more than 0")
    within("multiplier", multiplier, low, high)
    if not math.isfinite(mean_cost):
        raise BadInput(f"mean_cost={mean_cost!r}", "must be a finite number")
    log = math.log(multiplier) + learning_rate * multiplier * (mean_cost - limit)
    # exp(log(bound)) need not be the bound to the last bit
    return low if log <= math.log(low) else high if log >= math.log(high) else math.exp(log)


@torch.no_grad()
def moments(x_BT: Tensor, mask_BT: Tensor) -> Tensor:
    """[count, sum, sum of squares] of the valid entries, float64. For `whiten`, add them up over shards and ranks."""
    same_shape(mask_BT=mask_BT, x_BT=x_BT)
    valid = x_BT[mask_BT.bool()].double()
    return torch.stack((valid.new_tensor(valid.numel()), valid.sum(), valid.square().sum()))


@torch.no_grad()
def whiten(x_BT: Tensor, mask_BT: Tensor, moments: Tensor, shift_mean: bool = True, eps: float = 1e-8) -> Tensor:
    """(x - mean) / sqrt(var + eps), [B, T]; 0 outside the mask. For advantages; returns are never whitened.

    moments: those of the whole global batch, from `moments`. The variance is the unbiased one; that of a single entry
        is taken as 0. From float64 sums it has a relative error of some 1e-16 mean^2 / var.
    shift_mean: False puts the mean back after scaling, as Ziegler et al. 2019 do with rewards
        (https://github.com/openai/lm-human-preferences, `utils/core.py`).

    Raises `BadInput` on shapes that do not fit.
    """
    same_shape(mask_BT=mask_BT, x_BT=x_BT)
    if moments.shape != (3,):
        raise BadInput(
            f"moments has shape {list(moments.shape)}", "must be [count, sum, sum of squares], as from moments()"
        )
    count, total, squares = moments.double().unbind()
    mean = total / count.clamp(min=1)
    variance = ((squares - mean * total) / (count - 1).clamp(min=1)).clamp(min=0)
    white_BT = (x_BT.double() - mean) * torch.rsqrt(variance + eps)
    if not shift_mean:
        white_BT = white_BT + mean
    return torch.where(mask_BT.bool(), white_BT, 0.0).to(full(x_BT).dtype)


@torch.no_grad()
def grpo(scores_N: Tensor, group_N: Tensor, scale_by_std: bool = True, eps: float = 1e-6) -> Tensor:
    """Group-relative advantages, one a sample, [N].

        A_i = (R_i - mean_group) / (std_group + eps)    GRPO, https://arxiv.org/abs/2402.03300, section 4.1.2
        A_i =  R_i - mean_group                         with scale_by_std=False: Dr. GRPO, https://arxiv.org/abs/2503.20783

    group_N: an integer for each sample, the same for all answers to one prompt; any ids in any order. Give the samples
    of the whole global batch: a group may lie on several ranks. The standard deviation is the unbiased one. A group
    whose scores are all equal, and a group of one, gets exactly 0: it carries no gradient.

    Raises `BadInput` on shapes that do not fit or ids that are not integers.
    """
    centred_N, size_N, index_N = _centre(scores_N, group_N)
    if scale_by_std:
        variance_N = _group_sum(centred_N.square(), index_N) / (size_N - 1).clamp(min=1)
        centred_N = centred_N / (variance_N.sqrt() + eps)
    return centred_N.to(full(scores_N).dtype)


@torch.no_grad()
def rloo(scores_N: Tensor, group_N: Tensor) -> Tensor:
    """Leave-one-out advantages, one a sample, [N]: A_i = R_i - mean of the other scores of the group.

    Source: Ahmadian et al. 2024, https://arxiv.org/abs/2402.14740. group_N: as in `grpo`. Equal scores give exactly 0.

    Raises `BadInput` as `grpo` does, and on a group of one, which has no others to take a baseline from.
    """
    centred_N, size_N, _ = _centre(scores_N, group_N)
    if (size_N < 2).any():
        lone = group_N[size_N < 2].tolist()
        raise BadInput(
            f"{len(lone)} group(s) hold one sample, the first is group {lone[0]}",
            "leave-one-out needs at least two samples of each prompt",
            "draw more samples a prompt or leave these prompts out",
        )
    # R - (S - R) / (n - 1) = (R - S / n) n / (n - 1)
    return (centred_N * size_N / (size_N - 1)).to(full(scores_N).dtype)


def _centre(scores_N: Tensor, group_N: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Scores minus their group's mean (float64), the size of each sample's group, and each sample's group index."""
    same_shape(scores_N=scores_N, group_N=group_N)
    if scores_N.ndim != 1 or group_N.is_floating_point():
        raise BadInput(
            f"scores_N has shape {list(scores_N.shape)}, group_N is {group_N.dtype}",
            "one score a sample and one integer group id a sample are needed",
        )
    _, index_N = torch.unique(group_N, return_inverse=True)
    # Shifted by the least score of the group, equal scores become zeros, whose mean is exactly 0 whatever the rounding.
    lowest_N = scores_N.double().scatter_reduce(0, index_N, scores_N.double(), "amin", include_self=False)[index_N]
    shifted_N = scores_N.double() - lowest_N
    size_N = _group_sum(torch.ones_like(shifted_N), index_N)
    return shifted_N - _group_sum(shifted_N, index_N) / size_N, size_N, index_N


def _group_sum(x_N: Tensor, index_N: Tensor) -> Tensor:
    """For each sample, the sum over its group. There are at most as many groups as samples."""
    return torch.zeros_like(x_N).index_add(0, index_N, x_N)[index_N]
