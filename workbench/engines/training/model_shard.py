"""Reduces a loaded model to the shard of one rank of a layout (p, t, d). Also the base class of engines with such
shards: gathers whole weights from slices, and computes the norm of sliced gradients."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, cast

import torch
from torch import Tensor, nn

from workbench.engines.communicator import ParallelGroups
from workbench.engines.training.base import TrainingEngine
from workbench.engines.training.pipeline import Pipeline
from workbench.engines.training.steps import Pass
from workbench.errors import BadInput
from workbench.models.heads import PackedModule, TokenValues
from workbench.models.logits import Float32Head
from workbench.models.tensor_parallel import (
    RowParallelLinear,
    VocabularyParallelEmbedding,
    VocabularyParallelHead,
    enter_block,
)
from workbench.resharding.weights import ModelWeights, Weight, model_weights
from workbench.settings.layout import Layout

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

BLOCKS = {"self_attn": "o_proj", "mlp": "down_proj"}  # blocks of a decoder layer -> the last layer of each
SLICED_LAYERS = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", *BLOCKS.values(), "embed_tokens", "lm_head")


@dataclass(frozen=True, kw_only=True)
class ModelShard:
    """A rank's shard. weights: all of the model's. held: this rank's slices of them, by transformers' names.

    partial: names of weights that every tensor rank holds whole, while each computes a part of their gradient: norms
    inside a block, which act on the rank's own heads.
    """

    weights: ModelWeights
    held: dict[str, nn.Parameter]
    partial: frozenset[str]


class StagePlaceholder(nn.Module):
    """Replaces a layer of another pipeline stage: hidden states pass unchanged."""

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return hidden_states


def check_shardable(config: PreTrainedConfig, layout: Layout, head: Literal["lm", "scalar"]) -> ModelWeights:
    """Return the weights of a model; raise `BadInput`, naming a weight, if the model cannot be trained in `layout`."""
    weights = model_weights(config, head=head)
    weights.check(layout.p, layout.t)
    if layout.t == 1:
        return weights
    for weight in weights:
        layer = weight.name.rpartition(".")[0].rpartition(".")[2]
        if weight.axis is not None and (layer not in SLICED_LAYERS or len(weight.parts) > 1):
            raise BadInput(
                f"{weight.name} over t={layout.t} tensor ranks",
                f"training can slice only {', '.join(SLICED_LAYERS)}",
                "use t=1 for this model",
            )
        for part in weight.parts:
            if part.rule == "copied" and part.units % layout.t:
                raise BadInput(
                    f"{weight.name}: {part.units} key-value heads over t={layout.t} tensor ranks",
                    "in training each tensor rank has its own key-value heads: t must divide their number",
                    f"use a t that divides {part.units}",
                )
    return weights


def shard_model(module: PackedModule, groups: ParallelGroups) -> ModelShard:
    """Reduce `module` in place to this rank's shard. Every rank of a replica calls it with the same whole module.

    Raises `BadInput` if the layout cannot cut the model, or a trial shows that the cut model computes something else.
    """
    backbone: Any = module.get_backbone()
    layout = groups.layout
    weights = check_shardable(backbone.config, layout, "scalar" if isinstance(module, TokenValues) else "lm")
    if layout.p > 1 and module.padded_because is not None:
        raise BadInput(f"p={layout.p}", f"a pipeline needs packed sequences: {module.padded_because}", "use p=1")
    tokens = torch.arange(12) % int(backbone.config.get_text_config().vocab_size)
    trial: dict[str, Any] = {"input_ids": tokens.to(backbone.device), "lengths": (7, 5)}
    with torch.no_grad():
        whole = module.hidden_states(**trial)
        held = _held_weights(module, weights, groups)
        for weight in weights:
            if weight.name in held:
                held[weight.name].data = weight.cut(held[weight.name].data, groups.tensor.rank, layout.t).clone()
        if layout.t > 1:
            _slice_blocks(module, groups)
            _slice_vocabulary(module, weights, groups)
        if layout.p > 1:
            _drop_other_stages(module, weights, groups)
        cut = Pipeline(module, groups, whole.shape[-1], whole.dtype).hidden_states(trial)
    _require_same(whole, cut, groups, type(backbone).__name__)
    partial = _partial_weights(weights) if layout.t > 1 else frozenset[str]()
    return ModelShard(weights=weights, held=held, partial=partial)


def _require_same(whole: Tensor, cut: Tensor | None, groups: ParallelGroups, family: str) -> None:
    """Raise `BadInput` on every rank of the replica unless the cut model's hidden states [T, hidden], on the last
    stage, are those of the whole model."""
    expected, error = whole.float(), torch.zeros(())
    if cut is not None:
        error = ((cut.to(expected.device) - expected).float().norm() / expected.norm()).cpu()
    low = cut is not None and torch.bfloat16 in (cut.dtype, whole.dtype)
    # rounding errors are below these limits; a layer that is left out or computed twice gives about 1
    found = torch.tensor([float(not error <= (0.15 if low else 1e-3)), float(error)])
    wrong, worst = groups.pipeline.all_reduce_max(groups.tensor.all_reduce_max(found)).tolist()
    if wrong:
        raise BadInput(
            f"{family} over p={groups.layout.p} stages and t={groups.layout.t} tensor ranks",
            f"sliced over these ranks, the model computes something else (relative error {worst:.2g})",
            "use a model of the Llama, Qwen2 or Qwen3 family, or p=t=1",
        )


def _held_weights(module: PackedModule, weights: ModelWeights, groups: ParallelGroups) -> dict[str, nn.Parameter]:
    """Return the parameters of this stage by transformers' names; tied weights are one parameter."""
    names = module.weight_names()
    found = {names[own]: parameter for own, parameter in module.named_parameters()}
    return {weight.name: found[weight.name] for weight in weights.of_stage(groups.pipeline.rank, groups.layout.p)}


def _slice_blocks(module: PackedModule, groups: ParallelGroups) -> None:
    backbone: Any = module.get_backbone()
    for layer in backbone.layers:
        for name, out in BLOCKS.items():
            block = getattr(layer, name)
            enter_block(block, groups.tensor)
            setattr(block, out, RowParallelLinear(getattr(block, out), groups.tensor))


def _slice_vocabulary(module: PackedModule, weights: ModelWeights, groups: ParallelGroups) -> None:
    backbone: Any = module.get_backbone()
    by_layer = {weight.name.rpartition(".")[0].rpartition(".")[2]: weight for weight in weights}

    def start(layer: str) -> int:
        return by_layer[layer].intervals(groups.tensor.rank, groups.layout.t)[0][0]

    embedding = backbone.embed_tokens
    backbone.embed_tokens = VocabularyParallelEmbedding(embedding, start("embed_tokens"), groups.tensor)
    head: Any = getattr(module, "model", None)
    if head is not None:
        rows = "lm_head" if "lm_head" in by_layer else "embed_tokens"
        head.lm_head = VocabularyParallelHead(
            head.lm_head, start(rows), groups.tensor, in_float32=isinstance(head.lm_head, Float32Head)
        )


def _partial_weights(weights: ModelWeights) -> frozenset[str]:
    """Return `ModelShard.partial`: whole weights inside a block, except the bias of its last layer, which is added
    after the sum over the ranks."""

    def inside_block(weight: Weight) -> bool:
        steps = weight.name.split(".")
        return weight.axis is None and any(name in steps and out not in steps for name, out in BLOCKS.items())

    return frozenset(weight.name for weight in weights if inside_block(weight))


def _drop_other_stages(module: PackedModule, weights: ModelWeights, groups: ParallelGroups) -> None:
    """Keep only the layers of this stage, under their names in the whole model."""
    backbone: Any = module.get_backbone()
    each = weights.layers // groups.layout.p
    for number in range(weights.layers):
        if number // each != groups.pipeline.rank:
            backbone.layers[number] = StagePlaceholder()
    if not groups.first:
        backbone.embed_tokens = StagePlaceholder()
    if not groups.last:
        backbone.norm = StagePlaceholder()
        if isinstance(module, TokenValues):
            module.score = StagePlaceholder()  # type: ignore[assignment]
        else:
            module.model.lm_head = StagePlaceholder()  # type: ignore[union-attr]


class ShardedEngine(TrainingEngine):
    """Base class of engines whose ranks hold `_shard.held`, slices of the weights of their stage."""

    _shard: ModelShard
    _device: torch.device

    def _reduce(self, module: PackedModule) -> None:
        self._shard = shard_model(module, self._groups)

    def _parameters(self) -> dict[str, nn.Parameter]:
        return self._shard.held

    @property
    def moved_bytes(self) -> int:
        return self._groups.tensor.moved_bytes

    def stored_weights(self) -> Iterator[tuple[str, Tensor]]:
        return self._whole_weights(next(iter(self._shard.held.values())).dtype)

    def named_weights(self) -> Iterator[tuple[str, Tensor]]:
        return self._whole_weights(self._dtype)

    def local_weights(self) -> Iterator[tuple[str, Tensor]]:
        for name, parameter in self._shard.held.items():
            yield name, parameter.detach()

    def gradients(self, passes: Sequence[Pass]) -> Iterator[tuple[str, Tensor]]:
        with self.whole_gradients(passes):
            for weight in self._shard.weights:
                held = self._shard.held.get(weight.name)
                part = None if held is None else cast(Tensor, self._gradient(held)).float()
                yield weight.name, self._whole(weight, part)

    def _on_two_stages(self) -> list[Weight]:
        """Return the weights of this stage that another stage holds too: a tied embedding."""
        weights, p = self._shard.weights, self._groups.layout.p
        return [w for w in weights.of_stage(self._groups.pipeline.rank, p) if len(weights.stages(w, p)) > 1]

    @torch.no_grad()
    def _norm(self) -> Tensor:
        squares = torch.zeros((), dtype=torch.float64, device=self._device)
        elsewhere = {weight.name for weight in self._on_two_stages()} if not self._groups.first else set()
        for weight in self._shard.weights.of_stage(self._groups.pipeline.rank, self._groups.layout.p):
            mine = weight.axis is not None or self._groups.tensor.rank == 0
            if mine and weight.name not in elsewhere:
                squares += torch.linalg.vector_norm(gradient_of(self._shard.held[weight.name])).double().square()
        return self._groups.pipeline.all_reduce(self._groups.tensor.all_reduce(squares)).sqrt().float()

    def _whole_weights(self, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
        for weight in self._shard.weights:
            held = self._shard.held.get(weight.name)
            yield weight.name, self._whole(weight, None if held is None else held.detach().to(dtype), dtype)

    @torch.no_grad()
    def _whole(self, weight: Weight, held: Tensor | None, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return the whole weight on all ranks, from each rank's part: gathered in the tensor group of the first stage
        that has it, then broadcast to the other stages."""
        groups, t = self._groups, self._groups.layout.t
        source = self._shard.weights.stages(weight, groups.layout.p)[0]
        whole = torch.empty(weight.shape, dtype=dtype, device=self._device)
        if groups.pipeline.rank == source:
            assert held is not None
            if weight.axis is None or t == 1:
                whole = held
            else:
                parts = groups.tensor.all_gather(held.movedim(weight.axis, 0).contiguous())
                for j, part in enumerate(parts):
                    begin = 0
                    for start, stop in weight.intervals(j, t):
                        piece = part[begin : begin + stop - start].movedim(0, weight.axis)
                        whole.narrow(weight.axis, start, stop - start).copy_(piece)
                        begin += stop - start
        return groups.pipeline.broadcast(whole, source)


def gradient_of(parameter: nn.Parameter) -> Tensor:
    assert parameter.grad is not None
    return parameter.grad
