"""An output head that computes in fp32, in a model of another dtype."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from workbench.errors import BadInput

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class Float32Head(nn.Linear):
    """An output head that computes in fp32, in whatever dtype its weights are stored and its input comes."""

    def forward(self, input: Tensor) -> Tensor:
        with torch.autocast(input.device.type, enabled=False):
            bias = None if self.bias is None else self.bias.float()
            return nn.functional.linear(input.float(), self.weight.float(), bias)


def compute_in_float32(model: PreTrainedModel) -> None:
    """Let the output head of a causal language model compute in fp32."""
    head: Any = model.get_output_embeddings()
    if type(head) is not nn.Linear:
        raise BadInput(
            f"head_dtype='float32' with an output head of type {type(head).__name__}",
            "it must be a linear layer",
            "leave head_dtype out",
        )
    head.__class__ = Float32Head
