"""Responses of several turns and contexts: where each begins and ends, whose tokens they are, means over turns."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import groupby, pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from workbench.batches.columns import ColumnValues, Ragged, ragged_in
from workbench.batches.schema import CONTEXT_STARTS
from workbench.errors import BadInput

if TYPE_CHECKING:
    import pandas as pd


TURN_COLUMNS = (
    "turn_starts", "turn_ends", "response_ids", "response_mask", "turn_rewards", "rewards", "values", "advantages",
    "returns",
)  # fmt: skip


def ends_of_turns(turn_ends: Ragged, lengths: Tensor) -> Tensor:
    """Return True on the last token of each turn, bool [rows, tokens of the longest row].

    turn_ends: for each row and turn, the number of the row's tokens up to the turn's end. lengths: tokens of each row.
    Raises `BadInput` if the ends of a row do not rise, or exceed its number of tokens.
    """
    for row, (ends, length) in enumerate(zip(turn_ends.rows(), lengths.tolist(), strict=True)):
        steps = torch.diff(ends, prepend=ends.new_zeros(1), append=ends.new_tensor([length + 1]))
        if not bool((steps > 0).all()):
            raise BadInput(
                f"turn_ends {ends.tolist()} of row {row}, which has {length} tokens",
                "they must rise from turn to turn, up to the number of response tokens",
                "keep the column as actor.generate_sequences(environment=...) wrote it",
            )
    ends_BT = torch.zeros(len(lengths), int(lengths.max()) if len(lengths) else 0, dtype=torch.bool)
    ends_BT[torch.repeat_interleave(torch.arange(len(lengths)), turn_ends.lengths), turn_ends.values - 1] = True
    return ends_BT


def marked(token_ids: Sequence[int], mask: Sequence[bool], decode: Callable[[Sequence[int]], str]) -> str:
    """Return the text of a response, with the environment's part (outside the mask) in ⟦ ⟧."""
    text = ""
    for chosen, part in groupby(zip(token_ids, mask, strict=True), key=lambda pair: bool(pair[1])):
        words = decode([token for token, _ in part])
        text += words if chosen else f"⟦{words}⟧"
    return text


def chosen_mean(row: Sequence[float], mask: Sequence[bool] | None) -> float:
    """Return a row's mean over the tokens inside the mask; NaN without tokens. Ignores a mask of another length."""
    values = np.asarray(row, dtype=np.float64)
    if mask is not None and len(mask) == len(values):
        values = values[np.asarray(mask, dtype=bool)]
    return float(values.mean()) if len(values) else float("nan")


def frame_of_turns(
    table: Mapping[str, ColumnValues], numbers: Sequence[int], decode: Callable[[Sequence[int]], str]
) -> pd.DataFrame:
    """Return a frame of the turns of conversations, see `Batch.turns`. table: the existing columns of TURN_COLUMNS.
    numbers: the conversations' row numbers in their batch."""
    import pandas as pd

    names = ("response_ids", "response_mask", "turn_starts", "turn_ends")
    ids, masks, starts, ends = (ragged_in(table, name).rows() for name in names)
    of_tokens = {name: ragged_in(table, column).rows() for column, name in OF_TOKENS.items() if column in table}
    ends_of_turns(ragged_in(table, "turn_ends"), ragged_in(table, "response_ids").lengths)
    lines: list[dict[str, Any]] = []
    for i, number in enumerate(numbers):
        before = 0
        for turn, (start, end) in enumerate(zip(starts[i].tolist(), ends[i].tolist(), strict=True)):
            mask = masks[i][start:end]
            line = {
                "conversation": number,
                "turn": turn,
                "tokens": end - start,
                "text": decode(ids[i][start:end].tolist()),
                "observation": decode(ids[i][before:start].tolist()),
                "trained": bool(mask.any()),
                "reward": _reward(table, i, turn, slice(start, end), turn == len(ends[i]) - 1),
            }
            for name, rows in of_tokens.items():
                numbers_of_turn = rows[i][start:end].tolist()
                line[name] = numbers_of_turn[0] if name == "value" else chosen_mean(numbers_of_turn, mask.tolist())
            lines.append(line)
            before = end
    columns = ["conversation", "turn", "tokens", "text", "observation", "trained", "reward", *of_tokens]
    return pd.DataFrame(lines, columns=columns)


OF_TOKENS = {"values": "value", "advantages": "advantage", "returns": "return"}


def _reward(table: Mapping[str, ColumnValues], i: int, turn: int, tokens: slice, last: bool) -> float:
    scores = table.get("rewards")
    if isinstance(scores, Ragged):
        return float(scores.rows()[i][tokens].double().sum())
    if isinstance(scores, Tensor):
        return float(scores[i]) if last else 0.0
    given = table.get("turn_rewards")
    return float(given.rows()[i][turn]) if isinstance(given, Ragged) else float("nan")


def contexts_of(columns: Mapping[str, ColumnValues]) -> dict[int, list[int]]:
    """Return for each row with more than one context the response positions at which its further contexts begin."""
    starts = columns.get(CONTEXT_STARTS)
    if not isinstance(starts, Ragged) or not starts.values.any():
        return {}
    found = ((row, one.nonzero().flatten().tolist()) for row, one in enumerate(starts.rows()))
    return {row: places for row, places in found if places}


def answer_lengths(mask: Ragged, starts: Mapping[int, list[int]]) -> Tensor:
    """Return for each row the tokens after the prompt of its context with the most such tokens, [rows], as
    `max_new_tokens` counts them. mask: the response mask. starts: see `contexts_of`. The prompt of a further context is
    part of the response, and ends before the context's first sampled token."""
    lengths, masks = mask.lengths.clone(), mask.rows() if starts else []
    for row, places in starts.items():
        answers = [places[0]]
        for start, end in pairwise([*places, int(mask.lengths[row])]):
            sampled = masks[row][start:end].nonzero().flatten()
            answers.append(end - start - int(sampled[0]) if len(sampled) else 0)
        lengths[row] = max(answers)
    return lengths


def longest_contexts(prompts: Tensor | None, responses: Tensor, starts: Mapping[int, list[int]]) -> Tensor:
    """Return the tokens of each row's longest context, [rows]. prompts (or None), responses: token counts, [rows]."""
    lengths = (responses if prompts is None else prompts + responses).clone()
    for row, places in starts.items():
        before = 0 if prompts is None else int(prompts[row])
        ends = [0, *places, int(responses[row])]
        parts = [end - start for start, end in pairwise(ends)]
        lengths[row] = max(before + parts[0], *parts[1:])
    return lengths
