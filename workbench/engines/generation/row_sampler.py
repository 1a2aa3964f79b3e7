"""Draw a token for each row from a random stream of its own.

Shapes: B rows, V vocabulary, K tokens a block, N blocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import LogitsProcessor

BLOCK = 256  # about sqrt(V): a row then draws N + K random numbers a token instead of V
SMALLEST = 1e-300  # keeps a noise of exactly 0 from dividing 0 by 0


def exponential_noise(seeds: Sequence[int], step: int, count: int) -> Tensor:
    """Exp(1) numbers, fp64 [B, count]; row b depends on (seeds[b], step) alone, through a counter-based generator."""
    rows = [
        np.random.Generator(np.random.Philox(key=(step << 64) | (int(seed) % 2**64))).standard_exponential(count)
        for seed in seeds
    ]
    return torch.from_numpy(np.stack(rows)).clamp_min_(SMALLEST)


def draw(probs_BV: Tensor, seeds: Sequence[int], step: int) -> Tensor:
    """One token a row from the distributions `probs_BV`, exactly: token ids [B].

    The index of the largest p_i / e_i with e_i ~ Exp(1) has distribution p (the exponential race, also known as the
    Gumbel-max trick). It is run twice, over the blocks of a row by their mass and then inside the winning block.
    Unlike an inverse of the cumulative distribution, a rounding error of the probabilities moves a choice only with
    about the probability of that error, so that a row is drawn alike in whatever batch it is computed.
    """
    B, V = probs_BV.shape
    if V % BLOCK:
        probs_BV = F.pad(probs_BV, (0, BLOCK - V % BLOCK))
    probs_BNK = probs_BV.view(B, -1, BLOCK)
    N = probs_BNK.shape[1]
    noise = exponential_noise(seeds, step, N + BLOCK).to(probs_BV.device)
    block_B = (probs_BNK.sum(-1) / noise[:, :N]).argmax(-1)
    inside_BK = probs_BNK[torch.arange(B, device=probs_BV.device), block_B]
    return block_B * BLOCK + (inside_BK / noise[:, N:]).argmax(-1)


class RowSampler(LogitsProcessor):
    """Last of the logits processors: chooses each row's token and keeps its log-probability.

    It leaves only the chosen token possible, so that greedy decoding takes it. `log_probs` gains one fp32 [B] a step:
    log softmax of the scores that reach this processor. `temperature` 0 chooses the likeliest token.
    """

    def __init__(self, seeds: Sequence[int], temperature: float) -> None:
        self._seeds, self._greedy = list(seeds), temperature == 0
        self.log_probs: list[Tensor] = []

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        probs = scores.float().softmax(dim=-1)
        token = probs.argmax(-1) if self._greedy else draw(probs, self._seeds, len(self.log_probs))
        chosen = token[:, None]
        self.log_probs.append(probs.gather(1, chosen)[:, 0].log())
        return cast(torch.FloatTensor, torch.full_like(scores, -torch.inf).scatter_(1, chosen, 0.0))
