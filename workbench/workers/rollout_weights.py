"""The importance weights of a shard's rollouts: a column for the policy loss, metrics, factors of the learning rate."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from workbench.batches.columns import Ragged
from workbench.messages.metrics import Mean, Metrics, SampleSize
from workbench.messages.shards import Shard
from workbench.objectives.correction import (
    Correction,
    correct,
    effective_sample_size,
    log_weights,
    raw_weights,
    second_moment_cut,
    step_scale,
)
from workbench.workers.micro_batches import minibatch_indices
from workbench.workers.sampling_mask import check_correctable
from workbench.workers.worker import Context


@dataclass(frozen=True, kw_only=True)
class RolloutWeights:
    """column: a weight a response token. rate_scales: a factor of each minibatch's learning rate; empty: all 1."""

    column: Ragged
    metrics: Metrics
    rate_scales: tuple[float, ...]


def rollout_weights(batch: Shard, correction: Correction, context: Context) -> RolloutWeights:
    """The weights of a shard with `old_log_prob`, `rollout_log_prob` and `response_mask`; every rank calls it.

    Raises `BadInput` where the rollouts were sampled with top-p, top-k or min-p, and have no sampling mask.
    """
    check_correctable(f"{correction}", batch)
    mask = batch.valid_mask
    mask_BT = mask.pad().bool()
    old_BT, rollout_BT = batch.ragged("old_log_prob").pad(), batch.ragged("rollout_log_prob").pad()
    weights = correct(
        old_BT, rollout_BT, mask_BT, correction, _cuts(old_BT, rollout_BT, mask_BT, batch, correction, context)
    )
    raw_BT = raw_weights(old_BT, rollout_BT, mask_BT, correction.level)
    tokens = float(mask_BT.sum())

    def size(weight_BT: Tensor) -> SampleSize:
        total, squares, count = _sums(weight_BT, mask_BT, correction).tolist()
        return SampleSize(total=total, squares=squares, count=count)

    metrics: Metrics = {
        "correction/weight/mean": Mean(total=float(weights.weight_BT.sum()), count=tokens),
        "correction/bounded_fraction": Mean(total=float(weights.bounded_BT.sum()), count=tokens),
        "correction/effective_sample_size": size(raw_BT),
        "correction/bounded_effective_sample_size": size(weights.weight_BT),
    }
    scales: tuple[float, ...] = ()
    if correction.reference_size is not None:
        each = minibatch_indices(batch.minibatch_sizes)
        sums = [_sums(raw_BT[rows], mask_BT[rows], correction) for rows in each]
        sums_M3 = context.groups.data.all_reduce(torch.stack(sums).to(context.device))
        scales = tuple(step_scale(effective_sample_size(*row), correction.reference_size) for row in sums_M3.tolist())
    return RolloutWeights(column=Ragged.unpad(weights.weight_BT, mask.lengths), metrics=metrics, rate_scales=scales)


def _cuts(
    old_BT: Tensor, rollout_BT: Tensor, mask_BT: Tensor, batch: Shard, correction: Correction, context: Context
) -> Tensor | None:
    """For each row the (log w)^2 beyond which tokens of its minibatch, over all ranks, are left out; None where the
    correction leaves none out so."""
    if correction.bound != "second_moment":
        return None
    square_BT = log_weights(old_BT, rollout_BT, mask_BT, correction.level).double().square()
    cut_B1 = square_BT.new_zeros(len(square_BT), 1)

    def summed(sums: Tensor) -> Tensor:
        return context.groups.data.all_reduce(sums.to(context.device)).to(sums.device)

    for rows in minibatch_indices(batch.minibatch_sizes):
        squares_N = square_BT[rows][mask_BT[rows]]
        cut_B1[rows] = second_moment_cut(squares_N, correction.largest_second_moment, summed)
    return cut_B1


def _sums(weight_BT: Tensor, mask_BT: Tensor, correction: Correction) -> Tensor:
    """[sum w, sum w^2, count], float64: over the tokens, or over the sequences where a sequence has one weight."""
    if correction.level == "token":
        weights = weight_BT[mask_BT].double()
    else:
        weights = weight_BT.amax(-1)[mask_BT.any(-1)].double()
    return torch.stack((weights.sum(), weights.square().sum(), weights.new_tensor(weights.numel())))
