"""The numeric role: arithmetic over the whole batch, without a model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Annotated, Any

from pydantic import Field

from workbench.batches.columns import Ragged, Table
from workbench.batches.schema import CONTEXT_STARTS
from workbench.errors import BadInput
from workbench.errors.plain_text import shown
from workbench.messages.calls import Output
from workbench.messages.metrics import Mean, Metrics
from workbench.messages.operation import register
from workbench.messages.protocols import DP_PROTO
from workbench.messages.shards import Shard
from workbench.objectives.correction import Correction
from workbench.objectives.estimators import moments, whiten
from workbench.objectives.kl import KLKind, kl_estimate
from workbench.objectives.lagrangian import MAX_MULTIPLIER, lagrangian
from workbench.support.validation import NonNegativeFloat, NonNegativeInt, Number, PositiveInt, ZeroToOne
from workbench.workers.advantages import (
    BY_TURN,
    GROUPED,
    WHITENED,
    WITH_CRITIC,
    Estimation,
    Estimator,
    MacroTokens,
    with_baselines,
)
from workbench.workers.user_estimator import AN_ESTIMATOR, COST, GIVEN, REWARD, Signal
from workbench.workers.user_loss import ParameterNames, UserFunction, check_asked, check_function
from workbench.workers.worker import Worker


def _scored(signal: Signal, estimator: Estimator | UserFunction) -> tuple[str, ...]:
    """Return the columns of a signal that an estimator needs."""
    if callable(estimator):
        asked = ParameterNames.of(estimator)
        scores = (signal.scores,) if {"rewards", "token_rewards"} & set(asked.names) else ()
        return *scores, *signal.columns(asked.needed)
    critics = dict.fromkeys(WITH_CRITIC, (signal.values,))
    return signal.scores, *{**critics, "remax": (signal.baseline,)}.get(estimator, ())


def _signals(arguments: Mapping[str, Any]) -> tuple[Signal, ...]:
    return (REWARD,) if arguments["multiplier"] is None else (REWARD, COST)


def advantage_columns(arguments: Mapping[str, Any]) -> tuple[str, ...]:
    signals = _signals(arguments)
    columns = [name for signal in signals for name in _scored(signal, arguments["estimator"])]
    if arguments["bootstrap"]:
        columns += ["finished", *(signal.final_values for signal in signals)]
    if arguments["estimator"] in GROUPED:
        columns += ["prompt_uid"]
    if arguments["estimator"] in BY_TURN:
        columns += ["turn_ends"]
    if arguments["estimator"] == "off_policy_baseline":
        columns += ["old_log_prob", "rollout_log_prob"]
    if arguments["kl_coefficient"]:
        columns += ["old_log_prob", "ref_log_prob"]
    columns += {"perplexity": ["ref_log_prob"], "steps": ["step_ends"]}.get(str(arguments["macro_tokens"]), [])
    return tuple(dict.fromkeys(("response_mask", *columns)))


def _optional(arguments: Mapping[str, Any]) -> tuple[str, ...]:
    status = () if arguments["count_invalid"] else ("valid", "baseline_valid")
    estimator = arguments["estimator"]
    if callable(estimator):
        asked = ParameterNames.of(estimator).optional
        of_estimator = tuple(name for signal in _signals(arguments) for name in (signal.scores, *signal.columns(asked)))
    else:
        of_estimator = {"grpo_process": ("step_ends",), "off_policy_baseline": ("gradient_norm",)}.get(estimator, ())
    contexts = (CONTEXT_STARTS,) if arguments["overlong_buffer"] else ()
    return tuple(dict.fromkeys(("old_log_prob", "ref_log_prob", *of_estimator, *status, *contexts, "counted")))


def _written(arguments: Mapping[str, Any]) -> tuple[str, ...]:
    columns = ("advantages", "returns", "token_rewards")
    return columns if arguments["multiplier"] is None else (*columns, "cost_returns")


def _check(arguments: Mapping[str, Any]) -> None:
    if callable(arguments["estimator"]):
        check_function("estimator", arguments["estimator"], AN_ESTIMATOR)
    if arguments["bootstrap"] and (arguments["estimator"] not in WITH_CRITIC or arguments["macro_tokens"] != 1):
        raise BadInput(
            f"bootstrap=True with estimator={arguments['estimator']!r}, macro_tokens={arguments['macro_tokens']!r}",
            "only 'gae' with macro_tokens=1 and 'gae_turn' use values to continue a response that was cut",
        )
    if arguments["estimator"] == "off_policy_baseline" and not isinstance(arguments["correction"], Correction):
        raise BadInput(
            f"estimator='off_policy_baseline' with correction={shown(arguments['correction'])}",
            "its baseline depends on the weights that the update's correction gives",
            "give the same wb.Correction(...) as to update_actor",
        )
    if arguments["macro_tokens"] != 1 and arguments["estimator"] != "gae":
        raise BadInput(
            f"macro_tokens={arguments['macro_tokens']!r} with estimator={arguments['estimator']!r}",
            "only the estimator 'gae' has macro actions",
        )
    if arguments["overlong_buffer"]:
        if (longest := arguments["max_response_tokens"]) is None:
            raise BadInput(
                f"overlong_buffer={arguments['overlong_buffer']} without max_response_tokens",
                "the penalty begins that many tokens before the limit of a response",
                "give max_response_tokens, the max_new_tokens of the rollouts",
            )
        if arguments["overlong_buffer"] > longest:
            raise BadInput(f"overlong_buffer={arguments['overlong_buffer']}", f"must lie in [0, {longest}]")


class NumericWorker(Worker):
    """Computes advantages and returns; runs in the actor's pool."""

    @register(
        DP_PROTO,
        reads=advantage_columns,
        optional=_optional,
        writes=_written,
        minibatched=True,
        check=_check,
        check_columns=partial(check_asked, "estimator", GIVEN),
    )
    def compute_advantages(
        self,
        batch: Shard,
        *,
        estimator: Estimator | Callable[..., Any] = "gae",
        gamma: ZeroToOne = 1.0,
        lam: ZeroToOne = 0.95,
        bootstrap: bool = False,
        macro_tokens: MacroTokens = 1,
        kl_coefficient: NonNegativeFloat = 0.0,
        kl: KLKind = "k1",
        overlong_buffer: NonNegativeInt = 0,
        max_response_tokens: PositiveInt | None = None,
        whiten_advantages: bool | None = None,
        correction: Correction | None = None,
        multiplier: Annotated[Number, Field(ge=0, le=MAX_MULTIPLIER)] | None = None,
        count_invalid: bool = False,
    ) -> Output:
        """Advantages and returns from rewards, one number per response token.

        estimator: "gae" (PPO; reads `values`); "remax" (reads `baseline_rewards`, scores of greedy responses) and
        "reinforce_pp": reward to go; over the samples of one prompt "grpo", "dr_grpo" (no standard deviation),
        "grpo_batch_std" (standard deviation of all scores), "rloo", "off_policy_baseline" (VCPO),
        "reinforce_pp_baseline" (reward to go minus the prompt's mean score), "grpo_process" (normalised rewards of
        steps from a token on; steps end where `step_ends` is 1, or without that column at each token; a score of the
        whole response is one step). With a turn of a conversation as the action (turns end at `turn_ends`): "gae_turn"
        (reads `values` at the first token of a turn), "reinforce_turn" and "reinforce_turn_baseline" (minus the mean
        score of the prompt's conversations): gamma and lam count turns, and each token gets its turn's advantage. Or a
        function of the whole batch, the rows of all ranks in their order, which returns advantages [rows] or [rows,
        tokens], or (advantages, returns). Its parameters name `rewards` [rows], `token_rewards` (after the penalties),
        `mask` (bool), `group` (of a prompt) and any column; per-token numbers are [rows, tokens], 0 outside the mask.
        It does not get rows that are not `valid`. If it takes neither `rewards` nor `token_rewards`, the batch needs no
        rewards; the column `token_rewards` is then 0 without penalties, and `returns` too unless it returns them.
        bootstrap: GAE continues responses that were cut (not `finished`) with `final_values`, see `compute_values`;
        False: after the last token nothing more is to come, cut or not. macro_tokens: tokens that GAE takes as one
        action (MA-PPO): a number; "random": 1, 2, 3, 5 or 10, drawn; "perplexity": as long as each token is likelier
        than the one before by `ref_log_prob`; "steps": up to each `step_ends`, see `compute_reward(steps=)`.
        kl_coefficient, kl: per-token penalty against `ref_log_prob` in the reward, and its estimator.
        overlong_buffer: DAPO's penalty of rewards, which falls to -1 over the last `overlong_buffer` of
        max_response_tokens. Tokens are counted as for the rollouts' limit, with an environment's tokens, in the longest
        context of a response; 0: none.
        whiten_advantages: to mean 0 and variance 1 over the tokens of the whole batch; None: only with the estimators
        "gae...", "reinforce_...".
        correction: the update's, `update_actor(correction=...)`: "off_policy_baseline" uses the weights of its level,
        before they are bounded, and reads `gradient_norm`, see `compute_gradient_norm`; without that column it takes
        the squared norm as proportional to the number of tokens. The other estimators ignore it.
        multiplier: Safe-RLHF's; the advantages of `costs`, to which the KL penalty is added, are weighed against those
        of the rewards, see `lagrangian`, before whitening. For costs, the columns `cost_values`, `final_cost_values`
        and `baseline_costs` replace `values`, `final_values` and `baseline_rewards`, in a function of yours too.
        count_invalid: False: rows that are not `valid` are left out of baselines, deviations, whitening and metrics,
        and their advantages are 0. So are prompts with fewer than 2 valid rows, if a prompt's rows are each other's
        baseline (metric `dropped_groups`), and rows whose greedy response failed. The column `counted`, written by each
        call, tells the updates which rows are left. True: invalid rows' scores count too; the updates still leave these
        rows out, unless the column `valid` is dropped.
        Columns: `token_rewards` (after the penalties), `advantages`, `returns`; with a multiplier `cost_returns`.
        """
        metrics: Metrics = {}
        counting = with_baselines(batch, estimator, count_invalid, self.context.communicator, metrics)
        estimation = Estimation(
            given=batch, batch=counting, communicator=self.context.communicator, metrics=metrics, estimator=estimator,
            gamma=gamma, lam=lam, bootstrap=bootstrap, macro_tokens=macro_tokens,
            kl_coefficient=kl_coefficient, kl=kl, overlong_buffer=overlong_buffer,
            max_response_tokens=max_response_tokens, correction=correction,
        )  # fmt: skip
        rewards_BT, advantages_BT, returns_BT = estimation.of(REWARD)
        columns = {"token_rewards": rewards_BT, "returns": returns_BT}
        estimation.note_mean("returns", returns_BT, estimation.tokens)
        if multiplier is not None:
            _, of_costs_BT, columns["cost_returns"] = estimation.of(COST)
            estimation.note_mean("cost_returns", columns["cost_returns"], estimation.tokens)
            advantages_BT = lagrangian(advantages_BT, of_costs_BT, multiplier)
            metrics["multiplier"] = Mean(total=multiplier, count=1)
        if whiten_advantages or (whiten_advantages is None and estimator in WHITENED):
            total = self.context.communicator.all_reduce(moments(advantages_BT, estimation.mask_BT))
            advantages_BT = whiten(advantages_BT, estimation.mask_BT, total)
        columns["advantages"] = advantages_BT
        estimation.note_mean("advantages", advantages_BT, estimation.tokens)
        metrics |= _reference_kl(counting, estimation)
        lengths = counting.valid_mask.lengths
        made: Table = {name: Ragged.unpad(values_BT.float(), lengths) for name, values_BT in columns.items()}
        if "counted" in counting.columns:
            made["counted"] = counting.valid
            metrics["valid/fraction"] = Mean(total=estimation.rows, count=len(batch))
        return Output(columns=made, metrics=metrics, notes=tuple(estimation.notes))


def _reference_kl(batch: Shard, estimation: Estimation) -> Metrics:
    """Return the policy's KL from the reference, per token and per response, where both are known."""
    if "old_log_prob" not in batch.columns or "ref_log_prob" not in batch.columns:
        return {}
    kl_BT = kl_estimate(batch.ragged("old_log_prob").pad(), batch.ragged("ref_log_prob").pad(), "k1")
    total = float((kl_BT * estimation.mask_BT).sum())
    return {
        "reference_kl": Mean(total=total, count=estimation.tokens),
        "reference_kl_per_response": Mean(total=total, count=estimation.rows),
    }
