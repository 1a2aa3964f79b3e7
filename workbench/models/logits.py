"""Parts of output heads: layers in fp32, log-probabilities of chosen tokens, and the sets of tokens that could be
sampled under top-p, top-k or min-p."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from workbench.errors import BadInput
from workbench.models.packing import to_device

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# The logit of a token that could not be sampled: its probability is exactly 0, and its products are finite.
IMPOSSIBLE = -1e9


@dataclass(frozen=True, eq=False)
class TokenSets:
    """The token sets of N positions, on the CPU. sizes [N]: tokens in each set; 0: all. ids: the sets, end to end."""

    ids: Tensor
    sizes: Tensor

    def tensor_split(self, parts: int) -> list[TokenSets]:
        """Return the sets of the parts `x.tensor_split(parts)`, for x [N, ...]."""
        sizes = self.sizes.tensor_split(parts)
        ids = self.ids.split([int(part.sum()) for part in sizes])
        return [TokenSets(*pair) for pair in zip(ids, sizes, strict=True)]

    def take(self, numbers: Tensor) -> TokenSets:
        """Return the sets of `x[numbers]`, for x [N, ...]."""
        sizes, starts = self.sizes.long(), self.sizes.long().cumsum(0) - self.sizes.long()
        counts = sizes[numbers]
        firsts = torch.repeat_interleave(starts[numbers] - (counts.cumsum(0) - counts), counts)
        return TokenSets(self.ids[firsts + torch.arange(len(firsts))], self.sizes[numbers])

    def masked(self, logits: Tensor, start: int = 0) -> Tensor:
        """Return logits [N, count], of tokens [start, start + count), with `IMPOSSIBLE` for tokens outside the sets."""
        count = logits.shape[-1]
        row = torch.repeat_interleave(torch.arange(len(self.sizes)), self.sizes.long())
        column = self.ids.long() - start
        here = (column >= 0) & (column < count)
        outside = torch.ones(logits.shape, dtype=torch.bool, device=logits.device)
        outside.view(-1)[to_device((row * count + column)[here], logits.device)] = False
        outside &= to_device(self.sizes > 0, logits.device)[:, None]
        return logits.masked_fill(outside, IMPOSSIBLE)


class ChosenLogProbs(torch.autograd.Function):
    """Compute (log softmax(logits / temperature) at `targets` [N], the entropy [N] or None), fp32, from logits [N, V];
    with sets, over the tokens in them.

    The backward pass writes the gradient into the tensor that the forward pass saved; autograd would allocate a tensor
    [N, V] for each step of the formula:

        d chosen / d logits = (onehot(target) - p) / temperature
        d entropy / d logits = -p (log p + entropy) / temperature
    """

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, targets: Tensor, temperature: float, with_entropy: bool, sets: TokenSets | None = None
    ) -> tuple[Tensor, Tensor | None]:
        scaled = logits.float() if temperature == 1 else logits.float() / temperature
        if sets is not None:
            scaled = sets.masked(scaled)
        log_probs = torch.log_softmax(scaled, dim=-1)
        entropy = -log_probs.exp().mul_(log_probs).sum(-1) if with_entropy else None
        ctx.save_for_backward(log_probs, targets, entropy)
        ctx.temperature, ctx.dtype = temperature, logits.dtype
        ctx.set_materialize_grads(False)
        return log_probs.gather(-1, targets[:, None]).squeeze(-1), entropy

    @staticmethod
    def backward(ctx: Any, of_chosen: Tensor | None, of_entropy: Tensor | None) -> tuple[Tensor | None, ...]:
        log_probs, targets, entropy = ctx.saved_tensors
        factor = 0.0 if of_chosen is None else -of_chosen[:, None]
        if of_entropy is not None:
            factor = factor - of_entropy[:, None] * (log_probs + entropy[:, None])
        gradient = log_probs.exp_().mul_(factor)
        if of_chosen is not None:
            gradient[torch.arange(len(targets), device=targets.device), targets] += of_chosen
        if ctx.temperature != 1:
            gradient /= ctx.temperature
        return gradient.to(ctx.dtype), None, None, None, None


def linear_in_float32(layer: Any, input: Tensor) -> Tensor:
    """Compute a linear layer in fp32, whatever the dtypes of its weights and its input."""
    with torch.autocast(input.device.type, enabled=False):
        bias = None if layer.bias is None else layer.bias.float()
        return nn.functional.linear(input.float(), layer.weight.float(), bias)


class Float32Head(nn.Linear):
    """An output head that computes in fp32, see `linear_in_float32`."""

    def forward(self, input: Tensor) -> Tensor:
        return linear_in_float32(self, input)


class ScalarHead(Float32Head):
    """A `Float32Head` that is initialized with zeros."""

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.weight)
        nn.init.zeros_(self.bias)


def compute_in_float32(model: PreTrainedModel) -> None:
    """Make the output head of a causal language model compute in fp32."""
    head: Any = model.get_output_embeddings()
    if type(head) is not nn.Linear:
        raise BadInput(
            f"head_dtype='float32' with an output head of type {type(head).__name__}",
            "the head must be a linear layer",
            "leave head_dtype out",
        )
    head.__class__ = Float32Head
