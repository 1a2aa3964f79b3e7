"""Responses of several contexts: where each begins, and how long each is."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise

from torch import Tensor

from workbench.batches.columns import ColumnValues, Ragged
from workbench.batches.schema import CONTEXT_STARTS


def contexts_of(columns: Mapping[str, ColumnValues]) -> dict[int, list[int]]:
    """For each row of a shard with more than one context, the response tokens at which its further ones begin."""
    starts = columns.get(CONTEXT_STARTS)
    if not isinstance(starts, Ragged) or not starts.values.any():
        return {}
    found = ((row, one.nonzero().flatten().tolist()) for row, one in enumerate(starts.rows()))
    return {row: places for row, places in found if places}


def answer_lengths(mask: Ragged, starts: Mapping[int, list[int]]) -> Tensor:
    """Tokens after the prompt of a context, in the context of each row that has the most, [rows]: as `max_new_tokens`
    counts them. mask: of the response. The prompt of a further context, which stands in the response, ends where the
    first token was sampled."""
    lengths, masks = mask.lengths.clone(), mask.rows() if starts else []
    for row, places in starts.items():
        answers = [places[0]]
        for start, end in pairwise([*places, int(mask.lengths[row])]):
            sampled = masks[row][start:end].nonzero().flatten()
            answers.append(end - start - int(sampled[0]) if len(sampled) else 0)
        lengths[row] = max(answers)
    return lengths


def longest_contexts(prompts: Tensor | None, responses: Tensor, starts: Mapping[int, list[int]]) -> Tensor:
    """Tokens of the longest context of each row. prompts, responses: tokens of each, [rows]; prompts: None without."""
    lengths = (responses if prompts is None else prompts + responses).clone()
    for row, places in starts.items():
        before = 0 if prompts is None else int(prompts[row])
        ends = [0, *places, int(responses[row])]
        parts = [end - start for start, end in pairwise(ends)]
        lengths[row] = max(before + parts[0], *parts[1:])
    return lengths
