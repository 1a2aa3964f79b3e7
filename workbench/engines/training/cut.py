"""Cut a loaded model down to what one rank of a layout (p, t, d) holds of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn

from workbench.engines.training.base import transformers_names
from workbench.engines.training.groups import ParallelGroups
from workbench.engines.training.pipeline import Pipeline
from workbench.errors import BadInput
from workbench.models.heads import PackedModule, TokenValues
from workbench.models.tensor_parallel import (
    RowParallelLinear,
    VocabularyParallelEmbedding,
    VocabularyParallelHead,
    enter_block,
)
from workbench.placement.layout import Layout
from workbench.resharding.weights import ModelWeights, Weight, model_weights

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

BLOCKS = {"self_attn": "o_proj", "mlp": "down_proj"}  # of a decoder layer, and the layer that leads out of each
CUT_LAYERS = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", *BLOCKS.values(), "embed_tokens", "lm_head")


@dataclass(frozen=True, kw_only=True)
class Cut:
    """What a rank holds. weights: all of the model's. held: by transformers' names, this rank's parts of them.

    partial: names of weights that are whole on every tensor rank while each sees a part of their gradient: norms inside
    a block, which act on the rank's own heads.
    """

    weights: ModelWeights
    held: dict[str, nn.Parameter]
    partial: frozenset[str]


class Elsewhere(nn.Module):
    """Stands for a layer that another pipeline stage has: hidden states pass it as they are."""

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return hidden_states


def check_cut(config: PreTrainedConfig, layout: Layout, head: Literal["lm", "scalar"]) -> ModelWeights:
    """The weights of a model that `layout` can cut for training; `BadInput`, naming one, where it cannot."""
    weights = model_weights(config, head=head)
    weights.check(layout.p, layout.t)
    if layout.t == 1:
        return weights
    for weight in weights:
        layer = weight.name.rpartition(".")[0].rpartition(".")[2]
        if weight.axis is not None and (layer not in CUT_LAYERS or len(weight.parts) > 1):
            raise BadInput(
                f"{weight.name} over t={layout.t} tensor ranks",
                f"for training only {', '.join(CUT_LAYERS)} are cut",
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


def cut_model(module: PackedModule, groups: ParallelGroups) -> Cut:
    """Cut `module` in place. Every rank of a replica calls it with the same whole module.

    Raises `BadInput` where the model cannot be cut so, or then computes something else: that is tried.
    """
    backbone: Any = module.get_backbone()
    layout = groups.layout
    weights = check_cut(backbone.config, layout, "scalar" if isinstance(module, TokenValues) else "lm")
    if layout.p > 1 and module.padded_because is not None:
        raise BadInput(f"p={layout.p}", f"a pipeline takes packed sequences: {module.padded_because}", "use p=1")
    tokens = torch.arange(12) % int(backbone.config.get_text_config().vocab_size)
    inputs: dict[str, Any] = {"input_ids": tokens.to(backbone.device), "lengths": (7, 5)}
    with torch.no_grad():
        expected = module.hidden_states(**inputs)
        held = _slices(module, weights, groups)
        partial = _tensor_parallel(module, weights, groups) if layout.t > 1 else frozenset[str]()
        if layout.p > 1:
            _drop_other_stages(module, weights, groups)
        pipeline = Pipeline(module, groups, expected.shape[-1], expected.dtype)
        seen = pipeline.hidden_states(inputs)
    error = torch.zeros(()) if seen is None else ((seen - expected).float().norm() / expected.float().norm()).cpu()
    # rounding; a layer that is left out or computed twice makes 1
    wrong = torch.tensor([float(not error <= (1e-3 if expected.dtype == torch.float32 else 0.15))])
    if groups.pipeline.all_reduce_max(wrong).item():
        raise BadInput(
            f"{type(backbone).__name__} over p={layout.p} stages and t={layout.t} tensor ranks",
            f"cut like that it computes something else (relative error {float(error):.2g})",
            "take a model of the Llama, Qwen2 or Qwen3 family, or p=t=1",
        )
    return Cut(weights=weights, held=held, partial=partial)


def _slices(module: PackedModule, weights: ModelWeights, groups: ParallelGroups) -> dict[str, nn.Parameter]:
    """Each parameter of this stage reduced to this rank's slice; a tied one is one parameter, before as after."""
    layout, names, by_name = groups.layout, transformers_names(module), {weight.name: weight for weight in weights}
    found = {names.get(own, own): parameter for own, parameter in module.named_parameters()}
    if differ := found.keys() ^ by_name.keys():
        raise BadInput(f"weight {min(differ)!r}", "is not both in the model and in its configuration's class")
    held = {}
    for weight in weights.of_stage(groups.pipeline.rank, layout.p):
        parameter = held[weight.name] = found[weight.name]
        parameter.data = weight.cut(parameter.data, groups.tensor.rank, layout.t).clone()
    return held


def _tensor_parallel(module: PackedModule, weights: ModelWeights, groups: ParallelGroups) -> frozenset[str]:
    """Put layers that know of their tensor group in place of plain ones; the names of `Cut.partial`."""
    backbone: Any = module.get_backbone()
    for layer in backbone.layers:
        for name, out in BLOCKS.items():
            block = getattr(layer, name)
            enter_block(block, groups.tensor)
            setattr(block, out, RowParallelLinear(getattr(block, out), groups.tensor))
    by_layer = {weight.name.rpartition(".")[0].rpartition(".")[2]: weight for weight in weights}

    def start(layer: str) -> int:
        return by_layer[layer].intervals(groups.tensor.rank, groups.layout.t)[0][0]

    embedding = backbone.embed_tokens
    backbone.embed_tokens = VocabularyParallelEmbedding(embedding, start("embed_tokens"), groups.tensor)
    head: Any = getattr(module, "model", None)
    if head is not None:
        rows = "lm_head" if "lm_head" in by_layer else "embed_tokens"
        head.lm_head = VocabularyParallelHead(head.lm_head, start(rows), groups.tensor)
    return frozenset(weight.name for weight in weights if _inside_block(weight))


def _inside_block(weight: Weight) -> bool:
    """Whether a whole weight acts between the two ends of a block; the bias of the last layer is added after it."""
    steps = weight.name.split(".")
    return weight.axis is None and any(name in steps and out not in steps for name, out in BLOCKS.items())


def _drop_other_stages(module: PackedModule, weights: ModelWeights, groups: ParallelGroups) -> None:
    """Leave the layers of this stage; their names stay those of the whole model."""
    backbone: Any = module.get_backbone()
    each = weights.layers // groups.layout.p
    for number in range(weights.layers):
        if number // each != groups.pipeline.rank:
            backbone.layers[number] = Elsewhere()
    if not groups.first:
        backbone.embed_tokens = Elsewhere()
    if not groups.last:
        backbone.norm = Elsewhere()
        if isinstance(module, TokenValues):
            module.score = Elsewhere()  # type: ignore[assignment]
        else:
            module.model.lm_head = Elsewhere()  # type: ignore[union-attr]
