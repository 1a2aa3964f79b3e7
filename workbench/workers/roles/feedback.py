"""Rated answers as rows: each row has its own answer, and the answer to another prompt of its batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from workbench.batches.columns import ColumnValues, Ragged
from workbench.messages.shards import Shard
from workbench.workers.micro_batches import minibatch_indices
from workbench.workers.roles.pairs import last_tokens

FEEDBACK_COLUMNS = ("prompt_ids", "response_ids", "mismatched_ids")
REFERENCE_FEEDBACK_COLUMNS = ("ref_response_log_prob", "ref_mismatched_log_prob")


def as_answers(batch: Shard, answers: str) -> Shard:
    """Rows of prompt and one column of answers. `response_mask` is 1 on the last token of every answer: a row's loss
    counts there."""
    responses = batch.ragged(answers)
    columns: dict[str, ColumnValues] = {
        "prompt_ids": batch.ragged("prompt_ids"),
        "response_ids": responses,
        "response_mask": last_tokens(responses),
    }
    return replace(batch, columns=columns)


def minibatch_of(batch: Shard, number: int) -> Shard:
    """One minibatch of a shard, as a shard."""
    rows = list(minibatch_indices(batch.minibatch_sizes))[number]
    columns = {name: _taken(column, rows) for name, column in batch.columns.items()}
    return replace(batch, columns=columns, rows=batch.rows[rows], minibatch_sizes=(len(rows),))


def _taken(column: ColumnValues, rows: Sequence[int]) -> ColumnValues:
    if isinstance(column, Ragged):
        return column.take(rows)
    return [column[row] for row in rows] if isinstance(column, list) else column[list(rows)]
