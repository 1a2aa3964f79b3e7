"""Columns of scores: their weighted sum, their means, and the tokens that end a step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from workbench.batches.columns import ColumnValues, Ragged
from workbench.batches.schema import ScoredRows
from workbench.data.user_functions import Score, StepScores
from workbench.messages.metrics import Interval, Mean, Metrics
from workbench.messages.shards import Shard

STEP_ENDS = "step_ends"


def weighted(parts: Sequence[ColumnValues], weights: Sequence[float], mask: ColumnValues | None) -> ColumnValues:
    """Return the weighted sum of columns of scores. If some have a number per token, so has the sum, and a number per
    row is added at the row's last token of the policy. mask: `response_mask`; None: all tokens are the policy's."""
    first = next((part for part in parts if isinstance(part, Ragged)), None)
    if first is not None:
        parts = [part if isinstance(part, Ragged) else _at_last_token(part, first, mask) for part in parts]
    values = [part.values if isinstance(part, Ragged) else part for part in parts]
    total = torch.stack([weight * torch.as_tensor(part).double() for part, weight in zip(values, weights, strict=True)])
    whole = total.sum(0).float()
    return whole if first is None else first.like(whole)


def _at_last_token(scores: ColumnValues, like: Ragged, mask: ColumnValues | None) -> Ragged:
    """Spread one number per row over tokens: 0 except at the policy's last token. A row without such a token has no
    place for its number, as in `workbench.objectives.estimators.token_rewards`."""
    chosen = _chosen(mask, like)
    row_of_token = torch.repeat_interleave(torch.arange(len(like)), like.lengths)[chosen]
    last = torch.full((len(like),), -1).scatter_reduce(0, row_of_token, chosen.nonzero()[:, 0], "amax")
    values, placed = torch.zeros(len(like.values)), last >= 0
    values[last[placed]] = torch.as_tensor(scores).float()[placed]
    return like.like(values)


def _chosen(mask: ColumnValues | None, like: Ragged) -> Tensor:
    """Return which tokens the policy chose, [tokens]; all without a mask."""
    return mask.values.bool() if isinstance(mask, Ragged) else torch.ones(len(like.values), dtype=torch.bool)


def reported(column: str, scores: ColumnValues, valid: Tensor, batch: Shard) -> dict[str, Any]:
    """Return what a rank reports beside a column of scores. metrics: the mean score of the valid rows and, if the batch
    says which rows are of one prompt, half the width of its 95 % interval with prompts as clusters: samples of a prompt
    are not independent of each other. scored: rewards by prompt, or None."""
    metrics: Metrics = {f"{column}/mean": mean_score(scores, valid)}
    if "prompt_uid" not in batch.columns:
        return {"metrics": metrics, "scored": None}
    uids, totals = batch.numbers("prompt_uid")[valid], _row_totals(scores)[valid]
    clusters: dict[int, tuple[float, float]] = {}
    for uid, score in zip(uids.tolist(), totals.tolist(), strict=True):
        sum_before, count = clusters.get(uid, (0.0, 0.0))
        clusters[uid] = (sum_before + score, count + 1)
    metrics[f"{column}/interval95"] = Interval(clusters=clusters)
    if column != "rewards":
        return {"metrics": metrics, "scored": None}
    tokens, mask = torch.zeros(len(batch), dtype=torch.int64), batch.columns.get("response_mask")
    if isinstance(mask, Ragged):
        tokens = _row_totals(mask).long()
    elif "response_ids" in batch.columns:
        tokens = batch.ragged("response_ids").lengths
    scored = ScoredRows(prompt_uid=uids.long().numpy(), reward=totals.numpy(), tokens=tokens[valid].numpy())
    return {"metrics": metrics, "scored": scored}


def _row_totals(column: ColumnValues) -> Tensor:
    """Return the score of each row, float64; numbers per token are summed."""
    if not isinstance(column, Ragged):
        return torch.as_tensor(column).double()
    rows = torch.repeat_interleave(torch.arange(len(column)), column.lengths)
    return torch.zeros(len(column), dtype=torch.float64).index_add(0, rows, column.values.double())


def zero_failed(column: ColumnValues, right: Sequence[bool]) -> ColumnValues:
    keep = torch.tensor(list(right), dtype=torch.bool)
    if isinstance(column, Ragged):
        return column.like(torch.where(torch.repeat_interleave(keep, column.lengths), column.values, 0.0))
    return torch.where(keep, torch.as_tensor(column), 0.0)


def mean_score(column: ColumnValues, valid: Tensor) -> Mean:
    """Return the mean over the valid rows; numbers per token are summed."""
    if isinstance(column, Ragged):
        scores = column.values[torch.repeat_interleave(valid, column.lengths)]
    else:
        scores = torch.as_tensor(column)[valid]
    return Mean(total=float(scores.double().sum()), count=int(valid.sum()))


# --- steps ------------------------------------------------------------------------------------------------------------


def steps_of(batch: Shard, tokenizer: PreTrainedTokenizerBase, text: str) -> list[tuple[list[int], list[str]]]:
    """Return, for each response, the last token of each step, and the step's text.

    A step ends with the token in which `text` is complete; the last step ends with the policy's last token. Blanks are
    not a step but the beginning of the next one. Tokens that the policy did not choose are in no step. Special tokens
    are in no step's text, except those that `text` contains.
    """
    told: Pieces = {}
    found = []
    masks = batch.ragged("response_mask").rows() if "response_mask" in batch.columns else None
    for i, response in enumerate(batch.ragged("response_ids").rows()):
        places = range(len(response)) if masks is None else masks[i].nonzero()[:, 0].tolist()
        ends: list[int] = []
        steps: list[str] = []
        said = ""
        pieces = text_of_tokens(tokenizer, response[list(places)].tolist(), told, text)
        for t, piece in zip(places, pieces, strict=True):
            said += piece
            if t == places[-1] or text in said.lstrip():
                ends, steps, said = [*ends, t], [*steps, said], ""
        found.append((ends, steps))
    return found


Pieces = dict[tuple[tuple[int, ...], tuple[int, ...]], tuple[str, bool]]
MOST_OF_A_CHARACTER = 8  # tokens


def text_of_tokens(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int], told: Pieces, shown: str = "") -> list[str]:
    """Return the text that each token adds to those before it; together they are the whole text. Special tokens add
    none, except those that are part of the text `shown`.

    A token alone need not be text: a character may span several tokens and counts for the last of them, and a space may
    show only after another token. So a token is decoded after those before it. told: texts decoded so far.
    """
    added = tokenizer.added_tokens_decoder.items()
    special = {number for number, token in added if token.special and token.content not in shown}
    plain = [t for t, token in enumerate(ids) if token not in special]
    pieces, before, since = [""] * len(ids), 0, 0  # tokens from `since` on have shown no text yet
    for end, t in enumerate(plain, 1):
        known, new = (tuple(ids[place] for place in plain[a:b]) for a, b in ((before, since), (since, end)))
        if (known, new) not in told:
            text = _decoded(tokenizer, known + new)[len(_decoded(tokenizer, known)) :]
            part = text.endswith("\ufffd") and len(new) < MOST_OF_A_CHARACTER
            told[known, new] = text, not text or part
        text, waits = told[known, new]
        if not waits or end == len(plain):
            pieces[t], before, since = text, since, end
    return pieces


def _decoded(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int]) -> str:
    return str(tokenizer.decode(list(ids), clean_up_tokenization_spaces=False))


def step_ends_of(batch: Shard, tokenizer: PreTrainedTokenizerBase, text: str) -> Ragged:
    """Return a column that is 1 on the last token of each step, see `steps_of`."""
    like = batch.ragged("response_ids")
    marks, starts = torch.zeros(len(like.values), dtype=torch.bool), like.lengths.cumsum(0) - like.lengths
    for start, (ends, _) in zip(starts.tolist(), steps_of(batch, tokenizer, text), strict=True):
        marks[[start + end for end in ends]] = True
    return like.like(marks)


def step_ends(
    batch: Shard, asked: Sequence[int], scores: Sequence[Mapping[int, Score]], before: ColumnValues | None
) -> Ragged:
    """Return a column that is 1 on the last token of each step. A score of a whole response is one step; in a list of
    one number per token each token is a step. scores: by component. before: the column with rows that are not asked."""
    like = batch.ragged("response_ids")
    chosen = _chosen(batch.columns.get("response_mask"), like)
    ends = before.values.bool().clone() if isinstance(before, Ragged) else torch.zeros_like(chosen)
    starts = (like.lengths.cumsum(0) - like.lengths).tolist()
    for i, start, tokens in zip(range(len(batch)), starts, like.lengths.tolist(), strict=True):
        if i not in asked:
            continue
        ends[start : start + tokens] = False
        for of_component in scores:
            score = of_component.get(i)
            if isinstance(score, StepScores):
                ends[[start + end for end in score.ends]] = True
            elif isinstance(score, list):
                ends[start : start + tokens] = True
            elif score is not None and (inside := chosen[start : start + tokens].nonzero()).numel():
                ends[start + int(inside[-1])] = True
    return like.like(ends & chosen)
