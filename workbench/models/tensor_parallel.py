"""Tensor-parallel layers: each rank of a tensor group holds a slice, and together they compute the whole layer.

Megatron-LM's cut (Shoeybi et al. 2019, https://arxiv.org/abs/1909.08053, section 3): linear layers into attention and
MLP are cut by output, linear layers out of them by input. So a block needs one sum over the ranks at its end and, in
the backward pass, one at its start. All other results are equal on all ranks, to the last bit.

Shapes: T tokens, N positions, H hidden size, V vocabulary, of which a rank has rows [start, stop).
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn

from workbench.models.logits import TokenSets, linear_in_float32

TensorGroup = Any  # a `Communicator` of the tensor ranks; this layer does not know it


class _Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: TensorGroup) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return ctx.group.all_reduce(gradient.clone(memory_format=torch.contiguous_format)), None


class _Leave(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: TensorGroup) -> Tensor:
        return group.all_reduce(x.clone(memory_format=torch.contiguous_format))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


def enter(x: Tensor, group: TensorGroup) -> Tensor:
    """Return `x`, equal on all ranks, for the start of a block; its gradient is the sum of the ranks' gradients."""
    return cast(Tensor, _Enter.apply(x, group))


def leave(x: Tensor, group: TensorGroup) -> Tensor:
    """Return the sum of the ranks' `x`, for the end of a block; the sum and its gradient are equal on all ranks."""
    return cast(Tensor, _Leave.apply(x, group))


def enter_block(block: nn.Module, group: TensorGroup) -> None:
    """Make an attention or MLP block call `enter` on its hidden states: its first argument, or `hidden_states`."""

    def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if "hidden_states" in kwargs:
            return args, {**kwargs, "hidden_states": enter(kwargs["hidden_states"], group)}
        return (enter(args[0], group), *args[1:]), kwargs

    block.register_forward_pre_hook(hook, with_kwargs=True)


class RowParallelLinear(nn.Module):
    """The linear layer at the end of a block: columns of the weight, [out, in / t], and the whole bias."""

    def __init__(self, linear: nn.Linear, group: TensorGroup) -> None:
        super().__init__()
        self.weight, self.bias, self._group = linear.weight, linear.bias, group

    def forward(self, input: Tensor) -> Tensor:
        total = leave(nn.functional.linear(input, self.weight), self._group)
        return total if self.bias is None else total + self.bias.to(total.dtype)


class VocabularyParallelEmbedding(nn.Module):
    """An embedding of which this rank has rows [start, start + len(weight))."""

    def __init__(self, embedding: nn.Embedding, start: int, group: TensorGroup) -> None:
        super().__init__()
        self.weight, self.start, self._group = embedding.weight, start, group
        padding = -1 if embedding.padding_idx is None else embedding.padding_idx - start
        self.padding_idx = padding if 0 <= padding < len(self.weight) else None

    def forward(self, input_ids: Tensor) -> Tensor:
        rows, here = _rows_here(input_ids, self.start, len(self.weight))
        found = nn.functional.embedding(rows, self.weight, padding_idx=self.padding_idx)
        return leave(torch.where(here[..., None], found, 0.0), self._group)


class VocabularyParallelHead(nn.Module):
    """Rows [start, start + len(weight)) of an output head. Computes log-probabilities without gathering logits.

    The ranks find the largest logit, then add up their sums of exponentials, the chosen token's logit (from the one
    rank that has the token), and for the entropy sum exp(logit) x logit. in_float32: compute the logits in fp32.
    """

    def __init__(self, linear: nn.Linear, start: int, group: TensorGroup, *, in_float32: bool = False) -> None:
        super().__init__()
        self.weight, self.bias, self.start, self._group = linear.weight, linear.bias, start, group
        self._vocabulary, self._in_float32 = linear.out_features, in_float32

    def _logits(self, hidden: Tensor) -> Tensor:
        """Return the logits of this rank's tokens."""
        hidden = enter(hidden, self._group)
        if self._in_float32:
            return linear_in_float32(self, hidden)
        return nn.functional.linear(hidden, self.weight, self.bias)

    def whole_logits(self, hidden: Tensor) -> Tensor:
        """Return the logits of the whole vocabulary [N, V] on every rank; call it for a few positions at a time."""
        logits = self._logits(hidden)
        behind = self._vocabulary - self.start - len(self.weight)
        return leave(nn.functional.pad(logits, (self.start, behind)), self._group)

    def forward(
        self, hidden: Tensor, targets: Tensor, temperature: float, with_entropy: bool, sets: TokenSets | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Return (log softmax(logits / temperature) at `targets`, entropies or None), each fp32 [N], from hidden states
        [N, H]. targets [N], sets: token ids of the whole vocabulary; the probability outside the sets is 0."""
        logits = self._logits(hidden).float() / temperature
        if sets is not None:
            logits = sets.masked(logits, self.start)
        logits = logits - self._group.all_reduce_max(logits.detach().amax(-1))[:, None]
        columns, here = _rows_here(targets, self.start, len(self.weight))
        chosen = torch.where(here, logits.gather(-1, columns[:, None])[:, 0], 0.0)
        exponentials = logits.exp()
        parts = [exponentials.sum(-1), chosen]
        if with_entropy:
            parts.append((exponentials * logits).sum(-1))
        sums = leave(torch.stack(parts), self._group)
        log_normalizer = sums[0].log()
        entropy = log_normalizer - sums[2] / sums[0] if with_entropy else None
        return sums[1] - log_normalizer, entropy


def _rows_here(tokens: Tensor, start: int, count: int) -> tuple[Tensor, Tensor]:
    """Return the row of each token among the rank's `count` rows from `start`, or 0, and whether the rank has it."""
    here = (tokens >= start) & (tokens < start + count)
    return torch.where(here, tokens - start, 0), here
