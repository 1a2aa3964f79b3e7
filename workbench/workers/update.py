"""One call of an update: an optimizer step a minibatch and epoch, on the sum of several losses."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from workbench.engines.training import Pass, StepReport, TrainingEngine
from workbench.messages.metrics import Max, Mean, Metrics, merge_metrics
from workbench.messages.replies import Output
from workbench.messages.shards import Shard
from workbench.objectives.aggregation import Aggregation, aggregate, denominator
from workbench.workers.device_metrics import DeviceMetrics, OnDevice, on_host
from workbench.workers.finite import not_finite_in
from workbench.workers.micro_batches import MicroBatch, each_minibatch, minibatch_indices, tokens_of
from workbench.workers.token_budget import TokenBudget
from workbench.workers.worker import Context

TokenLoss = Callable[[MicroBatch, Any], tuple[Tensor, DeviceMetrics]]


@dataclass(frozen=True, kw_only=True)
class Term:
    """One summand of what is minimised: `loss` over the tokens of a shard, aggregated over each minibatch.

    inputs: what the module is given of a micro-batch. loss: from a micro-batch and the module's output to a loss a
    response token [B, R], and metrics. The shard has as many minibatches as those of the other terms.
    skip: rows of the shard that have no gradient, so that they only count in the denominators. Rows that are not valid
    count nowhere, and are left out too.
    together: consecutive rows whose loss is one, see `micro_batches`.
    prepare: called with the minibatch's number before each of its optimizer steps, on every rank.
    """

    shard: Shard
    inputs: Callable[[MicroBatch], Mapping[str, Any]]
    loss: TokenLoss
    aggregation: Aggregation = "token-mean"
    max_response_tokens: int | None = None
    skip: Collection[int] = ()
    together: int = 1
    prepare: Callable[[int], None] = lambda number: None

    def divisors(self, context: Context) -> list[Tensor]:
        """The denominator of each minibatch, over the rows of all replicas, skipped ones among them."""
        mask_BR = self.shard.valid_mask.pad()
        parts = [
            denominator(mask_BR[rows], self.aggregation, self.max_response_tokens)
            for rows in minibatch_indices(self.shard.minibatch_sizes)
        ]
        return list(context.groups.data.all_reduce(torch.stack(parts).to(context.device)))


@dataclass
class StepMetrics:
    """What the micro-batches of one optimizer step report. It is read after the step, so that the host does not wait
    for a device between micro-batches.

    reported: metrics, this rank's share of the loss among them. not_finite: of each micro-batch, in which rows the loss
    is not finite, [B].
    """

    reported: list[DeviceMetrics] = field(default_factory=list)
    not_finite: list[tuple[Term, MicroBatch, Tensor]] = field(default_factory=list)

    def add(self, term: Term, micro: MicroBatch, loss_BR: Tensor, share: Tensor, metrics: DeviceMetrics) -> None:
        """Add a micro-batch. loss_BR: 0 outside the mask."""
        self.reported.append({**metrics, "loss": OnDevice(Mean, {"total": share.detach(), "count": 0.0})})
        self.not_finite.append((term, micro, (~torch.isfinite(loss_BR.detach())).any(dim=1)))

    def read(self) -> Metrics:
        metrics: Metrics = {}
        for reported in on_host(self.reported):
            merge_metrics(metrics, reported)
        return metrics

    def first_not_finite(self) -> str:
        """In words, the first row whose loss is not finite, and the columns that are not finite there."""
        for term, micro, rows_B in self.not_finite:
            for i in rows_B.nonzero()[:1, 0].tolist():
                read = not_finite_in(term.shard.columns, micro.index[i])
                where = f"its loss is not finite, first in row {int(term.shard.rows[micro.index[i]])}"
                return where + (f", where {read} is not" if read else "")
        return "its loss is not finite"


@dataclass
class Update:
    """The optimizer steps of one call, on the sum of `terms`.

    rate_scales: a factor of the learning rate for each minibatch, equal on all ranks; empty: all 1.

    The token losses of a term are aggregated with the denominator of its whole minibatch, over all replicas and
    micro-batches. On a pipeline the metrics of losses are on its last stage. `Output.notes` names the steps that the
    engine skipped, and where the loss, or which gradient, was first not finite. Where a GPU has no memory for automatic
    micro-batches, the step begins again with smaller ones.
    """

    engine: TrainingEngine
    budget: TokenBudget
    context: Context
    terms: Sequence[Term]
    epochs: int
    rate_scales: Sequence[float] = ()
    _done: int = field(default=0, init=False)
    _done_tokens: int = field(default=0, init=False)

    def run(self) -> Output:
        """Take the steps; of an update that was stopped before, those that are left."""
        stopping, metrics, notes = self.context.stopping, Metrics(), list[str]()
        taken = 0
        if stopping.resume_from is not None:
            taken, metrics = stopping.resume_from.steps, dict(stopping.resume_from.metrics)
        self._cut_minibatches()
        divisors = [term.divisors(self.context) for term in self.terms]
        count = len(self._minibatches)
        for step in range(self.epochs * count):
            epoch, number = divmod(step, count)
            if step < taken:
                self._done += _passes(self._minibatches[number])
                continue
            stopping.point(step, self.epochs * count, {**metrics, "optimizer_steps": Max(value=self.engine.steps)})
            for term in self.terms:
                term.prepare(number)
            report, seen = self._step(epoch, number, [of_term[number] for of_term in divisors])
            of_step = seen.read()
            share = of_step.get("loss", Mean(total=0.0, count=0.0))  # reported on the last stage of a pipeline
            assert isinstance(share, Mean)
            if report.skipped:
                why = "" if math.isfinite(share.total) else seen.first_not_finite()
                why = why or f"the gradient is not finite, first that of {report.culprit or 'some weight'}"
                if report.loss_scale is not None:
                    why += f"; the loss scale was {report.loss_scale:g}, and is halved"
                notes.append(f"optimizer step {number + 1} of {count}, epoch {epoch + 1}, was skipped: {why}")
            # each replica holds its share of one global loss: the shares add up, the count is one a step
            of_step["loss"] = Mean(total=share.total, count=1 / self.context.groups.data.world_size)
            if not report.skipped:  # else it is not finite
                of_step["grad_norm"] = Mean(total=report.grad_norm, count=1)
            of_step["skipped/fraction"] = Mean(total=float(report.skipped), count=1)
            of_step["learning_rate"] = Mean(total=report.learning_rate, count=1)
            if report.loss_scale is not None:
                of_step["loss_scale"] = Mean(total=report.loss_scale, count=1)
            if step == 0:
                merge_metrics(metrics, {f"first_minibatch/{name}": metric for name, metric in of_step.items()})
            merge_metrics(metrics, of_step)
        metrics["optimizer_steps"] = Max(value=self.engine.steps)
        return Output(metrics=metrics, notes=tuple(notes))

    def _cut_minibatches(self) -> None:
        """The micro-batches of each term, for each minibatch, by the budget as it is now."""
        data, device, budget = self.context.groups.data, self.context.device, self.budget
        tokens = budget.tokens
        of_terms = (
            each_minibatch(
                term.shard,
                tokens,
                data,
                device,
                padded=budget.padded,
                skip={*term.skip, *term.shard.invalid_rows},
                together=term.together,
            )
            for term in self.terms
        )
        self._minibatches = list(zip(*of_terms, strict=True))
        self._total = self.epochs * sum(map(_passes, self._minibatches))

    def _step(self, epoch: int, number: int, divisors: Sequence[Tensor]) -> tuple[StepReport, StepMetrics]:
        """One optimizer step, again with smaller micro-batches where there was no memory for it."""
        rate_scale = self.rate_scales[number] if self.rate_scales else 1.0
        while True:
            seen, had_moments = StepMetrics(), self.engine.has_moments
            passes: list[Pass] = []
            for term, divisor, micros in zip(self.terms, divisors, self._minibatches[number], strict=True):
                passes += [self._pass(term, divisor, micro, seen) for micro in micros]
            try:
                return self.engine.step(passes, rate_scale), seen
            except torch.OutOfMemoryError as error:
                if self.engine.has_moments != had_moments:
                    raise  # in the middle of the optimizer's first step: some weights may have moved
                self.budget.halve(error)
            self._cut_minibatches()
            before = sum(map(_passes, self._minibatches[:number]))
            self._done = epoch * self._total // self.epochs + before

    def _pass(self, term: Term, divisor: Tensor, micro: MicroBatch, seen: StepMetrics) -> Pass:
        def begin() -> None:
            self.context.progress(self._done, self._total, self._done_tokens)
            self._done, self._done_tokens = self._done + 1, self._done_tokens + tokens_of(micro)

        mask = term.shard.valid_mask

        def share(output: Any) -> Tensor:
            loss_BR, metrics = term.loss(micro, output)
            mask_BR = micro.mask_BR(mask)
            scalar = aggregate(loss_BR, mask_BR, term.aggregation, divisor)
            seen.add(term, micro, loss_BR * mask_BR, scalar, metrics)
            if scalar.requires_grad:  # a loss that is not finite has no gradient to step along, whatever autograd gives
                finite = torch.isfinite(scalar.detach())
                scalar.register_hook(lambda gradient: torch.where(finite, gradient, torch.nan))
            return scalar

        tokens = tokens_of(micro) * self.context.groups.counts
        return Pass(inputs=term.inputs(micro), loss=share, tokens=tokens, begin=begin)


def _passes(minibatch: tuple[list[MicroBatch], ...]) -> int:
    return sum(map(len, minibatch))
