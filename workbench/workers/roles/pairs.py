"""Pairs as rows: each pair becomes two rows, side by side; rated answers as rows.

Suffix P: pairs of a micro-batch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from workbench.batches.columns import ColumnValues, Ragged
from workbench.engines.training.groups import Collectives
from workbench.messages.metrics import Mean, Metrics
from workbench.messages.shards import Shard
from workbench.objectives.preference import binomial_interval
from workbench.workers.micro_batches import DeviceMetrics, MicroBatch, OnDevice, minibatch_indices
from workbench.workers.passes import PassWorker, RowReading, Term

PAIR_COLUMNS = ("prompt_ids", "chosen_ids", "rejected_ids")
REFERENCE_COLUMNS = ("ref_chosen_log_prob", "ref_rejected_log_prob")

# (values of the chosen answers, of the rejected ones, numbers of the pairs) -> (loss [P], metrics, and more)
PairLoss = Callable[[Tensor, Tensor, list[int]], tuple[Tensor, DeviceMetrics, *tuple[Any, ...]]]


def as_rows(batch: Shard) -> Shard:
    """Pairs as rows: 2i is the chosen answer of pair i, 2i + 1 the rejected one.

    `response_mask` is 1 on the last token of every answer: a pair's loss counts there, once for each of its answers.
    """
    both = [batch.ragged(name) for name in ("chosen_ids", "rejected_ids")]
    prompts = [row for prompt in batch.ragged("prompt_ids").rows() for row in (prompt, prompt)]
    answers = [row for pair in zip(*(column.rows() for column in both), strict=True) for row in pair]
    responses = Ragged.of(answers, torch.int64)
    return replace(
        batch,
        columns={
            "prompt_ids": Ragged.of(prompts, torch.int64),
            "response_ids": responses,
            "response_mask": last_tokens(responses),
        },
        rows=batch.rows.repeat(2),
        minibatch_sizes=tuple(2 * size for size in batch.minibatch_sizes),
    )


def last_tokens(answers: Ragged) -> Ragged:
    """1 on the last token of every answer, none of which is empty."""
    last = torch.zeros(len(answers.values), dtype=torch.bool)
    last[torch.cumsum(answers.lengths, 0) - 1] = True
    return answers.like(last)


def pair_term(batch: Shard, reading: RowReading, loss: PairLoss) -> Term:
    """The mean of a loss over pairs. reading: the values that it is of."""

    def each(micro: MicroBatch, output: Any) -> tuple[Tensor, DeviceMetrics]:
        values_B = reading.values(micro, output)
        loss_P, metrics, *_ = loss(values_B[0::2], values_B[1::2], [row // 2 for row in micro.index[0::2]])
        loss_BR = loss_P.repeat_interleave(2)[:, None].expand(-1, micro.longest)
        return loss_BR, metrics if micro.weight else {}

    return Term(shard=as_rows(batch), inputs=reading.inputs, loss=each, together=2)


def pair_values(worker: PassWorker, batch: Shard, reading: RowReading) -> tuple[Tensor, Tensor]:
    """The values of the chosen and of the rejected answers, fp32 [rows] each, without gradients.

    In the micro-batches of `pair_term`, so that an update starts from these values to the last bit.
    """
    values_B = worker.row_values(as_rows(batch), reading, together=2)
    return values_B[0::2].clone(), values_B[1::2].clone()


def pair_metrics(
    loss_P: Tensor, chosen_P: Tensor, rejected_P: Tensor, *, names: tuple[str, str], sign: int = 1
) -> DeviceMetrics:
    """Metrics of pairs and their two scores: loss, share in which the chosen answer has the better one (a tie does not
    count), by how much it is better, and the mean of each. sign: -1 where lower is better."""
    chosen_P, rejected_P = chosen_P.detach().double(), rejected_P.detach().double()
    gap_P = sign * (chosen_P - rejected_P)
    told = {
        "preference_loss": loss_P.detach().double(),
        "accuracy": (gap_P > 0).double(),
        "margin": gap_P,
        f"{names[0]}/mean": chosen_P,
        f"{names[1]}/mean": rejected_P,
    }
    return {name: OnDevice(Mean, {"total": x.sum(), "count": len(x)}) for name, x in told.items()}


def accuracy_bounds(chosen: Tensor, rejected: Tensor, data: Collectives) -> Metrics:
    """The 95 % interval of the accuracy over the pairs of all replicas."""
    counts = torch.tensor([float((chosen > rejected).sum()), len(chosen)], dtype=torch.float64)
    right, pairs = data.all_reduce(counts).tolist()
    if not pairs:
        return {}
    low, high = binomial_interval(right, pairs)
    return {"accuracy/low": Mean(total=low, count=1), "accuracy/high": Mean(total=high, count=1)}


# --- rated answers ----------------------------------------------------------------------------------------------------

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
