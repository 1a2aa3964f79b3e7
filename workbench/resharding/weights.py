"""How a model's weights are split into tensor-parallel slices and assigned to pipeline stages. Loads nothing.

The split is Megatron-LM's (Shoeybi et al. 2019, arXiv:1909.08053): projections into attention heads and into the MLP
are split by output (axis 0), projections out of them by input (axis 1), embeddings and output head by vocabulary; other
weights are whole on every tensor rank. Layers are divided evenly among the stages, in order.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Any, Literal

from workbench.errors import BadInput
from workbench.errors.plain_text import shown
from workbench.models.dense_config import DenseConfig

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedConfig

Interval = tuple[int, int]
# Bytes of an element, by the name of the torch dtype.
ITEM_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2, "float8_e4m3fn": 1, "float8_e5m2": 1, "int8": 1}

MOST_TENSOR_RANKS = 64  # the largest t that a remedy names


@dataclass(frozen=True, kw_only=True)
class Part:
    """A range of a weight's split axis that is split separately: the whole axis, or q, k or v of a fused weight.

    size: elements along the axis. units: the number of pieces that stay whole, such as heads; it divides the size.
    rule: "even": each of t ranks has units/t units. "copied": the same, but if t is a multiple of units, each unit is
    on t/units ranks (key-value heads). "chunked": chunks of ceil(units/t), the last ones shorter or empty, as in
    torch.chunk and DTensor's Shard (vocabulary rows).
    """

    size: int
    units: int
    rule: Literal["even", "copied", "chunked"] = "even"

    def held_units(self, j: int, t: int, multiple: int = 1) -> Interval | None:
        """Return [start, stop) in units for tensor rank j of t; None if t cannot divide the units.

        multiple: the number of chunked units is rounded up to a multiple of this.
        """
        if self.rule == "chunked":
            chunk = -(-(-(-self.units // multiple) * multiple) // t)
            return min(j * chunk, self.units), min((j + 1) * chunk, self.units)
        if self.units % t == 0:
            each = self.units // t
            return j * each, (j + 1) * each
        if self.rule == "copied" and t % self.units == 0:
            return j * self.units // t, j * self.units // t + 1
        return None


@dataclass(frozen=True, kw_only=True)
class Weight:
    """One weight. name: transformers'. item_bytes: per element. axis: the split axis; None: whole on each tensor rank.

    parts: of the split axis, in order; () for a weight that is not split. layers: the decoder layers whose pipeline
    stages hold the weight: its own; the first layer for embeddings, the last for final norm and head; both for an
    embedding that is tied to the head.
    """

    name: str
    shape: tuple[int, ...]
    item_bytes: int
    axis: int | None = None
    parts: tuple[Part, ...] = ()
    layers: tuple[int, ...] = (0,)

    @property
    def matrix(self) -> tuple[int, int]:
        """(rows, columns) of the weight as a matrix; (elements, 1) for a vector."""
        rows = self.shape[0] if self.shape else 1
        return rows, math.prod(self.shape[1:])

    @property
    def group(self) -> str:
        """The name of the weights that move together: of the decoder layer ("model.layers.3"), else of the module."""
        module = self.name.rpartition(".")[0] or self.name
        found = re.match(r"(.*?\.\d+)(\.|$)", module)
        return found[1] if found else module

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.numel * self.item_bytes

    def intervals(self, j: int, t: int, multiple: int = 1) -> tuple[Interval, ...]:
        """Return the [start, stop) along the split axis that tensor rank j of t holds, one per part; may be empty.

        multiple: a vocabulary is rounded up to a multiple of this before it is split. A weight that is not split gives
        all of axis 0. Raises `BadInput` if t cannot divide a part.
        """
        if self.axis is None:
            return ((0, self.matrix[0]),)
        found, begin = [], 0
        for part in self.parts:
            units = part.held_units(j, t, multiple)
            if units is None:
                raise BadInput(
                    f"{self.name}: {part.units} units over t={t} tensor ranks",
                    "attention heads (and columns of an MLP) are not cut: t must divide them, or be a multiple of the "
                    "key-value heads",
                    f"use a t that divides {part.units}",
                )
            each = part.size // part.units
            found.append((begin + units[0] * each, begin + units[1] * each))
            begin += part.size
        return tuple(found)

    def local_shape(self, j: int, t: int, multiple: int = 1) -> tuple[int, ...]:
        """Return the shape of tensor rank j's slice, of t; `multiple` as in `intervals`."""
        if self.axis is None:
            return self.shape
        held = sum(stop - start for start, stop in self.intervals(j, t, multiple))
        return (*self.shape[: self.axis], held, *self.shape[self.axis + 1 :])

    def cut(self, tensor: Tensor, j: int, t: int) -> Tensor:
        """Return tensor rank j's slice, of t, of the whole weight: a view for one part, a joined copy for several."""
        if self.axis is None:
            return tensor
        pieces = [tensor.narrow(self.axis, start, stop - start) for start, stop in self.intervals(j, t)]
        if len(pieces) == 1:
            return pieces[0]
        import torch

        return torch.cat(pieces, self.axis)


@dataclass(frozen=True)
class ModelWeights:
    """All weights of a model in the order of its layers, tied weights once, and the number of decoder layers."""

    weights: tuple[Weight, ...]
    layers: int

    def __hash__(self) -> int:
        return hash((len(self.weights), self.layers, self.weights[-1:]))

    def __iter__(self) -> Iterator[Weight]:
        return iter(self.weights)

    def __len__(self) -> int:
        return len(self.weights)

    @cached_property
    def nbytes(self) -> int:
        return sum(weight.nbytes for weight in self.weights)

    def stages(self, weight: Weight, p: int) -> tuple[int, ...]:
        """Return the stages, of p, that hold a weight, ascending. `BadInput` if p does not divide the layers."""
        if self.layers % p:
            raise BadInput(
                f"{self.layers} layers over p={p} pipeline stages",
                "every stage has the same number of layers: p must divide them",
                f"use a p that divides {self.layers}",
            )
        return tuple(sorted({layer * p // self.layers for layer in weight.layers}))

    @lru_cache(maxsize=4096)  # noqa: B019 (there are few models)
    def of_stage(self, i: int, p: int) -> tuple[Weight, ...]:
        return tuple(weight for weight in self.weights if i in self.stages(weight, p))

    @lru_cache(maxsize=4096)  # noqa: B019 (there are few models)
    def check(self, p: int, t: int) -> None:
        """Raise `BadInput`, naming the weight, if p stages of t tensor ranks cannot divide the model."""
        for weight in self.weights:
            self.stages(weight, p)
            try:
                weight.intervals(0, t)
            except BadInput as error:
                fitting = ", ".join(str(n) for n in range(1, MOST_TENSOR_RANKS + 1) if self._fits(n))
                raise BadInput(error.value, error.rule, f"use one of t={fitting}") from None

    def _fits(self, t: int) -> bool:
        return all(part.held_units(0, t, 1) is not None for weight in self.weights for part in weight.parts)


def model_weights(
    config: PreTrainedConfig | DenseConfig,
    *,
    head: Literal["lm", "scalar"] = "lm",
    dtype: str | None = None,
    unknown: Literal["refuse", "whole"] = "refuse",
) -> ModelWeights:
    """Return the weights of the model that a config describes; allocates no weights and reads no files.

    head: "lm", an output head over the vocabulary, or "scalar", one value per token (`score.weight`, `score.bias`).
    dtype: for example "bfloat16"; None: the config's, or float32 if it has none.
    unknown: for layers whose split is not known: "refuse" raises; "whole" puts them whole on every tensor rank.
    Raises `BadInput` for a config that makes no language model, and ("refuse") for layers whose split is not known.
    """
    named = dtype or getattr(config, "dtype", None) or "float32"
    item_bytes = ITEM_BYTES.get(str(named).removeprefix("torch."))
    if item_bytes is None:
        raise BadInput(f"dtype={shown(named)}", "must be the name of a torch dtype", "use 'bfloat16' or 'float32'")
    text = config.get_text_config()
    if isinstance(config, DenseConfig):
        shapes, base = config.shapes(lm_head=head == "lm"), "model"
        tied = head == "lm" and config.tie_word_embeddings
    else:
        shapes, base, tied = _shapes_of(config, head)
    count = int(text.num_hidden_layers)
    if count < 1:
        raise BadInput(f"num_hidden_layers={count}", "a model needs at least one layer")
    if head == "scalar":
        shapes |= {"score.weight": (1, int(text.hidden_size)), "score.bias": (1,)}
    cutter = _Cutter(text, base)
    weights = [cutter.weight(name, shape, item_bytes, count, tied) for name, shape in shapes.items()]
    if cutter.unknown and unknown == "refuse":
        raise BadInput(
            f"{type(config).__name__} has layers that cannot be sharded: {', '.join(sorted(cutter.unknown))}",
            "a layer needs a name as in Llama, Qwen2, Qwen3 and similar models, or an entry in the config's "
            "base_model_tp_plan",
            "use a dense model of such a family",
        )
    return ModelWeights(tuple(weights), count)


def _shapes_of(config: PreTrainedConfig, head: Literal["lm", "scalar"]) -> tuple[dict[str, tuple[int, ...]], str, bool]:
    """Build the model on the meta device; return the shapes of its weights, the base model's prefix, and whether the
    output head is tied to the embeddings."""
    import torch
    from transformers import AutoModel, AutoModelForCausalLM

    auto = AutoModelForCausalLM if head == "lm" else AutoModel
    try:
        with torch.device("meta"):
            model: Any = auto.from_config(config)
    except Exception as error:  # its class depends on the model family
        raise BadInput(
            f"{type(config).__name__} ({type(error).__name__}: {' '.join(str(error).split())[:200]})",
            "must be the config of a language model",
            "use a dense model of a family such as Llama or Qwen",
        ) from error
    base = model.base_model_prefix
    prefix = "" if head == "lm" else f"{base}."
    shapes = {prefix + name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    output = model.get_output_embeddings()
    return shapes, base, output is not None and output.weight is model.get_input_embeddings().weight


class _Cutter:
    """Finds the parts of each layer by its name; collects unknown layers in `unknown`."""

    def __init__(self, text: Any, base: str) -> None:
        heads = int(getattr(text, "num_attention_heads", 1))
        key_value = int(getattr(text, "num_key_value_heads", None) or heads)
        self._heads, self._key_value, self._base = heads, key_value, base
        self._plan = {key: str(style) for key, style in (getattr(text, "base_model_tp_plan", None) or {}).items()}
        self.unknown: set[str] = set()

    def weight(self, name: str, shape: tuple[int, ...], item_bytes: int, count: int, tied: bool) -> Weight:
        module, _, kind = name.rpartition(".")
        steps = module.removeprefix(f"{self._base}.").split(".")
        numbers = [int(step) for step in steps if step.isdigit()]
        pattern = ".".join("*" if step.isdigit() else step for step in steps)
        axis, parts = self._cut(pattern, steps[-1], kind, shape)
        layers: tuple[int, ...] = (numbers[0],) if numbers else (count - 1,)
        if steps[-1] == "embed_tokens":
            layers = (0, count - 1) if tied else (0,)
        return Weight(name=name, shape=shape, item_bytes=item_bytes, axis=axis, parts=parts, layers=layers)

    def _cut(self, pattern: str, module: str, kind: str, shape: tuple[int, ...]) -> tuple[int | None, tuple[Part, ...]]:
        whole: tuple[int | None, tuple[Part, ...]] = (None, ())
        rows = shape[0]
        if module.endswith(("norm", "layernorm")) or module == "score":
            return whole
        if module in ("embed_tokens", "lm_head"):
            return 0, (Part(size=rows, units=rows, rule="chunked"),)
        if "experts" not in pattern:
            if module in ("o_proj", "down_proj"):
                units = self._heads if module == "o_proj" else shape[-1]
                return whole if kind == "bias" else (1, (Part(size=shape[1], units=units),))
            if module == "q_proj":
                return 0, (Part(size=rows, units=self._heads),)
            if module in ("k_proj", "v_proj"):
                return 0, (Part(size=rows, units=self._key_value, rule="copied"),)
            if module in ("gate_proj", "up_proj"):
                return 0, (Part(size=rows, units=rows),)
            if module == "qkv_proj":
                size = rows // (self._heads + 2 * self._key_value)
                key_value = Part(size=size * self._key_value, units=self._key_value, rule="copied")
                return 0, (Part(size=size * self._heads, units=self._heads), key_value, key_value)
            if module == "gate_up_proj":
                return 0, (Part(size=rows // 2, units=rows // 2),) * 2
        style = self._plan.get(pattern)
        if style == "replicated_with_grad_allreduce":
            return whole
        if style == "colwise" and "attn" not in pattern:  # in attention, the split needs the number of heads
            return 0, (Part(size=rows, units=rows),)
        if style == "rowwise" and "attn" not in pattern and len(shape) <= 2:
            return whole if kind == "bias" else (1, (Part(size=shape[1], units=shape[1]),))
        self.unknown.add(pattern)
        return whole
