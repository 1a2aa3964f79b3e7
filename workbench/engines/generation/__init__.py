"""Generation engines behind one interface. To add one: a `GenerationEngine`, a line here, its name in settings."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from workbench.engines.generation.base import Decoding, Ending, GenerationEngine, Response, Rollout
from workbench.models.lora import LoRA, add_lora
from workbench.settings.engines import Generation

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

__all__ = ["Decoding", "Ending", "GenerationEngine", "Response", "Rollout", "make_generation_engine"]


def make_generation_engine(
    name: str | Path,
    settings: Generation,
    *,
    tokenizer: PreTrainedTokenizerBase,
    trainer: PreTrainedModel | None,
    dtype: torch.dtype,
    device: torch.device,
    threads: int,
    sleeps: bool = False,
    cache_bytes: int | None = None,
    lora: LoRA | None = None,
    float32_head: bool = False,
) -> GenerationEngine:
    """Make the engine that `settings.engine` names, for the model `name`.

    trainer: the module being trained, if it holds whole weights: transformers then samples from it directly, and a sync
    moves nothing. None if the trainer's weights are sharded.
    sleeps: whether `sleep` will be called. cache_bytes: of vLLM's key-value cache on a GPU. lora: the trainer's adapter
    settings; an engine with weights of its own holds the adapter beside the model. float32_head: whether the trainer
    computes logits in fp32, for a copy that transformers runs.
    """
    if settings.engine == "vllm":
        from workbench.engines.generation.vllm_engine import VllmEngine
        from workbench.models import resolve

        return VllmEngine(
            resolve(name),
            settings,
            dtype=dtype,
            device=device,
            threads=threads,
            sleeps=sleeps,
            cache_bytes=cache_bytes,
            lora=lora,
        )
    from workbench.engines.generation.transformers_engine import TransformersEngine

    if trainer is not None:
        stored = {parameter.dtype for parameter in trainer.parameters()}  # an adapter and its model: two dtypes
        autocast = dtype if dtype != torch.float32 and stored != {dtype} else None
        return TransformersEngine(trainer, tokenizer, settings, owns_model=False, autocast_dtype=autocast)
    from workbench.models.loading import load_causal_lm
    from workbench.models.logits import compute_in_float32

    model = load_causal_lm(name, dtype=dtype, device=device, longest=settings.max_model_tokens)
    if float32_head:
        compute_in_float32(model)
    if lora is not None:
        add_lora(model, replace(lora, alpha=lora.rank), 0)  # B arrives scaled
        model.eval()
    return TransformersEngine(model, tokenizer, settings, owns_model=True, takes_adapter=lora is not None)
