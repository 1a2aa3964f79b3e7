"""How a role computes over a shard, micro-batch by micro-batch: `passes` runs forward passes, `steps` optimizer steps.

    column = self.token_values(batch, lambda micro: micro.scored(temperature))
    output = self.steps(Term(shard=batch, inputs=lambda micro: micro.inputs, loss=loss), epochs=1)

Suffixes as in micro_batches.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from workbench.batches.columns import Ragged
from workbench.engines.training import Pass, StepReport, TrainingEngine
from workbench.engines.training.steps import schedule_ended_note
from workbench.errors import BadInput
from workbench.messages.calls import Output, UpdatePart
from workbench.messages.metrics import Max, Mean, Metrics, merge_metrics
from workbench.messages.shards import Shard
from workbench.models.heads import PackedModule, TokenLogProbs
from workbench.objectives.aggregation import Aggregation, aggregate, denominator
from workbench.placement.estimate import MOST_TOKENS, TOKENS_STEP
from workbench.placement.role_model import AUTOMATIC_TOKENS
from workbench.support.machine import own_gpu_bytes
from workbench.telemetry import Recorder
from workbench.workers.hints import not_finite_in
from workbench.workers.micro_batches import (
    DeviceMetrics,
    MicroBatch,
    OnDevice,
    Scatter,
    each_minibatch,
    minibatch_indices,
    on_host,
)
from workbench.workers.worker import Context, Worker

# The batch's meta key of the temperature of `old_log_prob`; "temperature" is the rollout's.
LOG_PROB_TEMPERATURE = "log_prob_temperature"
# Tokens of a budget's two trial passes, and of each row in them; the share of memory that stays free for rows of other
# lengths and fragmentation.
TRIAL_TOKENS, TRIAL_ROW_TOKENS = (1024, 2048), 512
MARGIN = 0.1

Inputs = Callable[[MicroBatch], Mapping[str, Any]]  # the module's arguments for a micro-batch
TokenLoss = Callable[[MicroBatch, Any], tuple[Tensor, DeviceMetrics]]


@dataclass(frozen=True, kw_only=True)
class RowReading:
    """One number per row. inputs: the module's arguments for a micro-batch. values: the numbers [B], from its output.

    They are separate because on a pipeline only the last stage has the output.
    """

    inputs: Inputs
    values: Callable[[MicroBatch, Any], Tensor]


ANSWER_LOG_PROBS = RowReading(
    inputs=lambda micro: micro.scored(1.0), values=lambda micro, output: micro.to_BR(output[0]).sum(-1)
)
"""log pi(answer | prompt) of each row: the sum over its response tokens, EOS included, nats."""

LAST_TOKEN_SCORES = RowReading(
    inputs=lambda micro: {**micro.inputs, "positions": micro.last}, values=lambda micro, output: output
)
"""The score of each row, read at its last token."""


@dataclass(frozen=True, kw_only=True)
class Term:
    """One summand of the minimised loss: `loss` over the tokens of a shard, aggregated over each minibatch.

    loss: maps a micro-batch and the module's output to a loss per response token [B, R], and metrics. All terms' shards
    have the same number of minibatches.
    skip: rows of the shard without a gradient, which only count in the denominators. Rows that are not valid are left
    out too, and count nowhere.
    unit_rows: how many consecutive rows share one loss, see `each_minibatch`.
    prepare: called with the minibatch's number before each of its optimizer steps, on every rank.
    """

    shard: Shard
    inputs: Inputs
    loss: TokenLoss
    aggregation: Aggregation = "token-mean"
    max_response_tokens: int | None = None
    skip: Collection[int] = ()
    unit_rows: int = 1
    prepare: Callable[[int], None] = lambda number: None

    @cached_property
    def mask(self) -> Ragged:
        """The tokens that count."""
        return self.shard.valid_mask

    def divisors(self, context: Context) -> list[Tensor]:
        """Return the denominator of each minibatch, over the rows of all replicas, including skipped rows."""
        mask_BR = self.mask.pad()
        parts = [
            denominator(mask_BR[rows], self.aggregation, self.max_response_tokens)
            for rows in minibatch_indices(self.shard.minibatch_sizes)
        ]
        return list(context.groups.data.all_reduce(torch.stack(parts).to(context.device)))


@dataclass
class StepLosses:
    """The losses and metrics of one optimizer step's micro-batches. They are read after the step, so that the host does
    not wait for a device between micro-batches.

    reported: metrics, including this rank's share of the loss. not_finite: for each micro-batch, the rows whose loss is
    not finite, [B].
    """

    reported: list[DeviceMetrics] = field(default_factory=list)
    not_finite: list[tuple[Term, MicroBatch, Tensor]] = field(default_factory=list)

    def share(self, term: Term, divisor: Tensor, micro: MicroBatch, output: Any) -> Tensor:
        """Return a micro-batch's share of the minibatch's loss, a scalar. divisor: the minibatch's denominator."""
        loss_BR, metrics = term.loss(micro, output)
        mask_BR = micro.mask_BR(term.mask)
        share = aggregate(loss_BR, mask_BR, term.aggregation, divisor)
        self.reported.append({**metrics, "loss": OnDevice(Mean, {"total": share.detach(), "count": 0.0})})
        self.not_finite.append((term, micro, (~torch.isfinite((loss_BR * mask_BR).detach())).any(dim=1)))
        if share.requires_grad:  # a loss that is not finite gets a NaN gradient, whatever autograd computes
            finite = torch.isfinite(share.detach())
            share.register_hook(lambda gradient: torch.where(finite, gradient, torch.nan))
        return share

    def metrics(self, report: StepReport, replicas: int) -> tuple[Metrics, str]:
        """Return the step's metrics, and why the step was skipped ("" if it was taken)."""
        metrics, why = merge_metrics({}, *on_host(self.reported)), ""
        loss = metrics.get("loss", Mean(total=0.0, count=0.0))  # reported on the last stage of a pipeline
        assert isinstance(loss, Mean)
        # each replica holds its share of one global loss: the shares add up, and count once per step
        metrics["loss"] = Mean(total=loss.total, count=1 / replicas)
        if report.skipped:
            why = "" if math.isfinite(loss.total) else self._first_not_finite()
            why = why or f"the gradient is not finite, first that of {report.culprit or 'some weight'}"
            if report.loss_scale is not None:
                why += f"; the loss scale was {report.loss_scale:g}, and is halved"
        else:
            metrics["grad_norm"] = Mean(total=report.grad_norm, count=1)
        metrics["skipped/fraction"] = Mean(total=float(report.skipped), count=1)
        metrics["learning_rate"] = Mean(total=report.learning_rate, count=1)
        if report.loss_scale is not None:
            metrics["loss_scale"] = Mean(total=report.loss_scale, count=1)
        return metrics, why

    def _first_not_finite(self) -> str:
        for term, micro, rows_B in self.not_finite:
            for i in rows_B.nonzero()[:1, 0].tolist():
                read = not_finite_in(term.shard.columns, micro.index[i])
                where = f"its loss is not finite, first in row {int(term.shard.rows[micro.index[i]])}"
                return where + (f", where {read} is not" if read else "")
        return "its loss is not finite"


class PassWorker(Worker):
    """A worker that computes with an engine. budget: limits the tokens of a micro-batch."""

    engine: TrainingEngine | None = None
    budget: TokenBudget

    def passes(
        self, batch: Shard, inputs: Inputs, *, forward: Callable[..., Any] | None = None, unit_rows: int = 1
    ) -> Iterator[tuple[MicroBatch, Any]]:
        """Yield each micro-batch of a shard with the output of `forward(**inputs(micro))`, without gradients.

        forward: None: the engine's. unit_rows: see `each_minibatch`. Between passes the stage reports its progress and
        may be stopped. If a GPU has no memory for automatic micro-batches, all passes are repeated from the first with
        smaller ones, so that all rows are cut alike, as in an update: collect outputs by row, as `Scatter` does.
        """
        if self.engine is None:
            raise BadInput(f"{type(self).__name__} has no model", "it was declared with a function")
        context, groups, forward = self.context, self.context.groups, forward or self.engine.forward
        while True:
            micros, done_tokens = list(chain(*self._cut(batch, unit_rows=unit_rows))), 0
            try:
                for done, micro in enumerate(micros):
                    context.advance(done, len(micros), done_tokens)
                    tokens, before = micro.tokens * groups.is_leader, groups.tensor.moved_bytes
                    with context.recorder.span("forward", tokens=tokens) as counted, torch.no_grad():
                        output = forward(**inputs(micro))
                        counted.bytes = groups.tensor.moved_bytes - before
                    yield micro, output
                    done_tokens += micro.tokens
                return
            except torch.OutOfMemoryError as error:
                self.budget.halve(error)

    def token_values(
        self, batch: Shard, inputs: Inputs, *, width: int | None = None, forward: Callable[..., Any] | None = None
    ) -> Ragged:
        """Return one number per response token: the first output of the passes. width: see `Scatter`."""
        scatter = Scatter(batch.ragged("response_ids"), width)
        for micro, output in self.passes(batch, inputs, forward=forward):
            scatter.put(micro, output[0] if isinstance(output, tuple) else output)
        return scatter.column()

    def row_values(self, batch: Shard, reading: RowReading, *, unit_rows: int = 1) -> Tensor:
        """Return the numbers of a reading, without gradients, fp32 [rows]. unit_rows: see `each_minibatch`."""
        out = torch.zeros(len(batch))
        for micro, output in self.passes(batch, reading.inputs, unit_rows=unit_rows):
            if micro.weight:
                out[micro.index] = reading.values(micro, output).float().cpu()
        return out

    def steps(self, *terms: Term, epochs: int, rate_scales: Sequence[float] = ()) -> Output:
        """Take one optimizer step per minibatch and epoch on the sum of the terms; after a stop, the remaining steps.

        The token losses of a term are aggregated with the denominator of its whole minibatch, over all replicas and
        micro-batches. rate_scales: a factor of the learning rate per minibatch, equal on all ranks; empty: all 1. On a
        pipeline only the last stage has the losses' metrics. `Output.notes` names the steps that the engine skipped,
        and where the loss, or which gradient, was first not finite. If a GPU has no memory for automatic micro-batches,
        the step begins again with smaller micro-batches.
        """
        engine, context, stopping = self.engine, self.context, self.context.stopping
        assert engine is not None
        metrics, notes, taken = Metrics(), list[str](), 0
        if (left := stopping.begin_steps()) is not None:
            taken, metrics = left.steps, dict(left.metrics)
        minibatches = self._cut_terms(terms)
        divisors = list(zip(*(term.divisors(context) for term in terms), strict=True))
        count, done_tokens = len(minibatches), 0
        for step in range(taken, epochs * count):
            epoch, number = divmod(step, count)
            stopping.point(step, epochs * count, {**metrics, "optimizer_steps": Max(value=engine.steps)})
            for term in terms:
                term.prepare(number)
            while True:
                losses, tokens = StepLosses(), done_tokens
                sizes = [sum(map(len, minibatch)) for minibatch in minibatches]
                before, total = epoch * sum(sizes) + sum(sizes[:number]), epochs * sum(sizes)
                passes: list[Pass] = []
                for term, divisor, micros in zip(terms, divisors[number], minibatches[number], strict=True):
                    for micro in micros:
                        one = Pass(
                            inputs=term.inputs(micro),
                            loss=partial(losses.share, term, divisor, micro),
                            tokens=micro.tokens * context.groups.is_leader,
                            begin=partial(context.progress, before + len(passes), total, tokens),
                        )
                        passes.append(one)
                        tokens += micro.tokens
                try:
                    report = engine.step(passes, rate_scales[number] if rate_scales else 1.0)
                    stopping.note(None)
                    break
                except torch.OutOfMemoryError as error:
                    if engine.half_moved:
                        raise  # during the optimizer's step: some weights may have moved
                    self.budget.halve(error)
                minibatches = self._cut_terms(terms)
            done_tokens = tokens
            of_step, why = losses.metrics(report, context.groups.data.world_size)
            if why:
                notes.append(f"optimizer step {number + 1} of {count}, epoch {epoch + 1}, was skipped: {why}")
            if step == 0:
                merge_metrics(metrics, {f"first_minibatch/{name}": metric for name, metric in of_step.items()})
            merge_metrics(metrics, of_step)
        if engine.settings is not None and (said := schedule_ended_note(engine.settings, engine.steps)):
            notes.append(said)
        metrics["optimizer_steps"] = Max(value=engine.steps)
        stopping.note(UpdatePart(steps=epochs * count, of=epochs * count, metrics=dict(metrics)))
        return Output(metrics=metrics, notes=tuple(notes))

    def _cut(self, batch: Shard, skip: Collection[int] = (), unit_rows: int = 1) -> list[list[MicroBatch]]:
        data, device, budget = self.context.groups.data, self.context.device, self.budget
        return each_minibatch(batch, budget.tokens, data, device, padded=budget.padded, skip=skip, unit_rows=unit_rows)

    def _cut_terms(self, terms: Sequence[Term]) -> list[tuple[list[MicroBatch], ...]]:
        of_terms = (self._cut(term.shard, {*term.skip, *term.shard.invalid_rows}, term.unit_rows) for term in terms)
        return list(zip(*of_terms, strict=True))


class TokenBudget:
    """The largest number of tokens in a micro-batch, for all operations of a role.

    given: `Training.micro_batch_tokens`. If it is None on a GPU, small passes (forward, and backward if the role is
    trained) measure the bytes per token, by which the memory that the placement leaves is divided. So the same
    placement on the same device gives the same budget on every run. All ranks of the pool first read the budget at the
    same time, and use the smallest result.

    padded: whether micro-batches are padded.
    """

    def __init__(
        self, given: int | None, context: Context, engine: TrainingEngine, module: PackedModule, *, trained: bool
    ) -> None:
        self._context, self._engine, self._module, self._trained = context, engine, module, trained
        self.padded = module.padded_because is not None
        self.notes: list[str] = []
        self.automatic = given is None and context.room is not None
        self.known = None if self.automatic else given or AUTOMATIC_TOKENS["cpu"]
        if self.known is not None:
            module.micro_batch_tokens = self.known

    @property
    def tokens(self) -> int:
        """The budget, measured when it is first read."""
        if self.known is None:
            here = torch.tensor([-self._fitting()])
            self.known = -int(self._context.communicator.all_reduce_max(here).item())
            self._module.micro_batch_tokens = self.known
        return self.known

    def halve(self, error: torch.OutOfMemoryError) -> None:
        """Halve the budget after a pass ran out of memory, and add a note. Raises the error again if the budget was set
        by the user or is at its minimum, or if other ranks wait for this one inside a collective."""
        others_wait = self._context.communicator.world_size > 1
        if others_wait or not self.automatic or self.known is None or self.known <= TOKENS_STEP:
            raise error
        before, self.known = self.known, max(TOKENS_STEP, self.known // 2 // TOKENS_STEP * TOKENS_STEP)
        self._module.micro_batch_tokens = self.known
        self.notes.append(
            f"out of memory with micro-batches of {before:,} tokens: from now on they have {self.known:,}; "
            f"set Training(micro_batch_tokens={self.known}) to begin with this size"
        )

    def _fitting(self) -> int:
        assert self._context.room is not None
        self._engine.load("parameters")
        small, large = TRIAL_TOKENS
        try:
            self._trial(small)  # libraries allocate their workspaces, which stay
            first, second = (
                peak_bytes(partial(self._trial, tokens), self._context.recorder) for tokens in TRIAL_TOKENS
            )
        except torch.OutOfMemoryError:
            layout = self._context.layout
            if layout.p * layout.t > 1 or (self._trained and layout.size > 1):  # the others are in a collective
                raise
            return TOKENS_STEP
        each = max(1.0, (second - first) / (large - small))
        fixed = first - each * small  # includes gradients
        left = self._context.room.pass_bytes(own_gpu_bytes()) - fixed
        fitting = int((1 - MARGIN) * left / each) // TOKENS_STEP * TOKENS_STEP
        return min(MOST_TOKENS, max(TOKENS_STEP, fitting))

    def _trial(self, tokens: int) -> None:
        one = self._pass(tokens)
        if self._trained:
            # as many passes as a pipeline has under way; afterwards everything is as before
            with self._engine.whole_gradients([one] * self._context.layout.p):
                pass
        else:
            with torch.no_grad():
                self._engine.forward(**one.inputs)

    def _pass(self, tokens: int) -> Pass:
        rows, device = tokens // TRIAL_ROW_TOKENS, self._context.device
        vocabulary = int(self._module.get_backbone().config.get_text_config().vocab_size)
        ids = torch.arange(tokens, device=device) % vocabulary
        ends = torch.arange(tokens, device=device) % TRIAL_ROW_TOKENS == TRIAL_ROW_TOKENS - 1
        positions = (~ends).nonzero()[:, 0]
        inputs: dict[str, Any] = {
            "input_ids": ids, "lengths": (TRIAL_ROW_TOKENS,) * rows, "positions": positions,
        }  # fmt: skip
        if isinstance(self._module, TokenLogProbs):
            inputs |= {"targets": ids[positions + 1], "temperature": 1.0, "with_entropy": True}

        def nothing(output: Any) -> torch.Tensor:
            parts = output if isinstance(output, tuple) else (output,)
            return torch.stack([part.float().sum() for part in parts]).sum() * 0.0

        return Pass(inputs=inputs, loss=nothing)


def peak_bytes(work: Callable[[], None], recorder: Recorder) -> int:
    """Measure the most GPU bytes that `work` allocates beside those allocated before; peaks of the recorder's spans
    stay correct."""
    torch.cuda.synchronize()
    before, meter = torch.cuda.memory_allocated(), recorder.peak_meter()
    interval = meter.open()
    try:
        work()
        torch.cuda.synchronize()
    finally:
        peak = meter.close(interval)
    return peak - before


def chosen(column: Ragged, shard: Shard) -> Tensor:
    """Return a response column's numbers on the tokens that the policy chose (all tokens without a `response_mask`), in
    the rows that count."""
    if "response_mask" in shard.columns:
        return column.values[shard.valid_mask.values.bool()]
    return column.values[torch.repeat_interleave(shard.valid, column.lengths)]


def mean_of(column: Ragged, shard: Shard) -> Mean:
    values = chosen(column, shard)
    return Mean(total=float(values.double().sum()), count=len(values))


def sampling_temperature(shard: Shard, given: float | None) -> float:
    """Return the temperature that divides logits: `given`, else the rollout's; greedy rollouts are scored at 1."""
    temperature = shard.meta.get("temperature", 1.0) if given is None else given
    return float(temperature) or 1.0


def old_log_prob_temperature(shard: Shard, given: float | None) -> float:
    """Return the temperature of log-probabilities that are compared with `old_log_prob`: `given`, else that of the
    column, which is the rollout's unless `compute_log_prob` was given another. For operations that read the column."""
    return sampling_temperature(shard, shard.meta.get(LOG_PROB_TEMPERATURE) if given is None else given)
