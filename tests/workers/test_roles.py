"""Roles in an inline workbench: what a setting or an update says it does is what is found."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import workbench as wb
from tests.cases import TINY, tiny_lab
from tests.expected import expect_error
from workbench.batches.columns import Ragged
from workbench.errors import BadInput
from workbench.workers.model_worker import random_kept, random_state


def length(prompt: str, response: str, **row: str) -> float:
    """A reward that differs from row to row, whatever a tiny model writes."""
    return len(response) / 10


def greedy(runs: Path, name: str, engine: str, checkpointing: bool) -> tuple[list[list[int]], dict[str, float]]:
    """Greedy tokens after an update, and the gap of engine and trainer on sampled ones."""
    with tiny_lab(
        name, runs, engine=engine, training={"activation_checkpointing": checkpointing}, backend="inline"
    ) as lab:
        prompts = lab.prompts.next(4)
        sampled = lab.actor.compute_log_prob(lab.actor.generate_sequences(prompts, max_new_tokens=16, seed=3))
        gap = dict(lab.last_metrics["compute_log_prob"])
        scored = lab.compute_advantages(lab.critic.compute_values(lab.reward.compute_reward(sampled, function=length)))
        assert lab.actor.update_actor(scored)["grad_norm"] > 0
        tokens = lab.actor.generate_sequences(prompts, max_new_tokens=16, temperature=0).fetch(["response_ids"])
    column = tokens["response_ids"]
    assert isinstance(column, Ragged)
    return [row.tolist() for row in column.rows()], gap


def test_generation_beside_recomputed_activations(tmp_path: Path) -> None:
    expected, _ = greedy(tmp_path, "kept", "torch", False)
    tokens, gap = greedy(tmp_path, "recomputed", "torch", True)
    assert tokens == expected
    assert max(map(len, tokens)) == 16  # long enough for a lost key-value cache to show
    assert gap["rollout_gap/max"] < 1e-4


def test_an_update_says_how_much_the_value_clip_held_back(tmp_path: Path) -> None:
    with tiny_lab("clip", tmp_path, backend="inline", training={"minibatches": 1, "learning_rate": 1e-2}) as lab:
        batch = lab.actor.generate_sequences(lab.prompts.next(4), max_new_tokens=8)
        batch = lab.critic.compute_values(lab.actor.compute_log_prob(lab.reward.compute_reward(batch, function=length)))
        batch = lab.compute_advantages(batch)
        metrics = lab.critic.update_critic(batch, clip=0.01, epochs=4)
        # before the first step the values are the old ones, and after some they are further away than 0.01
        assert metrics["first_minibatch/value_clip_fraction"] == 0
        assert 0.1 < metrics["value_clip_fraction"] < 1
        assert lab.critic.update_critic(batch, clip=None)["value_clip_fraction"] == 0


def test_tensor_groups_that_cannot_be_are_refused(tmp_path: Path) -> None:
    with expect_error(BadInput, value="tensor_parallel_size=2 with engine='transformers'", remedy="engine='vllm'"):
        wb.Generation(engine="transformers", tensor_parallel_size=2)
    with expect_error(BadInput, value="tensor_parallel_size=0"):
        wb.Generation(tensor_parallel_size=0)
    pytest.importorskip("vllm")
    with expect_error(BadInput, value="tensor_parallel_size=2 on a pool of 1 device"):
        wb.open(
            "lonely", models={"actor": TINY}, generation=wb.Generation(tensor_parallel_size=2, max_model_tokens=64),
            training=wb.Training(engine="torch"), backend="inline", runs=tmp_path,
        )  # fmt: skip


def test_rows_without_advantage_are_left_out_unless_something_else_pulls_on_them(tmp_path: Path) -> None:
    with tiny_lab("skip", tmp_path, backend="inline", training={"minibatches": 1}) as lab:
        batch = lab.actor.compute_log_prob(lab.actor.generate_sequences(lab.prompts.next(4), max_new_tokens=8, seed=1))
        responses = batch.fetch(["response_ids"])["response_ids"]
        assert isinstance(responses, Ragged)
        rows = [torch.full((len(row),), float(i % 2)) for i, row in enumerate(responses.rows())]
        batch = batch.join(lab.put({"advantages": Ragged.of(rows, torch.float32)}))
        seen = lab.actor.update_actor(batch)
        assert seen["skipped_rows/fraction"] == 0.5
        assert seen["first_minibatch/ratio/max_deviation"] <= 1e-6
        spans = lab.spans()
        forward = spans[(spans["kind"] == "forward") & (spans["stage"] == "update_actor")]
        tokens = batch.lengths("prompt_ids") + batch.lengths("response_ids")
        assert forward["processed_tokens"].sum() == tokens[1] + tokens[3]
        assert lab.actor.update_actor(batch, entropy_coefficient=0.01)["skipped_rows/fraction"] == 0


def test_topology_says_how_sequences_run(tmp_path: Path) -> None:
    with tiny_lab("ways", tmp_path, backend="inline") as lab:
        said = lab.topology().set_index("role")["sequences"]
    assert said[["actor", "critic", "reference"]].tolist() == ["packed"] * 3
    assert said.isna()["reward"]  # a function


def test_a_process_that_uses_no_gpu_leaves_the_machines_gpus_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their generators' states cannot be read without starting CUDA, which fails if others hold the GPUs."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    if torch.cuda.is_initialized():
        pytest.skip("an earlier test has started CUDA")
    before, state = torch.get_rng_state(), random_state()
    assert not any(name.startswith("cuda") for name in state)
    with random_kept():
        torch.rand(1)
    assert torch.equal(torch.get_rng_state(), before)
    assert not torch.cuda.is_initialized()
