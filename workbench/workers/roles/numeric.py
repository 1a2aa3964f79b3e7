"""Stages that are arithmetic only: no model, but reductions over the whole batch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from workbench.algorithms.arguments import within
from workbench.algorithms.estimators import (
    MAX_MULTIPLIER,
    gae,
    grpo,
    lagrangian,
    moments,
    remax,
    rloo,
    token_rewards,
    whiten,
)
from workbench.algorithms.kl import KLKind, kl_estimate
from workbench.dataflow.columns import Ragged
from workbench.errors import BadInput
from workbench.workers.calls import Mean, Metrics, Output, Shard
from workbench.workers.operation import register
from workbench.workers.protocols import DP_PROTO
from workbench.workers.worker import Worker

Estimator = Literal["gae", "grpo", "dr_grpo", "rloo", "remax"]


@dataclass(frozen=True, kw_only=True)
class Signal:
    """What is to be raised or lowered, by its columns: scores, a critic's values of them, scores of greedy responses.

    sign: 1 for rewards; -1 for costs, to which the KL penalty is added.
    """

    scores: str
    values: str
    baseline: str
    sign: int

    def columns(self, estimator: Estimator) -> tuple[str, str]:
        """The columns that an estimator reads of it."""
        return self.scores, {"gae": self.values, "remax": self.baseline}.get(estimator, "prompt_uid")


REWARD = Signal(scores="rewards", values="values", baseline="baseline_rewards", sign=1)
COST = Signal(scores="costs", values="cost_values", baseline="baseline_costs", sign=-1)


def advantage_columns(arguments: Mapping[str, Any]) -> tuple[str, ...]:
    """The columns that `compute_advantages` reads with these arguments."""
    signals = (REWARD,) if arguments["multiplier"] is None else (REWARD, COST)
    columns = [name for signal in signals for name in signal.columns(arguments["estimator"])]
    if arguments["bootstrap"]:
        columns += ["finished", *(f"final_{signal.values}" for signal in signals)]
    if arguments["kl_coefficient"]:
        columns += ["old_log_prob", "ref_log_prob"]
    return tuple(dict.fromkeys(("response_mask", *columns)))


def _written(arguments: Mapping[str, Any]) -> tuple[str, ...]:
    columns = ("advantages", "returns", "token_rewards")
    return columns if arguments["multiplier"] is None else (*columns, "cost_returns")


def _check(arguments: Mapping[str, Any]) -> None:
    for name in ("gamma", "lam"):
        within(name, arguments[name], 0, 1)
    if arguments["bootstrap"] and arguments["estimator"] != "gae":
        raise BadInput(
            f"bootstrap=True with estimator={arguments['estimator']!r}",
            "values continue a response that was cut: gae's",
        )
    if arguments["multiplier"] is not None:
        within("multiplier", arguments["multiplier"], 0, MAX_MULTIPLIER)


class NumericWorker(Worker):
    """Lives beside the actor."""

    @register(
        DP_PROTO,
        reads=advantage_columns,
        optional=("old_log_prob", "ref_log_prob"),
        writes=_written,
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
        bootstrap: bool = False,
        kl_coefficient: float = 0.0,
        kl: KLKind = "k1",
        whiten_advantages: bool | None = None,
        multiplier: float | None = None,
    ) -> Output:
        """Advantages and returns from rewards, a number a response token.

        estimator: "gae" (PPO; reads `values`), "remax" (reads `baseline_rewards`, scores of greedy responses), "grpo",
        "dr_grpo" (no standard deviation), "rloo": over the samples of one prompt.
        bootstrap: GAE continues responses that were cut (not `finished`) with `final_values`, see `compute_values`;
        False: after the last token nothing more is to come, cut or not.
        kl_coefficient, kl: per-token penalty against `ref_log_prob` in the reward, and its estimator.
        whiten_advantages: to mean 0 and variance 1 over the tokens of the whole batch; None: for gae only.
        multiplier: Safe-RLHF's; the advantages of `costs` (for gae with `cost_values`), whose penalty has the other
        sign, are held against those of the rewards, see `estimators.lagrangian`, before whitening.
        Columns: `token_rewards` (after the penalty), `advantages`, `returns`; with a multiplier `cost_returns`.
        """
        mask = batch.ragged("response_mask")
        mask_BT = mask.pad().bool()
        tokens = float(mask_BT.sum())
        metrics: Metrics = {}

        def mean(name: str, total: Tensor, count: float) -> None:
            metrics[f"{name}/mean"] = Mean(total=float(total.sum()), count=count)

        def estimate(signal: Signal) -> tuple[Tensor, Tensor, Tensor]:
            """Token rewards, advantages and returns."""
            scores = _padded(batch, signal.scores)
            mean(signal.scores, scores, len(batch))
            rewards_BT = self._token_rewards(batch, scores, mask_BT, kl_coefficient, kl, signal.sign)
            if estimator == "gae":
                values_BT, after_B = batch.ragged(signal.values).pad(), None
                if bootstrap:
                    after_B = torch.where(
                        _numbers(batch, "finished").bool(), 0.0, _numbers(batch, f"final_{signal.values}")
                    )
                return rewards_BT, *gae(rewards_BT, values_BT, mask_BT, gamma, lam, after_B)
            if estimator == "remax":
                baseline = _padded(batch, signal.baseline)
                baseline_B = baseline if baseline.ndim == 1 else baseline.sum(-1)
                mean(signal.baseline, baseline_B, len(batch))
                return rewards_BT, *remax(rewards_BT, baseline_B, mask_BT, gamma)
            advantages_B = self._group_advantages(rewards_BT.sum(-1), batch, estimator)
            return rewards_BT, advantages_B[:, None] * mask_BT, rewards_BT.sum(-1, keepdim=True) * mask_BT

        rewards_BT, advantages_BT, returns_BT = estimate(REWARD)
        columns = {"token_rewards": rewards_BT, "returns": returns_BT}
        mean("returns", returns_BT, tokens)
        if multiplier is not None:
            _, cost_advantages_BT, columns["cost_returns"] = estimate(COST)
            mean("cost_returns", columns["cost_returns"], tokens)
            advantages_BT = lagrangian(advantages_BT, cost_advantages_BT, multiplier)
            metrics["multiplier"] = Mean(total=multiplier, count=1)
        if whiten_advantages or (whiten_advantages is None and estimator == "gae"):
            total = self.context.communicator.all_reduce(moments(advantages_BT, mask_BT))
            advantages_BT = whiten(advantages_BT, mask_BT, total)
        columns["advantages"] = advantages_BT
        mean("advantages", advantages_BT, tokens)
        if "old_log_prob" in batch.columns and "ref_log_prob" in batch.columns:
            kl_BT = kl_estimate(batch.ragged("old_log_prob").pad(), batch.ragged("ref_log_prob").pad(), "k1")
            metrics["reference_kl"] = Mean(total=float((kl_BT * mask_BT).sum()), count=tokens)
        return Output(
            columns={name: Ragged.unpad(values_BT.float(), mask.lengths) for name, values_BT in columns.items()},
            metrics=metrics,
        )

    @staticmethod
    def _token_rewards(
        batch: Shard, scores: Tensor, mask_BT: Tensor, kl_coefficient: float, kl: KLKind, sign: int
    ) -> Tensor:
        old_BT, ref_BT = torch.zeros_like(mask_BT, dtype=torch.float32), None
        if kl_coefficient:
            old_BT, ref_BT = batch.ragged("old_log_prob").pad(), batch.ragged("ref_log_prob").pad()
        # what lowers a reward raises a cost: the cost is a reward turned round
        return sign * token_rewards(sign * scores, old_BT, ref_BT, mask_BT, kl_coefficient, kl)

    def _group_advantages(self, scores_B: Tensor, batch: Shard, estimator: str) -> Tensor:
        # The samples of a prompt may lie on several ranks: every rank sees all scores, a number a row.
        communicator, groups_B = self.context.communicator, batch.columns["prompt_uid"]
        assert isinstance(groups_B, Tensor)
        scores_N = torch.cat(communicator.all_gather(scores_B))
        groups_N = torch.cat(communicator.all_gather(groups_B))
        if estimator == "rloo":
            advantages_N = rloo(scores_N, groups_N)
        else:
            if len(torch.unique(groups_N)) == len(groups_N):
                raise BadInput(
                    f"estimator={estimator!r} on one response a prompt",
                    "the other responses of a prompt are the baseline: alone, every advantage is 0",
                    "generate with samples=2 or more",
                )
            advantages_N = grpo(scores_N, groups_N, scale_by_std=estimator == "grpo")
        before = sum(len(part) for part in communicator.all_gather(scores_B)[: communicator.rank])
        return advantages_N[before : before + len(scores_B)].float()


def _numbers(batch: Shard, name: str) -> Tensor:
    """A column of one number a row."""
    column = batch.columns[name]
    assert isinstance(column, Tensor), name
    return column


def _padded(batch: Shard, name: str) -> Tensor:
    """A column of scores: [rows], or [rows, response tokens]."""
    column = batch.columns[name]
    scores = column.pad() if isinstance(column, Ragged) else column
    assert isinstance(scores, Tensor)
    return scores
