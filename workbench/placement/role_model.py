"""What decides the bytes of a role: its model's weights, which of them are trained, and its engines."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Literal

from workbench.resharding.weights import ITEM_BYTES, ModelWeights, Weight, model_weights
from workbench.settings.engines import Generation, Training
from workbench.settings.layout import Layout
from workbench.settings.roles import ROLLOUT

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

    from workbench.models.dense_config import DenseConfig
    from workbench.models.lora import LoRA

# Tokens of a micro-batch where Training.micro_batch_tokens is None, by device: on a CPU so many, on a GPU so many in a
# plan of what fits beside them, from which as many are taken as there is room for.
AUTOMATIC_TOKENS = {"cpu": 2048, "cuda": 8192}
# Matrices that are no linear layers below the head, so have no adapter.
TABLES = ("embed_tokens", "lm_head", "wte", "wpe")

_weights: dict[tuple[type, str, str, str], ModelWeights] = {}  # several roles have one model, and asking takes time


@dataclass(frozen=True, kw_only=True, eq=False)
class RoleModel:
    """A role's model by its configuration; no weights are read.

    head: as of `model_weights`. dtype: in which it computes. training: also of a role that is only run, for its
    micro-batches. trained: whether its weights, or its adapter's, change. generation: of roles that generate.
    samples_only: of rollout workers, which hold only the engine. automatic_tokens: of a micro-batch, where `training`
    does not set them.
    """

    config: PreTrainedConfig | DenseConfig
    head: Literal["lm", "scalar"]
    dtype: str
    training: Training
    trained: bool
    generation: Generation | None = None
    adapter: LoRA | None = None
    samples_only: bool = False
    automatic_tokens: int = AUTOMATIC_TOKENS["cpu"]

    @property
    def micro_batch_tokens(self) -> int:
        return self.training.micro_batch_tokens or self.automatic_tokens

    @property
    def engine(self) -> str:
        """ "frozen", "torch", or "zero0" to "zero3"."""
        if not self.trained:
            return "frozen"
        return "torch" if self.training.engine == "torch" else f"zero{self.training.zero_stage}"

    @property
    def stored_bytes(self) -> int:
        """Of an element of a trained weight: ZeRO from stage 1 on holds bfloat16 weights beside fp32 masters, the
        others, and those that train in float16, fp32 weights."""
        sharded = self.engine in ("zero1", "zero2", "zero3") and self.dtype != "float16"
        return ITEM_BYTES[self.dtype] if sharded else 4

    @property
    def frozen_bytes(self) -> int:
        """Of an element of a weight that is not trained."""
        return ITEM_BYTES[self.dtype]

    @cached_property
    def weights(self) -> ModelWeights:
        """The model's weights, in the order of its modules, counted in `dtype`."""
        key = type(self.config), self.config.to_json_string(), self.head, self.dtype
        if key not in _weights:
            _weights[key] = model_weights(self.config, head=self.head, dtype=self.dtype, unknown="whole")
        return _weights[key]

    @cached_property
    def adapter_weights(self) -> ModelWeights:
        """The adapter's: A [rank, in] and B [out, rank] beside each weight [out, in] that it changes."""
        found: list[Weight] = []
        for weight in self.weights if self.adapter is not None else ():
            module, _, kind = weight.name.rpartition(".")
            name = module.rpartition(".")[2]
            linear = kind == "weight" and len(weight.shape) == 2 and name not in TABLES
            if linear and (self.adapter.targets is None or name in self.adapter.targets):  # type: ignore[union-attr]
                rank, (out, into) = self.adapter.rank, weight.shape  # type: ignore[union-attr]
                for letter, shape in (("A", (rank, into)), ("B", (out, rank))):
                    found.append(Weight(name=f"{module}.lora_{letter}.weight", shape=shape, item_bytes=4,
                                        layers=weight.layers))  # fmt: skip
        return ModelWeights(tuple(found), self.weights.layers)

    @property
    def trained_weights(self) -> ModelWeights:
        """The weights that the optimizer changes; none of a role that is only run."""
        if not self.trained:
            return ModelWeights((), self.weights.layers)
        return self.weights if self.adapter is None else self.adapter_weights

    @property
    def frozen_weights(self) -> ModelWeights:
        moves = (self.trained and self.adapter is None) or self.samples_only
        return ModelWeights((), self.weights.layers) if moves else self.weights

    def standing(self, layout: Layout) -> Layout:
        """The layout of its placement, in the numbering of its ranks: those of an actor that is cut over several ranks
        generate in groups of consecutive ones."""
        if self.generation is None or layout.p * layout.t == 1:
            return layout
        return layout.generating(self.generation.tensor_parallel_size)

    @property
    def tokens_bound(self) -> int:
        """Most tokens in one pass: a micro-batch, or a row that is longer than one."""
        longest = self.generation.max_model_tokens if self.generation else 0
        return max(self.micro_batch_tokens, longest)


def local_sizes(weights: ModelWeights, layout: Layout, rank: int) -> list[tuple[Weight, int]]:
    """The weights of which a rank's replica position holds a slice, and the slice's elements: before any sharding over
    replicas. `BadInput` where the layout does not cut the model."""
    _, i, j = layout.coordinates(rank)
    return [(weight, math.prod(weight.local_shape(j, layout.t))) for weight in weights.of_stage(i, layout.p)]


def head_of(role: str) -> Literal["lm", "scalar"]:
    """The head of a role's model."""
    return "lm" if role in ("actor", "reference", "teacher", ROLLOUT) else "scalar"
