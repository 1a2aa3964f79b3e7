"""The critic role: it estimates the return from each state."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from workbench.batches.columns import Table
from workbench.batches.schema import COUNTING
from workbench.messages.calls import Output
from workbench.messages.operation import row_stage, update_stage
from workbench.messages.shards import Shard
from workbench.models.heads import load_token_values
from workbench.models.spec import Model
from workbench.objectives.aggregation import Aggregation
from workbench.objectives.losses import value_loss
from workbench.support.validation import PositiveFloat, PositiveInt
from workbench.workers.micro_batches import DeviceMetrics, MicroBatch, Scatter
from workbench.workers.model_worker import TrainedWorker, check_update
from workbench.workers.passes import Term, mean_of
from workbench.workers.user_loss import (
    ParameterNames,
    TokenFunction,
    check_asked,
    check_function,
    notes_on_state,
    own_state,
    reported,
)
from workbench.workers.worker import Context

CLIP = 0.2
GIVEN = ("values", "old_values", "returns", "mask")
OWN_METRICS = ("value_error", "values/", "returns/", "cost_values/", "cost_returns/")  # see `checked_loss`
A_LOSS = "def loss(values, old_values, returns, mask), which returns the loss of each token [rows, tokens]"


def _check_update(arguments: Mapping[str, Any]) -> None:
    check_update(arguments)
    if (loss := arguments["loss"]) is not None:
        clip = None if arguments["clip"] == CLIP else arguments["clip"]
        check_function("loss", loss, A_LOSS, one_of=("values",), clip=clip)


def _reads(columns: tuple[str, ...], arguments: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the columns of an update whose values and returns are in `columns`."""
    asked = () if arguments["loss"] is None else ParameterNames.of(arguments["loss"]).needed
    own = (name for name in asked if name not in GIVEN)
    return tuple(dict.fromkeys(("prompt_ids", "response_ids", "response_mask", *columns, *own)))


def _optional(arguments: Mapping[str, Any]) -> tuple[str, ...]:
    asked = () if arguments["loss"] is None else ParameterNames.of(arguments["loss"]).optional
    return tuple(dict.fromkeys((*COUNTING, *(name for name in asked if name not in GIVEN))))


_estimates = partial(row_stage, reads=("prompt_ids", "response_ids"), optional=("response_mask", *COUNTING))
_regresses = partial(
    update_stage, check=_check_update, check_columns=partial(check_asked, "loss", GIVEN), optional=_optional
)


class CriticWorker(TrainedWorker):
    """A model with a value head: `values[t]` is the value of the state in which response token t is chosen."""

    columns = ("values", "returns")

    def __init__(self, spec: Model, context: Context) -> None:
        assert spec.name is not None
        module = load_token_values(
            spec.name, torch.float32, context.loading_device(spec.training), spec.seed, longest=context.max_model_tokens
        )
        super().__init__(spec, context, module)

    @_estimates(writes=lambda arguments: ("values", *(["final_values"] if arguments["final"] else [])))
    def compute_values(self, batch: Shard, *, final: bool = False) -> Output:
        """Column `values` [rows, response tokens].

        final: also `final_values` [rows], the values after the last token, for `compute_advantages(bootstrap=True)`.
        """
        scatter, final_B, column = Scatter(batch.ragged("response_ids")), torch.zeros(len(batch)), self.columns[0]

        def inputs(micro: MicroBatch) -> Mapping[str, Any]:
            if not final:
                return micro.inputs
            # the state after the last token is read at it, in the same pass as the states before the others
            return {**micro.inputs, "positions": torch.cat([micro.inputs["positions"], micro.last])}

        for micro, output in self.passes(batch, inputs):
            tokens = len(micro.inputs["positions"])
            scatter.put(micro, output[:tokens])
            if final and micro.weight:
                final_B[micro.index] = output[tokens:].float().cpu()
        values = scatter.column()
        columns: Table = {column: values, **({f"final_{column}": final_B} if final else {})}
        return Output(columns=columns, metrics={f"{column}/mean": mean_of(values, batch)})

    @_regresses(reads=partial(_reads, columns))
    def update_critic(
        self,
        batch: Shard,
        *,
        loss: Callable[..., Any] | None = None,
        clip: PositiveFloat | None = CLIP,
        epochs: PositiveInt = 1,
        aggregation: Aggregation = "token-mean",
        max_response_tokens: PositiveInt | None = None,
    ) -> Output:
        """Regress values on `returns`, one optimizer step per minibatch and epoch.

        loss: a function in place of the squared error, as in `update_actor(loss=)`: its parameters name `values` (with
        gradient), `old_values` (the column `values`), `returns`, `mask`, and columns of the batch.
        clip: new values stay within this distance of `values` (PPO's value clipping); None: no clipping.
        epochs, aggregation, max_response_tokens: as in `update_actor`.
        """
        old, returns = (batch.ragged(name) for name in self.columns)
        mask, of_values, of_returns = batch.valid_mask, *(f"{name}/" for name in self.columns)

        def squared_error(values: Tensor, old_values: Tensor, returns: Tensor) -> Any:
            loss_BR, clipped_BR = value_loss(values, old_values, returns, clip=clip)
            return loss_BR, {"value_clip_fraction": clipped_BR.float()}

        before = own_state(loss)
        around_call = self.context.groups.data.all_or_none if loss is not None else nullcontext
        function = TokenFunction(
            function=loss or squared_error, columns=batch.columns, mask=mask, own=OWN_METRICS, around_call=around_call
        )
        if loss is not None:
            with self.context.communicator.all_or_none():
                function.rehearse(("values",), {"old_values": old, "returns": returns})

        def token_loss(micro: MicroBatch, values_N: Tensor) -> tuple[Tensor, DeviceMetrics]:
            values_BR, old_BR, returns_BR = micro.to_BR(values_N), micro.column_BR(old), micro.column_BR(returns)
            given = {"values": values_BR, "old_values": old_BR, "returns": returns_BR}
            loss_BR, told = function(micro.index, micro.column_BR, given)
            mask_BR, new_BR = micro.mask_BR(mask), values_BR.detach()
            mean = micro.mean_over(mask_BR)
            return loss_BR, {
                "value_error": mean((new_BR - returns_BR) ** 2),
                **{name: reported(micro, values, mask_BR) for name, values in told.items()},
                f"{of_values}mean": mean(new_BR),
                f"{of_returns}mean": mean(returns_BR),
            }

        term = Term(
            shard=batch, inputs=lambda micro: micro.inputs, loss=token_loss, aggregation=aggregation,
            max_response_tokens=max_response_tokens,
        )  # fmt: skip
        output = self.steps(term, epochs=epochs)
        return replace(output, notes=(*output.notes, *notes_on_state("loss", loss, before)))


class CostCriticWorker(CriticWorker):
    """The second critic of Safe-RLHF, which estimates future costs, with its own model, optimizer and placement."""

    columns = ("cost_values", "cost_returns")
    compute_values = None  # type: ignore[assignment]
    update_critic = None  # type: ignore[assignment]

    @_estimates(writes=lambda arguments: ("cost_values", *(["final_cost_values"] if arguments["final"] else [])))
    def compute_cost_values(self, batch: Shard, *, final: bool = False) -> Output:
        """Column `cost_values` [rows, response tokens]; final: also `final_cost_values`, as in `compute_values`."""
        return CriticWorker.compute_values(self, batch, final=final)

    @_regresses(reads=partial(_reads, columns))
    def update_cost_critic(
        self,
        batch: Shard,
        *,
        loss: Callable[..., Any] | None = None,
        clip: PositiveFloat | None = CLIP,
        epochs: PositiveInt = 1,
        aggregation: Aggregation = "token-mean",
        max_response_tokens: PositiveInt | None = None,
    ) -> Output:
        """Regress cost values on `cost_returns`, as `update_critic` does values on `returns`."""
        return CriticWorker.update_critic(
            self, batch, loss=loss, clip=clip, epochs=epochs, aggregation=aggregation,
            max_response_tokens=max_response_tokens,
        )  # fmt: skip
