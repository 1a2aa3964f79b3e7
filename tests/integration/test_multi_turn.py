"""Conversations on several ranks: data parallel, and in a tensor group of vLLM, whose ranks must ask the same of it."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch

import workbench as wb
from tests.calculator import Calculator, answer, segments, sums
from tests.cases import TINY, tiny_lab
from workbench.batches.columns import Ragged
from workbench.errors import StageError

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(torch.cuda.is_available(), reason="compares fp32 engines on the CPU"),
]


class Strict(Calculator):
    """Breaks off at its second turn."""

    def reset(self, prompt: str, sample_seed: int, **row: Any) -> str:
        self.turns = 0
        return super().reset(prompt, sample_seed, **row)

    def step(self, response: str) -> tuple[str, float, bool]:
        self.turns += 1
        if self.turns == 2:
            raise ZeroDivisionError("by nought")
        observation, reward, _ = super().step(response)
        return observation, reward, False


def conversations(lab: wb.Workbench) -> list[Any]:
    """Tokens, who wrote them, rewards, turns and endings of 3 prompts, which two ranks cannot share equally."""
    batch = lab.actor.generate_sequences(lab.prompts.next(3), samples=3, seed=5, **sums())
    names = ("response_ids", "response_mask", "environment_rewards", "turns", "ending")
    table = batch.fetch(names)
    assert max(map(len, segments(batch))) > 3
    for parts in segments(batch):
        for (_, said), (_, heard) in zip(parts[1::2], parts[2::2], strict=False):
            assert lab.decode(heard) == answer(lab.decode(said))[0]
    return [
        [row.tolist() for row in column.rows()] if isinstance(column, Ragged) else list(column)
        for column in (table[name] for name in names)
    ]


def test_two_ranks_converse_as_one_does(tmp_path: Path) -> None:
    models: dict[str, Any] = {"actor": TINY}
    with tiny_lab("inline", tmp_path, backend="inline", models=models) as lab:
        expected = conversations(lab)
    with tiny_lab("two", tmp_path, placement=wb.Placement.colocate(2), devices=2, models=models) as lab:
        assert conversations(lab) == expected


@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vllm is not installed")
@pytest.mark.thorough
def test_a_tensor_group_converses_as_one_rank_does(tmp_path: Path) -> None:
    def open_lab(size: int) -> wb.Workbench:
        return wb.open(
            f"group{size}",
            models={"actor": TINY},
            prompts="arithmetic",
            placement=wb.Placement.colocate(size),
            devices=size,
            training=wb.Training(engine="torch"),
            generation=wb.Generation(tensor_parallel_size=size, max_model_tokens=160, kv_cache_gib=0.05),
            runs=tmp_path,
        )

    with open_lab(1) as lab:
        expected = conversations(lab)
    with open_lab(2) as lab:
        assert conversations(lab) == expected
        with pytest.raises(StageError, match=r"environment Strict raised ZeroDivisionError: by nought for row"):
            lab.actor.generate_sequences(lab.prompts.next(2), seed=5, **sums(environment=Strict))
        batch = lab.actor.generate_sequences(lab.prompts.next(2), seed=5, **sums())
        assert batch.rows == 2
