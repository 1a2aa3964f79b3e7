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
from workbench.resharding.weights import ModelWeights, Weight, model_weights
from workbench.settings.layout import Layout

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

BLOCKS = {"self_attn": "o_proj", "mlp": "down_proj"}  # of a decoder layer, and the layer that leads out of each
INTO_BLOCKS = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")
VOCABULARY = ("embed_tokens", "lm_head")
CUT_LAYERS = (*INTO_BLOCKS, *BLOCKS.values(), *VOCABULARY)


@dataclass(frozen=True, kw_only=True)
class Cut:
    """What a rank holds. weights: all of the model's. held: by transformers' names, this rank's parts of them.

    partial: names of weights that are whole on every tensor rank while each sees a part of their gradient: norms inside
    a block, which act on the rank's own heads.
    """

    weights: ModelWeights
    held: dict[str, nn.Parameter]
    partial: frozenset[str]


class StagePlaceholder(nn.Module):
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
    trial = Trial(module)
    with torch.no_grad():
        held = held_weights(module, weights, groups)
        _slice(held, weights, groups)
        if layout.t > 1:
            _cut_blocks(module, groups)
            _cut_vocabulary(module, weights, groups)
        if layout.p > 1:
            _drop_other_stages(module, weights, groups)
        pipeline = Pipeline(module, groups, trial.expected.shape[-1], trial.expected.dtype)
        trial.require_same(pipeline.hidden_states(trial.inputs()), groups)
    return Cut(weights=weights, held=held, partial=partial_weights(weights) if layout.t > 1 else frozenset())


def cut_vocabulary(module: PackedModule, groups: ParallelGroups) -> Cut:
    """Cut the embedding and the output head of `module` in place, and leave its layers to DeepSpeed's AutoTP, which
    keeps their parameters, and cuts them alike. `BadInput` as from `cut_model`."""
    backbone: Any = module.get_backbone()
    weights = check_cut(backbone.config, groups.layout, "scalar" if isinstance(module, TokenValues) else "lm")
    held = held_weights(module, weights, groups)
    rows = {name: held[name] for name in held if name.split(".")[-2] in VOCABULARY}
    _slice(rows, weights, groups)
    _cut_vocabulary(module, weights, groups)
    return Cut(weights=weights, held=held, partial=partial_weights(weights))


class Trial:
    """A model's hidden states before it is cut, to be compared with those after it."""

    def __init__(self, module: PackedModule) -> None:
        self._module = module
        with torch.no_grad():
            self.expected = module.hidden_states(**self.inputs())

    def inputs(self) -> dict[str, Any]:
        """Two short sequences, where the module is now."""
        backbone: Any = self._module.get_backbone()
        tokens = torch.arange(12) % int(backbone.config.get_text_config().vocab_size)
        return {"input_ids": tokens.to(backbone.device), "lengths": (7, 5)}

    def require_same(self, seen: Tensor | None, groups: ParallelGroups) -> None:
        """Raise `BadInput` on every rank of the replica unless `seen` [T, hidden], of the last stage, is as before."""
        expected, error = self.expected.float(), torch.zeros(())
        if seen is not None:
            error = ((seen.to(expected.device) - expected).float().norm() / expected.norm()).cpu()
        low = seen is not None and torch.bfloat16 in (seen.dtype, self.expected.dtype)
        # rounding; a layer that is left out or computed twice makes 1
        wrong = torch.tensor([float(not error <= (0.15 if low else 1e-3))])
        if groups.pipeline.all_reduce_max(groups.tensor.all_reduce_max(wrong)).item():
            raise BadInput(
                f"{type(self._module.get_backbone()).__name__} over p={groups.layout.p} stages and "
                f"t={groups.layout.t} tensor ranks",
                f"cut like that it computes something else (relative error {float(error):.2g})",
                "take a model of the Llama, Qwen2 or Qwen3 family, or p=t=1",
            )


def held_weights(module: PackedModule, weights: ModelWeights, groups: ParallelGroups) -> dict[str, nn.Parameter]:
    """The parameters of this stage by transformers' names; a tied one is one parameter."""
    names, by_name = transformers_names(module), {weight.name: weight for weight in weights}
    found = {names.get(own, own): parameter for own, parameter in module.named_parameters()}
    if differ := found.keys() ^ by_name.keys():
        raise BadInput(f"weight {min(differ)!r}", "is not both in the model and in its configuration's class")
    return {weight.name: found[weight.name] for weight in weights.of_stage(groups.pipeline.rank, groups.layout.p)}


def _slice(held: dict[str, nn.Parameter], weights: ModelWeights, groups: ParallelGroups) -> None:
    """Reduce parameters to this rank's slices."""
    for weight in weights:
        if weight.name in held:
            parameter = held[weight.name]
            parameter.data = weight.cut(parameter.data, groups.tensor.rank, groups.layout.t).clone()


def _cut_blocks(module: PackedModule, groups: ParallelGroups) -> None:
    """Put layers that know of their tensor group in place of plain ones, in attention and MLP blocks."""
    backbone: Any = module.get_backbone()
    for layer in backbone.layers:
        for name, out in BLOCKS.items():
            block = getattr(layer, name)
            enter_block(block, groups.tensor)
            setattr(block, out, RowParallelLinear(getattr(block, out), groups.tensor))


def _cut_vocabulary(module: PackedModule, weights: ModelWeights, groups: ParallelGroups) -> None:
    """The same for the embedding and the output head."""
    backbone: Any = module.get_backbone()
    by_layer = {weight.name.rpartition(".")[0].rpartition(".")[2]: weight for weight in weights}

    def start(layer: str) -> int:
        return by_layer[layer].intervals(groups.tensor.rank, groups.layout.t)[0][0]

    embedding = backbone.embed_tokens
    backbone.embed_tokens = VocabularyParallelEmbedding(embedding, start("embed_tokens"), groups.tensor)
    head: Any = getattr(module, "model", None)
    if head is not None:
        rows = "lm_head" if "lm_head" in by_layer else "embed_tokens"
        head.lm_head = VocabularyParallelHead(head.lm_head, start(rows), groups.tensor)


def partial_weights(weights: ModelWeights) -> frozenset[str]:
    """The names of `Cut.partial`: weights that are whole and act between the two ends of a block; the bias of its last
    layer is added after it."""

    def inside_block(weight: Weight) -> bool:
        steps = weight.name.split(".")
        return weight.axis is None and any(name in steps and out not in steps for name, out in BLOCKS.items())

    return frozenset(weight.name for weight in weights if inside_block(weight))


def _drop_other_stages(module: PackedModule, weights: ModelWeights, groups: ParallelGroups) -> None:
    """Leave the layers of this stage; their names stay those of the whole model."""
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
