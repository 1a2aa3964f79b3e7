"""Compute token advantages from scores: token rewards, GAE, REINFORCE, whitening. Suffixes: see `arguments`.

Pure functions, without gradient, in at least fp32. Functions that need the whole global batch say so: the caller sums
`moments` over ranks. Variances are unbiased: over n - 1. Advantages from the group of a prompt's samples: `groups`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from workbench.errors import BadInput
from workbench.objectives.arguments import one_per_row, same_shape, upcast
from workbench.objectives.kl import KLKind, kl_estimate


@torch.no_grad()
def response_scores(scores: Tensor, mask_BT: Tensor) -> Tensor:
    """Return one score per response, float64 [B], for comparison with the other responses to the prompt.

    scores: [B]; or [B, T]: then the entries inside `score_mask` are summed, in float64, so that the same rewards in
        another order give the same score.
    """
    if scores.ndim == 1:
        one_per_row("scores_B", scores, mask_BT)
        return scores.double()
    same_shape(mask_BT=mask_BT, scores_BT=scores)
    return torch.where(score_mask(mask_BT), scores.double(), 0.0).sum(-1)


def score_mask(mask_BT: Tensor) -> Tensor:
    """Return which token scores count towards the response's score, [B, T]: those inside the mask, or all if the mask
    has no token of the response. Such a response, for example one masked out because it was truncated, is not trained
    on, but its score says as much about the prompt's baseline as the others."""
    inside_BT = mask_BT.bool()
    return inside_BT | ~inside_BT.any(-1, keepdim=True)


@torch.no_grad()
def token_rewards(
    scores: Tensor,
    log_prob_BT: Tensor,
    ref_log_prob_BT: Tensor | None,
    mask_BT: Tensor,
    beta: float,
    kind: KLKind = "k1",
) -> Tensor:
    """Return token rewards with a KL penalty, [B, T]; 0 outside the mask.

        r_t = -beta k_t + [t is the last valid token] R

    Sources: Ziegler et al. 2019, https://arxiv.org/abs/1909.08593; Ouyang et al. 2022, https://arxiv.org/abs/2203.02155.

    scores: [B], one score per response (the score of a row without valid tokens is dropped); or [B, T], a score for
        each token, added where the mask is 1.
    log_prob_BT: the policy's at the start of the update, `old_log_prob`.
    ref_log_prob_BT: the reference's; None is allowed with beta = 0.

    Raises `BadInput` on shapes that do not fit, or without a reference.
    """
    same_shape(mask_BT=mask_BT, log_prob_BT=log_prob_BT)
    mask_BT = mask_BT.bool()
    if scores.ndim == 2:
        same_shape(mask_BT=mask_BT, scores_BT=scores)
        rewards_BT = upcast(scores)
    else:
        one_per_row("scores_B", scores, mask_BT)
        valid_from_here_BT = mask_BT.flip(-1).cumsum(-1).flip(-1)
        rewards_BT = torch.where(valid_from_here_BT == 1, upcast(scores)[:, None], 0.0)
    if beta:
        if ref_log_prob_BT is None:
            rule = f"beta={beta:g} needs the reference's log-probabilities"
            raise BadInput("ref_log_prob_BT=None", rule, "pass ref_log_prob_BT, or beta=0")
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
    """Return generalised advantage estimates and returns, both [B, T]; 0 outside the mask.

        delta_t = r_t + gamma V_{t+1} - V_t
        A_t     = delta_t + gamma lambda A_{t+1}
        G_t     = A_t + V_t

    Source: Schulman et al. 2016, https://arxiv.org/abs/1506.02438, equation 16.

    t + 1 is the next token inside the mask: tokens outside the mask (tool output) are no time steps, so they add no
    factor gamma lambda, and their rewards and values do not count.
    bootstrap_B: V after the last valid token, 0 for responses that ended; None: 0 for all, truncated or not.

    Raises `BadInput` on shapes that do not fit.
    """
    same_shape(mask_BT=mask_BT, token_rewards_BT=token_rewards_BT, values_BT=values_BT)
    rewards_BT, values_BT, mask_BT = upcast(token_rewards_BT), upcast(values_BT), mask_BT.bool()
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


@torch.no_grad()
def reinforce(
    token_rewards_BT: Tensor, mask_BT: Tensor, gamma: float, baseline_B: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return REINFORCE's advantages (reward to go minus a baseline) and returns, both [B, T]; 0 outside the mask.

        A_t = G_t - b,     G_t = r_t + gamma G_{t+1}

    b: in ReMax, the score of the greedy response to the same prompt (Li et al. 2023, https://arxiv.org/abs/2310.10505);
    in REINFORCE++, none; in REINFORCE++-baseline, the mean score of the group; both are whitened afterwards over the
    global batch (Hu et al. 2025, https://arxiv.org/abs/2501.03262). With one score per response and gamma = 1, A is
    R - b on every token. A penalty in the token rewards counts from its token on. It is not part of the baseline, which
    is made of plain scores.

    baseline_B: one number per row. If it does not depend on the row's own tokens, the policy gradient stays unbiased.

    Raises `BadInput` on shapes that do not fit.
    """
    # with V = 0 and lambda = 1, GAE's advantage is the return; GAE skips tokens outside the mask
    returns_BT, _ = gae(token_rewards_BT, torch.zeros_like(token_rewards_BT), mask_BT, gamma, 1.0)
    return less_baseline(returns_BT, mask_BT, baseline_B)


def less_baseline(returns_BT: Tensor, mask_BT: Tensor, baseline_B: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return advantages (the returns minus the row's baseline, if there is one) and the returns."""
    if baseline_B is None:
        return returns_BT, returns_BT
    one_per_row("baseline_B", baseline_B, mask_BT)
    return torch.where(mask_BT.bool(), returns_BT - upcast(baseline_B)[:, None], 0.0), returns_BT


@torch.no_grad()
def overlong_penalty(lengths_B: Tensor, longest: int, buffer: int) -> Tensor:
    """Return DAPO's soft overlong punishment, [B], to be added to the score.

        0                                   if |y| <= longest - buffer
        (longest - buffer - |y|) / buffer   between
        -1                                  if |y| >= longest

    Source: Yu et al. 2025, https://arxiv.org/abs/2503.14476, equation 13. lengths_B, longest, buffer: tokens.
    """
    return ((longest - buffer - upcast(lengths_B)) / buffer).clamp(-1.0, 0.0)


@torch.no_grad()
def moments(x_BT: Tensor, mask_BT: Tensor) -> Tensor:
    """Return [count, sum, sum of squares] of the valid entries, float64. For `whiten`, sum them over all ranks."""
    same_shape(mask_BT=mask_BT, x_BT=x_BT)
    valid = x_BT[mask_BT.bool()].double()
    return torch.stack((valid.new_tensor(valid.numel()), valid.sum(), valid.square().sum()))


def explained_variance(returns: Tensor, errors: Tensor) -> float:
    """Return a critic's 1 - Var(returns - values) / Var(returns): 1 is perfect, 0 no better than the mean return, below
    0 worse; NaN if all returns are equal. returns, errors: `moments` of the returns, and of returns - values.
    """
    count, total, squares = torch.stack((returns, errors), -1).double().unbind()
    of_returns, of_errors = (squares / count - (total / count) ** 2).tolist()
    return 1 - of_errors / of_returns if of_returns > 0 else float("nan")


@torch.no_grad()
def whiten(x_BT: Tensor, mask_BT: Tensor, moments: Tensor, eps: float = 1e-8) -> Tensor:
    """Return (x - mean) / sqrt(var + eps), [B, T]; 0 outside the mask. For advantages; returns are never whitened.

    moments: of the whole global batch, from `moments`. The variance is the unbiased one, and 0 for a single entry.
        From float64 sums it has a relative error of about 1e-16 mean^2 / var.

    Raises `BadInput` on shapes that do not fit.
    """
    same_shape(mask_BT=mask_BT, x_BT=x_BT)
    count, total, squares = moments.double().unbind()
    mean = total / count.clamp(min=1)
    variance = ((squares - mean * total) / (count - 1).clamp(min=1)).clamp(min=0)
    white_BT = (x_BT.double() - mean) * torch.rsqrt(variance + eps)
    return torch.where(mask_BT.bool(), white_BT, 0.0).to(upcast(x_BT).dtype)
