"""Stages that are arithmetic only: no model, but reductions over the whole batch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import torch
from torch import Tensor

from workbench.algorithms.arguments import within
from workbench.algorithms.estimators import gae, grpo, moments, rloo, token_rewards, whiten
from workbench.algorithms.kl import KLKind, kl_estimate
from workbench.dataflow.columns import Ragged
from workbench.workers.calls import Mean, Metrics, Output, Shard
from workbench.workers.operation import register
from workbench.workers.protocols import DP_PROTO
from workbench.workers.worker import Worker

Estimator = Literal["gae", "grpo", "dr_grpo", "rloo"]


def advantage_columns(arguments: Mapping[str, Any]) -> tuple[str, ...]:
    """The columns that `compute_advantages` reads with these arguments."""
    columns = ["rewards", "response_mask", "values" if arguments["estimator"] == "gae" else "prompt_uid"]
    if arguments["kl_coefficient"]:
        columns += ["old_log_prob", "ref_log_prob"]
    return tuple(columns)


def _check(arguments: Mapping[str, Any]) -> None:
    for name in ("gamma", "lam"):
        within(name, arguments[name], 0, 1)


class NumericWorker(Worker):
    """Lives beside the actor."""

    @register(
        DP_PROTO,
        reads=advantage_columns,
        optional=("old_log_prob", "ref_log_prob"),
        writes=("advantages", "returns", "token_rewards"),
        minibatched=True,
        check=_check,
    )
    def compute_advantages(
        self,
        batch: Shard,
        *,
        estimator: Estimator = "gae",
        gamma: float = 1.0,
        lam: float = 0.95,
        kl_coefficient: float = 0.0,
        kl: KLKind = "k1",
        whiten_advantages: bool | None = None,
    ) -> Output:
        """Advantages and returns from rewards, a number a response token.

        estimator: "gae" (PPO; reads `values`), "grpo", "dr_grpo" (no standard deviation), "rloo": over the samples of
        one prompt. kl_coefficient, kl: per-token penalty against `ref_log_prob` in the reward, and its estimator.
        whiten_advantages: to mean 0 and variance 1 over the tokens of the whole batch; None: for gae only.
        Columns: `token_rewards` (after the penalty), `advantages`, `returns`.
        """
        mask = batch.ragged("response_mask")
        mask_BT = mask.pad().bool()
        reward_column = batch.columns["rewards"]
        token_level = isinstance(reward_column, Ragged)
        scores = reward_column.pad() if isinstance(reward_column, Ragged) else reward_column
        assert isinstance(scores, Tensor)
        old_BT, ref_BT = (
            batch.ragged(n).pad() if n in batch.columns else None for n in ("old_log_prob", "ref_log_prob")
        )
        if not kl_coefficient or old_BT is None:
            base_BT, reference_BT = torch.zeros_like(mask_BT, dtype=torch.float32), None
        else:
            base_BT, reference_BT = old_BT, ref_BT
        rewards_BT = token_rewards(scores, base_BT, reference_BT, mask_BT, kl_coefficient, kl)
        if estimator == "gae":
            advantages_BT, returns_BT = gae(rewards_BT, batch.ragged("values").pad(), mask_BT, gamma, lam)
        else:
            advantages_BT = self._group_advantages(rewards_BT.sum(-1), batch, estimator)[:, None] * mask_BT
            returns_BT = rewards_BT.sum(-1, keepdim=True) * mask_BT
        if whiten_advantages or (whiten_advantages is None and estimator == "gae"):
            total = self.context.communicator.all_reduce(moments(advantages_BT, mask_BT))
            advantages_BT = whiten(advantages_BT, mask_BT, total)
        tokens = float(mask_BT.sum())
        row_scores = scores.sum(-1) if token_level else scores
        metrics: Metrics = {
            "rewards/mean": Mean(total=float(row_scores.sum()), count=len(batch)),
            "returns/mean": Mean(total=float(returns_BT.sum()), count=tokens),
            "advantages/mean": Mean(total=float(advantages_BT.sum()), count=tokens),
        }
        if old_BT is not None and ref_BT is not None:
            kl_BT = kl_estimate(old_BT, ref_BT, "k1") * mask_BT
            metrics["reference_kl"] = Mean(total=float(kl_BT.sum()), count=tokens)
        return Output(
            columns={
                name: Ragged.unpad(values_BT.float(), mask.lengths)
                for name, values_BT in (
                    ("token_rewards", rewards_BT),
                    ("advantages", advantages_BT),
                    ("returns", returns_BT),
                )
            },
            metrics=metrics,
        )

    def _group_advantages(self, scores_B: Tensor, batch: Shard, estimator: str) -> Tensor:
        # The samples of a prompt may lie on several ranks: every rank sees all scores, a number a row.
        communicator, groups_B = self.context.communicator, batch.columns["prompt_uid"]
        assert isinstance(groups_B, Tensor)
        scores_N = torch.cat(communicator.all_gather(scores_B))
        groups_N = torch.cat(communicator.all_gather(groups_B))
        if estimator == "rloo":
            advantages_N = rloo(scores_N, groups_N)
        else:
            advantages_N = grpo(scores_N, groups_N, scale_by_std=estimator == "grpo")
        before = sum(len(part) for part in communicator.all_gather(scores_B)[: communicator.rank])
        return advantages_N[before : before + len(scores_B)].float()
