"""Advantages of responses from the other responses to their prompt. Suffixes: see `arguments`.

Pure functions, without gradient. They take the samples of the whole global batch, since a group may lie on several
ranks. group_N: an integer for each sample, the same for all answers to one prompt; any ids in any order.
"""

from __future__ import annotations

import torch
from torch import Tensor

from workbench.errors import BadInput
from workbench.objectives.arguments import full, same_shape


@torch.no_grad()
def grpo(scores_N: Tensor, group_N: Tensor, scale_by_std: bool = True, eps: float = 1e-6) -> Tensor:
    """Group-relative advantages, one a sample, [N].

        A_i = (R_i - mean_group) / (std_group + eps)    GRPO, https://arxiv.org/abs/2402.03300, section 4.1.2
        A_i =  R_i - mean_group                         with scale_by_std=False: Dr. GRPO, https://arxiv.org/abs/2503.20783

    The standard deviation is the unbiased one. A group whose scores are all equal, and a group of one, gets exactly 0:
    it carries no gradient.

    Raises `BadInput` on shapes that do not fit or ids that are not integers.
    """
    centred_N, size_N, index_N = _centre(scores_N, group_N)
    if scale_by_std:
        variance_N = _group_sum(centred_N.square(), index_N) / (size_N - 1).clamp(min=1)
        centred_N = centred_N / (variance_N.sqrt() + eps)
    return centred_N.to(full(scores_N).dtype)


@torch.no_grad()
def grpo_batch_std(scores_N: Tensor, group_N: Tensor, eps: float = 1e-6) -> Tensor:
    """GRPO's advantages with the standard deviation of all scores, [N].

        A_i = (R_i - mean_group) / (std_batch + eps)

    Source: Liu et al. 2025, https://arxiv.org/abs/2508.08221; TRL's `scale_rewards="batch"`. The standard deviation is
    the unbiased one of the whole batch: a prompt on which the samples hardly differ does not weigh more for that.
    Groups of equal scores, and groups of one, get exactly 0.

    Raises `BadInput` as `grpo` does.
    """
    centred_N, _, _ = _centre(scores_N, group_N)
    deviation = scores_N.double().std() if len(scores_N) > 1 else 0.0
    return (centred_N / (deviation + eps)).to(full(scores_N).dtype)


@torch.no_grad()
def step_scores(rewards_BT: Tensor, ends_BT: Tensor) -> Tensor:
    """The reward of each step, [S], in the order of rows and of steps in them: the sum over its tokens. What stands
    behind the last step of a row counts for that one.

    ends_BT: true on the last token of each step. Raises `BadInput` on shapes that do not fit.
    """
    same_shape(ends_BT=ends_BT, rewards_BT=rewards_BT)
    if rewards_BT.ndim != 2:
        raise BadInput(f"rewards_BT has shape {list(rewards_BT.shape)}", "must be [rows, tokens]")
    ends_BT = ends_BT.bool()
    steps_B = ends_BT.sum(-1)
    step_BT = torch.minimum(ends_BT.cumsum(-1) - ends_BT.long(), (steps_B - 1).clamp(min=0)[:, None])
    of_rows_BT = torch.zeros_like(full(rewards_BT)).scatter_add(-1, step_BT, full(rewards_BT))
    return of_rows_BT[torch.arange(rewards_BT.shape[1], device=ends_BT.device) < steps_B[:, None]]


@torch.no_grad()
def process_advantages(normalised_S: Tensor, ends_BT: Tensor) -> Tensor:
    """Process supervision: the sum of the normalised rewards of the steps that end at a token or after it, [B, T].

        A_t = sum over steps j with end_j >= t of (r_j - mean) / std

    Source: GRPO, https://arxiv.org/abs/2402.03300, section 4.1.3; mean and deviation are those of all steps of all
    samples of the prompt, `grpo` with a score a step.

    normalised_S: a number for each true entry of ends_BT, in their order. Raises `BadInput` where they are not as many.
    """
    ends_BT = ends_BT.bool()
    if normalised_S.shape != (int(ends_BT.sum()),):
        raise BadInput(f"normalised_S has shape {list(normalised_S.shape)}", f"there are {int(ends_BT.sum())} steps")
    at_ends_BT = torch.zeros(ends_BT.shape, dtype=normalised_S.dtype, device=ends_BT.device)
    at_ends_BT[ends_BT] = normalised_S
    return at_ends_BT.flip(-1).cumsum(-1).flip(-1)


@torch.no_grad()
def rloo(scores_N: Tensor, group_N: Tensor) -> Tensor:
    """Leave-one-out advantages, one a sample, [N]: A_i = R_i - mean of the other scores of the group.

    Source: Ahmadian et al. 2024, https://arxiv.org/abs/2402.14740. Equal scores give exactly 0.

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


@torch.no_grad()
def group_mean(scores_N: Tensor, group_N: Tensor) -> Tensor:
    """The mean score of each sample's group, itself included, [N]. Raises `BadInput` as `grpo` does."""
    centred_N, _, _ = _centre(scores_N, group_N)
    return (scores_N.double() - centred_N).to(full(scores_N).dtype)


@torch.no_grad()
def group_deviation(scores_N: Tensor, group_N: Tensor) -> Tensor:
    """The standard deviation of each sample's group, [N], of the group as it is (over n, not n - 1); 1 where it is not
    above 1e-8. As VCPO's authors divide by it. Raises `BadInput` as `grpo` does."""
    centred_N, size_N, index_N = _centre(scores_N, group_N)
    deviation_N = (_group_sum(centred_N.square(), index_N) / size_N).sqrt()
    return torch.where(deviation_N > 1e-8, deviation_N, 1.0).to(full(scores_N).dtype)


@torch.no_grad()
def with_variance(scores_N: Tensor, group_N: Tensor) -> Tensor:
    """True for the samples of groups whose scores are not all equal, [N]: the others carry no gradient.

    What DAPO's dynamic sampling keeps (Yu et al. 2025, https://arxiv.org/abs/2503.14476, section 3.2).
    Raises `BadInput` as `grpo` does.
    """
    centred_N, _, index_N = _centre(scores_N, group_N)
    return _group_sum((centred_N != 0).double(), index_N) > 0


@torch.no_grad()
def off_policy_baseline(scores_N: Tensor, group_N: Tensor, weight_N: Tensor, norm2_N: Tensor) -> Tensor:
    """The baseline of each sample's group that gives an importance-weighted policy gradient least variance, [N].

        b = sum_i w_i^2 |g_i|^2 R_i / sum_i w_i^2 |g_i|^2

    Source: VCPO's optimal off-policy baseline, Huang et al. 2026, https://arxiv.org/abs/2602.17616: the minimum over b
    of E |w g (R - b)|^2, where g is the gradient of the response's log-probability. As there, a group's own samples
    stand for the expectation; so the baseline depends a little on each, as `grpo`'s mean does. With equal weights and
    norms it is that mean.

    weight_N: pi_old / pi_rollout of each response, before it is bounded, as in the authors' scripts: a response whose
    weight is far larger than the others' makes its group's baseline.
    norm2_N: |g_i|^2 in any unit, of the sum over the response's tokens (the authors take that also where the update
    takes their mean), see `compute_gradient_norm`. Its expectation is the sum over the tokens of E |grad log pi_t|^2
    (their cross terms vanish), so where a token's is taken as constant, the number of tokens can be given, as in OPO,
    https://arxiv.org/abs/2505.23585. A group without any weight gets its mean.

    Raises `BadInput` on shapes that do not fit, ids that are not integers, or negative norms.
    """
    centred_N, _, index_N = _centre(scores_N, group_N)
    same_shape(scores_N=scores_N, weight_N=weight_N, norm2_N=norm2_N)
    if (norm2_N < 0).any():
        raise BadInput(f"norm2_N with {float(norm2_N.min())}", "must hold squared norms")
    importance_N = weight_N.double().square() * norm2_N.double()
    total_N = _group_sum(importance_N, index_N)
    # from the mean on, so that equal scores give exactly that score
    shift_N = _group_sum(importance_N * centred_N, index_N) / torch.where(total_N > 0, total_N, 1.0)
    return (scores_N.double() - centred_N + shift_N).to(full(scores_N).dtype)


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
