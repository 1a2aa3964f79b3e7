"""How the actor learns from people's preferences: from pairs of answers, and from single answers that were rated.

Suffix P: pairs of a micro-batch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import chain
from typing import Annotated, Any, Literal

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from workbench.batches.columns import Ragged, rows_at
from workbench.batches.schema import COUNTING
from workbench.engines.communicator import Communicator
from workbench.messages.calls import Output
from workbench.messages.metrics import Mean, Metrics
from workbench.messages.operation import row_stage, update_stage
from workbench.messages.shards import Shard
from workbench.models.packing import to_device
from workbench.objectives.preference import dpo_loss, ipo_loss, kto_loss, orpo_loss
from workbench.support.intervals import wilson_bounds
from workbench.support.validation import NonNegativeFloat, Number, PositiveFloat, PositiveInt
from workbench.workers.micro_batches import DeviceMetrics, MicroBatch, OnDevice, minibatch_indices, on_host
from workbench.workers.model_worker import TrainedWorker
from workbench.workers.passes import ANSWER_LOG_PROBS, PassWorker, RowReading, Term

PAIR_COLUMNS = ("prompt_ids", "chosen_ids", "rejected_ids")
REFERENCE_COLUMNS = ("ref_chosen_log_prob", "ref_rejected_log_prob")

# (values of the chosen answers, of the rejected ones, numbers of the pairs) -> (loss [P], metrics, and more)
PairLoss = Callable[[Tensor, Tensor, list[int]], tuple[Tensor, DeviceMetrics, *tuple[Any, ...]]]


def as_rows(batch: Shard) -> Shard:
    """Turn pairs into rows: row 2i is the chosen answer of pair i, row 2i + 1 the rejected one.

    `response_mask` is 1 on the last token of every answer: a pair's loss counts there, once for each of its answers.
    """
    pairs = zip(*(batch.ragged(name).rows() for name in ("chosen_ids", "rejected_ids")), strict=True)
    responses = Ragged.of(list(chain(*pairs)), torch.int64)
    prompts = batch.ragged("prompt_ids").take(np.arange(len(batch)).repeat(2))
    return replace(
        batch,
        columns={"prompt_ids": prompts, "response_ids": responses, "response_mask": last_tokens(responses)},
        rows=batch.rows.repeat(2),
        minibatch_sizes=tuple(2 * size for size in batch.minibatch_sizes),
    )


def last_tokens(answers: Ragged) -> Ragged:
    """Return a column that is 1 on the last token of every answer; no answer may be empty."""
    last = torch.zeros(len(answers.values), dtype=torch.bool)
    last[torch.cumsum(answers.lengths, 0) - 1] = True
    return answers.like(last)


def pair_term(batch: Shard, reading: RowReading, loss: PairLoss) -> Term:
    """Return the mean of a loss over pairs, as a term. reading: reads the values from which the loss is computed."""

    def each(micro: MicroBatch, output: Any) -> tuple[Tensor, DeviceMetrics]:
        values_B = reading.values(micro, output)
        loss_P, metrics, *_ = loss(values_B[0::2], values_B[1::2], [row // 2 for row in micro.index[0::2]])
        loss_BR = loss_P.repeat_interleave(2)[:, None].expand(-1, micro.longest)
        return loss_BR, metrics if micro.weight else {}

    return Term(shard=as_rows(batch), inputs=reading.inputs, loss=each, unit_rows=2)


def pair_values(worker: PassWorker, batch: Shard, reading: RowReading) -> tuple[Tensor, Tensor]:
    """Return the values of the chosen and of the rejected answers, fp32 [rows] each, without gradients.

    Uses the same micro-batches as `pair_term`, so that an update starts from these values to the last bit.
    """
    values_B = worker.row_values(as_rows(batch), reading, unit_rows=2)
    return values_B[0::2].clone(), values_B[1::2].clone()


def pair_metrics(
    loss_P: Tensor, chosen_P: Tensor, rejected_P: Tensor, *, names: tuple[str, str], sign: int = 1
) -> DeviceMetrics:
    """Metrics of pairs and their two scores: the loss, the share whose chosen answer has the better score (a tie does
    not count), by how much it is better, and the mean of each score. sign: -1 if lower scores are better."""
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


def accuracy_bounds(chosen: Tensor, rejected: Tensor, data: Communicator) -> Metrics:
    """Return the 95 % interval of the accuracy over the pairs of all replicas."""
    counts = torch.tensor([float((chosen > rejected).sum()), len(chosen)], dtype=torch.float64)
    right, pairs = data.all_reduce(counts).tolist()
    if not pairs:
        return {}
    low, high = map(float, wilson_bounds(right, pairs))
    return {"accuracy/low": Mean(total=low, count=1), "accuracy/high": Mean(total=high, count=1)}


# --- rated answers ----------------------------------------------------------------------------------------------------

FEEDBACK_COLUMNS = ("prompt_ids", "response_ids", "mismatched_ids")
REFERENCE_FEEDBACK_COLUMNS = ("ref_response_log_prob", "ref_mismatched_log_prob")


def as_answers(batch: Shard, answers: str) -> Shard:
    """Return rows of the prompt and one column of answers. `response_mask` is 1 on the last token of every answer: a
    row's loss counts there."""
    prompts, responses = batch.ragged("prompt_ids"), batch.ragged(answers)
    mask = last_tokens(responses)
    return replace(batch, columns={"prompt_ids": prompts, "response_ids": responses, "response_mask": mask})


PairObjective = Literal["dpo", "ipo", "orpo"]
Smoothing = Annotated[Number, Field(ge=0, le=0.5)]
REWARDS = ("chosen_rewards", "rejected_rewards")
LOG_ODDS = ("chosen_log_odds", "rejected_log_odds")


def pair_losses(batch: Shard, objective: PairObjective, beta: float, label_smoothing: float = 0.0) -> PairLoss:
    """Return the loss of a shard's pairs. Beside loss and metrics it returns the scores by which a pair is judged.

    beta, label_smoothing: see `workbench.objectives.preference`.
    """

    def loss(chosen_P: Tensor, rejected_P: Tensor, pairs: list[int]) -> tuple[Tensor, DeviceMetrics, Any]:
        def here(chosen: Tensor, rejected: Tensor) -> tuple[Tensor, Tensor]:
            return to_device(chosen[pairs], chosen_P.device), to_device(rejected[pairs], chosen_P.device)

        tokens = here(batch.ragged("chosen_ids").lengths, batch.ragged("rejected_ids").lengths)
        if objective == "orpo":
            loss_P, odds = orpo_loss(chosen_P, rejected_P, *tokens, beta)
            scores = odds.chosen_log_odds_P, odds.rejected_log_odds_P
            sft = OnDevice(Mean, {"total": odds.sft_loss_P.double().sum(), "count": len(pairs)})
            return loss_P, {**pair_metrics(loss_P, *scores, names=LOG_ODDS), "sft_loss": sft}, scores
        reference = here(*(batch.numbers(name) for name in REFERENCE_COLUMNS))
        if objective == "ipo":
            loss_P, rewards = ipo_loss(chosen_P, rejected_P, *reference, *tokens, beta)
        else:
            loss_P, rewards = dpo_loss(chosen_P, rejected_P, *reference, beta, label_smoothing)
        return loss_P, pair_metrics(loss_P, *rewards, names=REWARDS), rewards

    return loss


class PreferenceWorker(TrainedWorker):
    """A trained causal language model that learns which answers are preferred."""

    @row_stage(
        reads=PAIR_COLUMNS, optional=(*REFERENCE_COLUMNS, *COUNTING), writes=("chosen_log_prob", "rejected_log_prob")
    )
    def compute_pair_log_prob(
        self,
        batch: Shard,
        *,
        objective: PairObjective = "dpo",
        beta: PositiveFloat = 0.1,
        label_smoothing: Smoothing = 0.0,
    ) -> Output:
        """Columns `chosen_log_prob`, `rejected_log_prob` [rows]: log-probabilities of the whole answers of each pair,
        summed over their tokens, in nats.

        If the batch has the reference's columns (always for objective "orpo", which needs none), the metrics are those
        of `update_dpo`, `update_ipo` or `update_orpo` with the same arguments, and the bounds of the accuracy's 95 %
        interval: use them on held-out pairs. They are over the rows that are `valid`.
        """
        chosen, rejected = pair_values(self, batch, ANSWER_LOG_PROBS)
        metrics: Metrics = {}
        if objective == "orpo" or set(REFERENCE_COLUMNS) <= set(batch.columns):
            loss = pair_losses(batch, objective, beta, label_smoothing)
            valid_B = batch.valid
            _, told, scores = loss(chosen[valid_B], rejected[valid_B], valid_B.nonzero()[:, 0].tolist())
            (metrics,) = on_host([told])
            metrics |= accuracy_bounds(scores[0], scores[1], self.context.groups.data)
        return Output(columns={"chosen_log_prob": chosen, "rejected_log_prob": rejected}, metrics=metrics)

    @update_stage(reads=(*PAIR_COLUMNS, *REFERENCE_COLUMNS))
    def update_dpo(
        self, batch: Shard, *, beta: PositiveFloat = 0.1, label_smoothing: Smoothing = 0.0, epochs: PositiveInt = 1
    ) -> Output:
        """Direct preference optimization, one optimizer step per minibatch (of pairs) and epoch; see
        `workbench.objectives.preference.dpo_loss`.

        Reads `chosen_ids` and `rejected_ids`, and the columns that `lab.reference.compute_ref_pair_log_prob` wrote. In
        float32 the first loss is log 2; in bfloat16 the frozen reference rounds differently from the actor, by tenths
        of a nat. Metrics: `accuracy` (of the implicit rewards beta log pi/ref), `margin` between them, and their means.
        """
        loss = pair_losses(batch, "dpo", beta, label_smoothing)
        return self.steps(pair_term(batch, ANSWER_LOG_PROBS, loss), epochs=epochs)

    @update_stage(reads=(*PAIR_COLUMNS, *REFERENCE_COLUMNS))
    def update_ipo(self, batch: Shard, *, beta: PositiveFloat = 0.1, epochs: PositiveInt = 1) -> Output:
        """Identity preference optimization, one optimizer step per minibatch (of pairs) and epoch; see
        `workbench.objectives.preference.ipo_loss`.

        Reads the columns that `update_dpo` reads, and reports the same metrics, of implicit rewards that are means over
        tokens. In float32 the first loss is 1 / (4 beta^2).
        """
        return self.steps(pair_term(batch, ANSWER_LOG_PROBS, pair_losses(batch, "ipo", beta)), epochs=epochs)

    @update_stage(reads=PAIR_COLUMNS)
    def update_orpo(self, batch: Shard, *, beta: PositiveFloat = 0.1, epochs: PositiveInt = 1) -> Output:
        """Odds ratio preference optimization, one optimizer step per minibatch (of pairs) and epoch; see
        `workbench.objectives.preference.orpo_loss`. It needs no reference.

        Metrics: `sft_loss` (of the chosen answers), `accuracy` (of the log-odds), `margin` between them (the log odds
        ratio), and their means.
        """
        return self.steps(pair_term(batch, ANSWER_LOG_PROBS, pair_losses(batch, "orpo", beta)), epochs=epochs)

    @row_stage(
        reads=FEEDBACK_COLUMNS,
        optional=("desirable", *REFERENCE_FEEDBACK_COLUMNS, *COUNTING),
        writes=("response_log_prob", "mismatched_log_prob"),
    )
    def compute_feedback_log_prob(
        self,
        batch: Shard,
        *,
        beta: PositiveFloat = 0.1,
        desirable_weight: NonNegativeFloat = 1.0,
        undesirable_weight: NonNegativeFloat = 1.0,
    ) -> Output:
        """Columns `response_log_prob`, `mismatched_log_prob` [rows]: log-probabilities of each row's whole answer, and
        of the answer to another prompt, summed over their tokens, in nats.

        If the batch has ratings and the reference's columns, the metrics are those of `update_kto` with the same
        arguments: use them on held-out feedback. They are over the rows that are `valid`.
        """
        own, mismatched = (
            self.row_values(as_answers(batch, name), ANSWER_LOG_PROBS) for name in ("response_ids", "mismatched_ids")
        )
        metrics: Metrics = {}
        if {"desirable", *REFERENCE_FEEDBACK_COLUMNS} <= set(batch.columns):
            kl = self._reference_point(mismatched, batch)
            columns = (own, batch.numbers("ref_response_log_prob"), batch.numbers("desirable"))
            own_B, ref_B, good_B = (column[batch.valid] for column in columns)
            loss_B, rewards_B = kto_loss(own_B, ref_B, good_B, kl, beta, desirable_weight, undesirable_weight)
            (metrics,) = on_host([_kto_metrics(loss_B, rewards_B, good_B, kl)])
        return Output(columns={"response_log_prob": own, "mismatched_log_prob": mismatched}, metrics=metrics)

    @update_stage(reads=(*FEEDBACK_COLUMNS, "desirable", *REFERENCE_FEEDBACK_COLUMNS))
    def update_kto(
        self,
        batch: Shard,
        *,
        beta: PositiveFloat = 0.1,
        desirable_weight: NonNegativeFloat = 1.0,
        undesirable_weight: NonNegativeFloat = 1.0,
        epochs: PositiveInt = 1,
    ) -> Output:
        """Kahneman-Tversky optimization, one optimizer step per minibatch (of rated answers) and epoch; see
        `workbench.objectives.preference.kto_loss`.

        Reads the columns of `lab.feedback(...)`, and those that `lab.reference.compute_ref_feedback_log_prob` wrote.
        Before each step, a pass without gradients over `mismatched_ids` of the minibatch's rows on all replicas
        estimates the reference point `kl`. In float32 the first loss is half of the mean weight.
        Metrics: `kl`; `desirable_rewards/mean` and `undesirable_rewards/mean`, of beta log pi/ref.
        """
        rows, kl = as_answers(batch, "response_ids"), 0.0
        ref, good = batch.numbers("ref_response_log_prob"), batch.numbers("desirable")

        def prepare(number: int) -> None:
            nonlocal kl
            index = np.array(list(minibatch_indices(batch.minibatch_sizes))[number])
            part = replace(
                batch, columns=rows_at(batch.columns, index), rows=batch.rows[index], minibatch_sizes=(len(index),)
            )
            mismatched = self.row_values(as_answers(part, "mismatched_ids"), ANSWER_LOG_PROBS)
            kl = self._reference_point(mismatched, part)

        def loss(micro: MicroBatch, output: Any) -> tuple[Tensor, DeviceMetrics]:
            values_B = ANSWER_LOG_PROBS.values(micro, output)
            ref_B, good_B = (to_device(column[micro.index], values_B.device) for column in (ref, good))
            loss_B, rewards_B = kto_loss(values_B, ref_B, good_B, kl, beta, desirable_weight, undesirable_weight)
            loss_BR = loss_B[:, None].expand(-1, micro.longest)
            return loss_BR, _kto_metrics(loss_B, rewards_B, good_B, kl) if micro.weight else {}

        term = Term(shard=rows, inputs=ANSWER_LOG_PROBS.inputs, loss=loss, prepare=prepare)
        output = self.steps(term, epochs=epochs)
        return replace(output, notes=(*output.notes, *self._note_on_labels(good)))

    def _note_on_labels(self, desirable_B: Tensor) -> tuple[str, ...]:
        """Return a note for the user if the answers of all replicas have the same label."""
        counts = torch.tensor([int(desirable_B.bool().sum()), len(desirable_B)])
        good, rows = self.context.groups.data.all_reduce(counts).tolist()
        if 0 < good < rows:
            return ()
        kind, other = ("desirable", "undesirable") if good else ("undesirable", "desirable")
        return (
            f"all {rows} answers are {kind}: KTO learns from both kinds. With one kind, the policy can raise or lower "
            f"the probability of all answers. Give {other} ones too, such as both answers of pairs",
        )

    def _reference_point(self, mismatched: Tensor, batch: Shard) -> float:
        """Return KTO's estimate of KL(pi || ref), over the valid rows of all replicas."""
        gap = (mismatched.double() - batch.numbers("ref_mismatched_log_prob").double())[batch.valid]
        counts = torch.tensor([float(gap.sum()), len(gap)], dtype=torch.float64)
        total, rows = self.context.groups.data.all_reduce(counts).tolist()
        return max(0.0, total / max(rows, 1))


def _kto_metrics(loss_B: Tensor, rewards_B: Tensor, desirable_B: Tensor, kl: float) -> DeviceMetrics:
    good_B, rewards_B = desirable_B.bool(), rewards_B.double()

    def mean(of_B: Tensor) -> OnDevice:
        return OnDevice(Mean, {"total": torch.where(of_B, rewards_B, 0.0).sum(), "count": of_B.sum()})

    return {
        "preference_loss": OnDevice(Mean, {"total": loss_B.detach().double().sum(), "count": len(loss_B)}),
        "desirable_rewards/mean": mean(good_B),
        "undesirable_rewards/mean": mean(~good_B),
        "kl": OnDevice(Mean, {"total": kl * len(loss_B), "count": len(loss_B)}),
    }
