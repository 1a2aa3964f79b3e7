"""On a GPU: automatic sizes, the estimate against the allocator, roles that take turns, a device that is capped."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import workbench as wb
from benchmarks.memory import ALLOWED, Case, against_estimate, measured
from workbench.support.machine import gpu_bytes, own_gpu_bytes, read_gpus

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)
pytestmark = [pytest.mark.gpu, pytest.mark.slow]

GIB = 2**30
SMALL = "smollm2-135m"


def length(prompt: str, response: str, **row: Any) -> float:
    """A reward that differs between any two responses of a group."""
    return len(response) % 97 / 97


def open_lab(name: str, runs: Path, models: dict[str, Any], **options: Any) -> wb.Workbench:
    return wb.open(
        name, models=models, prompts="arithmetic", backend="inline", device="cuda", runs=runs, dtype="bfloat16",
        generation=options.pop("generation", wb.Generation(max_model_tokens=512)), **options,
    )  # fmt: skip


@pytest.fixture
def capped() -> Iterator[None]:
    """This process may take 16 GB of its GPU."""
    torch.cuda.init()
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(16e9 / total)
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


@pytest.mark.usefixtures("capped")
def test_a_device_of_16_gb_runs_an_iteration_with_automatic_sizes(tmp_path: Path) -> None:
    assert own_gpu_bytes() == pytest.approx(16e9, rel=1e-3)
    has = gpu_bytes(read_gpus())
    assert not has or has == pytest.approx(16e9, rel=0.03)
    with open_lab("capped", tmp_path, {"actor": SMALL, "reference": SMALL, "reward": length}) as lab:
        wb.GRPO(lab, prompts=8, samples=8, sampling=wb.Sampling(max_new_tokens=256)).iterate()
        row: Any = lab.topology().set_index("role").loc["actor"]
        assert row["micro_batch_tokens"] >= 4096
        assert row["generation_kv_cache_bytes"] > 1e9
        assert torch.cuda.max_memory_allocated() < 16e9


def test_a_step_that_runs_out_of_memory_goes_on_with_smaller_micro_batches(tmp_path: Path) -> None:
    with open_lab("halved", tmp_path, {"actor": SMALL, "reward": length}) as lab:
        algorithm = wb.GRPO(lab, prompts=8, samples=8, sampling=wb.Sampling(max_new_tokens=256))
        algorithm.iterate()
        backend: Any = lab.hosts.backend
        budget = backend.host(lab.hosts.infos[0].name).workers["actor"].budget
        before, total = budget.tokens, torch.cuda.get_device_properties(0).total_memory
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + 1.5 * GIB) / total)
        try:
            algorithm.iterate()
        finally:
            torch.cuda.set_per_process_memory_fraction(1.0)
        assert 512 <= budget.tokens < before


def test_four_models_take_turns(tmp_path: Path) -> None:
    """Spans show what moves; the estimate is what is held."""
    models = dict.fromkeys(("actor", "critic", "reference", "reward"), SMALL)
    with open_lab("turns", tmp_path, models, share_memory=True) as lab:
        algorithm = wb.PPO(lab, prompts=8, sampling=wb.Sampling(max_new_tokens=128))
        for _ in range(3):
            algorithm.iterate()
        spans = lab.spans()
        assert set(lab.syncs()["verdict"]) == {"ok"}
        moved = spans[spans["kind"].isin(["offload", "load"]) & (spans["moved_bytes"] > 100e6)].tail(20)
        rates = moved["moved_bytes"] / (moved["end_s"] - moved["start_s"])
        assert rates.median() > 5e9, moved[["kind", "role", "note", "moved_bytes"]]
        table = against_estimate(lab)
        assert (table["lasting_ratio"] - 1).abs().max() < ALLOWED, table.to_string()


@pytest.mark.parametrize("engine", ["torch", "zero1"])
def test_the_estimate_of_a_pass_is_what_the_allocator_says(engine: str) -> None:
    case = Case(role="actor", engine=engine, dtype="bfloat16", size="135m", tokens=8192, device="cuda")
    row = measured(case)
    assert row.within, row
