"""What trained roles share: an engine, and updates made of minibatches."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from workbench.engines.training import Pass, TrainingEngine, make_training_engine
from workbench.errors import BadInput
from workbench.messages.metrics import Max, Mean, Metrics, merge_metrics
from workbench.messages.operation import register
from workbench.messages.protocols import ONE_TO_ALL, VALUES_OF_RANKS
from workbench.messages.replies import Output
from workbench.messages.shards import Shard
from workbench.models.compiling import compile_layers
from workbench.models.heads import PackedModule
from workbench.models.spec import Model
from workbench.objectives.aggregation import Aggregation, aggregate, denominator
from workbench.support.validation import whole
from workbench.workers.device_metrics import DeviceMetrics, OnDevice, on_host
from workbench.workers.finite import not_finite_in
from workbench.workers.gradients import GradientProbe, GradientReport
from workbench.workers.micro_batches import MicroBatch, each_minibatch, minibatch_indices, tokens_of
from workbench.workers.model_worker import ModelWorker, random_state, set_random_state
from workbench.workers.saving import save_model
from workbench.workers.token_budget import TokenBudget
from workbench.workers.worker import Context

TokenLoss = Callable[[MicroBatch, Any], tuple[Tensor, DeviceMetrics]]


def check_update(arguments: Mapping[str, Any]) -> None:
    """Raise `BadInput` for arguments of an update that are out of range."""
    whole("epochs", arguments["epochs"], 1)
    if arguments["max_response_tokens"] is not None:
        whole("max_response_tokens", arguments["max_response_tokens"], 1)
    elif arguments["aggregation"] == "fixed-length":
        raise BadInput("aggregation='fixed-length'", "divides by max_response_tokens", "give max_response_tokens")


@dataclass(frozen=True, kw_only=True)
class Term:
    """One summand of what is minimised: `loss` over the tokens of a shard, aggregated over each minibatch.

    inputs: what the module is given of a micro-batch. loss: from a micro-batch and the module's output to a loss a
    response token [B, R], and metrics. The shard's minibatches are in step with those of the other terms.
    skip: rows of the shard that have no gradient, so that they need only be counted.
    together: consecutive rows whose loss is one, see `micro_batches`.
    """

    shard: Shard
    inputs: Callable[[MicroBatch], Mapping[str, Any]]
    loss: TokenLoss
    aggregation: Aggregation = "token-mean"
    max_response_tokens: int | None = None
    skip: Collection[int] = ()
    together: int = 1


@dataclass
class Minibatch:
    """One optimizer step in the making: what its micro-batches tell. It is read when the step has been taken, so that
    the host does not wait for a device between micro-batches.

    told: their metrics, this rank's share of the loss among them. odd_rows: which rows' losses are not finite, [B].
    """

    told: list[DeviceMetrics] = field(default_factory=list)
    odd_rows: list[tuple[Term, MicroBatch, Tensor]] = field(default_factory=list)

    def tell(self, term: Term, micro: MicroBatch, loss_BR: Tensor, share: Tensor, metrics: DeviceMetrics) -> None:
        """One micro-batch more. loss_BR: 0 outside the mask."""
        self.told.append({**metrics, "loss": OnDevice(Mean, {"total": share.detach(), "count": 0.0})})
        self.odd_rows.append((term, micro, (~torch.isfinite(loss_BR.detach())).any(dim=1)))

    def read(self) -> Metrics:
        """The metrics of all micro-batches."""
        metrics: Metrics = {}
        for told in on_host(self.told):
            merge_metrics(metrics, told)
        return metrics

    def odd_loss(self) -> str:
        """In which row of the batch a loss is first not finite, and which columns are not there, in words."""
        for term, micro, odd_B in self.odd_rows:
            for i in odd_B.nonzero()[:1, 0].tolist():
                read = not_finite_in(term.shard.columns, micro.index[i])
                where = f"its loss is not finite, first in row {int(term.shard.rows[micro.index[i]])}"
                return where + (f", where {read} is not" if read else "")
        return "its loss is not finite"


class TrainedWorker(ModelWorker):
    """A worker whose module is trained."""

    engine: TrainingEngine

    def __init__(self, spec: Model, context: Context, module: PackedModule) -> None:
        super().__init__(spec, context)
        assert spec.training is not None and spec.dtype is not None
        self.training = spec.training
        self.sequences, self.padded = module.describe(), module.padded_because is not None
        if self.training.compile:
            compile_layers(module)
        self.engine = make_training_engine(
            module, spec.training, context.groups, device=context.device, dtype=getattr(torch, spec.dtype)
        )
        self.budget = TokenBudget(spec.training.micro_batch_tokens, context, self.engine, module, trained=True)

    def describe(self) -> dict[str, Any]:
        return {**super().describe(), "sequences": self.sequences, "micro_batch_tokens": self.budget.known}

    def state(self) -> dict[str, Any]:
        return {"engine": self.engine.state_dict(), "random": random_state()}

    def load_state(self, state: dict[str, Any]) -> None:
        self.engine.load_state_dict(state["engine"])
        set_random_state(state["random"])

    @register(ONE_TO_ALL)
    def weights_checksum(self) -> float:
        """Sum of the absolute values of all weights in fp64: equal on ranks that hold the same weights."""
        return float(sum(tensor.double().abs().sum().item() for _, tensor in self.engine.named_weights()))

    @register(ONE_TO_ALL)
    def save_model(self, path: str | Path) -> str:
        """Write the weights as they are now, with configuration and tokenizer, as transformers does: `wb.Model(path)`,
        and vLLM, load it. The absolute path, once a rank.

        path: a folder that is empty or not there yet; relative to where the workbench was opened, on the machine of the
        role's first rank. Weights are written in the role's dtype; those of a value or score head as "score".
        """
        assert self.spec.name is not None
        return save_model(self.engine, path, self.spec.name, self.context)

    @register(VALUES_OF_RANKS, reads=lambda arguments: arguments["columns"], minibatched=True)
    def measure_gradient(
        self,
        batch: Shard,
        *,
        update: str,
        columns: tuple[str, ...],
        arguments: Mapping[str, Any],
        micro_batch_tokens: int | None = None,
    ) -> GradientReport:
        """What one of this role's updates would hand to its optimizer, as each rank sees it; no step is taken.

        update, arguments: the operation and what it is called with. columns: those of the batch that it reads.
        micro_batch_tokens: in place of the setting's.
        """
        engine, budget = self.engine, self.budget
        counts = self.context.groups.counts
        probe = GradientProbe(engine, counts)
        self.engine = cast(TrainingEngine, probe)
        if micro_batch_tokens is not None:
            module = cast(PackedModule, engine.module)
            self.budget = TokenBudget(micro_batch_tokens, self.context, engine, module, trained=True)
        try:
            output = getattr(self, update)(batch, **arguments)
        finally:
            self.engine, self.budget = engine, budget
            cast(PackedModule, engine.module).expect(budget.tokens)
        metrics = {name: metric.value for name, metric in output.metrics.items()}
        return GradientReport(counts=counts, metrics=metrics, minibatches=tuple(probe.minibatches))

    def update(self, *terms: Term, epochs: int, rate_scales: Sequence[float] = ()) -> Output:
        """One optimizer step a minibatch and epoch, on the sum of the terms.

        rate_scales: a factor of the learning rate for each minibatch, equal on all ranks; empty: all 1.

        The token losses of a term are aggregated with the denominator of its whole minibatch, over all replicas and
        micro-batches. On a pipeline the metrics of losses are on its last stage. Steps that the engine skipped are told
        in `Output.notes`: where the loss, or which gradient, was first not finite. Where a GPU
        has no memory for automatic micro-batches, the step begins anew with smaller ones.
        """
        context, done_tokens, done = self.context, 0, 0
        resume_from = context.stopping.resume_from  # an update that was stopped goes on where it stood
        taken, metrics = (resume_from.steps, dict(resume_from.metrics)) if resume_from else (0, Metrics())
        notes: list[str] = []
        groups = context.groups
        minibatches = self._minibatches(terms)
        total = epochs * sum(map(_count, minibatches))

        def pass_of(term: Term, divisor: Tensor, micro: MicroBatch, step: Minibatch) -> Pass:
            def begin() -> None:
                nonlocal done, done_tokens
                context.progress(done, total, done_tokens)
                done, done_tokens = done + 1, done_tokens + tokens_of(micro)

            def share(output: Any) -> Tensor:
                loss_BR, more = term.loss(micro, output)
                mask_BR = micro.mask_BR(term.shard.ragged("response_mask"))
                scalar = aggregate(loss_BR, mask_BR, term.aggregation, divisor)
                step.tell(term, micro, loss_BR * mask_BR, scalar, more)
                return scalar

            tokens = tokens_of(micro) * groups.counts
            return Pass(inputs=term.inputs(micro), loss=share, tokens=tokens, begin=begin)

        divisors = [self._divisors(term) for term in terms]
        for epoch in range(epochs):
            for number in range(len(minibatches)):
                steps = epoch * len(minibatches) + number
                if steps < taken:
                    done += _count(minibatches[number])
                    continue
                so_far: Metrics = {**metrics, "optimizer_steps": Max(value=self.engine.steps)}
                context.stopping.point(steps, epochs * len(minibatches), so_far)
                while True:
                    step, had_moments = Minibatch(), self.engine.has_moments
                    passes = []
                    for term, of_term, micros in zip(terms, divisors, minibatches[number], strict=True):
                        passes += [pass_of(term, of_term[number], micro, step) for micro in micros]
                    try:
                        report = self.engine.step(passes, rate_scales[number] if rate_scales else 1.0)
                        break
                    except torch.OutOfMemoryError as error:
                        if self.engine.has_moments != had_moments:
                            raise  # in the middle of the optimizer's first step: some weights may have moved
                        self.budget.halve(error)
                    minibatches = self._minibatches(terms)
                    total = epochs * sum(map(_count, minibatches))
                    done = epoch * total // epochs + sum(map(_count, minibatches[:number]))
                of_step = step.read()
                share = of_step.get("loss", Mean(total=0.0, count=0.0))  # told on the last stage of a pipeline
                assert isinstance(share, Mean)
                if report.skipped:
                    odd = "" if math.isfinite(share.total) else step.odd_loss()
                    notes.append(
                        f"optimizer step {number + 1} of {len(minibatches)}, epoch {epoch + 1}, was skipped: "
                        + (odd or f"the gradient is not finite, first that of {report.culprit or 'some weight'}")
                    )
                # each replica holds its share of one global loss: the shares add up, the count is one a step
                of_step["loss"] = Mean(total=share.total, count=1 / groups.data.world_size)
                of_step["grad_norm"] = Mean(total=report.grad_norm, count=1)
                of_step["skipped/fraction"] = Mean(total=float(report.skipped), count=1)
                of_step["learning_rate"] = Mean(total=report.learning_rate, count=1)
                if epoch == number == 0:
                    merge_metrics(metrics, {f"first_minibatch/{name}": m for name, m in of_step.items()})
                merge_metrics(metrics, of_step)
        metrics["optimizer_steps"] = Max(value=self.engine.steps)
        return Output(metrics=metrics, notes=tuple(notes))

    def _minibatches(self, terms: Sequence[Term]) -> list[tuple[list[MicroBatch], ...]]:
        """For each minibatch, the micro-batches of each term."""
        data, device, tokens = self.context.groups.data, self.context.device, self.micro_batch_tokens
        of_terms = (
            each_minibatch(term.shard, tokens, data, device, padded=self.padded, skip=term.skip, together=term.together)
            for term in terms
        )
        return list(zip(*of_terms, strict=True))

    def _divisors(self, term: Term) -> list[Tensor]:
        """The denominator of each minibatch of a term, over the rows of all replicas, skipped ones among them."""
        mask_BR = term.shard.ragged("response_mask").pad()
        parts = [
            denominator(mask_BR[rows], term.aggregation, term.max_response_tokens)
            for rows in minibatch_indices(term.shard.minibatch_sizes)
        ]
        return list(self.context.groups.data.all_reduce(torch.stack(parts).to(self.context.device)))


def _count(minibatch: tuple[list[MicroBatch], ...]) -> int:
    """The micro-batches of all terms."""
    return sum(map(len, minibatch))
