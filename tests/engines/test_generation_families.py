"""Families that vLLM computes differently from most: with another state than keys and values, with transformers'
class, or with a configuration of its own."""

from __future__ import annotations

import gc
import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.engines.generation_cases import scored
from tests.expected import expect_error
from workbench.engines.generation.vllm_engine import VllmEngine
from workbench.errors import BadInput
from workbench.models import load_tokenizer
from workbench.models.loading import load_causal_lm, load_config
from workbench.settings.engines import Generation, Sampling

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vllm is not installed"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="compares fp32 engines on the CPU"),
]
SETTINGS = Generation(max_model_tokens=64, kv_cache_gib=0.02)
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def default_group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    gc.freeze()  # vLLM collects garbage eight times
    yield
    gc.unfreeze()
    dist.destroy_process_group()


def saved(folder: Path, family: str, **more: Any) -> Path:
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(
        family, vocab_size=264, hidden_size=128, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, initializer_range=0.1, pad_token_id=0, bos_token_id=1, eos_token_id=2, **more,
    )  # fmt: skip
    with torch.random.fork_rng():
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    load_tokenizer("tiny-llama").save_pretrained(folder)
    return folder


MAMBA = {"mamba_d_ssm": 256, "mamba_n_heads": 8, "mamba_d_head": 32, "mamba_d_state": 16, "head_dim": 32}
LFM2 = {"layer_types": ["conv", "full_attention"], "block_auto_adjust_ff_dim": False, "conv_dim": 128, "block_dim": 128}
NEMOTRON = {
    "layers_block_type": ["linear_attention", "full_attention"], "ssm_state_size": 16, "mamba_num_heads": 8,
    "mamba_head_dim": 32, "n_groups": 2, "head_dim": 32, "chunk_size": 16, "time_step_min": 0.5,
}  # fmt: skip
FAMILIES = {"falcon_h1": MAMBA, "starcoder2": {"sliding_window": 8}, "lfm2": LFM2, "nemotron_h": NEMOTRON, "gpt2": {}}


@pytest.mark.parametrize(("family", "more"), FAMILIES.items())
@torch.no_grad()
def test_the_trainer_agrees_and_its_class_stays(family: str, more: dict[str, Any], tmp_path: Path) -> None:
    folder = saved(tmp_path / family, family, **more)
    engine = VllmEngine(folder, SETTINGS, dtype=torch.float32, device=CPU, threads=1)
    try:
        assert engine._sleep_level == 2
        model = load_causal_lm(folder)  # made after vLLM has started, from transformers' class
        for parameter in model.parameters():
            parameter.add_(0.02 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)))
        engine.update_weights(model.named_parameters(), 1)
        prompts = [[1, *range(40, 40 + n)] for n in (3, 20)]
        rollout = engine.generate(prompts, Sampling(max_new_tokens=12), [5, 6])
        for prompt, response, log_probs in zip(prompts, rollout.response_ids, rollout.log_probs, strict=True):
            expected = scored(model, prompt + response)[len(prompt) - 1 :]
            torch.testing.assert_close(torch.tensor(log_probs), expected, rtol=0, atol=1e-4)
    finally:
        engine.close()


def test_slopes_of_attention_survive_a_sleep(tmp_path: Path) -> None:
    """vLLM's deep sleep saves buffers alone, and a sync brings weights alone."""
    engine = VllmEngine(saved(tmp_path / "bloom", "bloom"), SETTINGS, dtype=torch.float32, device=CPU, threads=1)
    try:
        (attention,) = engine._engine.apply_model(lambda model: model.transformer.h[0].self_attention.attn)
        (buffers,) = engine._engine.apply_model(lambda model: {buffer.data_ptr() for buffer in model.buffers()})
        assert attention.impl.alibi_slopes.data_ptr() not in buffers
        assert engine._sleep_level == 1
    finally:
        engine.close()


def test_a_family_that_vllm_cannot_compute_here(tmp_path: Path) -> None:
    """vLLM has a configuration of its own for Kimi Linear, and needs a package for it that is not there. Before, it
    imports Numba, in whose library its search for kernels must not end."""
    folder = saved(
        tmp_path / "kimi", "kimi_linear", num_experts=4, num_experts_per_token=2, moe_intermediate_size=32,
        kv_lora_rank=32, qk_rope_head_dim=16, qk_nope_head_dim=16, v_head_dim=32, linear_head_dim=32,
        linear_num_heads=4, layer_types=["linear_attention", "full_attention"], mlp_layer_types=["dense", "sparse"],
    )  # fmt: skip
    before = type(load_config(folder))
    with expect_error(BadInput, value="vLLM rejects 'kimi'", rule="ModuleNotFoundError"):
        VllmEngine(folder, SETTINGS, dtype=torch.float32, device=CPU)
    assert type(load_config(folder)) is before
