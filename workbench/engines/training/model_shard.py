"""Reduce a loaded model to the shard that one rank of a layout (p, t, d) holds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn

from workbench.engines.training.base import transformers_names
from workbench.engines.training.groups import ParallelGroups
from workbench.engines.training.pipeline import Pipeline
from workbench.errors import BadInput
from workbench.models.float32_head import Float32Head
from workbench.models.heads import PackedModule, TokenValues
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

BLOCKS = {"self_attn": "o_proj", "mlp": "down_proj"}  # of a decoder layer, and the layer that leads out of each
SLICED_LAYERS = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", *BLOCKS.values(), "embed_tokens", "lm_head")


@dataclass(frozen=True, kw_only=True)
class ModelShard:
    """What a rank holds. weights: all of the model's. held: this rank's slices of them, by transformers' names.

    partial: names of weights that every tensor rank holds whole, while each computes a part of their gradient: norms
    inside a block, which act on the rank's own heads.
    """

    weights: ModelWeights
    held: dict[str, nn.Parameter]
    partial: frozenset[str]


class StagePlaceholder(nn.Module):
    """In place of a layer of another pipeline stage: hidden states pass unchanged."""

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return hidden_states


def check_shardable(config: PreTrainedConfig, layout: Layout, head: Literal["lm", "scalar"]) -> ModelWeights:
    """The weights of a model; `BadInput`, naming one, where it cannot be trained in `layout`."""
    weights = model_weights(config, head=head)
    weights.check(layout.p, layout.t)
    if layout.t == 1:
        return weights
    for weight in weights:
        layer = weight.name.rpartition(".")[0].rpartition(".")[2]
        if weight.axis is not None and (layer not in SLICED_LAYERS or len(weight.parts) > 1):
            raise BadInput(
                f"{weight.name} over t={layout.t} tensor ranks",
                f"for training only {', '.join(SLICED_LAYERS)} are cut",
                "use t=1 for this model",
            )
        for part in weight.parts:
            if part.rule == "copied" and part.units % layout.t:
                raise BadInput(
                    f"{weight.name}: {part.units} key-value heads over t={layout.t} tensor ranks",
                    "in training each tensor rank has key-value heads of its own: t must divide them",
                    f"use a t that divides {part.units}",
                )
        if any(start == stop for start, stop in weight.intervals(layout.t - 1, layout.t)):
            raise BadInput(
                f"{weight.name} over t={layout.t} tensor ranks", "each needs a part of it", "use a smaller t"
            )
    return weights


def shard_model(module: PackedModule, groups: ParallelGroups) -> ModelShard:
    """Reduce `module` in place to this rank's shard. Every rank of a replica calls it with the same whole module.

    Raises `BadInput` where the layout cannot cut the model, or a trial shows that it then computes something else.
    """
    backbone: Any = module.get_backbone()
    layout = groups.layout
    weights = check_shardable(backbone.config, layout, "scalar" if isinstance(module, TokenValues) else "lm")
    if layout.p > 1 and module.padded_because is not None:
        raise BadInput(f"p={layout.p}", f"a pipeline takes packed sequences: {module.padded_because}", "use p=1")
    trial = _Trial(module)
    with torch.no_grad():
        held = _held_weights(module, weights, groups)
        for weight in weights:
            if weight.name in held:
                held[weight.name].data = weight.cut(held[weight.name].data, groups.tensor.rank, layout.t).clone()
        if layout.t > 1:
            _slice_blocks(module, groups)
            _slice_vocabulary(module, weights, groups)
        if layout.p > 1:
            _drop_other_stages(module, weights, groups)
        pipeline = Pipeline(module, groups, trial.expected.shape[-1], trial.expected.dtype)
        trial.require_same(pipeline.hidden_states(trial.inputs()), groups)
    partial = _partial_weights(weights) if layout.t > 1 else frozenset[str]()
    return ModelShard(weights=weights, held=held, partial=partial)


class _Trial:
    """The hidden states of the whole model, for comparison with those of its shards."""

    def __init__(self, module: PackedModule) -> None:
        self._module = module
        with torch.no_grad():
            self.expected = module.hidden_states(**self.inputs())

    def inputs(self) -> dict[str, Any]:
        """Two short sequences, on the device of the module."""
        backbone: Any = self._module.get_backbone()
        tokens = torch.arange(12) % int(backbone.config.get_text_config().vocab_size)
        return {"input_ids": tokens.to(backbone.device), "lengths": (7, 5)}

    def require_same(self, seen: Tensor | None, groups: ParallelGroups) -> None:
        """Raise `BadInput` on every rank of the replica unless `seen` [T, hidden], on the last stage, is the same."""
        expected, error = self.expected.float(), torch.zeros(())
        if seen is not None:
            error = ((seen.to(expected.device) - expected).float().norm() / expected.norm()).cpu()
        low = seen is not None and torch.bfloat16 in (seen.dtype, self.expected.dtype)
        # rounding is below these limits; a layer that is left out or computed twice gives about 1
        wrong = torch.tensor([float(not error <= (0.15 if low else 1e-3))])
        if groups.pipeline.all_reduce_max(groups.tensor.all_reduce_max(wrong)).item():
            raise BadInput(
                f"{type(self._module.get_backbone()).__name__} over p={groups.layout.p} stages and "
                f"t={groups.layout.t} tensor ranks",
                f"cut like that it computes something else (relative error {float(error):.2g})",
                "take a model of the Llama, Qwen2 or Qwen3 family, or p=t=1",
            )


def _held_weights(module: PackedModule, weights: ModelWeights, groups: ParallelGroups) -> dict[str, nn.Parameter]:
    """The parameters of this stage by transformers' names; a tied one is one parameter."""
    names, by_name = transformers_names(module), {weight.name: weight for weight in weights}
    found = {names.get(own, own): parameter for own, parameter in module.named_parameters()}
    if differ := found.keys() ^ by_name.keys():
        raise BadInput(f"weight {min(differ)!r}", "is not both in the model and in its configuration's class")
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
    """`ModelShard.partial`: whole weights inside a block, but for the bias of its last layer, which is added after the
    sum over the ranks."""

    def inside_block(weight: Weight) -> bool:
        steps = weight.name.split(".")
        return weight.axis is None and any(name in steps and out not in steps for name, out in BLOCKS.items())

    return frozenset(weight.name for weight in weights if inside_block(weight))


def _drop_other_stages(module: PackedModule, weights: ModelWeights, groups: ParallelGroups) -> None:
    """Keep the layers of this stage, under their names in the whole model."""
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
