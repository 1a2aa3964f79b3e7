"""Log-probabilities of chosen tokens and entropies, of logits, with a gradient that takes little memory."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from workbench.models.token_sets import TokenSets


class ChosenLogProbs(torch.autograd.Function):
    """(log softmax(logits / temperature) at `targets` [N], the entropy [N] or None), fp32, of logits [N, V]; with sets,
    of the tokens in them.

    Its gradient is written into what the forward pass saved, where autograd would allocate a tensor of [N, V] for each
    step of the formula:

        d chosen / d logits = (onehot(target) - p) / temperature
        d entropy / d logits = -p (log p + entropy) / temperature
    """

    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        targets: Tensor,
        temperature: float,
        with_entropy: bool,
        sets: TokenSets | None = None,
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
