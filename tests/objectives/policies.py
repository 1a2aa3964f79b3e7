"""Random masks, and a policy small enough that every expectation is a finite sum."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import torch
from torch import Tensor


def random_masks(rows: int, tokens: int, seed: int) -> Tensor:
    """Right padding, holes inside, one row without a valid token, one with a single one, one full."""
    generator = torch.Generator().manual_seed(seed)
    mask = torch.rand(rows, tokens, generator=generator) < 0.7
    lengths = torch.randint(1, tokens + 1, (rows, 1), generator=generator)
    mask &= torch.arange(tokens) < lengths
    mask[0], mask[1], mask[2] = False, False, True
    mask[1, tokens // 2] = True
    return mask


def normal(*shape: int, seed: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def sequences() -> tuple[Tensor, Tensor]:
    """All responses of two tokens out of three, [9, 2], and logits that choose the second token by the first."""
    actions = torch.tensor(list(itertools.product(range(3), repeat=2)))
    logits = normal(4, 3, seed=7).requires_grad_()  # row 0: the first token; row 1 + a: the second, after a
    return actions, logits


def log_probs_of(actions: Tensor, logits: Tensor) -> Tensor:
    """[9, 2]"""
    tables = logits.log_softmax(-1)
    return torch.stack((tables[0, actions[:, 0]], tables[1 + actions[:, 0], actions[:, 1]]), 1)


def expected_policy_gradient(advantages: Tensor, actions: Tensor, logits: Tensor) -> Tensor:
    """E[sum_t A_t grad log pi_t], enumerated."""
    log_probs = log_probs_of(actions, logits)
    weight = log_probs.sum(-1).exp().detach()
    (gradient,) = torch.autograd.grad((weight[:, None] * advantages * log_probs).sum(), logits)
    return gradient


def true_gradient(scores: Callable[[Tensor], Tensor], actions: Tensor, logits: Tensor) -> Tensor:
    """grad E[score], where the score may itself depend on the log-probabilities [9, 2]."""
    log_probs = log_probs_of(actions, logits)
    (gradient,) = torch.autograd.grad((log_probs.sum(-1).exp() * scores(log_probs)).sum(), logits)
    return gradient
