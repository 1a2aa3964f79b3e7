"""Advantages from the rewards of steps, over all samples of a prompt, on whichever ranks they lie."""

from __future__ import annotations

import torch
from torch import Tensor

from workbench.errors import BadInput
from workbench.messages.metrics import Mean, Metrics
from workbench.messages.shards import Shard
from workbench.objectives.groups import grpo, process_advantages, step_scores, with_variance
from workbench.workers.communicator import Communicator


def over_steps(
    rewards_BT: Tensor, one_step: bool, batch: Shard, mask_BT: Tensor, communicator: Communicator, metrics: Metrics
) -> Tensor:
    """The advantages of process supervision, [B, T], from token rewards after penalties. one_step: a response is one.

    Metrics: `steps/mean`, of a response, and the share of steps whose prompt has equal rewards only.
    """
    groups_B = batch.numbers("prompt_uid")
    check_groups("grpo_process", communicator.gathered(groups_B))
    ends_BT = mask_BT
    if one_step:
        ends_BT = mask_BT & (mask_BT.flip(-1).cumsum(-1).flip(-1) == 1)
    elif "step_ends" in batch.columns:
        ends_BT = mask_BT & batch.ragged("step_ends").pad().bool()
    steps_S, groups_S = step_scores(rewards_BT, ends_BT), groups_B.repeat_interleave(ends_BT.sum(-1))
    shards = communicator.all_gather(steps_S)
    steps_N, groups_N = torch.cat(shards), communicator.gathered(groups_S)
    before = sum(map(len, shards[: communicator.rank]))
    mine = slice(before, before + len(steps_S))
    metrics["steps/mean"] = Mean(total=len(steps_S), count=int(batch.valid.sum()))
    alike = len(steps_S) - float(with_variance(steps_N, groups_N)[mine].sum())
    metrics.setdefault("without_variance/fraction", Mean(total=alike, count=len(steps_S)))
    return process_advantages(grpo(steps_N, groups_N)[mine].float(), ends_BT) * mask_BT


def check_groups(estimator: object, groups_N: Tensor) -> None:
    """Raise `BadInput` where no prompt has two responses."""
    if len(torch.unique(groups_N)) == len(groups_N):
        raise BadInput(
            f"estimator={estimator!r} on one response a prompt",
            "the other responses of a prompt are the baseline: alone, every advantage is 0",
            "generate with samples=2 or more",
        )
