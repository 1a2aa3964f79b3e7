"""On a CUDA device: the default settings run on, and a sync is near a plain copy of as many bytes."""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import workbench as wb
from tests.cases import vowels
from workbench.engines.generation.vllm_engine import VllmEngine
from workbench.models import load_tokenizer
from workbench.settings.engines import Generation

if importlib.util.find_spec("vllm") is None or not torch.cuda.is_available():
    pytest.skip("needs vllm and a CUDA device", allow_module_level=True)
pytestmark = [pytest.mark.gpu, pytest.mark.slow]


@pytest.mark.parametrize("dtype", [None, "float32"])
def test_the_default_settings_go_on_after_an_update(dtype: str | None, tmp_path: Path) -> None:
    models = {"actor": "smollm2-135m", "reward": vowels}
    with wb.open("default", models=models, prompts="arithmetic", dtype=dtype, runs=tmp_path) as lab:
        assert lab.actor.spec.dtype == (dtype or "bfloat16")
        history = wb.GRPO(lab, prompts=4, samples=4, reward=vowels).run(3)
        assert len(history) == 3
        syncs = lab.syncs()
        assert set(syncs["verdict"]) == {"ok"}
        assert (syncs["event"] == "sync").sum() == 2
        gaps = history["generate_sequences/sync_gap/mean"].dropna()
        assert len(gaps) == 2
        assert gaps.max() < (1e-3 if dtype == "float32" else 0.1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """1.4 billion random parameters."""
    from transformers import AutoConfig, AutoModelForCausalLM

    path = tmp_path_factory.mktemp("model")
    config = AutoConfig.for_model(
        "qwen2", vocab_size=49152, hidden_size=1536, intermediate_size=8960, num_hidden_layers=28,
        num_attention_heads=12, num_key_value_heads=2, tie_word_embeddings=True,
    )  # fmt: skip
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.to_empty(device="cuda")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.02)
    model.tie_weights()
    model.save_pretrained(path)
    load_tokenizer("smollm2-135m").save_pretrained(path)
    return path


def fastest_s(act: Callable[[], Any]) -> float:
    taken = []
    for _ in range(5):
        torch.cuda.synchronize()
        start = time.perf_counter()
        act()
        torch.cuda.synchronize()
        taken.append(time.perf_counter() - start)
    return min(taken)


@pytest.mark.parametrize("trained", [torch.bfloat16, torch.float32], ids=["bf16-weights", "fp32-masters"])
def test_a_sync_is_near_a_copy(trained: torch.dtype, folder: Path) -> None:
    from transformers import AutoModelForCausalLM

    device = torch.device("cuda:0")
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=trained)
    model.to(device)
    settings = Generation(max_model_tokens=256, gpu_memory_fraction=0.2)
    engine = VllmEngine(folder, settings, dtype=torch.bfloat16, device=device)
    try:
        nbytes = engine.update_weights(model.named_parameters(), 1)
        assert nbytes == 2 * sum(p.numel() for p in model.parameters())
        sync_s = fastest_s(lambda: engine.update_weights(model.named_parameters(), 2))
        source = torch.ones(nbytes, dtype=torch.uint8, device=device)
        target = torch.empty_like(source)
        copy_s = fastest_s(lambda: target.copy_(source))
        assert copy_s / sync_s > 0.1
        held = engine.readable_weights()
        for name, weight in model.named_parameters():
            assert torch.equal(held[name][: len(weight)], weight.to(torch.bfloat16)), name
    finally:
        engine.close()
