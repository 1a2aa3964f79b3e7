"""The reference role: the frozen policy to which the actor is kept close."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Annotated, Any, Literal, cast

import torch
from pydantic import Field
from torch import nn

from workbench.batches.columns import Table
from workbench.batches.schema import COUNTING
from workbench.engines.training import TrainingEngine
from workbench.errors import BadInput
from workbench.messages.calls import Output
from workbench.messages.metrics import Metrics
from workbench.messages.operation import register, row_stage
from workbench.messages.protocols import ONE_TO_ALL
from workbench.messages.shards import Shard
from workbench.models.heads import TokenLogProbs
from workbench.models.loading import load_causal_lm
from workbench.models.logits import Float32Head, linear_in_float32
from workbench.models.lora import ADAPTER, adapted_layers, merged_weight
from workbench.models.spec import Model
from workbench.settings.precision import PRECISIONS, Precision
from workbench.support.validation import PositiveFloat, PositiveInt
from workbench.workers.micro_batches import MicroBatch
from workbench.workers.model_worker import ModelWorker, log_probs_of
from workbench.workers.passes import ANSWER_LOG_PROBS, PassWorker, mean_of, sampling_temperature
from workbench.workers.roles.distillation import (
    TEACHER_COLUMNS,
    TEACHER_TEMPERATURE,
    TopK,
    check_top_k,
    teacher_columns,
)
from workbench.workers.roles.preferences import (
    FEEDBACK_COLUMNS,
    PAIR_COLUMNS,
    REFERENCE_FEEDBACK_COLUMNS,
    as_answers,
    pair_values,
)
from workbench.workers.sampling_mask import MASK_COLUMNS, SamplingMask
from workbench.workers.weight_exchange import Published, plan_of_taking, weights_of
from workbench.workers.weight_intake import WeightIntake
from workbench.workers.worker import Context


@contextmanager
def computing_in(module: TokenLogProbs, precision: Precision) -> Iterator[None]:
    """Inside the block the module computes in this precision, from copies of its weights, which need extra memory."""
    dtype, head = getattr(torch, precision.dtype), cast(Any, module.model.get_output_embeddings())
    parameters = list(module.parameters())
    device = parameters[0].device
    with ExitStack() as inside:
        for parameter in parameters:
            inside.callback(setattr, parameter, "data", parameter.data)
        if precision.adapter == "merged":
            _merge(module)
        if precision.head == "float32":  # the head in float32, from its current weights
            bias = None if head.bias is None else head.bias.data.float()
            head.forward = partial(linear_in_float32, SimpleNamespace(weight=head.weight.data.float(), bias=bias))
            inside.callback(delattr, head, "forward")
        elif type(head) is Float32Head:  # `Training.head_dtype` made it a float32 head
            head.__class__ = nn.Linear  # type: ignore[assignment]
            inside.callback(setattr, head, "__class__", Float32Head)
        held = dtype if precision.weights == "same" else torch.float32
        for parameter in parameters:
            parameter.data = parameter.data.to(held)
        autocast = held != dtype
        inside.enter_context(torch.autocast(device.type, dtype if autocast else None, enabled=autocast))
        yield


@torch.no_grad()
def _merge(module: nn.Module) -> None:
    for layer in adapted_layers(module).values():
        merged, up = merged_weight(layer), layer.lora_B[ADAPTER].weight
        layer.get_base_layer().weight.data = merged
        up.data = torch.zeros_like(up.data)


class ReferencePolicy(PassWorker):
    """The operations of a reference, for a worker that has a policy with fixed weights."""

    engine: TrainingEngine

    def as_reference(self) -> AbstractContextManager[None]:
        """Inside the block, the engine's module is the reference."""
        return nullcontext()

    @row_stage(reads=PAIR_COLUMNS, writes=("ref_chosen_log_prob", "ref_rejected_log_prob"))
    def compute_ref_pair_log_prob(self, batch: Shard) -> Output:
        """Columns `ref_chosen_log_prob`, `ref_rejected_log_prob` [rows]: log-probabilities of both whole answers of
        each pair, summed over their tokens, in nats."""
        with self.as_reference():
            chosen, rejected = pair_values(self, batch, ANSWER_LOG_PROBS)
        return Output(columns={"ref_chosen_log_prob": chosen, "ref_rejected_log_prob": rejected})

    @row_stage(reads=FEEDBACK_COLUMNS, writes=REFERENCE_FEEDBACK_COLUMNS)
    def compute_ref_feedback_log_prob(self, batch: Shard) -> Output:
        """Columns `ref_response_log_prob`, `ref_mismatched_log_prob` [rows]: log-probabilities of each row's whole
        answer, and of the answer to another prompt, summed over their tokens, in nats."""
        with self.as_reference():
            own, mismatched = (
                self.row_values(as_answers(batch, name), ANSWER_LOG_PROBS) for name in FEEDBACK_COLUMNS[1:]
            )
        return Output(columns={"ref_response_log_prob": own, "ref_mismatched_log_prob": mismatched})

    @row_stage(
        reads=("prompt_ids", "response_ids"),
        optional=lambda arguments: ("response_mask", *COUNTING, *(MASK_COLUMNS if arguments["sampling_mask"] else ())),
        writes=("ref_log_prob",),
    )
    def compute_ref_log_prob(
        self, batch: Shard, *, temperature: PositiveFloat | None = None, sampling_mask: bool = True
    ) -> Output:
        """Column `ref_log_prob` [rows, response tokens]: log softmax(logits / temperature) at each response token.

        temperature: None uses the temperature with which the responses were sampled, also if `compute_log_prob` was
        given another. sampling_mask: for rollouts with a sampling mask (`keep_mask`), only over tokens that could be
        drawn, as `old_log_prob`, so that a KL compares distributions over the same tokens; False: over all tokens.
        """
        scale, mask = sampling_temperature(batch, temperature), SamplingMask.of(batch, self.spec, self.context)
        with self.as_reference():
            column = self.token_values(batch, lambda micro: micro.scored(scale, sets=mask))
        return Output(columns={"ref_log_prob": column}, metrics={"ref_log_prob/mean": mean_of(column, batch)})

    @row_stage(
        reads=("prompt_ids", "response_ids"),
        optional=("response_mask", *MASK_COLUMNS, *COUNTING),
        writes=lambda arguments: tuple(f"log_prob_{name}" for name in arguments["precisions"]),
    )
    def compute_precisions(
        self,
        batch: Shard,
        *,
        precisions: Annotated[Mapping[str, Precision], Field(min_length=1)] = PRECISIONS,
        temperature: PositiveFloat | None = None,
    ) -> Output:
        """Columns `log_prob_<name>` [rows, response tokens]: log softmax(logits / temperature) at each response token,
        once in each of these precisions, from the current weights. See `lab.mismatch`.

        temperature: None uses the temperature with which the responses were sampled.
        """
        module: Any = self.engine.module
        if self.context.layout.p * self.context.layout.t > 1 or any(hasattr(w, "ds_id") for w in module.parameters()):
            raise BadInput(
                "compute_precisions on a model that is sharded over ranks", "each rank needs the whole model",
                "use a layout with p=t=1, and zero_stage=2 or less",
            )  # fmt: skip
        scale, mask = sampling_temperature(batch, temperature), SamplingMask.of(batch, self.spec, self.context)
        self.engine.load("parameters")
        columns: Table = {}
        metrics: Metrics = {}

        for name, precision in precisions.items():
            sets = mask if precision.sampling_mask else None
            inputs = partial(MicroBatch.scored, temperature=scale, sets=sets)
            with computing_in(module, precision):
                column = self.token_values(batch, inputs, forward=module)
            columns[f"log_prob_{name}"], metrics[f"log_prob_{name}/mean"] = column, mean_of(column, batch)
        return Output(columns=columns, metrics=metrics)

    @row_stage(
        reads=lambda arguments: (arguments["prompt"], "response_ids"),
        optional=("response_mask", *COUNTING),
        writes=TEACHER_COLUMNS,
        check_model=check_top_k,
    )
    def compute_teacher_log_prob(
        self,
        batch: Shard,
        *,
        top_k: PositiveInt = 64,
        vocabulary: PositiveInt | None = None,
        temperature: PositiveFloat | None = None,
        prompt: Literal["prompt_ids", "teacher_prompt_ids"] = "prompt_ids",
    ) -> Output:
        """This model's prediction of each response token, for `update_distill`: the top_k likeliest tokens of
        softmax(logits / temperature) and their log-probabilities, `teacher_ids` and `teacher_log_prob` [rows, response
        tokens x top_k], and `teacher_tail_log_prob` [rows, response tokens], the log-probability of all other tokens
        together. These take 8 top_k + 4 bytes per response token.

        vocabulary: leave out the tokens from this id on, which the student's model does not have; None: leave out none.
        temperature: None uses the temperature with which the responses were sampled; the batch's meta keeps it as
        `teacher_temperature`. prompt: "teacher_prompt_ids" reads other prompts than the student's, such as prompts that
        contain a solution: self-distillation.
        Metric: `teacher_tokens/mass`, this model's probability of the top_k tokens, in valid rows.
        """
        scale = sampling_temperature(batch, temperature)
        rows = replace(batch, columns={**batch.columns, "prompt_ids": batch.ragged(prompt)})
        reader = TopK(top_k, vocabulary)
        with self.as_reference():
            read = self.token_values(rows, lambda micro: {**micro.scored(scale), "reader": reader}, width=reader.width)
        mass = read.like(1 - read.values[:, -1].exp())
        return Output(
            columns=teacher_columns(read, top_k),
            metrics={"teacher_tokens/mass": mean_of(mass, batch)},
            meta={TEACHER_TEMPERATURE: scale},
        )


class ReferenceWorker(ReferencePolicy, ModelWorker):
    """A causal language model whose weights only `take_weights` changes."""

    def __init__(self, spec: Model, context: Context) -> None:
        assert spec.name and spec.training and spec.dtype
        device, longest = context.loading_device(None), context.max_model_tokens
        model = load_causal_lm(spec.name, dtype=getattr(torch, spec.dtype), device=device, longest=longest)
        super().__init__(spec, context)
        self.hold(log_probs_of(model, spec), trained=False)

    def state(self) -> dict[str, Any]:
        return {name: weight.to("cpu", copy=True) for name, weight in self.engine.local_weights()}

    @torch.no_grad()
    def load_state(self, state: dict[str, Any]) -> None:
        for name, weight in self.engine.local_weights():
            weight.copy_(state[name])

    @register(ONE_TO_ALL)
    @torch.no_grad()
    def take_weights(self, published: Published) -> None:
        """Take the weights that the actor has published: each rank takes its own part.

        Raises `BadInput`, with nothing changed, unless they are all the weights of this model.
        """
        module: Any = self.engine.module
        layouts = published.layout, self.context.layout
        weights = weights_of(module.get_backbone().config, str(self.spec.dtype), *layouts)
        mine = {weight.name: weight.shape for weight in weights}
        given = self.context.exchange.contents(published).shapes
        wrong = [name for name in mine.keys() | given.keys() if mine.get(name) != given.get(name)]
        if wrong:
            raise BadInput(
                f"weight {min(wrong)!r}", "the reference can take over only weights of its own architecture",
                "open the workbench with the actor's model as reference",
            )  # fmt: skip
        plan, rank = plan_of_taking(weights, *layouts), self.context.communicator.rank
        me, live = plan.destination.ranks[rank], dict(self.engine.local_weights())
        shards = {weight.name: plan.destination.shard(weight, me) for weight in plan.weights}
        held = {name: (live[name], shard) for name, shard in shards.items() if shard is not None}
        WeightIntake(plan, rank, self.context.exchange).place(published, held)


class TeacherWorker(ReferenceWorker):
    """The model from which a student learns: a reference that does not start as the actor's copy."""
