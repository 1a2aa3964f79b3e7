"""The distribution that `Sampling` describes, from the logits of transformers' models, as vLLM computes it.

transformers' own repetition penalty also counts the padding to the left of a prompt, so that a response would depend on
the other rows of its batch; it has no penalties for presence and frequency.

Shapes: B rows, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import LogitsProcessor, MinPLogitsWarper, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from workbench.settings.engines import Sampling


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
