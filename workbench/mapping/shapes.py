"""The figures of a model that decide how long it computes: products, keys and values, layers; from its config."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from workbench.errors import BadInput
from workbench.errors.plain_text import shown
from workbench.mapping.workload import Workload
from workbench.models.dense_config import DenseConfig, read_plan_config
from workbench.placement.generation_memory import kv_elements_per_token
from workbench.placement.role_model import TABLES, RoleModel, head_of
from workbench.settings.engines import Training
from workbench.settings.roles import TRAINED_ROLES

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

# hidden, intermediate, layers, heads, key-value heads, vocabulary: Touvron et al. 2023 (arXiv:2302.13971 and
# 2307.09288); 34b: Roziere et al. 2023 (arXiv:2308.12950), with the vocabulary of the others
_LLAMAS = {
    "llama-7b": (4096, 11008, 32, 32, 32, 32000),
    "llama-13b": (5120, 13824, 40, 40, 40, 32000),
    "llama-34b": (8192, 22016, 48, 64, 8, 32000),
    "llama-70b": (8192, 28672, 80, 64, 8, 32000),
}
SIZES = tuple(_LLAMAS)


def config_of(model: str | Path | PreTrainedConfig | DenseConfig) -> PreTrainedConfig | DenseConfig:
    """The config of a size preset, of a model by name or folder, or the one given. Raises `ModelUnavailable`."""
    if str(model) in _LLAMAS:
        hidden, inner, layers, heads, key_heads, vocabulary = _LLAMAS[str(model)]
        return DenseConfig(hidden_size=hidden, intermediate_size=inner, num_hidden_layers=layers, vocab_size=vocabulary,
                           num_attention_heads=heads, num_key_value_heads=key_heads)  # fmt: skip
    if isinstance(model, str | Path):
        return read_plan_config(model)
    if not hasattr(model, "get_text_config"):
        raise BadInput(f"model {shown(model)}", "a size, a name or a config", f"name one of {', '.join(SIZES)}")
    return model


def role_models(models: Mapping[str, Any], workload: Workload) -> dict[str, RoleModel]:
    """The models that are placed: each role's as a preset, a name, a folder, a config, or a `RoleModel`; a role whose
    model is None is a function and is left out."""
    found = {}
    for role, model in models.items():
        if model is None:
            continue
        training = workload.training
        found[role] = model if isinstance(model, RoleModel) else RoleModel(
            config=config_of(model), head=head_of(role), dtype=workload.dtype, training=training,
            trained=role in TRAINED_ROLES,
        )  # fmt: skip
    if lost := [role for role in workload.roles if role not in found]:
        raise BadInput(
            f"no model for {', '.join(lost)}",
            f"{workload.algorithm} has calls of {', '.join(workload.roles)}",
            f"name one of {', '.join(SIZES)}, a folder or a config for {lost[0]}",
        )
    return found


@dataclass(frozen=True, eq=False)
class Shape:
    """The figures of a role's model that costs are made of."""

    role: RoleModel
    _held: dict[tuple[int, int, int, int], int] = field(default_factory=dict, init=False, repr=False)
    _matrices: dict[int, tuple[Counter[tuple[int, int]], Counter[tuple[int, int]]]] = field(
        default_factory=dict, init=False, repr=False
    )

    @cached_property
    def nbytes(self) -> int:
        return self.role.weights.nbytes

    def held_bytes(self, p: int, t: int, i: int, j: int) -> int:
        """Of the slices of pipeline stage i and tensor rank j."""
        key = p, t, i, j
        if key not in self._held:
            held = self.role.weights.of_stage(i, p)
            self._held[key] = sum(math.prod(weight.local_shape(j, t)) * weight.item_bytes for weight in held)
        return self._held[key]

    @cached_property
    def _text(self) -> Any:
        return self.role.config.get_text_config()

    @cached_property
    def layers(self) -> int:
        return int(self._text.num_hidden_layers)

    @cached_property
    def hidden(self) -> int:
        return int(self._text.hidden_size)

    @cached_property
    def queries(self) -> int:
        heads = int(getattr(self._text, "num_attention_heads", None) or 1)
        return heads * int(getattr(self._text, "head_dim", None) or self.hidden // heads)

    @cached_property
    def inner(self) -> int:
        """Elements of an MLP's hidden state."""
        text = self._text
        return int(getattr(text, "intermediate_size", None) or getattr(text, "n_inner", None) or 4 * self.hidden)

    def matrices(self, t: int) -> tuple[Counter[tuple[int, int]], Counter[tuple[int, int]]]:
        """The matrices that every token is multiplied with, of the layers and of the head, as one of t tensor ranks has
        them: how many there are of each (elements out, elements in). A tied table counts as the head that it is."""
        if t not in self._matrices:
            weights = self.role.weights
            has_head = any(weight.name.startswith("lm_head.") for weight in weights)
            tied = self.role.head == "lm" and not has_head
            layers, head = Counter[tuple[int, int]](), Counter[tuple[int, int]]()
            for weight in weights:
                module = weight.name.split(".")[-2]
                is_head = module == "lm_head" or (tied and module in ("embed_tokens", "wte"))
                if len(weight.shape) == 2 and (is_head or module not in TABLES):
                    rows, columns = weight.local_shape(0, t)
                    (head if is_head else layers)[rows, columns] += 1
            self._matrices[t] = layers, head
        return self._matrices[t]

    @cached_property
    def product_elements(self) -> int:
        """Elements of the matrices that every token is multiplied with."""
        return sum(n * k * count for matrices in self.matrices(1) for (n, k), count in matrices.items())

    @cached_property
    def elements(self) -> int:
        return sum(weight.numel for weight in self.role.weights)

    @cached_property
    def trained_elements(self) -> int:
        return sum(weight.numel for weight in self.role.trained_weights)

    @cached_property
    def kv_bytes_per_token(self) -> int:
        """Keys and values of one token, all layers, in the dtype of generation."""
        return kv_elements_per_token(self.role) * self.role.frozen_bytes

    @cached_property
    def keys(self) -> int:
        """Elements of a layer's keys."""
        heads = int(getattr(self._text, "num_attention_heads", None) or 1)
        return self.queries // heads * self.key_heads

    @cached_property
    def key_heads(self) -> int:
        heads = getattr(self._text, "num_attention_heads", None) or 1
        return int(getattr(self._text, "num_key_value_heads", None) or heads)

    def forward_flop(self, tokens: float, context: float) -> float:
        """Operations of a forward pass: 2 a weight and token, and for attention 4 a query element and token of the
        context that a token sees, half the row in the mean: 2 P T + 4 L q T c (Korthikanti et al. 2022,
        arXiv:2205.05198, appendix A, without its dense mask)."""
        return 2.0 * self.product_elements * tokens + 4.0 * self.layers * self.queries * tokens * context

    @property
    def training(self) -> Training:
        return self.role.training
