"""What several test files run: small workbenches, and one training iteration on stored rollouts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

import workbench as wb
from workbench.batches.columns import Ragged, Table
from workbench.messages.metrics import MetricValues
from workbench.placement import Layout

TINY = "tiny-llama-tied"


def vowels(prompt: str, response: str, **row: Any) -> float:
    """A reward that any model can get some of: the share of vowels."""
    return sum(c in "aeiou" for c in response) / max(1, len(response))


def hosts_of(lab: wb.Workbench) -> dict[str, Any]:
    """The hosts of an inline workbench, by name: what tests see of a process that is this one."""
    hosts: dict[str, Any] = lab.hosts.backend._hosts  # type: ignore[attr-defined]
    return hosts


def tiny_lab(
    name: str, runs: Path, *, engine: str = "torch", generation: Any = "transformers", **options: Any
) -> wb.Workbench:
    """Four roles on a tiny model with tied embeddings, learning fast enough to move them."""
    training: dict[str, Any] = {"engine": engine, "learning_rate": 1e-3, "minibatches": 2, "micro_batch_tokens": 256}
    training |= options.pop("training", {})
    return wb.open(
        name,
        models=options.pop("models", {"actor": TINY, "critic": TINY, "reference": TINY, "reward": vowels}),
        prompts=options.pop("prompts", "arithmetic/test"),  # of 200 rows, where all are read at each opening
        training=wb.Training(**training),
        generation=wb.Generation(engine=generation, max_model_tokens=192, kv_cache_gib=0.1),
        runs=runs,
        **options,
    )


def rollouts(lab: wb.Workbench, rows: int = 8) -> tuple[Table, dict[str, Any]]:
    """Stored rollouts: columns and meta of one generation."""
    batch = lab.actor.generate_sequences(lab.prompts.next(rows), max_new_tokens=12, temperature=0.8)
    return batch.fetch(), dict(batch.meta)


def stored(rows: int = 4) -> Table:
    """All that an update of actor and critic reads, made up: cheaper than what a dataflow makes."""
    draws = torch.Generator().manual_seed(7)
    lengths = [5 + row % 3 for row in range(rows)]

    def numbers() -> Ragged:
        return Ragged.of([torch.randn(n, generator=draws) for n in lengths], torch.float32)

    def ids() -> Ragged:
        return Ragged.of([torch.randint(8, 264, (n,), generator=draws) for n in lengths], torch.int64)

    mask = Ragged.of([torch.ones(n, dtype=torch.bool) for n in lengths], torch.bool)
    likely = {"old_log_prob": Ragged(-5 - numbers().values.abs(), mask.lengths)}
    names = ("values", "returns", "advantages")
    return {
        "prompt_ids": ids(), "response_ids": ids(), "response_mask": mask, **likely, **{n: numbers() for n in names},
    }  # fmt: skip


def update_on(lab: wb.Workbench, table: Table) -> dict[str, float]:
    """An update of the critic and one of the actor; all metrics."""
    batch = lab.put(table)
    found: dict[str, MetricValues] = {"critic": lab.critic.update_critic(batch), "actor": lab.actor.update_actor(batch)}
    return {f"{role}/{name}": value for role, metrics in found.items() for name, value in metrics.items()}


def train_on(lab: wb.Workbench, table: Table, meta: dict[str, Any]) -> dict[str, float]:
    """One PPO iteration's stages after generation; all metrics."""
    lab.runner.counters.last_metrics = {}
    batch = lab.put(table, meta=meta)
    batch = lab.actor.compute_log_prob(batch)
    batch = lab.reference.compute_ref_log_prob(batch)
    batch = lab.critic.compute_values(batch)
    batch = lab.reward.compute_reward(batch)
    batch = lab.compute_advantages(batch, kl_coefficient=0.1)
    updates: list[MetricValues] = [lab.critic.update_critic(batch, epochs=2), lab.actor.update_actor(batch, epochs=2)]
    assert all(len(update) > 5 for update in updates)
    return {f"{stage}/{name}": value for stage, metrics in lab.last_metrics.items() for name, value in metrics.items()}


def generation_groups(layout: Layout, axis: str) -> list[list[int]]:
    """The ranks that generate together: "tensor" groups share a replica, "micro_data" groups hold one shard of the
    training replica between them."""
    found: dict[tuple[int, int, int], list[int]] = {}
    for rank in range(layout.size):
        place = layout.generation_place(rank)
        key = (place.replica, place.stage, place.micro if axis == "tensor" else place.tensor)
        found.setdefault(key, []).append(rank)
    return sorted(found.values())
