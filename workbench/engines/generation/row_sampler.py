"""Draw a token for each row from a random stream of its own.

Shapes: B rows, V vocabulary, K tokens a block, N blocks.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

BLOCK = 256  # about sqrt(V): a row then draws N + K random numbers a token instead of V
SMALLEST = 1e-300  # keeps a noise of exactly 0 from dividing 0 by 0


def exponential_noise(seeds: Sequence[int], steps: Sequence[int], count: int) -> Tensor:
    """Exp(1) numbers, fp64 [B, count]; row b depends on (seeds[b], steps[b]) alone, through a counter-based
    generator."""
    rows = [
        np.random.Generator(np.random.Philox(key=(step << 64) | (int(seed) % 2**64))).standard_exponential(count)
        for seed, step in zip(seeds, steps, strict=True)
    ]
    return torch.from_numpy(np.stack(rows)).clamp_min_(SMALLEST)


def draw(probs_BV: Tensor, seeds: Sequence[int], steps: Sequence[int]) -> Tensor:
    """One token a row from the distributions `probs_BV`, exactly: token ids [B]. steps: tokens that each has drawn.

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
    noise = exponential_noise(seeds, steps, N + BLOCK).to(probs_BV.device)
    block_B = (probs_BNK.sum(-1) / noise[:, :N]).argmax(-1)
    inside_BK = probs_BNK[torch.arange(B, device=probs_BV.device), block_B]
    return block_B * BLOCK + (inside_BK / noise[:, N:]).argmax(-1)
