"""Reward and cost: scores of responses, by a model or by a rule."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any, TypeVar

import torch
from pydantic import Field
from torch import Tensor

from workbench.batches.schema import SCHEMA, STATUS
from workbench.data.batched import over_of
from workbench.data.reward_function import RewardFunction, check_function, check_parameters
from workbench.data.user_functions import RAW_RESPONSE
from workbench.engines.training import TrainingEngine
from workbench.errors import BadInput
from workbench.messages.metrics import Max, Mean
from workbench.messages.operation import ALL_TEXT, register
from workbench.messages.protocols import ONE_TO_ALL, THREE_D_PROTO
from workbench.messages.replies import Output
from workbench.messages.shards import Shard
from workbench.models import load_tokenizer
from workbench.models.heads import TokenValues, load_token_values
from workbench.models.packing import to_device
from workbench.models.spec import Model
from workbench.objectives.arguments import within
from workbench.objectives.preference import pairwise_loss
from workbench.support.calls.pickling import name_of
from workbench.support.validation import FINITE, Number, Rule, at_least, whole
from workbench.workers.device_metrics import DeviceMetrics, on_host
from workbench.workers.inference import each_row
from workbench.workers.model_worker import ModelWorker
from workbench.workers.readings import LAST_TOKEN_SCORES
from workbench.workers.roles.pairs import PAIR_COLUMNS, accuracy_bounds, pair_metrics, pair_term, pair_values
from workbench.workers.saving import save_model
from workbench.workers.scoring import (
    Scoring,
    check_same_components,
    component_columns,
    components_of,
    row_numbers,
    total_of,
)
from workbench.workers.worker import Context

F = TypeVar("F", bound=Callable[..., Any])
TOKENS = ("prompt_ids", "response_ids")
OF_ROW = (ALL_TEXT, "environment_rewards")  # what a function may be given beside prompt and response
_NUMBERS = set(SCHEMA) - set(OF_ROW)  # columns that no function is given
# a function, or components: functions by name, each alone or with its weight
RewardFunctions = Annotated[
    RewardFunction
    | Mapping[
        Annotated[str, Field(pattern=r"^\w+$")], RewardFunction | tuple[RewardFunction, Annotated[Number, FINITE]]
    ],
    Rule(
        "must be a function, or functions by name (letters, digits, _), each alone or as (function, weight)",
        'write {"right": right, "format": (tidy, 0.2)}',
    ),
]


def _check(arguments: Mapping[str, Any]) -> None:
    whole("concurrency", arguments["concurrency"], 1)
    at_least("call_timeout_s", arguments["call_timeout_s"], 0, strictly=True)
    whole("retries", arguments["retries"], 0)
    within("most_failed", arguments["most_failed"], 0, 1)
    row_numbers(arguments["only"])
    if arguments["function"] is not None:
        if not components_of(arguments["function"]):
            raise BadInput("function={}", "components by name", 'write function={"right": right}')
        for function, _ in components_of(arguments["function"]).values():
            check_function(function)


def _check_row(column: str, arguments: Mapping[str, Any], model: Model, columns: Collection[str]) -> None:
    if arguments["function"] is None:
        if arguments["only"] is not None:
            raise BadInput("only= without a function", "a model scores all rows, and fails for none", "leave it out")
        return
    if arguments["only"] is not None:
        check_same_components(column, arguments["function"], columns)
    given = {
        "prompt",
        "response",
        *RAW_RESPONSE,
        *(name for name in columns if name not in _NUMBERS and "/" not in name),
    }
    for function, _ in components_of(arguments["function"]).values():
        check_parameters(function, sorted(given))
        if over_of(function) == "group" and "prompt_uid" not in columns:
            raise BadInput(
                f"{name_of(function)} over groups, of a batch without 'prompt_uid'",
                "that column says which rows are of one prompt", "take a batch of lab.prompts.next(n), or put it",
            )  # fmt: skip


def _optional(arguments: Mapping[str, Any]) -> tuple[str, ...]:
    return (*OF_ROW, "response_mask", *(("prompt_uid", *STATUS) if arguments["function"] is not None else ()))


def _stage(column: str) -> Callable[[F], F]:
    """An operation that writes a column of scores. Functions write beside it which rows failed, and components."""

    def own(arguments: Mapping[str, Any]) -> tuple[str, ...]:
        return (column, *component_columns(column, arguments["function"]))

    def writes(arguments: Mapping[str, Any]) -> tuple[str, ...]:
        return (*own(arguments), *STATUS) if arguments["function"] is not None else (column,)

    def reads(arguments: Mapping[str, Any]) -> tuple[str, ...]:
        return TOKENS if arguments["only"] is None else (*TOKENS, *own(arguments))

    return register(
        THREE_D_PROTO, reads=reads, optional=_optional, writes=writes, minibatched=True, check=_check,
        check_columns=partial(_check_row, column), by_hand=lambda arguments: arguments["only"] is not None,
    )  # fmt: skip


def _check_trained(arguments: Mapping[str, Any], model: Model) -> None:
    if not model.trained:
        raise BadInput(
            f"{model}, which is not trained",
            "a reward or cost model has an optimizer where its settings are given",
            "open with wb.Model(name, training=wb.Training(...)) for this role",
        )


def _check_epochs(arguments: Mapping[str, Any]) -> None:
    whole("epochs", arguments["epochs"], 1)


_on_pairs = partial(register, THREE_D_PROTO, reads=PAIR_COLUMNS, optional=("margin",), minibatched=True)


class RewardWorker(ModelWorker):
    """A model with a score head, or no model and a function. Functions given to a call run here too.

    The model has an optimizer where `Model(..., training=...)` was given for this role.
    """

    def __init__(self, spec: Model, context: Context) -> None:
        super().__init__(spec, context)
        self.tokenizer = load_tokenizer(context.tokenizer_name)
        if spec.name is not None:
            assert spec.dtype is not None
            dtype = torch.float32 if spec.trained else getattr(torch, spec.dtype)
            module = load_token_values(
                spec.name, dtype=dtype, device=context.loading_device, seed=spec.seed, init="normal"
            )
            self.hold(module, trained=spec.trained)
        if spec.function is not None:
            context.calls.prepare(spec.function)

    def state(self) -> dict[str, Any]:
        return {**self.trained_state(), "shift": self._module.shift} if self.spec.trained else {}

    def load_state(self, state: dict[str, Any]) -> None:
        if self.spec.trained:
            self.load_trained_state(state)
            self._module.shift = state["shift"]

    def extra_state(self) -> dict[str, Any]:
        return {"shift": self._module.shift} if self.spec.trained else {}

    def load_extra_state(self, state: dict[str, Any]) -> None:
        if self.spec.trained:
            self._module.shift = state["shift"]

    @property
    def _model(self) -> TrainingEngine:
        if self.engine is None:
            raise BadInput(f"{type(self).__name__} has no model", "it was declared with a function")
        return self.engine

    @property
    def _module(self) -> TokenValues:
        module = self._model.module
        assert isinstance(module, TokenValues)
        return module

    @register(ONE_TO_ALL)
    def save_model(self, path: str | Path) -> str:
        """Write the model as it is now, score head and centring included; see the actor's `save_model`.

        transformers' `AutoModelForSequenceClassification` reads all but the head's bias, in which the centring is: its
        logits + `config.score_bias` are the scores. Differences between answers are the same without it, the sign of a
        cost is not.
        """
        assert self.spec.name is not None
        return save_model(self._model, path, self.spec.name, self.context)

    @register(
        THREE_D_PROTO,
        reads=lambda arguments: ("prompt_ids", arguments["answers"]),
        updates=True,
        check_model=_check_trained,
    )
    def center(self, batch: Shard, *, answers: str = "response_ids") -> Output:
        """Shift all scores so that the answers in this batch have mean 0. The shift is kept with the weights.

        answers: the column with their tokens; "chosen_ids" for those of pairs. Take reference answers, such as
        demonstrations: a loss on pairs leaves the level of the scores open. transformers adds no level: `save_model`.
        Source: Stiennon et al. 2020, https://arxiv.org/abs/2009.01325, section 3.4.
        """
        scores = self._scores(replace(batch, columns={**batch.columns, "response_ids": batch.ragged(answers)}))
        scores = self._model.everywhere(scores)
        sums = torch.tensor([float(scores.double().sum()), len(scores)], dtype=torch.float64)
        total, count = self.context.groups.data.all_reduce(sums).tolist()
        self._module.shift += total / count
        told = {"shift": Mean(total=self._module.shift, count=1), "before/mean": Mean(total=total, count=count)}
        return Output(metrics={**told, "optimizer_steps": Max(value=self._model.steps)})

    @_on_pairs(writes=("chosen_rewards", "rejected_rewards"))
    def compute_pair_rewards(self, batch: Shard) -> Output:
        """Columns `chosen_rewards`, `rejected_rewards` [rows]: the scores of both answers of each pair.

        Metrics, in `lab.last_metrics["compute_pair_rewards"]`: what `update_reward` says, without an update, and
        `accuracy/low`, `accuracy/high`: bounds of the accuracy's 95 % interval.
        """
        return self._score_pairs(batch, ("chosen_rewards", "rejected_rewards"), sign=1)

    @_on_pairs(updates=True, check=_check_epochs, check_model=_check_trained)
    def update_reward(self, batch: Shard, *, epochs: int = 1) -> Output:
        """Learn from pairs: -log sigmoid(r_chosen - r_rejected - margin), one optimizer step a minibatch (of pairs) and
        epoch; see `workbench.objectives.preference.pairwise_loss`.

        Scores are read at an answer's last token. `margin` is taken from the batch where it has one.
        Metrics: `accuracy` (the chosen answer has the higher score), `margin` between the scores, their means.
        """
        return self._learn_pairs(batch, ("chosen_rewards", "rejected_rewards"), sign=1, epochs=epochs)

    def _scores(self, batch: Shard) -> torch.Tensor:
        scores = partial(LAST_TOKEN_SCORES.of, self._model)
        return each_row(batch, scores, self.budget, self.context)

    def _score_pairs(self, batch: Shard, names: tuple[str, str], sign: int) -> Output:
        values = partial(LAST_TOKEN_SCORES.of, self._model)
        chosen, rejected = pair_values(batch, values, self.budget, self.context)
        loss = pairwise_loss(sign * chosen, sign * rejected, _margin(batch))
        (metrics,) = on_host([pair_metrics(loss, chosen, rejected, names=names, sign=sign)])
        metrics |= accuracy_bounds(sign * chosen, sign * rejected, self.context.groups.data)
        return Output(columns={names[0]: chosen, names[1]: rejected}, metrics=metrics)

    def _learn_pairs(self, batch: Shard, names: tuple[str, str], sign: int, epochs: int) -> Output:
        margin = _margin(batch)

        def loss(chosen_P: Tensor, rejected_P: Tensor, pairs: list[int]) -> tuple[Tensor, DeviceMetrics]:
            margin_P = None if margin is None else to_device(margin[pairs], chosen_P.device)
            loss_P = pairwise_loss(sign * chosen_P, sign * rejected_P, margin_P)
            return loss_P, pair_metrics(loss_P, chosen_P, rejected_P, names=names, sign=sign)

        return self.update(pair_term(batch, LAST_TOKEN_SCORES, loss, self.context), epochs=epochs)

    @_stage("rewards")
    def compute_reward(
        self,
        batch: Shard,
        *,
        function: RewardFunctions | None = None,
        concurrency: int = 8,
        call_timeout_s: float = 30.0,
        retries: int = 0,
        most_failed: float = 0.2,
        only: Any = None,
    ) -> Output:
        """Column `rewards`: one score a row [rows], or one a response token where the function returns lists; 0 on the
        tokens that the policy did not choose (outside `response_mask`).

        function: `fn(prompt, response, **row)` -> number, given from a cell and run here, one sample a call; None: the
        role's own function or model. A model's score is read at the last response token. The row's text columns are
        passed by name, those that the function takes. `response` is without special tokens; a parameter `raw_response`
        gets the text with them, `response_ids` the token ids. After rollouts in an environment `environment_rewards`, a
        list of one number a response token: to return it is to take the environment's rewards as they are, token by
        token; to return its sum is to score the whole response with it.
        Several functions by name, `{"right": right, "format": (tidy, 0.2)}`, each alone (weight 1) or with its weight,
        are components: each writes a column, `rewards/right`, and `rewards` is their weighted sum; see `reweigh`. Where
        a component returns lists, `rewards` has one number a token, and a component of one number a row counts on the
        row's last token in `response_mask`. A function over many rows at once: `wb.batched`.
        concurrency, call_timeout_s: calls of a function under way at once, and the time limit of one. A call past it
        ends the process in which the function runs; other limits: `wb.limits`.
        retries: how often a call that failed is made again, after all others. A row whose call still fails, for
        whatever reason, is not `valid`, has reward 0, and `failure` says why: `batch.failed()` lists them.
        most_failed: the share of the batch's rows that may fail. Where more do, no further call is made, and the stage
        raises `RewardError`, whose `.batch` has the rows that were finished; 0: any failure fails the stage.
        only: `batch.failed()`, or row numbers: only these rows are asked, and the others keep their scores. Components
        are those of the batch, by name; `rewards` of all rows is made from them with the weights given now.
        Metrics: `rewards/mean`, of the valid rows, and of each component; `failed/fraction`.
        """
        return self._score(batch, "rewards", function, concurrency, call_timeout_s, retries, most_failed, only)

    @register(
        THREE_D_PROTO,
        reads=lambda arguments: tuple(f"rewards/{name}" for name in arguments["weights"]),
        optional=("valid", "response_mask"),
        writes=("rewards",),
        check=lambda arguments: _check_weights(arguments["weights"]),
        by_hand=lambda arguments: True,
    )
    def reweigh(self, batch: Shard, weights: Mapping[str, Annotated[Number, FINITE]]) -> Output:
        """Column `rewards` anew, from the columns of components that `compute_reward` wrote: no function is called.

        weights: by name of the component; one that is not named has none. Rows that are not valid have reward 0.
        Components of one number a row and of one a token are added as `compute_reward` adds them.
        `lab.compare` takes these rewards as they are, so that arms differ in nothing else.
        """
        parts = [batch.columns[f"rewards/{name}"] for name in weights]
        mask = batch.columns.get("response_mask")
        return Output(**total_of("rewards", parts, list(weights.values()), mask, batch.valid))

    def _score(
        self, batch: Shard, column: str, function: Any, concurrency: int, call_timeout_s: float, retries: int,
        most_failed: float, only: Any,
    ) -> Output:  # fmt: skip
        function = function or self.spec.function
        if function is None:
            scores = self._scores(batch)
            return Output(
                columns={column: scores}, metrics={f"{column}/mean": Mean(total=float(scores.sum()), count=len(batch))}
            )
        return Scoring(
            batch=batch, context=self.context, tokenizer=self.tokenizer, column=column,
            stage="compute_reward" if column == "rewards" else "compute_cost", components=components_of(function),
            concurrency=concurrency, timeout_s=call_timeout_s, retries=retries, most_failed=most_failed, only=only,
        ).output()  # fmt: skip


class CostWorker(RewardWorker):
    """The cost model of Safe-RLHF: a reward worker that writes `costs`."""

    compute_reward = None  # type: ignore[assignment]
    reweigh = None  # type: ignore[assignment]
    compute_pair_rewards = None  # type: ignore[assignment]
    update_reward = None  # type: ignore[assignment]

    @_stage("costs")
    def compute_cost(
        self,
        batch: Shard,
        *,
        function: RewardFunctions | None = None,
        concurrency: int = 8,
        call_timeout_s: float = 30.0,
        retries: int = 0,
        most_failed: float = 0.2,
        only: Any = None,
    ) -> Output:
        """Column `costs`, as `compute_reward` makes `rewards`."""
        return self._score(batch, "costs", function, concurrency, call_timeout_s, retries, most_failed, only)

    @_on_pairs(writes=("chosen_costs", "rejected_costs"))
    def compute_pair_costs(self, batch: Shard) -> Output:
        """Columns `chosen_costs`, `rejected_costs` [rows], as `compute_pair_rewards`; it is right where the chosen
        answer has the lower cost."""
        return self._score_pairs(batch, ("chosen_costs", "rejected_costs"), sign=-1)

    @_on_pairs(updates=True, check=_check_epochs, check_model=_check_trained)
    def update_cost(self, batch: Shard, *, epochs: int = 1) -> Output:
        """Learn from pairs as `update_reward` does, with the signs turned: the chosen (safer) answer is to cost less.

        Source: the pairwise term of Safe-RLHF's cost model, Dai et al. 2023, https://arxiv.org/abs/2310.12773,
        equation 6. (Which costs are harmless is then for `center` to say: answers at the limit have mean 0.)
        """
        return self._learn_pairs(batch, ("chosen_costs", "rejected_costs"), sign=-1, epochs=epochs)


def _check_weights(weights: Mapping[str, float]) -> None:
    if not weights:
        raise BadInput("weights={}", "a weight for each component that counts", 'write weights={"right": 1.0}')


def _margin(batch: Shard) -> Tensor | None:
    return batch.numbers("margin") if "margin" in batch.columns else None
