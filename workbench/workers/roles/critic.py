"""The critic: estimates of the return from each state."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from workbench.batches.columns import Table
from workbench.messages.operation import register
from workbench.messages.protocols import THREE_D_PROTO
from workbench.messages.replies import Output
from workbench.messages.shards import Shard
from workbench.models.heads import load_token_values
from workbench.models.spec import Model
from workbench.objectives.aggregation import Aggregation
from workbench.objectives.losses import value_loss
from workbench.support.validation import at_least
from workbench.workers.device_metrics import DeviceMetrics
from workbench.workers.inference import each_response_token, mean_of
from workbench.workers.micro_batches import MicroBatch
from workbench.workers.roles.trained import TrainedWorker, check_update
from workbench.workers.update import Term
from workbench.workers.worker import Context


def _check_update(arguments: Mapping[str, Any]) -> None:
    check_update(arguments)
    if arguments["clip"] is not None:
        at_least("clip", arguments["clip"], 0, strictly=True)


_estimates = partial(
    register, THREE_D_PROTO, reads=("prompt_ids", "response_ids"), optional=("response_mask",), minibatched=True
)
_regresses = partial(register, THREE_D_PROTO, optional=("valid",), minibatched=True, updates=True, check=_check_update)


class CriticWorker(TrainedWorker):
    """A model with a value head: `values[t]` is the value of the state in which response token t is chosen."""

    def __init__(self, spec: Model, context: Context) -> None:
        assert spec.name is not None
        module = load_token_values(
            spec.name, dtype=torch.float32, device=context.loading_device, seed=spec.seed, init="zero"
        )
        super().__init__(spec, context, module)

    @_estimates(writes=lambda arguments: ("values", *(["final_values"] if arguments["final"] else [])))
    def compute_values(self, batch: Shard, *, final: bool = False) -> Output:
        """Column `values` [rows, response tokens].

        final: also `final_values` [rows], those after the last token, for `compute_advantages(bootstrap=True)`.
        """
        return self._values(batch, "values", final)

    @_regresses(reads=("prompt_ids", "response_ids", "response_mask", "values", "returns"))
    def update_critic(
        self,
        batch: Shard,
        *,
        clip: float | None = 0.2,
        epochs: int = 1,
        aggregation: Aggregation = "token-mean",
        max_response_tokens: int | None = None,
    ) -> Output:
        """Regress values on `returns`, one optimizer step a minibatch and epoch.

        clip: new values stay within this distance of `values` (PPO's value clipping); None: no clipping.
        aggregation: how token losses become one, see `workbench.objectives.aggregation`.
        """
        return self._regress(batch, "values", "returns", clip, epochs, aggregation, max_response_tokens)

    def _values(self, batch: Shard, column: str, final: bool) -> Output:
        final_B = torch.zeros(len(batch))

        def forward(micro: MicroBatch) -> Tensor:
            if not final:
                return self.engine.forward(**micro.inputs)
            # the state after the last token is read at it, in the same pass as the states before the others
            before_N = micro.inputs["positions"]
            both = self.engine.forward(**{**micro.inputs, "positions": torch.cat([before_N, micro.last])})
            if micro.weight:
                final_B[micro.index] = both[len(before_N) :].float().cpu()
            return both[: len(before_N)]

        values = each_response_token(batch, forward, self.budget, self.context)
        columns: Table = {column: values}
        if final:
            columns[f"final_{column}"] = final_B
        return Output(columns=columns, metrics={f"{column}/mean": mean_of(values, batch)})

    def _regress(
        self,
        batch: Shard,
        values_column: str,
        returns_column: str,
        clip: float | None,
        epochs: int,
        aggregation: Aggregation,
        max_response_tokens: int | None,
    ) -> Output:
        old, returns, mask = batch.ragged(values_column), batch.ragged(returns_column), batch.valid_mask

        def loss(micro: MicroBatch, values_N: Tensor) -> tuple[Tensor, DeviceMetrics]:
            values_BR = micro.to_BR(values_N)
            returns_BR, mask_BR = micro.column_BR(returns), micro.mask_BR(mask)
            loss_BR, stats = value_loss(values_BR, micro.column_BR(old), returns_BR, clip=clip)
            mean, new_BR = micro.mean_over(mask_BR), values_BR.detach()
            return loss_BR, {
                "value_error": mean((new_BR - returns_BR) ** 2),
                "value_clip_fraction": mean(stats.clipped_BT.float()),
                f"{values_column}/mean": mean(new_BR),
                f"{returns_column}/mean": mean(returns_BR),
            }

        term = Term(
            shard=batch,
            inputs=lambda micro: micro.inputs,
            loss=loss,
            aggregation=aggregation,
            max_response_tokens=max_response_tokens,
        )
        return self.update(term, epochs=epochs)


class CostCriticWorker(CriticWorker):
    """The second critic of Safe-RLHF, of future costs: a model, an optimizer and a place of its own."""

    compute_values = None  # type: ignore[assignment]
    update_critic = None  # type: ignore[assignment]

    @_estimates(writes=lambda arguments: ("cost_values", *(["final_cost_values"] if arguments["final"] else [])))
    def compute_cost_values(self, batch: Shard, *, final: bool = False) -> Output:
        """Column `cost_values` [rows, response tokens]; final: also `final_cost_values`, as in `compute_values`."""
        return self._values(batch, "cost_values", final)

    @_regresses(reads=("prompt_ids", "response_ids", "response_mask", "cost_values", "cost_returns"))
    def update_cost_critic(
        self,
        batch: Shard,
        *,
        clip: float | None = 0.2,
        epochs: int = 1,
        aggregation: Aggregation = "token-mean",
        max_response_tokens: int | None = None,
    ) -> Output:
        """Regress cost values on `cost_returns`, as `update_critic` does values on `returns`."""
        return self._regress(batch, "cost_values", "cost_returns", clip, epochs, aggregation, max_response_tokens)
