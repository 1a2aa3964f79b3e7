"""The reward and cost roles: they score responses by a model or a function."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
from pydantic import Field
from torch import Tensor

from workbench.batches.columns import Table
from workbench.batches.schema import COUNTING
from workbench.data.reward_function import Weight
from workbench.errors import BadInput
from workbench.messages.calls import Output
from workbench.messages.metrics import Max, Mean
from workbench.messages.operation import register, row_stage, update_stage
from workbench.messages.protocols import ONE_TO_ALL, THREE_D_PROTO
from workbench.messages.shards import Shard
from workbench.models import load_tokenizer
from workbench.models.heads import TokenValues, load_token_values
from workbench.models.loading import SHARD_GB
from workbench.models.packing import to_device
from workbench.models.spec import Model
from workbench.objectives.preference import pairwise_loss
from workbench.support.validation import NonNegativeInt, Number, PositiveFloat, PositiveInt, ZeroToOne
from workbench.workers.judge import JudgeEngine
from workbench.workers.micro_batches import DeviceMetrics, MicroBatch, on_host
from workbench.workers.model_worker import ModelWorker
from workbench.workers.passes import LAST_TOKEN_SCORES
from workbench.workers.roles.preferences import PAIR_COLUMNS, accuracy_bounds, pair_metrics, pair_term, pair_values
from workbench.workers.score_columns import STEP_ENDS, reported, step_ends_of, weighted, zero_failed
from workbench.workers.score_operation import RewardFunctions, scoring_stage
from workbench.workers.scoring import Components, Scoring, components_of
from workbench.workers.worker import Context


def _check_trained(arguments: Mapping[str, Any], model: Model) -> None:
    if not model.trained:
        raise BadInput(
            f"{model}, which is not trained",
            "a reward or cost model has an optimizer only if training settings are given",
            "open with wb.Model(name, training=wb.Training(...)) for this role",
        )


_scores_pairs = partial(row_stage, reads=PAIR_COLUMNS, optional=("margin", *COUNTING))
_learns_pairs = partial(update_stage, reads=PAIR_COLUMNS, optional=("margin",), check_model=_check_trained)


class RewardWorker(ModelWorker):
    """A model with a score head, or no model and a function. Functions that are arguments of a call run here too.

    The model has an optimizer if this role was declared with `Model(..., training=...)`. A judge generates.
    """

    column, sign = "rewards", 1  # the column of scores; sign: -1 if lower scores are better
    _judge: JudgeEngine | None = None

    def __init__(self, spec: Model, context: Context) -> None:
        super().__init__(spec, context)
        self.tokenizer = load_tokenizer(context.tokenizer_name)
        if spec.name is not None:
            assert spec.dtype is not None
            dtype = torch.float32 if spec.trained else getattr(torch, spec.dtype)
            module = load_token_values(
                spec.name, dtype, context.loading_device(spec.training), spec.seed, "normal", context.max_model_tokens
            )
            self.hold(module, trained=spec.trained)
        if spec.function is not None:
            context.calls.prepare(spec.function)
        if spec.judge is not None and not context.replaces_live:
            self.begin()

    def begin(self) -> None:
        if self.spec.judge is not None:
            self._judge = JudgeEngine(self.spec, self.context)

    def memory_bytes(self) -> dict[str, int]:
        judge = {} if self._judge is None else self._judge.generator.memory_bytes()
        return {**super().memory_bytes(), **{f"judge {name}": held for name, held in judge.items()}}

    def close(self) -> None:
        super().close()
        if self._judge is not None:
            self._judge.generator.close()

    def state(self) -> dict[str, Any]:
        return {**super().state(), **self.extra_state()}

    def load_state(self, state: dict[str, Any]) -> None:
        super().load_state(state)
        self.load_extra_state(state)

    def extra_state(self) -> dict[str, Any]:
        return {"shift": self._module.shift} if self.spec.trained else {}

    def load_extra_state(self, state: dict[str, Any]) -> None:
        if self.spec.trained:
            self._module.shift = state["shift"]

    @property
    def _module(self) -> TokenValues:
        assert self.engine is not None and isinstance(self.engine.module, TokenValues)
        return self.engine.module

    @register(ONE_TO_ALL)
    def save_model(self, path: str | Path, *, card: str = "", shard_gb: PositiveFloat = SHARD_GB) -> str:
        """Write the current model, including score head and centring; see the actor's `save_model`.

        transformers' `AutoModelForSequenceClassification` reads all but the head's bias, which holds the centring: its
        logits + `config.score_bias` are the scores. Differences between answers are the same without the bias, but the
        sign of a cost is not.
        """
        return self.write_weights(path, card, shard_gb)

    @register(
        THREE_D_PROTO,
        reads=lambda arguments: ("prompt_ids", arguments["answers"]),
        optional=("valid",),
        updates=True,
        check_model=_check_trained,
    )
    def center(self, batch: Shard, *, answers: str = "response_ids") -> Output:
        """Shift all scores so that the answers in this batch have mean 0. The shift is kept with the weights.

        answers: the column with the answers' tokens; "chosen_ids" for the chosen answers of pairs. Use reference
        answers, such as demonstrations: a loss on pairs leaves the level of the scores open. transformers does not add
        the shift, see `save_model`. Rows that are not `valid` do not count.
        Source: Stiennon et al. 2020, https://arxiv.org/abs/2009.01325, section 3.4.
        """
        rows = replace(batch, columns={**batch.columns, "response_ids": batch.ragged(answers)})
        assert self.engine is not None  # `_check_trained` of the operation
        scores = self.engine.everywhere(self.row_values(rows, LAST_TOKEN_SCORES))[batch.valid]
        sums = torch.tensor([float(scores.double().sum()), len(scores)], dtype=torch.float64)
        total, count = self.context.groups.data.all_reduce(sums).tolist()
        self._module.shift += total / count
        told = {"shift": Mean(total=self._module.shift, count=1), "before/mean": Mean(total=total, count=count)}
        return Output(metrics={**told, "optimizer_steps": Max(value=self.engine.steps)})

    @_scores_pairs(writes=("chosen_rewards", "rejected_rewards"))
    def compute_pair_rewards(self, batch: Shard) -> Output:
        """Columns `chosen_rewards`, `rejected_rewards` [rows]: the scores of both answers of each pair.

        Metrics, in `lab.last_metrics["compute_pair_rewards"]`: those of `update_reward`, without an update, and
        `accuracy/low`, `accuracy/high`: bounds of the accuracy's 95 % interval. All are over the rows that are `valid`.
        """
        chosen, rejected = pair_values(self, batch, LAST_TOKEN_SCORES)
        margin, valid_B, names, sign = _margin(batch), batch.valid, self._of_pairs, self.sign
        chosen_B, rejected_B = chosen[valid_B], rejected[valid_B]
        loss = pairwise_loss(sign * chosen_B, sign * rejected_B, None if margin is None else margin[valid_B])
        (metrics,) = on_host([pair_metrics(loss, chosen_B, rejected_B, names=names, sign=sign)])
        metrics |= accuracy_bounds(sign * chosen_B, sign * rejected_B, self.context.groups.data)
        return Output(columns={names[0]: chosen, names[1]: rejected}, metrics=metrics)

    @_learns_pairs()
    def update_reward(self, batch: Shard, *, epochs: PositiveInt = 1) -> Output:
        """Learn from pairs: -log sigmoid(r_chosen - r_rejected - margin), one optimizer step per minibatch (of pairs)
        and epoch; see `workbench.objectives.preference.pairwise_loss`.

        Scores are read at an answer's last token. The column `margin` is read if the batch has it.
        Metrics: `accuracy` (the chosen answer has the higher score), `margin` between the scores, their means.
        """
        margin, names, sign = _margin(batch), self._of_pairs, self.sign

        def loss(chosen_P: Tensor, rejected_P: Tensor, pairs: list[int]) -> tuple[Tensor, DeviceMetrics]:
            margin_P = None if margin is None else to_device(margin[pairs], chosen_P.device)
            loss_P = pairwise_loss(sign * chosen_P, sign * rejected_P, margin_P)
            return loss_P, pair_metrics(loss_P, chosen_P, rejected_P, names=names, sign=sign)

        return self.steps(pair_term(batch, LAST_TOKEN_SCORES, loss), epochs=epochs)

    @property
    def _of_pairs(self) -> tuple[str, str]:
        return f"chosen_{self.column}", f"rejected_{self.column}"

    @scoring_stage("rewards")
    def compute_reward(
        self,
        batch: Shard,
        *,
        function: RewardFunctions | None = None,
        weights: Mapping[str, Weight] | None = None,
        concurrency: PositiveInt | None = None,
        call_timeout_s: Annotated[Number, Field(gt=0)] = 30.0,
        retries: NonNegativeInt = 0,
        most_failed: ZeroToOne = 0.2,
        only: Any = None,
        steps: str | bool = False,
    ) -> Output:
        """Column `rewards`: one score per row [rows], or one per response token if the function returns lists; 0 on the
        tokens that the policy did not choose (outside `response_mask`).

        function: `fn(prompt, response, **row)` -> number, defined in a cell and run here, one sample per call; None:
        the role's own function or model. A model's score is read at the last response token. The function gets the
        row's text columns, and columns of your own, that its parameters name: so scores of a model, renamed, can be one
        of its inputs. `response` is without special tokens; a parameter `raw_response`
        gets the text with them, `response_ids` the token ids, `last_turn` the text of a conversation's last turn:
        `response` also contains what the environment said. After rollouts in an environment, `environment_rewards` is a
        list of one number per response token: return it to use the environment's rewards unchanged, token by token;
        return its sum to score the whole response with it.
        Several functions by name, `{"right": right, "format": (tidy, 0.2)}`, each alone (weight 1) or with its weight,
        are components: each writes a column, `rewards/right`; `rewards` is their weighted sum; see `reweigh`. If a
        component returns lists, `rewards` has one number per token, and a component of one number per row counts on the
        row's last token in `response_mask`. A function over many rows at once: `wb.batched`.
        weights: by name of the component, in place of the weights given with the functions; the others keep theirs.
        concurrency: how many calls of a function run at once, in threads, for a function that waits, say for a server.
        None: one by one, in the main thread of the function's process; for an `async def` function, eight at once.
        call_timeout_s: the time limit of a call. A longer call ends the function's process. The function's memory:
        `wb.limits`.
        retries: how often a failed call is repeated, after all other calls; for a judge's row with a new judgement, if
        the judge samples. A row whose call still fails, for any reason, is not `valid`, has reward 0, and `failure`
        says why: `batch.failed()` lists such rows.
        most_failed: the share of the batch's rows that may fail. If more fail, no further call is made, and the stage
        raises `RewardError`, whose `.batch` has the rows that were finished; 0: any failure fails the stage.
        only: `batch.failed()`, or row numbers: only these rows are scored, and the others keep their scores. Components
        are those of the batch, by name; `rewards` of all rows is computed from them with the weights given now.
        steps: the text with which steps of a response end, such as "\\n\\n" or a special token: a function returns one
        number per step and may ask for `steps`, their texts; a model's score is read at the last token of each step.
        True: the function returns (last token, number) pairs. `rewards` has the numbers on those tokens, 0 on the
        others, and the column `step_ends` is 1 on them; a number for the whole response is a step that ends with it.
        See the estimator "grpo_process" of `compute_advantages`.
        Metrics: `rewards/mean`, over the valid rows, and the mean of each component; `rewards/interval95`, half the
        width of the mean's 95 % interval with prompts as clusters (see `clustered_half_width`); `failed/fraction`.
        """
        return self._score(
            batch, self._components(function, weights), steps=steps, concurrency=concurrency,
            timeout_s=call_timeout_s, retries=retries, most_failed=most_failed, only=only,
        )  # fmt: skip

    @register(
        THREE_D_PROTO,
        reads=lambda arguments: tuple(f"rewards/{name}" for name in arguments["weights"]),
        optional=("valid", "response_mask", "prompt_uid"),
        writes=("rewards",),
        by_hand=lambda arguments: True,
    )
    def reweigh(self, batch: Shard, weights: Annotated[Mapping[str, Weight], Field(min_length=1)]) -> Output:
        """Compute column `rewards` again from the component columns that `compute_reward` wrote: no function is called.

        weights: by name of the component; a component that is not named has no part. Rows that are not valid have
        reward 0. Components of one number per row and per token are added as in `compute_reward`. `lab.compare` uses
        these rewards unchanged, so that arms differ in nothing else.
        """
        parts = [batch.columns[f"rewards/{name}"] for name in weights]
        whole = weighted(parts, list(weights.values()), batch.columns.get("response_mask"))
        whole = zero_failed(whole, batch.valid.tolist())
        return Output(columns={"rewards": whole}, **reported("rewards", whole, batch.valid, batch))

    def _components(self, function: Any, weights: Mapping[str, float] | None = None) -> Components | None:
        """Return the components of a call; None: the role's model scores."""
        function = function or self.spec.function
        if function is None:
            return None
        return {name: (one, (weights or {}).get(name, own)) for name, (one, own) in components_of(function).items()}

    def _score(
        self, batch: Shard, components: Components | None, *, steps: str | bool = False, **asking: Any
    ) -> Output:
        column = self.column
        if components is not None:
            return Scoring(
                batch=batch, context=self.context, tokenizer=self.tokenizer, column=column, components=components,
                steps=steps, judge=self._judge, **asking,
            ).output()  # fmt: skip
        if not isinstance(steps, str):
            scores = self.row_values(batch, LAST_TOKEN_SCORES)
            return Output(columns={column: scores}, **reported(column, scores, batch.valid, batch))
        ends_BT = step_ends_of(batch, self.tokenizer, steps)
        read = self.token_values(batch, lambda micro: {**micro.inputs, "positions": _own_positions(micro)})
        scores_BT = ends_BT.like(torch.where(ends_BT.values, read.values, 0.0))
        columns: Table = {column: scores_BT, STEP_ENDS: ends_BT}
        return Output(columns=columns, **reported(column, scores_BT, batch.valid, batch))


class CostWorker(RewardWorker):
    """The cost model of Safe-RLHF: a reward worker that writes `costs`."""

    column, sign = "costs", -1
    compute_reward = None  # type: ignore[assignment]
    reweigh = None  # type: ignore[assignment]
    compute_pair_rewards = None  # type: ignore[assignment]
    update_reward = None  # type: ignore[assignment]

    @scoring_stage("costs")
    def compute_cost(
        self,
        batch: Shard,
        *,
        function: RewardFunctions | None = None,
        concurrency: PositiveInt | None = None,
        call_timeout_s: Annotated[Number, Field(gt=0)] = 30.0,
        retries: NonNegativeInt = 0,
        most_failed: ZeroToOne = 0.2,
        only: Any = None,
    ) -> Output:
        """Column `costs`, computed as `compute_reward` computes `rewards`."""
        return self._score(
            batch, self._components(function), concurrency=concurrency, timeout_s=call_timeout_s,
            retries=retries, most_failed=most_failed, only=only,
        )  # fmt: skip

    @_scores_pairs(writes=("chosen_costs", "rejected_costs"))
    def compute_pair_costs(self, batch: Shard) -> Output:
        """Columns `chosen_costs`, `rejected_costs` [rows], as in `compute_pair_rewards`; a pair counts as accurate if
        the chosen answer has the lower cost."""
        return RewardWorker.compute_pair_rewards(self, batch)

    @_learns_pairs()
    def update_cost(self, batch: Shard, *, epochs: PositiveInt = 1) -> Output:
        """Learn from pairs as `update_reward` does, with the opposite sign: the chosen (safer) answer is to cost less.

        Source: the pairwise term of Safe-RLHF's cost model, Dai et al. 2023, https://arxiv.org/abs/2310.12773, equation
        6. (`center` then decides which costs are harmless: answers at the limit have mean 0.)
        """
        return RewardWorker.update_reward(self, batch, epochs=epochs)


def _own_positions(micro: MicroBatch) -> Tensor:
    """Return each response token's own position, [N]. `micro.inputs` has the position before it, which predicts it."""
    positions_N, rows_N = micro.inputs["positions"], micro.response_rows
    is_last_N = torch.ones_like(rows_N, dtype=torch.bool)
    is_last_N[:-1] = rows_N[1:] != rows_N[:-1]
    return torch.where(is_last_N, micro.last[rows_N], positions_N.roll(-1))


def _margin(batch: Shard) -> Tensor | None:
    return batch.numbers("margin") if "margin" in batch.columns else None
