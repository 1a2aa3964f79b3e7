"""A forward pass over a shard, micro-batch by micro-batch: a number a response token, or a number a row."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from workbench.batches.columns import Ragged
from workbench.messages.metrics import Mean
from workbench.messages.shards import Shard
from workbench.support.validation import at_least
from workbench.workers.micro_batches import MicroBatch, Scatter, each_minibatch, tokens_of
from workbench.workers.token_budget import TokenBudget
from workbench.workers.worker import Context

# The batch's meta key of the temperature of `old_log_prob`; "temperature" is the rollout's.
LOG_PROB_TEMPERATURE = "log_prob_temperature"
# The batch's meta key of the settings by which its rollouts were sampled from some tokens only, see `truncation`.
TRUNCATION = "truncation"


def each_response_token(
    shard: Shard,
    forward: Callable[[MicroBatch], Tensor],
    budget: TokenBudget,
    context: Context,
    *,
    width: int | None = None,
) -> Ragged:
    """`forward(micro_batch)` -> [N], or [N, width], without gradients, collected in the shard's row order.

    budget: of tokens of a micro-batch; it may shrink during the pass.
    """
    scatter = Scatter(shard.ragged("response_ids"), width)
    for micro, values_N in _passes(shard, forward, budget, context):
        scatter.put(micro, values_N)
    return scatter.column()


def each_row(
    shard: Shard, forward: Callable[[MicroBatch], Tensor], budget: TokenBudget, context: Context, *, together: int = 1
) -> Tensor:
    """`forward(micro_batch)` -> [B], without gradients, as one fp32 tensor [rows] in the shard's row order.

    budget: as in `each_response_token`. together: as in `micro_batches`.
    """
    out = torch.zeros(len(shard))
    for micro, values_B in _passes(shard, forward, budget, context, together):
        if micro.weight:
            out[micro.index] = values_B.float().cpu()
    return out


def _passes(
    shard: Shard, forward: Callable[[MicroBatch], Tensor], budget: TokenBudget, context: Context, together: int = 1
) -> Iterator[tuple[MicroBatch, Tensor]]:
    groups = context.groups
    minibatches = each_minibatch(
        shard, budget.tokens, groups.data, context.device, padded=budget.padded, together=together
    )
    micros = [micro for minibatch in minibatches for micro in minibatch]
    done_tokens = 0
    for done, micro in enumerate(micros):
        context.progress(done, len(micros), done_tokens)
        context.stopping.point()
        tokens = tokens_of(micro)
        before = groups.moved_bytes
        try:
            with context.recorder.span("forward", tokens=tokens * groups.counts) as counted, torch.no_grad():
                values = forward(micro)
                counted.bytes = groups.moved_bytes - before
        except torch.OutOfMemoryError as error:
            budget.halve(error)
            break
        yield micro, values
        done_tokens += tokens
    else:
        return
    # from the start, so that all rows are cut alike, as in an update
    yield from _passes(shard, forward, budget, context, together)


def chosen(column: Ragged, shard: Shard) -> Tensor:
    """The numbers of a response column on the tokens that the policy chose, all of them without a `response_mask`, in
    the rows that count."""
    if "response_mask" in shard.columns:
        return column.values[shard.valid_mask.values.bool()]
    return column.values[torch.repeat_interleave(shard.valid, column.lengths)]


def mean_of(column: Ragged, shard: Shard) -> Mean:
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


def old_log_prob_temperature(shard: Shard, given: float | None) -> float:
    """The temperature of log-probabilities that are compared with `old_log_prob`: as given, else that of the column,
    which is the rollout's unless `compute_log_prob` was given another. For operations that read the column."""
    return sampling_temperature(shard, shard.meta.get(LOG_PROB_TEMPERATURE) if given is None else given)
