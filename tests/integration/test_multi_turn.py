"""Conversations on several ranks: data parallel, and in a tensor group of vLLM, whose ranks must ask the same of it."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import psutil
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


class Endless(Calculator):
    """Goes on until turns run out."""

    def step(self, response: str) -> tuple[str, float, bool]:
        return *super().step(response)[:2], False


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


def by_hand(lab: wb.Workbench) -> list[Any]:
    """The turns of a chat: two, the first one edited, and forks behind it."""
    chat = lab.conversation("1+2=", sampling=wb.Sampling(**sums(environment=Endless, max_turns=4)), seed=3)
    chat.step()
    chat.step()
    chat.edit(0, "4+5=")
    assert chat.path[0].answer == "9;"
    fork = chat.fork(3)
    turns = [(turn.parent, [*turn.token_ids], [*turn.answer_ids], turn.reward) for turn in chat.tree.turns]
    return [turns, list(fork.returns), fork.endings]


@pytest.mark.thorough
def test_two_ranks_converse_as_one_does(tmp_path: Path) -> None:
    models: dict[str, Any] = {"actor": TINY}
    with tiny_lab("inline", tmp_path, backend="inline", models=models) as lab:
        expected = conversations(lab), by_hand(lab)
    placement = wb.Placement.of({"shared": (2, ["actor"]), "environments": (3, ["environment"])})
    with tiny_lab("two", tmp_path, placement=placement, devices=2, models=models) as lab:
        assert (conversations(lab), by_hand(lab)) == expected
        below = [below_host(int(process)) for process in lab.topology()["process"]]
        assert sorted(below) == [1, 2]  # the processes of environments are dealt to the ranks


def below_host(process: int) -> int:
    """How many processes of user functions a host has."""
    children = psutil.Process(process).children()
    return sum("workbench.support.calls.server" in " ".join(child.cmdline()) for child in children)


@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vllm is not installed")
@pytest.mark.thorough
def test_a_tensor_group_converses_as_one_rank_does(tmp_path: Path) -> None:
    def open_lab(size: int) -> wb.Workbench:
        return wb.open(
            f"group{size}",
            models={"actor": TINY},
            prompts="arithmetic/test",
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
