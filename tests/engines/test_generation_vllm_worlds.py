"""vLLM over several processes. Two worlds run side by side, as two pools of one machine do."""

from __future__ import annotations

import importlib.util
import shutil
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.multiprocessing

from tests.engines import generation_cases as cases
from tests.engines.generation_ranks import run
from workbench.models.loading import load_causal_lm

if importlib.util.find_spec("vllm") is None:
    pytest.skip("vllm is not installed", allow_module_level=True)
if torch.cuda.is_available():
    pytest.skip("compares fp32 engines on the CPU", allow_module_level=True)
pytestmark = pytest.mark.slow


@pytest.mark.thorough
def test_tensor_groups_of_two_worlds_at_once_then_single_ranks(tmp_path, monkeypatch):
    temporary = tempfile.mkdtemp(prefix="wbt", dir="/tmp")  # sockets in it have short paths
    monkeypatch.setenv("TMPDIR", temporary)
    context = torch.multiprocessing.get_context("spawn")
    answers = context.SimpleQueue()
    processes = [
        context.Process(target=run, args=(rank, tmp_path / f"store-{world}", answers), daemon=True)
        for world in range(2)
        for rank in range(2)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join(timeout=1200)
    assert [process.exitcode for process in processes] == [0] * 4
    assert not [path for path in Path(temporary).iterdir() if path.is_socket() or path.name.startswith("wb-")]
    shutil.rmtree(temporary)
    seen = [answers.get() for _ in processes]

    model: Any = load_causal_lm("tiny-llama-tied")
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=generator))
    expected = cases.scored(model, cases.PROMPTS[2])
    greedy = []
    for prompt in cases.PROMPTS:
        ids = torch.tensor([prompt])
        plain = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=8)
        greedy.append(plain[0, len(prompt) :].tolist())
    _, ((_, sampled, _), _) = seen[0]
    for _, sizes in seen:
        for greedy_here, sampled_here, log_probs in sizes:
            assert greedy_here == greedy
            assert sampled_here == sampled
            torch.testing.assert_close(torch.tensor(log_probs), expected, atol=1e-4, rtol=0)
