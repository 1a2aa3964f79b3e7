"""What the tests of the memory estimate measure inside ranks of their own: bytes of live engines, at three moments."""

from __future__ import annotations

from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from tests.engines.layout_ranks import groups_of
from tests.engines.training_ranks import CPU, negative_log_likelihood, sequences, settings, squared_values
from workbench.engines.training import make_training_engine
from workbench.models.heads import TokenLogProbs, TokenValues
from workbench.models.lora import LoRA, add_lora
from workbench.placement import Layout

# The embedding is above DeepSpeed's threshold of 100,000 elements, under which ZeRO-3 keeps weights whole, the rest
# below it; no count of elements is a multiple of the ranks.
CONFIG: dict[str, Any] = {
    "vocab_size": 1601, "hidden_size": 64, "intermediate_size": 176, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "use_cache": False, "attention_bias": True,
}  # fmt: skip
ADAPTER = LoRA(rank=3)
Moments = dict[str, dict[str, int]]


def config_of(*, tied: bool = True) -> LlamaConfig:
    return LlamaConfig(**CONFIG, tie_word_embeddings=tied)


def measured(kind: str, dtype: torch.dtype, layout: Layout, head: str = "lm", adapter: bool = False) -> Moments:
    """Bytes on this rank: when the engine is made, while it holds the gradients of an update, after two updates.

    kind: "torch", "zero0" to "zero3", or "frozen".
    """
    model = LlamaForCausalLM(config_of(tied=head == "lm")).eval()
    torch.manual_seed(0)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    if adapter:
        add_lora(model, ADAPTER, 0)
    module: Any = TokenLogProbs(model, micro_batch_tokens=512) if head == "lm" else TokenValues(model.model, 64)
    given = None if kind == "frozen" else settings(kind)
    groups = groups_of(layout)
    engine = make_training_engine(module, given, groups, device=CPU, dtype=dtype)
    found = {"made": engine.memory_bytes()}
    if given is None:
        return found
    loss = negative_log_likelihood if head == "lm" else squared_values
    passes = [loss(sequences(0)[n : n + 2]) for n in (0, 2)]
    for _ in engine.gradients(passes):
        found["update"] = engine.memory_bytes()
    for _ in range(2):
        engine.step(passes)
    return found | {"after": engine.memory_bytes()}


def all_measured(cases: list[tuple[Any, ...]]) -> list[Moments]:
    return [measured(*case) for case in cases]
