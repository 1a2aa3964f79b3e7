"""Mixtures of experts: transformers holds a layer's experts in one tensor, files hold each one alone."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

from tests.engines.generation_cases import scored
from tests.expected import expect_error
from workbench.engines.generation.vllm_engine import VllmEngine
from workbench.errors import BadInput
from workbench.models import load_tokenizer
from workbench.models.file_weights import FileWeights
from workbench.models.loading import load_causal_lm, load_config, write_model
from workbench.models.lora import LoRA, adapter_names, add_lora
from workbench.settings.engines import Generation

SMALL = {
    "vocab_size": 264, "hidden_size": 64, "intermediate_size": 64, "moe_intermediate_size": 32, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32, "num_experts_per_tok": 2, "pad_token_id": 0,
    "eos_token_id": 2, "max_position_embeddings": 64, "num_local_experts": 4, "n_routed_experts": 4,
    "first_k_dense_replace": 1, "initializer_range": 0.1,
}  # fmt: skip


MORE = ("glm4_moe", "mixtral", "olmoe")


def small(folder: Path, family: str) -> Path:
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **SMALL))
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):  # a router's, which no loss trains
                buffer.normal_()
    model.save_pretrained(folder)
    load_tokenizer("tiny-llama").save_pretrained(folder)
    return folder


@pytest.mark.parametrize("family", ["glm4_moe", "mixtral", "minimax_m2"])
def test_weights_are_those_of_the_files(tmp_path: Path, family: str) -> None:
    """With what is no parameter: a router's bias."""
    folder = small(tmp_path, family)
    weights, model = FileWeights(load_config(folder)), load_causal_lm(folder)
    weights.add_constants(folder)
    found = {key: w for name, weight in model.named_parameters() for key, w in weights.of({name: weight}).items()}
    torch.testing.assert_close(found, load_file(folder / "model.safetensors"), rtol=0, atol=0)


@torch.no_grad()
def test_a_model_that_takes_images_keeps_its_other_parts(tmp_path: Path) -> None:
    """Only its part for texts is trained here, under other names than those of the files."""
    from transformers import AutoConfig, AutoModelForImageTextToText

    kinds = {"layer_types": ["full_attention"], "num_hidden_layers": 1}
    images = {"depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": 64}
    config = AutoConfig.for_model("qwen3_5", text_config=SMALL | kinds, vision_config=images)
    AutoModelForImageTextToText.from_config(config).save_pretrained(tmp_path / "before")
    model = load_causal_lm(tmp_path / "before")
    for weight in model.parameters():
        weight.add_(1)
    write_model(tmp_path / "after", dict(model.named_parameters()), tmp_path / "before", scalar_head=False)
    before, after = (load_file(tmp_path / when / "model.safetensors") for when in ("before", "after"))
    assert {name.split(".")[1] for name in before} == {"visual", "language_model", "weight"}
    expected = {name: weight + ("visual" not in name) for name, weight in before.items()}
    torch.testing.assert_close(after, expected, rtol=0, atol=0)


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vllm is not installed")
@pytest.mark.skipif(torch.cuda.is_available(), reason="compares fp32 engines on the CPU")
@pytest.mark.parametrize(
    "family", ["qwen3_moe", "apertus", *(pytest.param(f, marks=pytest.mark.thorough) for f in MORE)]
)
@torch.no_grad()
def test_new_weights_arrive_in_vllm(tmp_path: Path, family: str) -> None:
    """All weights, and then those of the last layer alone. Apertus is dense, with constants in its activation."""
    folder, row = small(tmp_path, family), list(range(20, 60))
    model, atol = load_causal_lm(folder), 1e-2 if family == "apertus" else 1e-4  # vLLM keeps its constants in bfloat16
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        settings = Generation(max_model_tokens=64, kv_cache_gib=0.1)
        engine = VllmEngine(folder, settings, dtype=torch.float32, device=torch.device("cpu"), threads=1)
        for version, part in enumerate(("", "model.layers.1."), start=1):
            changed = {name: weight for name, weight in model.named_parameters() if name.startswith(part)}
            for weight in changed.values():
                weight.add_(0.05 * torch.randn_like(weight))
            assert (engine.log_probs(row) - scored(model, row)).abs().max() > 0.05
            engine.update_weights(changed.items(), version, partial=bool(part))
            torch.testing.assert_close(engine.log_probs(row), scored(model, row), rtol=0, atol=atol)
        engine.close()
    finally:
        dist.destroy_process_group()


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vllm is not installed")
@pytest.mark.skipif(torch.cuda.is_available(), reason="compares fp32 engines on the CPU")
@pytest.mark.parametrize("family", ["qwen2_moe", "glm4"])
@torch.no_grad()
def test_an_adapter_arrives_in_vllm(tmp_path: Path, family: str) -> None:
    """Beside experts, and a shared one. vLLM expects other layers in GLM-4 than its files have."""
    folder, row = small(tmp_path, family), list(range(20, 60))
    lora = LoRA(rank=2, alpha=2)
    trained = torch.nn.Module()
    trained.model = model = load_causal_lm(folder)
    add_lora(model, lora, seed=0)
    weights = dict(trained.named_parameters())
    for name in (named := adapter_names(trained)):
        weights[name].normal_(std=0.2)
    adapter = [(name, weights[own]) for own, name in named.items()]
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    settings, cpu = Generation(max_model_tokens=64, kv_cache_gib=0.1), torch.device("cpu")
    engine = VllmEngine(folder, settings, dtype=torch.float32, device=cpu, threads=1, lora=lora)
    try:
        if family == "glm4":
            with expect_error(BadInput, value="gate_up_proj", remedy="'down_proj', 'k_proj'"):
                engine.update_weights(adapter, 1)
            return
        engine.update_weights(adapter, 1)
        assert (engine.log_probs(row) - scored(load_causal_lm(folder), row)).abs().max() > 0.05
        torch.testing.assert_close(engine.log_probs(row), scored(model, row), rtol=0, atol=1e-4)
    finally:
        engine.close()
        dist.destroy_process_group()
