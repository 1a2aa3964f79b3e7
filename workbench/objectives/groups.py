"""Compute a response's advantage from the other responses to its prompt. Suffixes: see `arguments`.

Pure functions, without gradient. They take the samples of the whole global batch, because a group may span several
ranks. group_N: an integer per sample, the same for all answers to one prompt; any ids in any order.
"""

from __future__ import annotations

import torch
from torch import Tensor

from workbench.errors import BadInput
from workbench.objectives.arguments import same_shape, upcast


@torch.no_grad()
def grpo(scores_N: Tensor, group_N: Tensor, scale_by_std: bool = True, eps: float = 1e-6) -> Tensor:
    """Return group-relative advantages, one per sample, [N].

        A_i = (R_i - mean_group) / (std_group + eps)    GRPO, https://arxiv.org/abs/2402.03300, section 4.1.2
        A_i =  R_i - mean_group                         with scale_by_std=False: Dr. GRPO, https://arxiv.org/abs/2503.20783

    The standard deviation is the unbiased one. Groups of equal scores, and groups of one, get exactly 0: they have no
    gradient.

    Raises `BadInput` on unequal shapes.
    """
    centred_N, size_N, index_N = _centre(scores_N, group_N)
    if scale_by_std:
        variance_N = _group_sum(centred_N.square(), index_N) / (size_N - 1).clamp(min=1)
        centred_N = centred_N / (variance_N.sqrt() + eps)
    return centred_N.to(upcast(scores_N).dtype)


@torch.no_grad()
def grpo_batch_std(scores_N: Tensor, group_N: Tensor, eps: float = 1e-6) -> Tensor:
    """Return GRPO's advantages with the standard deviation of all scores, [N].

        A_i = (R_i - mean_group) / (std_batch + eps)

    Source: Liu et al. 2025, https://arxiv.org/abs/2508.08221; TRL's `scale_rewards="batch"`. The standard deviation is
    the unbiased one of the whole batch, so a prompt whose samples hardly differ does not get larger advantages for
    this. Groups of equal scores, and groups of one, get exactly 0.

    Raises `BadInput` as `grpo` does.
    """
    centred_N, _, _ = _centre(scores_N, group_N)
    deviation = scores_N.double().std() if len(scores_N) > 1 else 0.0
    return (centred_N / (deviation + eps)).to(upcast(scores_N).dtype)


@torch.no_grad()
def step_scores(rewards_BT: Tensor, ends_BT: Tensor) -> Tensor:
    """Return the reward of each step, [S], ordered by row, then by step: the sum over the step's tokens. Rewards after
    the last step of a row count for that step.

    ends_BT: true on the last token of each step. Raises `BadInput` on unequal shapes.
    """
    same_shape(ends_BT=ends_BT, rewards_BT=rewards_BT)
    ends_BT = ends_BT.bool()
    steps_B = ends_BT.sum(-1)
    step_BT = torch.minimum(ends_BT.cumsum(-1) - ends_BT.long(), (steps_B - 1).clamp(min=0)[:, None])
    of_rows_BT = torch.zeros_like(upcast(rewards_BT)).scatter_add(-1, step_BT, upcast(rewards_BT))
    return of_rows_BT[torch.arange(rewards_BT.shape[1], device=ends_BT.device) < steps_B[:, None]]


@torch.no_grad()
def process_advantages(normalised_S: Tensor, ends_BT: Tensor) -> Tensor:
    """Return process supervision's advantages, [B, T]: the sum of normalised rewards of steps ending at t or later.

        A_t = sum over steps j with end_j >= t of (r_j - mean) / std

    Source: GRPO, https://arxiv.org/abs/2402.03300, section 4.1.3; mean and deviation are over all steps of all samples
    of the prompt: `grpo` with one score per step.

    normalised_S: one number per true entry of ends_BT, in the same order. Raises `BadInput` if the counts differ.
    """
    ends_BT = ends_BT.bool()
    if normalised_S.shape != (int(ends_BT.sum()),):
        raise BadInput(f"normalised_S has shape {list(normalised_S.shape)}", f"must be of {int(ends_BT.sum())} steps")
    at_ends_BT = torch.zeros(ends_BT.shape, dtype=normalised_S.dtype, device=ends_BT.device)
    at_ends_BT[ends_BT] = normalised_S
    return at_ends_BT.flip(-1).cumsum(-1).flip(-1)


@torch.no_grad()
def rloo(scores_N: Tensor, group_N: Tensor) -> Tensor:
    """Return leave-one-out advantages, one per sample, [N]: A_i = R_i - mean of the other scores of the group.

    Source: Ahmadian et al. 2024, https://arxiv.org/abs/2402.14740. Equal scores give exactly 0.

    Raises `BadInput` as `grpo` does, and on a group of one, which has no other samples for a baseline.
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
    return (centred_N * size_N / (size_N - 1)).to(upcast(scores_N).dtype)


@torch.no_grad()
def group_mean(scores_N: Tensor, group_N: Tensor) -> Tensor:
    """Return the mean score of each sample's group, [N], including the sample. Raises `BadInput` as `grpo` does."""
    centred_N, _, _ = _centre(scores_N, group_N)
    return (scores_N.double() - centred_N).to(upcast(scores_N).dtype)


@torch.no_grad()
def group_deviation(scores_N: Tensor, group_N: Tensor) -> Tensor:
    """Return the standard deviation (over n, not n - 1) of each sample's group, [N]; 1 if it is not above 1e-8. VCPO's
    authors divide by this. Raises `BadInput` as `grpo` does."""
    centred_N, size_N, index_N = _centre(scores_N, group_N)
    deviation_N = (_group_sum(centred_N.square(), index_N) / size_N).sqrt()
    return torch.where(deviation_N > 1e-8, deviation_N, 1.0).to(upcast(scores_N).dtype)


@torch.no_grad()
def with_variance(scores_N: Tensor, group_N: Tensor) -> Tensor:
    """Return True for samples of groups whose scores are not all equal, [N]; the other groups have no gradient.

    DAPO's dynamic sampling keeps these samples (Yu et al. 2025, https://arxiv.org/abs/2503.14476, section 3.2).
    Raises `BadInput` as `grpo` does.
    """
    centred_N, _, index_N = _centre(scores_N, group_N)
    return _group_sum((centred_N != 0).double(), index_N) > 0


@torch.no_grad()
def off_policy_baseline(scores_N: Tensor, group_N: Tensor, weight_N: Tensor, norm2_N: Tensor) -> Tensor:
    """Return the baseline of each sample's group that minimises the variance of the weighted policy gradient, [N].

        b = sum_i w_i^2 |g_i|^2 R_i / sum_i w_i^2 |g_i|^2

    Source: VCPO's optimal off-policy baseline, Huang et al. 2026, https://arxiv.org/abs/2602.17616: the minimum over b
    of E |w g (R - b)|^2, where g is the gradient of the response's log-probability. As in the paper, the expectation is
    estimated from the group's own samples; so the baseline depends a little on each sample, like `grpo`'s mean. With
    equal weights and norms it is that mean.

    weight_N: pi_old / pi_rollout of each response, before it is bounded, as in the authors' scripts: a response whose
    weight is far larger than the others' dominates its group's baseline.
    norm2_N: |g_i|^2 in any unit, for the sum over the response's tokens (the authors use the sum even if the update
    uses the mean), see `compute_gradient_norm`. Its expectation is the sum over the tokens of E |grad log pi_t|^2 (the
    cross terms vanish), so if a token's norm is assumed constant, you can give the number of tokens, as in OPO,
    https://arxiv.org/abs/2505.23585. A group whose weights are all 0 gets its mean.

    Raises `BadInput` on unequal shapes.
    """
    centred_N, _, index_N = _centre(scores_N, group_N)
    same_shape(scores_N=scores_N, weight_N=weight_N, norm2_N=norm2_N)
    importance_N = weight_N.double().square() * norm2_N.double()
    total_N = _group_sum(importance_N, index_N)
    # computed as mean + shift, so that equal scores give exactly that score
    shift_N = _group_sum(importance_N * centred_N, index_N) / torch.where(total_N > 0, total_N, 1.0)
    return (scores_N.double() - centred_N + shift_N).to(upcast(scores_N).dtype)


def _centre(scores_N: Tensor, group_N: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return scores minus their group's mean (float64), and each sample's group size and group index."""
    same_shape(scores_N=scores_N, group_N=group_N)
    _, index_N = torch.unique(group_N, return_inverse=True)
    # Minus the group's lowest score, equal scores become zeros, whose mean is exactly 0 in spite of rounding.
    lowest_N = scores_N.double().scatter_reduce(0, index_N, scores_N.double(), "amin", include_self=False)[index_N]
    shifted_N = scores_N.double() - lowest_N
    size_N = _group_sum(torch.ones_like(shifted_N), index_N)
    return shifted_N - _group_sum(shifted_N, index_N) / size_N, size_N, index_N


def _group_sum(x_N: Tensor, index_N: Tensor) -> Tensor:
    """Return, for each sample, the sum over its group. There are at most as many groups as samples."""
    return torch.zeros_like(x_N).index_add(0, index_N, x_N)[index_N]
