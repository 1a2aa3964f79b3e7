"""The config of a dense decoder for plans: weight shapes, without transformers, whose import takes seconds."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field

from workbench.errors import BadInput, ModelUnavailable
from workbench.models.resolve import config_file
from workbench.support.files import read_json
from workbench.support.validation import PositiveInt, settings

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
# entries of a config that show that the fields below do not describe the model completely
UNSUPPORTED_KEYS = {"text_config", "quantization_config", "auto_map"}


@settings()
class DenseConfig:
    """The fields of a Llama, Qwen2 or Qwen3 config that decide its weights, under transformers' names. head_dim: None
    means hidden size / heads."""

    hidden_size: PositiveInt
    intermediate_size: PositiveInt
    num_hidden_layers: Annotated[PositiveInt, Field(le=1000)]
    num_attention_heads: PositiveInt
    num_key_value_heads: PositiveInt
    vocab_size: PositiveInt
    head_dim: PositiveInt | None = None
    model_type: Literal["llama", "qwen2", "qwen3"] = "llama"
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False
    dtype: str | None = None

    def get_text_config(self) -> DenseConfig:
        return self

    def to_json_string(self) -> str:
        return repr(self)

    def shapes(self, *, lm_head: bool) -> dict[str, tuple[int, ...]]:
        """Return each weight's shape, by transformers' names and in its order; a tied output head has no weight."""
        hidden, inner = self.hidden_size, self.intermediate_size
        head = self.head_dim or hidden // self.num_attention_heads
        queries, keys = self.num_attention_heads * head, self.num_key_value_heads * head
        qwen2, qwen3 = self.model_type == "qwen2", self.model_type == "qwen3"
        bias, mlp_bias = self.attention_bias and not qwen2, self.mlp_bias and not (qwen2 or qwen3)
        found: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (self.vocab_size, hidden)}
        for layer in (f"model.layers.{i}" for i in range(self.num_hidden_layers)):
            for name, shape, biased in (
                ("self_attn.q_proj", (queries, hidden), bias or qwen2),
                ("self_attn.k_proj", (keys, hidden), bias or qwen2),
                ("self_attn.v_proj", (keys, hidden), bias or qwen2),
                ("self_attn.o_proj", (hidden, queries), bias),
                ("self_attn.q_norm", (head,) if qwen3 else (), False),
                ("self_attn.k_norm", (head,) if qwen3 else (), False),
                ("mlp.gate_proj", (inner, hidden), mlp_bias),
                ("mlp.up_proj", (inner, hidden), mlp_bias),
                ("mlp.down_proj", (hidden, inner), mlp_bias),
                ("input_layernorm", (hidden,), False),
                ("post_attention_layernorm", (hidden,), False),
            ):
                found |= {f"{layer}.{name}.weight": shape} if shape else {}
                found |= {f"{layer}.{name}.bias": shape[:1]} if biased else {}
        found["model.norm.weight"] = (hidden,)
        if lm_head and not self.tie_word_embeddings:
            found["lm_head.weight"] = (self.vocab_size, hidden)
        return found


def read_plan_config(name: str | Path) -> DenseConfig | PreTrainedConfig:
    """Return the config of a size preset or a model. `loading.read_config` reads models that are no plain dense
    decoder, and reports wrong configs. Raises `ModelUnavailable`."""
    if str(name) in _LLAMAS:
        hidden, inner, layers, heads, key_heads, vocabulary = _LLAMAS[str(name)]
        return DenseConfig(hidden_size=hidden, intermediate_size=inner, num_hidden_layers=layers, vocab_size=vocabulary,
                           num_attention_heads=heads, num_key_value_heads=key_heads)  # fmt: skip
    try:
        file = config_file(name)
    except ModelUnavailable as error:
        raise ModelUnavailable(error.value, error.rule, f"{error.remedy}, or a size: {', '.join(SIZES)}") from error
    with suppress(OSError, BadInput):
        if dense := _dense(read_json(file)):
            return dense
    from workbench.models.loading import read_config

    return read_config(file)


def _dense(values: Any) -> DenseConfig | None:
    """Return a `DenseConfig`; None for other families, and if transformers has its own default for a missing field."""
    if not isinstance(values, dict) or values.keys() & UNSUPPORTED_KEYS or "model_type" not in values:
        return None
    if values["model_type"] == "qwen3" and not values.get("head_dim"):
        return None
    names = [field.name for field in fields(DenseConfig)]
    given = {name: values[name] for name in names if values.get(name) is not None}
    found = DenseConfig(**{"dtype": values.get("torch_dtype"), **given})
    return None if found.hidden_size % found.num_attention_heads else found
