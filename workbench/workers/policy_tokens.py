"""The policy's loss of each token of a micro-batch: the arguments of `update_actor`'s loss function and the terms added
to it; the importance weights of rollouts; and the tokens that a covariance loss holds back.

Suffixes: B rows of a micro-batch, R response tokens of the longest, N packed tokens; T response tokens of the longest
row of the shard.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from workbench.batches.columns import Ragged
from workbench.engines.communicator import Communicator
from workbench.messages.metrics import Mean, Metric, Metrics, SampleSize
from workbench.messages.shards import Shard
from workbench.models.logits import TokenSets
from workbench.objectives.correction import (
    Correction,
    correct,
    effective_sample_size,
    log_weights,
    raw_weights,
    second_moment_cut,
    step_scale,
)
from workbench.objectives.kl import KLLoss, kl_estimate, kl_loss, ratio_of
from workbench.objectives.losses import (
    CovarianceLoss,
    KLCov,
    clips_in_effect,
    covariances,
    held_back,
    kl_cov_loss,
    ppo_loss,
)
from workbench.workers.micro_batches import DeviceMetrics, MicroBatch, OnDevice, largest, minibatch_indices
from workbench.workers.sampling_mask import check_correctable
from workbench.workers.user_loss import OF_MODEL, TokenFunction, of_model, reported, selected
from workbench.workers.worker import Context


@dataclass(frozen=True, kw_only=True)
class PolicyTokens:
    """The loss of a `Term`: `function`, weighted by `weights`, with the entropy bonus and the KL penalty.

    batch: the shard; `function` reads its columns. temperature: of log-probabilities. sets: the tokens that could be
    drawn, with a sampling mask. on_policy, entropy_coefficient, kl_coefficient, kl: see `update_actor`. weights: the
    correction's weight of each response token. held_back: which tokens a covariance loss holds back.
    """

    batch: Shard
    function: TokenFunction
    temperature: float
    sets: Callable[[list[int]], TokenSets] | None
    on_policy: bool
    entropy_coefficient: float
    kl_coefficient: float
    kl: KLLoss
    weights: Ragged | None
    held_back: Ragged | None

    def inputs(self, micro: MicroBatch) -> Mapping[str, Any]:
        return micro.scored(self.temperature, self._with_entropy, self.sets, with_hidden=self._reads_model)

    def __call__(self, micro: MicroBatch, output: tuple[Any, ...]) -> tuple[Tensor, DeviceMetrics]:
        """Return the loss [B, R] and metrics, from the module's log-probabilities, entropies and further outputs."""
        mask = self.function.mask
        mask_BR = micro.mask_BR(mask)
        mean = micro.mean_over(mask_BR)
        log_probs_N, entropy_N, *read = output
        log_probs_BR = selected(micro.to_BR(log_probs_N), micro.column_BR(mask).bool())
        now_BR = log_probs_BR.detach()
        old_BR = self._old(micro, now_BR)
        given: dict[str, Any] = {"log_prob": log_probs_BR}
        if old_BR is not None:
            given["old_log_prob"] = old_BR
        if self._with_entropy:
            given["entropy"] = micro.to_BR(entropy_N)
        if self._reads_model:
            given |= of_model(micro, mask, self.function.asked, *read)
        if self.held_back is not None:
            given[HELD_BACK] = micro.column_BR(self.held_back)
        loss_BR, told = self.function(micro.index, micro.column_BR, given)
        if self.weights is not None:
            loss_BR = loss_BR * micro.column_BR(self.weights)
        metrics = self._metrics(micro, mask_BR, mean, now_BR, old_BR, told)
        if self._with_entropy:
            metrics["entropy"] = mean(given["entropy"])
        if self.entropy_coefficient:
            loss_BR = loss_BR - self.entropy_coefficient * given["entropy"]
        if self.kl_coefficient:
            ref_BR = micro.column_BR(self.batch.ragged("ref_log_prob"))
            assert old_BR is not None  # an update with a KL penalty reads the column, or is on policy
            kl_BR = kl_loss(log_probs_BR, old_BR, ref_BR, self.kl)
            loss_BR = loss_BR + self.kl_coefficient * kl_BR
            metrics["kl_loss"] = mean(kl_BR)
        return loss_BR, metrics

    @property
    def _with_entropy(self) -> bool:
        return self.on_policy or self.entropy_coefficient != 0 or "entropy" in self.function.asked

    @property
    def _reads_model(self) -> bool:
        return any(name in self.function.asked for name in OF_MODEL)

    def _old(self, micro: MicroBatch, now_BR: Tensor) -> Tensor | None:
        if self.on_policy:
            return now_BR
        return micro.column_BR(self.batch.ragged("old_log_prob")) if "old_log_prob" in self.batch.columns else None

    def _metrics(
        self,
        micro: MicroBatch,
        mask_BR: Tensor,
        mean: Callable[[Tensor], OnDevice],
        now_BR: Tensor,
        old_BR: Tensor | None,
        told: dict[str, Tensor],
    ) -> dict[str, Metric | OnDevice]:
        metrics: dict[str, Metric | OnDevice] = {}
        if old_BR is not None:
            own = "ratio" in told and told["ratio"].ndim == 2
            ratio_BR = told.pop("ratio") if own else ratio_of(now_BR, old_BR)
            metrics["ratio/mean"] = mean(ratio_BR)
            metrics["ratio/max_deviation"] = largest(torch.where(mask_BR > 0, (ratio_BR - 1).abs(), 0.0))
        metrics |= {name: reported(micro, values, mask_BR) for name, values in told.items()}
        if old_BR is not None:
            metrics["approximate_kl"] = mean(kl_estimate(old_BR, now_BR, "k3"))
        if "rollout_log_prob" in self.batch.columns:
            rollout_BR = micro.column_BR(self.batch.ragged("rollout_log_prob"))
            # a selection, not a product: outside the mask the exponential may be infinite
            gap_BR = torch.where(mask_BR > 0, now_BR - rollout_BR, 0.0)
            metrics["rollout_ratio/max_deviation"] = largest((gap_BR.exp() - 1).abs())
            if self.on_policy:
                metrics["rollout_gap/mean"] = mean(gap_BR.abs())
                metrics["rollout_gap/max"] = largest(gap_BR.abs())
        if self.on_policy:
            metrics["old_log_prob/mean"] = mean(now_BR)
        return metrics


def rollout_weights(
    batch: Shard, correction: Correction, context: Context
) -> tuple[Ragged, Metrics, tuple[float, ...]]:
    """Return, for a shard with `old_log_prob`, `rollout_log_prob` and `response_mask`, a weight per response token,
    metrics, and a factor of each minibatch's learning rate (empty: all 1). Every rank calls it.

    Raises `BadInput` if the rollouts were sampled with top-p, top-k or min-p, and have no sampling mask.
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
    return Ragged.unpad(weights.weight_BT, mask.lengths), metrics, scales


def _cuts(
    old_BT: Tensor, rollout_BT: Tensor, mask_BT: Tensor, batch: Shard, correction: Correction, context: Context
) -> Tensor | None:
    """Return, for each row, the (log w)^2 above which tokens of its minibatch (over all ranks) are left out; None if
    the correction has no such cut."""
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
    """Return [sum w, sum w^2, count], float64: over the tokens, or over the sequences if a sequence has one weight."""
    if correction.level == "token":
        weights = weight_BT[mask_BT].double()
    else:
        weights = weight_BT.amax(-1)[mask_BT.any(-1)].double()
    return torch.stack((weights.sum(), weights.square().sum(), weights.new_tensor(weights.numel())))


# --- tokens that a covariance loss holds back -------------------------------------------------------------------------

HELD_BACK = "held_back"  # the parameter of these losses' functions
LONGEST = 2**32  # more tokens than a row can have


def covariance_function(loss: CovarianceLoss, clip: float | None, clip_high: float | None) -> Callable[..., Any]:
    """Return a covariance loss as a function of the form that users write."""

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


def held_back_tokens(batch: Shard, loss: CovarianceLoss, communicator: Communicator) -> Ragged:
    """Return a bool column of held-back response tokens, by `old_log_prob` and `advantages`. Every rank calls it.

    Every rank sees the tokens of all ranks in the same order, so that neither ranks nor micro-batches change the
    choice. Draws depend on the tokens' ids alone: rounding does not change them, and an update that continues after a
    stop draws the same tokens.
    """
    mask_BT = batch.valid_mask.pad().bool()
    old_BT, advantages_BT = batch.ragged("old_log_prob").pad(), batch.ragged("advantages").pad()
    ids_BT, rows_B = batch.ragged("response_ids").pad(), torch.as_tensor(batch.rows)
    found_BT = torch.zeros_like(mask_BT)
    for index in minibatch_indices(batch.minibatch_sizes):
        rows_N, times_N = mask_BT[index].nonzero(as_tuple=True)
        rows_N = torch.as_tensor(index)[rows_N]
        mine_N = rows_B[rows_N] * LONGEST + times_N
        keys_N, order_N = communicator.gathered(mine_N).sort()
        log_prob_N, advantages_N, ids_N = (
            communicator.gathered(x_BT[rows_N, times_N])[order_N] for x_BT in (old_BT, advantages_BT, ids_BT)
        )
        if not len(keys_N):
            continue
        draws = torch.Generator().manual_seed(zlib.crc32(ids_N.numpy().tobytes()))
        held_N = held_back(loss, covariances(log_prob_N, advantages_N), draws)
        found_BT[rows_N, times_N] = torch.isin(mine_N, keys_N[held_N])
    return Ragged.unpad(found_BT, batch.valid_mask.lengths)
