"""Reward and cost: scores of responses, by a model or by a rule."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from itertools import accumulate
from typing import Any

import torch

from workbench.dataflow.columns import Column, Ragged
from workbench.engines.settings import at_least
from workbench.engines.training.torch_engine import TorchEngine
from workbench.errors import BadInput, RewardError
from workbench.models import load_tokenizer
from workbench.models.heads import load_token_values
from workbench.models.spec import Model
from workbench.workers.calls import Mean, Output, Shard
from workbench.workers.micro_batches import each_minibatch, tokens_of
from workbench.workers.model_worker import ModelWorker
from workbench.workers.operation import ALL_TEXT, register
from workbench.workers.protocols import THREE_D_PROTO
from workbench.workers.reward_function import ALIKE, RewardFunction, score_rows
from workbench.workers.worker import Context

TOKENS = ("prompt_ids", "response_ids")
OF_ROW = (ALL_TEXT, "environment_rewards")  # what a function may be given beside prompt and response


def _check(arguments: Mapping[str, Any]) -> None:
    at_least("concurrency", arguments["concurrency"], 1)
    at_least("timeout_s", arguments["timeout_s"], 0, strictly=True)
    function = arguments["function"]
    if function is None:
        return
    if not callable(function):
        raise BadInput(f"function={function!r:.60}", "must be callable: fn(prompt, response, **row)")
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):  # a callable that does not say
        return
    takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    lacks = [name for name in ("prompt", "response") if name not in parameters and not takes_all]
    if lacks:
        raise BadInput(
            f"function={getattr(function, '__name__', function)} takes {', '.join(parameters) or 'nothing'}",
            f"it is called with prompt=, response= and the row's other columns by name, and has no {lacks[0]!r}",
            "def fn(prompt, response, **row)",
        )


class RewardWorker(ModelWorker):
    """A model with a score head, or no model and a function. Functions given to a call run here too."""

    def __init__(self, spec: Model, context: Context) -> None:
        super().__init__(spec, context)
        self.tokenizer = load_tokenizer(context.actor_name)
        self.engine: TorchEngine | None = None
        self.sequences, self.padded = "", False
        if spec.name is not None:
            assert spec.training is not None and spec.dtype is not None
            dtype = getattr(torch, spec.dtype)
            module = load_token_values(spec.name, dtype=dtype, device=context.device, seed=spec.seed, init="normal")
            self.sequences, self.padded = module.describe(), module.padded_because is not None
            self.engine = TorchEngine(module, None, context.communicator, device=context.device, dtype=dtype)

    def memory_bytes(self) -> dict[str, int]:
        return self.engine.memory_bytes() if self.engine else {}

    def describe(self) -> dict[str, Any]:
        return super().describe() | ({"sequences": self.sequences} if self.engine else {})

    @register(THREE_D_PROTO, reads=TOKENS, optional=OF_ROW, writes=("rewards",), minibatched=True, check=_check)
    def compute_reward(
        self, batch: Shard, *, function: RewardFunction | None = None, concurrency: int = 8, timeout_s: float = 30.0
    ) -> Output:
        """Column `rewards`: one score a row [rows], or one a response token where the function returns lists.

        function: `fn(prompt, response, **row)` -> number, given from a cell and run here, one sample a call; None: the
        role's own function or model. A model's score is read at the last response token. The row's text columns are
        passed by name, those that the function takes, and after rollouts in an environment `environment_rewards`, a
        list of one number a response token: to return it is to take the environment's rewards as they are, token by
        token; to return its sum is to score the whole response with it.
        concurrency, timeout_s: calls of the function under way at once, and the time limit of one. A call past it fails
        the stage, but Python cannot end it: it goes on in its host until it returns.
        """
        return self._score(batch, "rewards", function, concurrency, timeout_s)

    def _score(
        self, batch: Shard, column: str, function: RewardFunction | None, concurrency: int, timeout_s: float
    ) -> Output:
        function = function or self.spec.function
        scores = (
            self._by_model(batch) if function is None else self._by_function(batch, function, concurrency, timeout_s)
        )
        values = scores.values if isinstance(scores, Ragged) else scores
        assert isinstance(values, torch.Tensor)
        return Output(
            columns={column: scores}, metrics={f"{column}/mean": Mean(total=float(values.sum()), count=len(batch))}
        )

    def _by_model(self, batch: Shard) -> torch.Tensor:
        engine = self.engine
        if engine is None:
            raise BadInput(f"{type(self).__name__} has no model", "it was declared with a function")
        assert self.spec.training is not None
        context, scores, tokens = self.context, torch.zeros(len(batch)), 0
        budget = self.spec.training.micro_batch_tokens
        minibatches = each_minibatch(batch, budget, context.communicator, context.device, padded=self.padded)
        micros = [micro for minibatch in minibatches for micro in minibatch]
        for done, micro in enumerate(micros):
            context.progress(done, len(micros), tokens)
            inputs = {name: micro.inputs[name] for name in ("input_ids", "lengths")}
            last = torch.tensor(list(accumulate(inputs["lengths"])), device=context.device) - 1
            with context.recorder.span("forward", tokens=tokens_of(micro)), torch.no_grad():
                values = engine.forward(**inputs, positions=last)
            if micro.weight:
                scores[micro.index] = values.float().cpu()
            tokens += tokens_of(micro)
        return scores

    def _by_function(self, batch: Shard, function: RewardFunction, concurrency: int, timeout_s: float) -> Column:
        responses = batch.ragged("response_ids").rows()
        where = f"rank {self.context.host.rank} of pool {self.context.host.pool}"
        given = "environment_rewards" in batch.columns
        rewards = batch.ragged("environment_rewards").rows() if given else None
        rows: list[dict[str, Any]] = []
        for i, response in enumerate(responses):
            row = {name: column[i] for name, column in batch.columns.items() if isinstance(column, list)}
            if rewards is not None:
                row["environment_rewards"] = rewards[i].tolist()
            row["response"] = self.tokenizer.decode(response.tolist(), skip_special_tokens=True)
            rows.append(row)
        several_one = torch.zeros(2)  # whether any rank got several numbers a row, and whether any got one
        try:
            with self.context.recorder.span("reward"):
                scores = score_rows(
                    function,
                    rows,
                    [len(response) for response in responses],
                    concurrency=concurrency,
                    timeout_s=timeout_s,
                    where=where,
                    row_numbers=batch.rows.tolist(),
                    progress=self.context.progress,
                )
            several = isinstance(scores[0], list)
            several_one[:] = torch.tensor([several, not several])
        finally:  # also where the function failed: the other ranks wait to compare
            self.context.communicator.all_reduce_max(several_one)
        if several_one.all():
            raise RewardError(
                f"the reward function returned {scores[0]!r:.60} for row {batch.rows[0]} on {where}, "
                f"but {'one number' if several else 'several'} a row on another rank",
                ALIKE,
            )
        return Ragged.of(scores, torch.float32) if several else torch.tensor(scores, dtype=torch.float32)  # type: ignore[arg-type]


class CostWorker(RewardWorker):
    """The cost model of Safe-RLHF: a reward worker that writes `costs`."""

    compute_reward = None  # type: ignore[assignment]

    @register(THREE_D_PROTO, reads=TOKENS, optional=OF_ROW, writes=("costs",), minibatched=True, check=_check)
    def compute_cost(
        self, batch: Shard, *, function: RewardFunction | None = None, concurrency: int = 8, timeout_s: float = 30.0
    ) -> Output:
        """Column `costs`, as `compute_reward` makes `rewards`."""
        return self._score(batch, "costs", function, concurrency, timeout_s)
