"""The distribution that `Sampling` describes, from the logits of transformers' models, as vLLM computes it; and tokens
drawn from it, for each row from a random stream of its own.

transformers' own repetition penalty also counts the padding to the left of a prompt, so that a response would depend on
the other rows of its batch; it has no penalties for presence and frequency.

Shapes: B rows, V vocabulary, K tokens a block, N blocks.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import LogitsProcessor, MinPLogitsWarper, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from workbench.settings.engines import Sampling

BLOCK = 256  # about sqrt(V): a row then draws N + K random numbers a token instead of V
SMALLEST = 1e-300  # keeps a noise of exactly 0 from dividing 0 by 0


class Distribution:
    """Logits in, the logits that a token is drawn from out. end_ids: tokens that end a response."""

    def __init__(self, sampling: Sampling, end_ids: Collection[int]) -> None:
        self._sampling, self._end_ids, self._bias = sampling, sorted(end_ids), sampling.logit_bias or {}
        self._penalizes = (sampling.repetition_penalty, sampling.presence_penalty, sampling.frequency_penalty) != (
            1, 0, 0,
        )  # fmt: skip
        warpers: list[LogitsProcessor] = []
        if sampling.temperature not in (0, 1):
            warpers.append(TemperatureLogitsWarper(float(sampling.temperature)))
        if sampling.temperature and sampling.min_p:
            warpers.append(MinPLogitsWarper(float(sampling.min_p)))
        if sampling.temperature and sampling.top_k:
            warpers.append(TopKLogitsWarper(sampling.top_k))
        if sampling.temperature and sampling.top_p < 1:
            warpers.append(TopPLogitsWarper(sampling.top_p))
        self._warpers: list[Any] = warpers

    def of(self, logits_BV: Tensor, prompts: Sequence[Sequence[int]], responses: Sequence[Sequence[int]]) -> Tensor:
        """fp32 [B, V]; the tokens of each row so far are those of its prompt and of its response."""
        scores_BV = logits_BV.to(torch.float32, copy=True)
        for token, bias in self._bias.items():
            scores_BV[:, token] += bias
        early = [row for row, ids in enumerate(responses) if len(ids) < self._sampling.min_new_tokens]
        if early and self._end_ids:
            scores_BV[torch.tensor(early)[:, None], torch.tensor(self._end_ids)] = -torch.inf
        if self._penalizes:
            scores_BV = self._penalized(scores_BV, prompts, responses)
        for warper in self._warpers:
            scores_BV = warper(None, scores_BV)
        return scores_BV

    def _penalized(
        self, scores_BV: Tensor, prompts: Sequence[Sequence[int]], responses: Sequence[Sequence[int]]
    ) -> Tensor:
        """Repetition, frequency and presence penalties, see `Sampling`."""
        prompt_BV, counts_BV = (_counted(rows, scores_BV) for rows in (prompts, responses))
        repetition = self._sampling.repetition_penalty
        penalized_BV = torch.where(scores_BV > 0, scores_BV / repetition, scores_BV * repetition)
        out_BV = torch.where((prompt_BV + counts_BV) > 0, penalized_BV, scores_BV)
        out_BV = out_BV - self._sampling.frequency_penalty * counts_BV
        return out_BV - self._sampling.presence_penalty * (counts_BV > 0)


def _counted(rows: Iterable[Sequence[int]], like_BV: Tensor) -> Tensor:
    """How often each token stands in each row, [B, V]."""
    places = [(row, token) for row, ids in enumerate(rows) for token in ids]
    at = torch.tensor(places, dtype=torch.long, device=like_BV.device).reshape(-1, 2).unbind(1)
    return torch.zeros_like(like_BV).index_put_(at, like_BV.new_ones(()), accumulate=True)


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
