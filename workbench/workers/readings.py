"""What is asked of a model about a micro-batch, and the numbers that its output makes. Suffixes as in micro_batches."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from workbench.engines.training import TrainingEngine
from workbench.workers.micro_batches import MicroBatch
from workbench.workers.sampling_mask import SamplingMask


@dataclass(frozen=True, kw_only=True)
class Reading:
    """inputs: what the module is given. values: of its output, a number a response token [N] or a row [B].

    The two stand apart because on a pipeline the output is on the last stage alone.
    """

    inputs: Callable[[MicroBatch], dict[str, Any]]
    values: Callable[[MicroBatch, Any], Tensor]

    def of(self, engine: TrainingEngine, micro: MicroBatch) -> Tensor:
        """The numbers of one micro-batch."""
        return self.values(micro, engine.forward(**self.inputs(micro)))


def token_log_probs(temperature: float, mask: SamplingMask | None = None) -> Reading:
    """log softmax(logits / temperature) of each response token, [N], nats; with a mask over the tokens of its sets."""
    sets = None if mask is None else mask.sets
    return Reading(inputs=lambda micro: micro.scored(temperature, sets=sets), values=lambda micro, output: output[0])


def token_log_probs_and_entropies(temperature: float, mask: SamplingMask | None = None) -> Reading:
    """The same, and the entropy of the distribution that each token was drawn from, [2, N], nats."""
    sets = None if mask is None else mask.sets
    return Reading(
        inputs=lambda micro: micro.scored(temperature, with_entropy=True, sets=sets),
        values=lambda micro, output: torch.stack(output),
    )


ANSWER_LOG_PROBS = Reading(
    inputs=lambda micro: micro.scored(1.0), values=lambda micro, output: micro.to_BR(output[0]).sum(-1)
)
"""log pi(answer | prompt) of each row, [B]: the sum over its response tokens, EOS included, nats."""


LAST_TOKEN_SCORES = Reading(
    inputs=lambda micro: {**micro.inputs, "positions": micro.last}, values=lambda micro, output: output
)
"""The score of each row, [B], read at its last token."""


def _own_positions(micro: MicroBatch) -> Tensor:
    """The position of each response token, [N]. `micro.inputs` has that of the token before, which predicts it."""
    positions_N, rows_N = micro.inputs["positions"], micro.response_rows
    is_last_N = torch.ones_like(rows_N, dtype=torch.bool)
    is_last_N[:-1] = rows_N[1:] != rows_N[:-1]
    return torch.where(is_last_N, micro.last[rows_N], positions_N.roll(-1))


TOKEN_SCORES = Reading(
    inputs=lambda micro: {**micro.inputs, "positions": _own_positions(micro)}, values=lambda micro, output: output
)
"""The score of a response up to each of its tokens, [N], read at that token."""
