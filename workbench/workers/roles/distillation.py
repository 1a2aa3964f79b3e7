"""Distillation: a teacher's predictions of the next token, and a student that learns them.

The teacher writes its k likeliest tokens at each position, their log-probabilities, and that of all other tokens
together: 8 k + 4 bytes per token. The student's divergence is over these k + 1 outcomes. With k = vocabulary it is the
whole divergence, which is too much to send for large vocabularies. With both models in one process, whole distributions
would not have to be sent, but the models' placements would be tied. Neither side holds logits of more than 512
positions at a time in memory.

Shape legend: N response tokens of a micro-batch, n of one call of the head, k tokens of the teacher, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from workbench.batches.columns import ColumnValues, Ragged
from workbench.errors import BadInput
from workbench.messages.calls import Output
from workbench.messages.operation import update_stage
from workbench.messages.shards import Shard
from workbench.models.loading import Limits
from workbench.models.packing import to_device
from workbench.models.spec import Model
from workbench.objectives.aggregation import Aggregation
from workbench.objectives.kl import divergence, merge_other_tokens
from workbench.support.validation import PositiveInt, ZeroToOne
from workbench.workers.micro_batches import DeviceMetrics, MicroBatch
from workbench.workers.model_worker import TrainedWorker, check_update
from workbench.workers.passes import Term, sampling_temperature

TEACHER_COLUMNS = ("teacher_ids", "teacher_log_prob", "teacher_tail_log_prob")
# The batch's meta key of the temperature of the teacher's log-probabilities.
TEACHER_TEMPERATURE = "teacher_temperature"
# The least log-probability that a column holds: a column must not hold infinite numbers.
LEAST = -1e4


class TopK:
    """Reads the k likeliest tokens: [n, 2 k + 1], ids, log-probabilities, and the log-probability of all others.

    vocabulary: tokens from this id on are left out, and the others' probabilities are normalised to sum to 1.
    """

    def __init__(self, k: int, vocabulary: int | None) -> None:
        self.k, self.vocabulary, self.width = k, vocabulary, 2 * k + 1

    def __call__(self, log_probs: Tensor, positions: slice) -> Tensor:
        if self.vocabulary is not None and self.vocabulary < log_probs.shape[-1]:
            log_probs = torch.log_softmax(log_probs[:, : self.vocabulary], dim=-1)
        ids = log_probs.topk(self.k, dim=-1).indices
        outcomes = merge_other_tokens(log_probs, ids).clamp(min=LEAST)
        if outcomes.shape[-1] == self.k:  # no token is left
            outcomes = torch.nn.functional.pad(outcomes, (0, 1), value=LEAST)
        return torch.cat([ids.float(), outcomes], dim=-1)  # float32 holds ids up to 2^24


class Divergence:
    """Reads the student's divergence from the teacher's columns, and its probability of the teacher's tokens: [n, 2].

    Each part of the columns moves to the device only together with the logits to which it is compared.
    """

    width = 2

    def __init__(self, columns: Mapping[str, Ragged], index: list[int], k: int, beta: float) -> None:
        self._columns, self._index, self._k, self._beta = columns, index, k, beta

    @cached_property
    def _rows(self) -> tuple[Tensor, Tensor, Tensor]:
        """Ids [N, k], their log-probabilities [N, k], and the log-probability of all other tokens [N, 1]."""
        ids, chosen, others = (self._columns[name].take(self._index).values for name in TEACHER_COLUMNS)
        return ids.view(-1, self._k), chosen.view(-1, self._k), others[:, None]

    def __call__(self, log_probs: Tensor, positions: slice) -> Tensor:
        ids, chosen, others = (to_device(rows[positions], log_probs.device) for rows in self._rows)
        student = merge_other_tokens(log_probs, ids.long())
        teacher = chosen if student.shape[-1] == self._k else torch.cat([chosen, others], dim=-1)
        share = student[:, : self._k].detach().exp().sum(-1)
        return torch.stack([divergence(teacher, student, self._beta), share], dim=-1)


def teacher_columns(read: Ragged, k: int) -> dict[str, ColumnValues]:
    """Make the teacher's columns from what `TopK` read at all response tokens [tokens, 2 k + 1]."""
    ids, chosen, others = read.values.split([k, k, 1], dim=-1)
    each = k * read.lengths
    ids_of, log_probs, others_of = TEACHER_COLUMNS
    return {
        ids_of: Ragged(ids.to(torch.int32).flatten(), each),
        log_probs: Ragged(chosen.flatten(), each),
        others_of: read.like(others.flatten()),
    }


def check_top_k(arguments: Mapping[str, Any], model: Model) -> None:
    sizes = (arguments["vocabulary"], None if model.name is None else Limits.of(model.name).vocabulary)
    size = min((size for size in sizes if size is not None), default=arguments["top_k"])
    if arguments["top_k"] > size:
        raise BadInput(
            f"top_k={arguments['top_k']}", f"the teacher can choose among {size} tokens", f"use at most top_k={size}"
        )


class DistilledWorker(TrainedWorker):
    """A trained causal language model that learns a teacher's distributions."""

    @update_stage(
        reads=("prompt_ids", "response_ids", "response_mask", *TEACHER_COLUMNS), optional=("valid",), check=check_update
    )
    def update_distill(
        self,
        batch: Shard,
        *,
        beta: ZeroToOne = 1.0,
        epochs: PositiveInt = 1,
        aggregation: Aggregation = "token-mean",
        max_response_tokens: PositiveInt | None = None,
    ) -> Output:
        """Learn the teacher's distribution at each response token, one optimizer step per minibatch and epoch.

        Reads the columns of `lab.teacher.compute_teacher_log_prob`, at its temperature. beta: 0 is the forward KL, 1
        the reverse KL, between them the generalised Jensen-Shannon divergence, see
        `workbench.objectives.kl.divergence`. aggregation, max_response_tokens: as in `update_actor`.
        If the student drew the responses, no gradient flows through the sampling, as in GKD (Agarwal et al. 2023,
        https://arxiv.org/abs/2306.13649, section 3.1). Rows that are not `valid` are ignored.
        Metrics: `divergence` a token; `teacher_tokens/student_mass`, the student's probability of the teacher's tokens.
        """
        columns = {name: batch.ragged(name) for name in TEACHER_COLUMNS}
        k = self._teacher_k(batch, columns["teacher_ids"])
        scale = sampling_temperature(batch, batch.meta.get(TEACHER_TEMPERATURE))
        mask = batch.valid_mask

        def inputs(micro: MicroBatch) -> dict[str, Any]:
            return {**micro.scored(scale), "reader": Divergence(columns, micro.index, k, beta)}

        def loss(micro: MicroBatch, output: Tensor) -> tuple[Tensor, DeviceMetrics]:
            loss_BR, share_BR = micro.to_BR(output[:, 0]), micro.to_BR(output[:, 1])
            mean = micro.mean_over(micro.mask_BR(mask))
            return loss_BR, {"divergence": mean(loss_BR), "teacher_tokens/student_mass": mean(share_BR)}

        term = Term(
            shard=batch, inputs=inputs, loss=loss, aggregation=aggregation, max_response_tokens=max_response_tokens
        )
        return self.steps(term, epochs=epochs)

    def _teacher_k(self, batch: Shard, ids: Ragged) -> int:
        """Return the teacher's tokens per position; raise `BadInput` on every rank if any rank's columns do not fit."""
        assert self.spec.name is not None
        tokens, size = batch.ragged("response_ids").lengths, Limits.of(self.spec.name).vocabulary or 0
        k = len(ids.values) // max(1, int(tokens.sum()))
        columns = (ids, batch.ragged("teacher_log_prob"))
        same = all(torch.equal(column.lengths, k * tokens) for column in columns)
        largest = int(ids.values.max()) if len(ids.values) else 0
        seen = torch.tensor([float(not same), float(largest), float(k)], dtype=torch.float64)
        uneven, largest, most = (int(x) for x in self.context.groups.data.all_reduce_max(seen).tolist())
        if uneven:
            raise BadInput(
                f"columns {', '.join(TEACHER_COLUMNS[:2])}",
                "they must have the same number of values for each response token",
                "use the columns that compute_teacher_log_prob wrote",
            )
        if largest >= size:
            raise BadInput(
                f"token id {largest} in 'teacher_ids'",
                f"the actor's model has ids 0 to {size - 1}",
                f"compute_teacher_log_prob(batch, vocabulary={size})",
            )
        return k or most
