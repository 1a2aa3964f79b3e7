"""Models of benchmarks that no package brings: random weights of a published shape, made once a machine."""

from __future__ import annotations

from pathlib import Path

import torch

from workbench.models import load_tokenizer, resolve
from workbench.models.resolve import made_once, save_here, silence_libraries

QWEN2_1B4 = "qwen2-1.4b"
"""1.39 billion parameters: the layers of Qwen2-1.5B with SmolLM2's vocabulary and tokenizer; bfloat16, random."""


def folder(name: str) -> Path:
    """The folder of a model: QWEN2_1B4, or any name that `wb.open` takes."""
    return made_once(f"{QWEN2_1B4}-1", _write) if name == QWEN2_1B4 else resolve(name)


def _write(path: Path) -> None:
    from transformers import Qwen2Config, Qwen2ForCausalLM

    tokenizer = load_tokenizer("smollm2-135m")
    config = Qwen2Config(
        hidden_size=1536,
        num_hidden_layers=28,
        num_attention_heads=12,
        num_key_value_heads=2,
        intermediate_size=8960,
        vocab_size=49152,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        dtype="bfloat16",
    )
    with silence_libraries(), torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        torch.manual_seed(0)
        model = Qwen2ForCausalLM._from_config(config, dtype=torch.bfloat16)
    save_here(model, path)
    tokenizer.save_pretrained(path)
