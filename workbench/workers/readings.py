"""What is asked of a model about a micro-batch, and the numbers that its output makes. Suffixes as in micro_batches."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from workbench.engines.training import TrainingEngine
from workbench.workers.micro_batches import MicroBatch


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


def token_log_probs(temperature: float) -> Reading:
    """log softmax(logits / temperature) of each response token, [N], nats."""
    return Reading(inputs=lambda micro: micro.scored(temperature), values=lambda micro, output: output[0])


def token_log_probs_and_entropies(temperature: float) -> Reading:
    """The same, and the entropy of the distribution that each token was drawn from, [2, N], nats."""
    return Reading(
        inputs=lambda micro: micro.scored(temperature, with_entropy=True),
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
