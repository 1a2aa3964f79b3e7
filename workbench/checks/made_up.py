"""Logits and hidden states for a loss that is checked in the kernel, where there is no model.

Suffixes: B rows, T response tokens of the longest, n tokens, V numbers of each.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from workbench.workers.token_logits import Logits

TOKENS_PER_CALL = 512


def made_up(leaves_BT: Mapping[str, Tensor], sizes: Mapping[str, int], rows: Sequence[int], inside_BT: Tensor) -> Any:
    """What stands in for the `logits` and `hidden_states` of these rows: smooth numbers that depend on row and token.

    leaves_BT: for each of the two names how far the numbers of each token have moved along a direction, so that a
    gradient is one number a token. sizes: of the vocabulary, and of a hidden state. rows: their numbers in the batch.
    """
    token_T = torch.arange(inside_BT.shape[1], dtype=torch.float64)
    place_BT = torch.tensor(rows, dtype=torch.float64)[:, None] * 0.37 + token_T * 1.13 + 1
    found: dict[str, Any] = {}
    if "hidden_states" in leaves_BT:
        found["hidden_states"] = _numbers(place_BT, leaves_BT["hidden_states"], sizes["hidden_states"])
    if "logits" in leaves_BT:
        place_N, moved_N = place_BT.flatten(), leaves_BT["logits"].flatten()

        def of_tokens(numbers: Tensor, function: Callable[[Tensor, slice], Tensor]) -> Tensor:
            parts = []
            for start in range(0, max(1, len(numbers)), TOKENS_PER_CALL):
                here = numbers[start : start + TOKENS_PER_CALL]
                logits = _numbers(place_N[here], moved_N[here], sizes["logits"])
                parts.append(function(logits, slice(start, start + len(here))))
            return torch.cat(parts)

        found["logits"] = Logits(inside_BT, of_tokens)
    return found


def _numbers(place: Tensor, moved: Tensor, size: int) -> Tensor:
    draws = torch.Generator().manual_seed(4)
    rates_V, phases_V, other_rates_V, other_phases_V = 1 + 9 * torch.rand(4, size, generator=draws, dtype=torch.float64)
    base = 2 * torch.cos(place[..., None] * rates_V + phases_V)
    return base + moved[..., None] * torch.cos(place[..., None] * other_rates_V + other_phases_V)
