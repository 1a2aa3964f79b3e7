"""vLLM frees a GPU while something else computes there, and samples from the weights that it is given afterwards."""

from __future__ import annotations

import importlib.util

import pytest
import torch

from tests.engines import generation_cases as cases
from workbench.engines.generation.vllm_engine import VllmEngine
from workbench.errors import BadInput
from workbench.models import load_causal_lm, resolve
from workbench.settings.engines import Generation, Sampling

if importlib.util.find_spec("vllm") is None or not torch.cuda.is_available():
    pytest.skip("needs vllm and a CUDA device", allow_module_level=True)
pytestmark = [pytest.mark.slow, pytest.mark.gpu]


@pytest.mark.parametrize("name", ["tiny-llama", "tiny-llama-tied"])
def test_sleep_frees_the_device_until_the_next_sync(name: str) -> None:
    device, model = torch.device("cuda"), load_causal_lm(name)
    settings = Generation(max_model_tokens=cases.MAX_MODEL_TOKENS, gpu_memory_fraction=0.2)
    engine = VllmEngine(resolve(name), settings, dtype=torch.float32, device=device, sleeps=True)
    try:
        greedy = Sampling(max_new_tokens=8, temperature=0)
        expected, held = engine.generate(cases.PROMPTS, greedy, cases.SEEDS), engine.memory_bytes()
        for version in (1, 2):
            free = torch.cuda.mem_get_info()[0]
            assert engine.sleep() == sum(held.values())
            assert engine.sleep() == 0
            assert torch.cuda.mem_get_info()[0] - free > 0.9 * sum(held.values())
            assert (engine.memory_bytes(), engine.weights_version) == ({"weights": 0, "kv_cache": 0}, -1)
            with pytest.raises(BadInput, match="sleeps"):
                engine.generate(cases.PROMPTS, greedy, cases.SEEDS)
            engine.update_weights(model.named_parameters(), version)
            assert engine.memory_bytes() == {"weights": held["weights"], "kv_cache": 0}  # room for the trainer's still
            assert engine.generate(cases.PROMPTS, greedy, cases.SEEDS).response_ids == expected.response_ids
            assert engine.memory_bytes() == held
    finally:
        engine.close()
