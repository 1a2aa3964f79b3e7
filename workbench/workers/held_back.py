"""The tokens that a covariance loss holds back, chosen over each minibatch of all replicas."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from workbench.batches.columns import Ragged
from workbench.engines.training.groups import ModelCollectives
from workbench.messages.shards import Shard
from workbench.objectives.covariance import (
    CovarianceLoss,
    KLCov,
    clips_in_effect,
    covariances,
    held_back,
    kl_cov_loss,
)
from workbench.objectives.losses import ppo_loss
from workbench.workers.micro_batches import minibatch_indices

HELD_BACK = "held_back"  # what the functions of these losses ask for
LONGEST = 2**32  # tokens of a row


def covariance_function(loss: CovarianceLoss, clip: float | None, clip_high: float | None) -> Callable[..., Any]:
    """A covariance loss as a function such as users write."""

    def kl_cov(log_prob: Tensor, old_log_prob: Tensor, advantages: Tensor, held_back: Tensor) -> Any:
        assert isinstance(loss, KLCov)
        loss_BR = kl_cov_loss(log_prob, old_log_prob, advantages, held_back, loss.coefficient)
        return loss_BR, {"held_back_fraction": held_back.float()}

    def clip_cov(log_prob: Tensor, old_log_prob: Tensor, advantages: Tensor, held_back: Tensor) -> Any:
        bounds = clips_in_effect({"loss": loss, "clip": clip, "clip_high": clip_high})
        loss_BR, stats = ppo_loss(log_prob, old_log_prob, advantages, bounds["clip"], bounds["clip_high"])
        metrics = {"held_back_fraction": held_back.float(), "clip_fraction": stats.clipped_BT.float()}
        return torch.where(held_back, 0.0, loss_BR), metrics

    return kl_cov if isinstance(loss, KLCov) else clip_cov


def held_back_tokens(batch: Shard, loss: CovarianceLoss, communicator: ModelCollectives) -> Ragged:
    """A bool column of response tokens, from `old_log_prob` and `advantages`; every rank calls it.

    Every rank sees the tokens of all ranks in the same order, so that neither ranks nor micro-batches change the
    choice. Draws depend on the covariances alone: an update that goes on after a stop makes the same ones.
    """
    mask_BT = batch.valid_mask.pad().bool()
    old_BT, advantages_BT = batch.ragged("old_log_prob").pad(), batch.ragged("advantages").pad()
    found_BT, rows_B = torch.zeros_like(mask_BT), torch.as_tensor(batch.rows)

    def everywhere(values_N: Tensor) -> Tensor:
        return torch.cat(communicator.all_gather(values_N))

    for index in minibatch_indices(batch.minibatch_sizes):
        rows_N, times_N = mask_BT[index].nonzero(as_tuple=True)
        rows_N = torch.as_tensor(index)[rows_N]
        mine_N = rows_B[rows_N] * LONGEST + times_N
        keys_N, order_N = everywhere(mine_N).sort()
        log_prob_N, advantages_N = (everywhere(x_BT[rows_N, times_N])[order_N] for x_BT in (old_BT, advantages_BT))
        if not len(keys_N):
            continue
        found_N = covariances(log_prob_N, advantages_N)
        draws = torch.Generator().manual_seed(zlib.crc32(found_N.numpy().tobytes()))
        found_BT[rows_N, times_N] = torch.isin(mine_N, keys_N[held_back(loss, found_N, draws)])
    return Ragged.unpad(found_BT, batch.valid_mask.lengths)
