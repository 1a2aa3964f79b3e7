"""One forward pass over a shard, micro-batch by micro-batch: a number a response token."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from workbench.dataflow.columns import Ragged
from workbench.engines.settings import at_least
from workbench.workers.calls import Mean, Shard
from workbench.workers.micro_batches import MicroBatch, Scatter, each_minibatch, tokens_of
from workbench.workers.worker import Context


def each_response_token(
    shard: Shard, forward: Callable[[MicroBatch], Tensor], budget_tokens: int, context: Context, *, padded: bool = False
) -> Ragged:
    """`forward(micro_batch)` -> [N], without gradients, collected in the shard's row order. padded: see `cut`."""
    scatter = Scatter(shard.ragged("response_ids"))
    minibatches = each_minibatch(shard, budget_tokens, context.communicator, context.device, padded=padded)
    micros = [micro for minibatch in minibatches for micro in minibatch]
    done_tokens = 0
    for done, micro in enumerate(micros):
        context.progress(done, len(micros), done_tokens)
        tokens = tokens_of(micro)
        with context.recorder.span("forward", tokens=tokens), torch.no_grad():
            scatter.put(micro, forward(micro))
        done_tokens += tokens
    return scatter.column()


def chosen(column: Ragged, shard: Shard) -> Tensor:
    """The numbers of a response column on the tokens that the policy chose: all of them, without a `response_mask`."""
    if "response_mask" not in shard.columns:
        return column.values
    return column.values[shard.ragged("response_mask").values.bool()]


def mean_of(column: Ragged, shard: Shard) -> Mean:
    """The mean over the tokens that the policy chose, as a metric."""
    values = chosen(column, shard)
    return Mean(total=float(values.double().sum()), count=len(values))


def check_temperature(arguments: Mapping[str, Any]) -> None:
    """Raise `BadInput` unless the argument `temperature` is None or above 0."""
    if arguments["temperature"] is not None:
        at_least("temperature", arguments["temperature"], 0, strictly=True)


def sampling_temperature(shard: Shard, given: float | None) -> float:
    """The temperature to divide logits by: as given, else the rollout's; greedy rollouts are scored at 1."""
    temperature = shard.meta.get("temperature", 1.0) if given is None else given
    return float(temperature) or 1.0
