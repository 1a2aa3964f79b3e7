"""Penalties on logits that depend on the tokens so far, as vLLM computes them, for transformers.

transformers' own repetition penalty also counts the padding to the left of a prompt, so that a response would depend on
the other rows of its batch; it has no penalties for presence and frequency.

Shapes: B rows, T positions so far, V vocabulary.
"""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor
from transformers import LogitsProcessor

from workbench.settings.engines import Sampling


class Penalties(LogitsProcessor):
    """Repetition, frequency and presence penalties, see `Sampling`.

    prompt_mask_BT: 1 on the tokens of the prompts, 0 on the padding to their left.
    """

    def __init__(self, sampling: Sampling, prompt_mask_BT: Tensor) -> None:
        self._sampling, self._prompt_mask_BT = sampling, prompt_mask_BT

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        width = self._prompt_mask_BT.shape[1]
        prompt_BV = torch.zeros_like(scores).scatter_add_(1, input_ids[:, :width], self._prompt_mask_BT.to(scores))
        response = input_ids[:, width:]
        counts_BV = torch.zeros_like(scores).scatter_add_(1, response, torch.ones_like(response, dtype=scores.dtype))
        repetition = self._sampling.repetition_penalty
        penalized = torch.where(scores > 0, scores / repetition, scores * repetition)
        out = torch.where((prompt_BV + counts_BV) > 0, penalized, scores)
        out = out - self._sampling.frequency_penalty * counts_BV
        return cast(torch.FloatTensor, out - self._sampling.presence_penalty * (counts_BV > 0))
