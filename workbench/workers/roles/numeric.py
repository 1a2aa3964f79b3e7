"""Stages of arithmetic without a model: reductions over the whole batch."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor

from workbench.batches.columns import Ragged, Table
from workbench.errors import BadInput
from workbench.messages.metrics import Max, Mean, Metrics
from workbench.messages.operation import register
from workbench.messages.protocols import DP_PROTO
from workbench.messages.replies import Output
from workbench.messages.shards import Shard
from workbench.objectives.arguments import within
from workbench.objectives.correction import Correction, raw_weights
from workbench.objectives.estimators import (
    counted,
    explained_variance,
    gae,
    moments,
    overlong_penalty,
    reinforce,
    response_scores,
    token_rewards,
    whiten,
)
from workbench.objectives.groups import (
    group_deviation,
    group_mean,
    grpo,
    grpo_batch_std,
    off_policy_baseline,
    rloo,
    with_variance,
)
from workbench.objectives.kl import KLKind, kl_estimate
from workbench.objectives.lagrangian import MAX_MULTIPLIER, lagrangian
from workbench.objectives.macro_actions import macro_gae
from workbench.settings.engines import check_untruncated
from workbench.support.validation import whole
from workbench.workers.inference import TRUNCATION
from workbench.workers.signals import COST, REWARD, Signal
from workbench.workers.user_estimator import (
    check_estimator,
    check_estimator_columns,
    estimated,
    estimator_columns,
    optional_columns,
    reads_greedy,
)
from workbench.workers.user_loss import UserFunction
from workbench.workers.worker import Worker

Estimator = Literal[
    "gae",
    "grpo",
    "grpo_batch_std",
    "dr_grpo",
    "rloo",
    "off_policy_baseline",
    "remax",
    "reinforce_pp",
    "reinforce_pp_baseline",
]
# the samples of a prompt are each other's baseline: one response a prompt teaches nothing
GROUPED = ("grpo", "grpo_batch_std", "dr_grpo", "rloo", "off_policy_baseline", "reinforce_pp_baseline")
WHITENED = ("gae", "reinforce_pp", "reinforce_pp_baseline")


def _scored(signal: Signal, estimator: Estimator | UserFunction) -> tuple[str, ...]:
    """The columns of a signal that an estimator needs."""
    if callable(estimator):
        return signal.scores, *estimator_columns(estimator, signal)
    return signal.scores, *{"gae": (signal.values,), "remax": (signal.baseline,)}.get(estimator, ())


def _signals(arguments: Mapping[str, Any]) -> tuple[Signal, ...]:
    return (REWARD,) if arguments["multiplier"] is None else (REWARD, COST)


def advantage_columns(arguments: Mapping[str, Any]) -> tuple[str, ...]:
    signals = _signals(arguments)
    columns = [name for signal in signals for name in _scored(signal, arguments["estimator"])]
    if arguments["bootstrap"]:
        columns += ["finished", *(signal.final_values for signal in signals)]
    if arguments["estimator"] in GROUPED:
        columns += ["prompt_uid"]
    if arguments["estimator"] == "off_policy_baseline":
        columns += ["old_log_prob", "rollout_log_prob"]
    if arguments["kl_coefficient"]:
        columns += ["old_log_prob", "ref_log_prob"]
    return tuple(dict.fromkeys(("response_mask", *columns)))


def _optional(arguments: Mapping[str, Any]) -> tuple[str, ...]:
    status = () if arguments["count_invalid"] else ("valid", "baseline_valid")
    of_estimator = optional_columns(arguments["estimator"], _signals(arguments))
    return tuple(dict.fromkeys((*of_estimator, *status, "counted")))


def _written(arguments: Mapping[str, Any]) -> tuple[str, ...]:
    columns = ("advantages", "returns", "token_rewards")
    return columns if arguments["multiplier"] is None else (*columns, "cost_returns")


def _check(arguments: Mapping[str, Any]) -> None:
    if callable(arguments["estimator"]):
        check_estimator(arguments["estimator"])
    for name in ("gamma", "lam"):
        within(name, arguments[name], 0, 1)
    if arguments["bootstrap"] and (arguments["estimator"] != "gae" or arguments["macro_tokens"] > 1):
        raise BadInput(
            f"bootstrap=True with estimator={arguments['estimator']!r}, macro_tokens={arguments['macro_tokens']}",
            "values continue a response that was cut: gae's, token by token",
        )
    if arguments["estimator"] == "off_policy_baseline" and not isinstance(arguments["correction"], Correction):
        raise BadInput(
            f"estimator='off_policy_baseline' with correction={arguments['correction']!r:.60}",
            "its baseline is the best one for the weights of the update",
            "give the wb.Correction(...) that update_actor is given",
        )
    within("kl_coefficient", arguments["kl_coefficient"], 0)
    if arguments["multiplier"] is not None:
        within("multiplier", arguments["multiplier"], 0, MAX_MULTIPLIER)
    whole("macro_tokens", arguments["macro_tokens"])
    if arguments["macro_tokens"] > 1 and arguments["estimator"] != "gae":
        raise BadInput(
            f"macro_tokens={arguments['macro_tokens']} with estimator={arguments['estimator']!r}",
            "macro actions are steps of GAE; the other estimators give one advantage a response",
        )
    if arguments["overlong_buffer"]:
        if arguments["max_response_tokens"] is None:
            raise BadInput(
                f"overlong_buffer={arguments['overlong_buffer']} without max_response_tokens",
                "the penalty begins that many tokens before the longest response that is allowed",
                "give max_response_tokens, the max_new_tokens of the rollouts",
            )
        within("overlong_buffer", arguments["overlong_buffer"], 0, arguments["max_response_tokens"])


class NumericWorker(Worker):
    """Runs in the actor's pool."""

    @register(
        DP_PROTO,
        reads=advantage_columns,
        optional=_optional,
        writes=_written,
        minibatched=True,
        check=_check,
        check_columns=check_estimator_columns,
    )
    def compute_advantages(
        self,
        batch: Shard,
        *,
        estimator: Estimator | Callable[..., Any] = "gae",
        gamma: float = 1.0,
        lam: float = 0.95,
        bootstrap: bool = False,
        macro_tokens: int = 1,
        kl_coefficient: float = 0.0,
        kl: KLKind = "k1",
        overlong_buffer: int = 0,
        max_response_tokens: int | None = None,
        whiten_advantages: bool | None = None,
        correction: Correction | None = None,
        multiplier: float | None = None,
        count_invalid: bool = False,
    ) -> Output:
        """Advantages and returns from rewards, a number a response token.

        estimator: "gae" (PPO; reads `values`); "remax" (reads `baseline_rewards`, scores of greedy responses) and
        "reinforce_pp": reward to go; over the samples of one prompt "grpo", "dr_grpo" (no standard deviation),
        "grpo_batch_std" (that of all scores), "rloo", "off_policy_baseline" (VCPO), "reinforce_pp_baseline" (reward to
        go less their mean). Or a function of the whole batch, the rows of all ranks in their order, which gives
        advantages [rows] or [rows, tokens], or (advantages, returns). It asks by the names of its parameters for
        `rewards` [rows], `token_rewards` (after the penalties), `mask` (bool), `group` (of a prompt) and any column;
        numbers of tokens are [rows, tokens], 0 outside the mask. Rows that are not `valid` are not among its rows.
        bootstrap: GAE continues responses that were cut (not `finished`) with `final_values`, see `compute_values`;
        False: after the last token nothing more is to come, cut or not. macro_tokens: tokens that GAE takes as one
        action (MA-PPO).
        kl_coefficient, kl: per-token penalty against `ref_log_prob` in the reward, and its estimator.
        overlong_buffer: DAPO's penalty of rewards, down to -1 over the last so many of max_response_tokens, counted as
        the rollouts' limit counts them, with what an environment wrote; 0: none.
        whiten_advantages: to mean 0 and variance 1 over the tokens of the whole batch; None: for gae and reinforce_pp.
        correction: that of the update, `update_actor(correction=...)`: "off_policy_baseline" takes the weights of its
        level, before they are bounded; the other estimators do not look at it.
        multiplier: Safe-RLHF's; the advantages of `costs`, whose penalty has the other sign, are held against those of
        the rewards, see `lagrangian`, before whitening. For them `values`, `final_values` and `baseline_rewards` are
        the columns `cost_values`, `final_cost_values` and `baseline_costs`, in a function of yours too.
        count_invalid: rows that are not `valid` are left out of baselines, deviations, whitening and metrics, and their
        advantages are 0. So is a prompt of which fewer than 2 rows are valid, where its rows are each other's baseline
        (metric `dropped_groups`), and a row whose greedy response failed. The column `counted`, made anew by each call,
        tells the updates which rows are left. True counts the scores of invalid rows too; the updates leave them out
        all the same, unless the column `valid` is dropped.
        Columns: `token_rewards` (after the penalties), `advantages`, `returns`; with a multiplier `cost_returns`.
        """
        metrics: Metrics = {}
        given, batch = batch, self._with_baselines(batch, estimator, count_invalid, metrics)
        mask, valid_B = batch.valid_mask, batch.valid
        mask_BT, rows = mask.pad().bool(), int(valid_B.sum())
        tokens = float(mask_BT.sum())
        all_reduce = self.context.communicator.all_reduce

        def mean(name: str, total: Tensor, count: float) -> None:
            metrics[f"{name}/mean"] = Mean(
                total=float((total[valid_B] if total.ndim == 1 else total).sum()), count=count
            )

        def over_groups(scores_B: Tensor, penalised_B: Tensor) -> Tensor:
            return self._over_groups(scores_B, penalised_B, batch, mask_BT, estimator, correction, metrics)

        def estimate(signal: Signal) -> tuple[Tensor, Tensor, Tensor]:
            """Token rewards, advantages and returns."""
            scores = self._scores(batch, signal.scores, mask_BT)
            scores_B = response_scores(scores, mask_BT)
            mean(signal.scores, scores_B, rows)
            rewards_BT = self._token_rewards(batch, scores, mask_BT, kl_coefficient, kl, signal.sign)
            penalty_B = torch.zeros(len(batch))
            if overlong_buffer and signal is REWARD:
                assert max_response_tokens is not None
                penalty_B = overlong_penalty(mask.lengths, max_response_tokens, overlong_buffer)
                mean("overlong_penalty", penalty_B, rows)
                rewards_BT = rewards_BT + token_rewards(penalty_B, rewards_BT, None, mask_BT, 0.0)
            if callable(estimator):
                of_tokens_BT, returns = estimated(
                    estimator, given, scores_B, rewards_BT, self.context.communicator, signal, valid_B
                )
                return (
                    rewards_BT,
                    of_tokens_BT,
                    reinforce(rewards_BT, mask_BT, gamma)[1] if returns is None else returns,
                )
            if estimator == "gae":
                values_BT, after_B = batch.ragged(signal.values).pad(), None
                if macro_tokens > 1:
                    return rewards_BT, *macro_gae(rewards_BT, values_BT, mask_BT, gamma, lam, macro_tokens)
                if bootstrap:
                    after_B = torch.where(batch.numbers("finished").bool(), 0.0, batch.numbers(signal.final_values))
                advantages_BT, returns_BT = gae(rewards_BT, values_BT, mask_BT, gamma, lam, after_B)
                both = all_reduce(torch.stack([moments(x, mask_BT) for x in (returns_BT, returns_BT - values_BT)]))
                explained = explained_variance(*both)
                if not math.isnan(explained):
                    metrics[f"{signal.values}/explained_variance"] = Mean(total=explained, count=1)
                return rewards_BT, advantages_BT, returns_BT
            if estimator == "reinforce_pp":
                return rewards_BT, *reinforce(rewards_BT, mask_BT, gamma)
            if estimator == "remax":
                # of other responses, whose mask is not this batch's
                baseline = self._scores(batch, signal.baseline)
                baseline_B = baseline if baseline.ndim == 1 else baseline.double().sum(-1)
                mean(signal.baseline, baseline_B, rows)
                return rewards_BT, *reinforce(rewards_BT, mask_BT, gamma, baseline_B)
            if estimator == "reinforce_pp_baseline":
                centred_B = over_groups(scores_B, scores_B)
                return rewards_BT, *reinforce(rewards_BT, mask_BT, gamma, scores_B - centred_B)
            penalised_B = scores_B + penalty_B
            if kl_coefficient:
                nothing = torch.zeros(len(batch))
                kl_BT = self._token_rewards(batch, nothing, mask_BT, kl_coefficient, kl, signal.sign)
                penalised_B = penalised_B + kl_BT.double().sum(-1)
            advantages_B = over_groups(scores_B, penalised_B)
            return rewards_BT, advantages_B[:, None] * mask_BT, penalised_B[:, None] * mask_BT

        rewards_BT, advantages_BT, returns_BT = estimate(REWARD)
        columns = {"token_rewards": rewards_BT, "returns": returns_BT}
        mean("returns", returns_BT, tokens)
        if multiplier is not None:
            _, cost_advantages_BT, columns["cost_returns"] = estimate(COST)
            mean("cost_returns", columns["cost_returns"], tokens)
            advantages_BT = lagrangian(advantages_BT, cost_advantages_BT, multiplier)
            metrics["multiplier"] = Mean(total=multiplier, count=1)
        if whiten_advantages or (whiten_advantages is None and estimator in WHITENED):
            total = all_reduce(moments(advantages_BT, mask_BT))
            advantages_BT = whiten(advantages_BT, mask_BT, total)
        columns["advantages"] = advantages_BT
        mean("advantages", advantages_BT, tokens)
        if "old_log_prob" in batch.columns and "ref_log_prob" in batch.columns:
            kl_BT = kl_estimate(batch.ragged("old_log_prob").pad(), batch.ragged("ref_log_prob").pad(), "k1")
            total_kl = float((kl_BT * mask_BT).sum())
            metrics["reference_kl"] = Mean(total=total_kl, count=tokens)
            metrics["reference_kl_per_response"] = Mean(total=total_kl, count=rows)
        made: Table = {name: Ragged.unpad(values_BT.float(), mask.lengths) for name, values_BT in columns.items()}
        if "counted" in batch.columns:
            made["counted"] = valid_B
            metrics["valid/fraction"] = Mean(total=rows, count=len(batch))
        return Output(columns=made, metrics=metrics)

    def _with_baselines(
        self, batch: Shard, estimator: Estimator | UserFunction, count_invalid: bool, metrics: Metrics
    ) -> Shard:
        """The shard with its column `counted` made anew: valid rows with a baseline. Rows whose greedy response failed
        have none, nor has the only valid row of a prompt whose rows are each other's baseline."""
        stale = "counted" in batch.columns
        unread = {"counted", *(("valid", "baseline_valid") if count_invalid else ())}
        batch = replace(batch, columns={name: column for name, column in batch.columns.items() if name not in unread})
        valid_B = batch.valid
        if "baseline_valid" in batch.columns and reads_greedy(estimator):
            valid_B = valid_B & batch.numbers("baseline_valid").bool()
        elif "valid" not in batch.columns and not stale:
            return batch
        if estimator in GROUPED:
            groups_B = batch.numbers("prompt_uid")
            every_N, left_N = self._gathered(groups_B), self._gathered(groups_B[valid_B])
            enough_G, counts_G = torch.unique(left_N, return_counts=True)
            enough_G = enough_G[counts_G > 1]
            valid_B = valid_B & torch.isin(groups_B, enough_G)
            metrics["dropped_groups"] = Max(value=float(len(torch.unique(every_N)) - len(enough_G)))
        return replace(batch, columns={**batch.columns, "counted": valid_B})

    @staticmethod
    def _scores(batch: Shard, name: str, mask_BT: Tensor | None = None) -> Tensor:
        """A column of scores: [rows], or [rows, response tokens], 0 where a response has others inside its mask."""
        column = batch.columns[name]
        assert not isinstance(column, list)  # the schema has numbers
        scores = column.pad() if isinstance(column, Ragged) else column
        return torch.where(counted(mask_BT), scores, 0.0) if scores.ndim == 2 and mask_BT is not None else scores

    @staticmethod
    def _token_rewards(
        batch: Shard, scores: Tensor, mask_BT: Tensor, kl_coefficient: float, kl: KLKind, sign: int
    ) -> Tensor:
        old_BT, ref_BT = torch.zeros_like(mask_BT, dtype=torch.float32), None
        if kl_coefficient:
            old_BT, ref_BT = batch.ragged("old_log_prob").pad(), batch.ragged("ref_log_prob").pad()
        # what lowers a reward raises a cost: the cost is a reward turned round
        return sign * token_rewards(sign * scores, old_BT, ref_BT, mask_BT, kl_coefficient, kl)

    def _over_groups(
        self,
        scores_B: Tensor,
        penalised_B: Tensor,
        batch: Shard,
        mask_BT: Tensor,
        estimator: object,
        correction: Correction | None,
        metrics: Metrics,
    ) -> Tensor:
        """The advantage of each response over the others of its prompt, [B], by penalised scores; whether a prompt's
        scores differ at all is decided without penalties."""
        # The samples of a prompt may lie on several ranks: every rank sees all valid scores, a number a row.
        valid_B, all_groups_B = batch.valid, batch.numbers("prompt_uid")
        all_groups_N = self._gathered(all_groups_B)
        communicator = self.context.communicator
        shards = communicator.all_gather(penalised_B[valid_B])
        scores_N, groups_N = torch.cat(shards), self._gathered(all_groups_B[valid_B])
        if estimator != "rloo" and len(torch.unique(all_groups_N)) == len(all_groups_N):
            raise BadInput(
                f"estimator={estimator!r} on one response a prompt",
                "the other responses of a prompt are the baseline: alone, every advantage is 0",
                "generate with samples=2 or more",
            )
        if estimator == "rloo":
            advantages_N = rloo(scores_N, groups_N)
        elif estimator == "off_policy_baseline":
            mask_BT = mask_BT[valid_B]
            old_BT, rollout_BT = (batch.ragged(name).pad()[valid_B] for name in ("old_log_prob", "rollout_log_prob"))
            assert correction is not None
            check_untruncated(f"{correction}", batch.meta.get(TRUNCATION, {}))
            weight_BT = raw_weights(old_BT, rollout_BT, mask_BT, correction.level)
            tokens_B = mask_BT.sum(-1)
            # its gradient is the sum of its tokens', each times its own weight: w^2 |g|^2 is that of their mean square
            weight_B = (weight_BT.square().sum(-1) / tokens_B.clamp(min=1)).sqrt()
            weight_N, tokens_N = self._gathered(weight_B), self._gathered(tokens_B)
            centred_N = scores_N - off_policy_baseline(scores_N, groups_N, weight_N, tokens_N)
            advantages_N = centred_N / group_deviation(scores_N, groups_N)
        elif estimator == "reinforce_pp_baseline":
            advantages_N = scores_N - group_mean(scores_N, groups_N)
        elif estimator == "grpo_batch_std":
            advantages_N = grpo_batch_std(scores_N, groups_N)
        else:
            advantages_N = grpo(scores_N, groups_N, scale_by_std=estimator == "grpo")
        before = sum(map(len, shards[: communicator.rank]))
        mine = slice(before, before + int(valid_B.sum()))
        without = ~with_variance(self._gathered(scores_B[valid_B]), groups_N)[mine]
        metrics.setdefault("without_variance/fraction", Mean(total=float(without.sum()), count=int(valid_B.sum())))
        advantages_B = torch.zeros(len(batch))
        advantages_B[valid_B] = advantages_N[mine].float()
        return advantages_B

    def _gathered(self, x_B: Tensor) -> Tensor:
        return torch.cat(self.context.communicator.all_gather(x_B))
