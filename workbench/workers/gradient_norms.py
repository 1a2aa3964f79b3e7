"""How large the gradient of each response's log-probability is: a backward pass a row."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from workbench.engines.training import Pass, TrainingEngine
from workbench.messages.shards import Shard
from workbench.models.token_sets import TokenSets
from workbench.workers.micro_batches import MicroBatch, each_minibatch, tokens_of
from workbench.workers.worker import Context


def response_gradient_norms(
    batch: Shard,
    engine: TrainingEngine,
    temperature: float,
    sets: Callable[[list[int]], TokenSets] | None,
    context: Context,
) -> Tensor:
    """|grad log pi(response | prompt)| of each row, over the weights that are trained, [rows]; log pi is the sum over
    the tokens of the response mask. 0 for rows that do not count, for which no pass is made.

    sets: of some rows, see `SamplingMask`. Every rank must call it.
    """
    norms, mask = torch.zeros(len(batch)), batch.valid_mask
    groups, skip = context.groups, batch.invalid_rows
    minibatches = each_minibatch(batch, 1, groups.data, context.device, skip=skip)  # of one token: each row is alone
    micros = [micro for minibatch in minibatches for micro in minibatch]

    def gradient_of(micro: MicroBatch) -> Pass:
        def log_prob(output: tuple[Tensor, ...]) -> Tensor:
            return torch.where(micro.mask_BR(mask) > 0, micro.to_BR(output[0]), 0.0).sum()

        tokens = tokens_of(micro) * groups.counts
        return Pass(inputs=micro.scored(temperature, sets=sets), loss=log_prob, tokens=tokens)

    tokens = 0
    for done, micro in enumerate(micros):
        context.progress(done, len(micros), tokens)
        context.stopping.point()
        (norm,) = engine.gradient_norms([gradient_of(micro)])
        if micro.weight:
            norms[micro.index] = norm
        tokens += tokens_of(micro)
    return norms
