"""A role's model, trained weights and engines: everything that determines the role's bytes and speed."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Any, Literal

from workbench.models.dense_config import DenseConfig
from workbench.resharding.weights import ITEM_BYTES, ModelWeights, Weight, model_weights
from workbench.settings.engines import Generation
from workbench.settings.layout import Layout
from workbench.settings.roles import ROLLOUT
from workbench.settings.training import Training

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

    from workbench.models.lora import LoRA

# Tokens of a micro-batch if Training.micro_batch_tokens is None, by device. On a GPU this is only used to plan the
# other sizes; then micro-batches get as many tokens as fit.
AUTOMATIC_TOKENS = {"cpu": 2048, "cuda": 8192}
# Embeddings and heads: matrices that get no adapter.
TABLES = ("embed_tokens", "lm_head", "wte", "wpe")

_weights: dict[tuple[type, str, str, str], ModelWeights] = {}  # a cache: roles often share a model
_layers: dict[tuple[type, str], dict[str, tuple[int, int]]] = {}  # likewise


def _linear_layers(config: PreTrainedConfig | DenseConfig) -> dict[str, tuple[int, int]]:
    """Return name -> (outputs, inputs) of the layers that may get an adapter."""
    if isinstance(config, DenseConfig):
        shapes = ((name.removesuffix(".weight"), shape) for name, shape in config.shapes(lm_head=False).items())
        return {name: (s[0], s[1]) for name, s in shapes if len(s) == 2 and name.rpartition(".")[2] not in TABLES}
    key = type(config), config.to_json_string()
    if key not in _layers:
        import torch
        from transformers import AutoModelForCausalLM

        from workbench.models.lora import linear_layers

        with torch.device("meta"):
            _layers[key] = linear_layers(AutoModelForCausalLM.from_config(config))
    return _layers[key]


@dataclass(frozen=True, kw_only=True)
class RoleModel:
    """A role's model by its configuration; no weights are read.

    head: as in `model_weights`. dtype: the dtype of computation. training: also needed by a role that is not trained,
    for its micro-batches. trained: whether the role's weights, or its adapter, change. generation: of roles that
    generate. samples_only: for rollout workers, which hold only the engine. publishes: for the actor of rollout
    workers, which keeps a copy of the last published weights. automatic_tokens: of a micro-batch, if `training` does
    not set them.
    """

    config: PreTrainedConfig | DenseConfig
    head: Literal["lm", "scalar"]
    dtype: str
    training: Training
    trained: bool
    generation: Generation | None = None
    adapter: LoRA | None = None
    samples_only: bool = False
    publishes: bool = False
    automatic_tokens: int = AUTOMATIC_TOKENS["cpu"]

    def __hash__(self) -> int:  # the fields with settings may not be hashable
        return hash((self.head, self.dtype, self.trained, self.samples_only, self.layers, self.hidden))

    @property
    def micro_batch_tokens(self) -> int:
        return self.training.micro_batch_tokens or self.automatic_tokens

    @cached_property
    def _text(self) -> Any:
        return self.config.get_text_config()

    @cached_property
    def layers(self) -> int:
        return int(self._text.num_hidden_layers)

    @cached_property
    def hidden(self) -> int:
        return int(self._text.hidden_size)

    @cached_property
    def vocabulary(self) -> int:
        return int(self._text.vocab_size)

    @cached_property
    def inner(self) -> int:
        """The size of an MLP's hidden state."""
        text = self._text
        return int(getattr(text, "intermediate_size", None) or getattr(text, "n_inner", None) or 4 * self.hidden)

    @cached_property
    def _heads(self) -> int:
        return int(getattr(self._text, "num_attention_heads", None) or 1)

    @cached_property
    def key_heads(self) -> int:
        return int(getattr(self._text, "num_key_value_heads", None) or self._heads)

    @cached_property
    def head_dim(self) -> int:
        return int(getattr(self._text, "head_dim", None) or self.hidden // self._heads)

    @property
    def queries(self) -> int:
        """Elements of a layer's queries; `keys`: of its keys, and of its values."""
        return self._heads * self.head_dim

    @property
    def keys(self) -> int:
        return self.key_heads * self.head_dim

    @cached_property
    def elements(self) -> int:
        return sum(weight.numel for weight in self.weights)

    @cached_property
    def trained_elements(self) -> int:
        return sum(weight.numel for weight in self.trained_weights)

    @property
    def kv_bytes_per_token(self) -> int:
        """The bytes of one token's keys and values in all layers, in the dtype of generation."""
        return 2 * self.layers * self.keys * self.frozen_bytes

    @property
    def engine(self) -> str:
        """ "frozen", "torch", or "zero0" to "zero3"."""
        if not self.trained:
            return "frozen"
        return "torch" if self.training.engine == "torch" else f"zero{self.training.zero_stage}"

    @property
    def stored_bytes(self) -> int:
        """Bytes of an element of a trained weight. ZeRO from stage 1 on holds weights in `dtype` and fp32 masters; the
        other engines, and training in float16, hold fp32 weights."""
        sharded = self.engine in ("zero1", "zero2", "zero3") and self.dtype != "float16"
        return ITEM_BYTES[self.dtype] if sharded else 4

    @property
    def frozen_bytes(self) -> int:
        """Bytes of an element of a weight that is not trained."""
        return ITEM_BYTES[self.dtype]

    @cached_property
    def weights(self) -> ModelWeights:
        """The model's weights, in the order of its modules, with item bytes of `dtype`."""
        key = type(self.config), self.config.to_json_string(), self.head, self.dtype
        if key not in _weights:
            _weights[key] = model_weights(self.config, head=self.head, dtype=self.dtype, unknown="whole")
        return _weights[key]

    @cached_property
    def adapter_weights(self) -> ModelWeights:
        """The adapter's weights: A [rank, in] and B [out, rank] for each weight [out, in] that it changes."""
        found, weights = list[Weight](), self.weights
        if self.adapter is not None:
            rank, targets, layers = self.adapter.rank, self.adapter.targets, _linear_layers(self.config)
            for weight in weights:
                module, _, kind = weight.name.rpartition(".")
                if kind == "weight" and module in layers and (targets is None or module.rpartition(".")[2] in targets):
                    out, into = layers[module]
                    for letter, shape in (("A", (rank, into)), ("B", (out, rank))):
                        found.append(Weight(name=f"{module}.lora_{letter}.weight", shape=shape, item_bytes=4,
                                            layers=weight.layers))  # fmt: skip
        return ModelWeights(tuple(found), weights.layers)

    @property
    def adapter_bytes(self) -> int:
        """The bytes of the adapter in a generation engine and in a weight sync."""
        return sum(weight.numel for weight in self.adapter_weights) * self.frozen_bytes

    @property
    def trained_weights(self) -> ModelWeights:
        """The weights that the optimizer changes; none if the role is not trained."""
        if not self.trained:
            return ModelWeights((), self.weights.layers)
        return self.weights if self.adapter is None else self.adapter_weights

    @property
    def frozen_weights(self) -> ModelWeights:
        moves = (self.trained and self.adapter is None) or self.samples_only
        return ModelWeights((), self.weights.layers) if moves else self.weights

    def rank_layout(self, layout: Layout) -> Layout:
        """Return a placement's layout with the numbering that the role's ranks use: an actor that is split over several
        ranks generates in groups of consecutive ranks."""
        if self.generation is None or layout.p * layout.t == 1:
            return layout
        return layout.generating(self.generation.tensor_parallel_size)

    @property
    def tokens_bound(self) -> int:
        """The most tokens in one pass: a micro-batch, or a longer single row."""
        longest = self.generation.max_model_tokens if self.generation else 0
        return max(self.micro_batch_tokens, longest)


def local_sizes(weights: ModelWeights, layout: Layout, rank: int) -> list[tuple[Weight, int]]:
    """Return the weights of which a rank holds a slice, and the elements of each slice, before any sharding over
    replicas. `BadInput` if the layout cannot divide the model."""
    _, i, j = layout.coordinates(rank)
    return [(weight, math.prod(weight.local_shape(j, layout.t))) for weight in weights.of_stage(i, layout.p)]


def head_of(role: str) -> Literal["lm", "scalar"]:
    return "lm" if role in ("actor", "reference", "teacher", ROLLOUT) else "scalar"


Matrices = Counter[tuple[int, int]]


@lru_cache(maxsize=1024)
def matrices(role: RoleModel, t: int) -> tuple[Matrices, Matrices]:
    """Return the matrices that every token is multiplied with, of the layers and of the head, on one of t tensor ranks:
    the count of each shape (elements out, elements in). A tied embedding counts as the head."""
    tied = role.head == "lm" and not any(weight.name.startswith("lm_head.") for weight in role.weights)
    layers, head = Matrices(), Matrices()
    for weight in role.weights:
        module = weight.name.split(".")[-2]
        is_head = module == "lm_head" or (tied and module in ("embed_tokens", "wte"))
        if len(weight.shape) == 2 and (is_head or module not in TABLES):
            rows, columns = weight.local_shape(0, t)
            (head if is_head else layers)[rows, columns] += 1
    return layers, head


@lru_cache(maxsize=4096)
def held_bytes(role: RoleModel, p: int, t: int, i: int, j: int) -> int:
    """Return the bytes of the slices of pipeline stage i and tensor rank j."""
    held = role.weights.of_stage(i, p)
    return sum(math.prod(weight.local_shape(j, t)) * weight.item_bytes for weight in held)
