"""What each rank of a two-process world does with vLLM: a tensor group of two, and after it two engines of one rank."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.engines.generation_cases import PROMPTS, SEEDS
from workbench.engines.generation.vllm_engine import VllmEngine
from workbench.models import resolve
from workbench.models.loading import load_causal_lm
from workbench.settings.engines import Generation, Sampling

GREEDY = Sampling(temperature=0, max_new_tokens=8)


def run(rank: int, store: Path, answers: Any) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    # Not on the main thread: as in a concurrency group of a Ray actor.
    seen: list[Any] = []
    thread = threading.Thread(target=lambda: seen.append(_two_sizes()))
    thread.start()
    thread.join()
    answers.put((rank, seen[0]))  # IndexError, and with it a failed process, where the thread raised
    dist.destroy_process_group()


@torch.no_grad()
def _two_sizes() -> list[Any]:
    name, seen = "tiny-llama-tied", []
    model = load_causal_lm(name)
    generator = torch.Generator().manual_seed(5)
    for parameter in model.parameters():
        parameter.add_(0.05 * torch.randn(parameter.shape, generator=generator))
    for size in (2, 1):
        engine = VllmEngine(
            resolve(name),
            Generation(max_model_tokens=64, kv_cache_gib=0.05, tensor_parallel_size=size),
            dtype=torch.float32,
            device=torch.device("cpu"),
        )
        engine.update_weights(model.named_parameters(), 1)
        sampled = engine.generate(PROMPTS, Sampling(max_new_tokens=8), SEEDS)
        seen.append(
            (engine.generate(PROMPTS, GREEDY, SEEDS).response_ids, sampled.response_ids, engine.log_probs(PROMPTS[2]))
        )
        engine.close()
        total = torch.ones(1)
        dist.all_reduce(total)
        assert total.item() == 2
    return [(greedy, sampled, log_probs.tolist()) for greedy, sampled, log_probs in seen]
