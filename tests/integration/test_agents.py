"""Agents on two ranks of Ray: each rank serves its own rows, and draws what one rank draws."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import workbench as wb
from tests.cases import TINY, tiny_lab
from workbench.batches.columns import Ragged, Table

pytest.importorskip("aiohttp")
pytest.importorskip("openai")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(torch.cuda.is_available(), reason="compares fp32 engines on the CPU"),
]


async def asks_on(row: dict[str, Any], client: Any) -> float:
    messages = [{"role": "user", "content": row["prompt"]}]
    for turn in range(1 + row["sample_seed"] % 3):
        answer = await client.chat.completions.create(model="policy", messages=messages, max_tokens=6)
        messages += [answer.choices[0].message.model_dump(), {"role": "user", "content": f"{turn}?"}]
    if row["sample_seed"] % 5 == 0:
        raise ValueError("fifth")
    return float(len(messages))


def drawn(lab: wb.Workbench, prompts: Table) -> list[Any]:
    batch = lab.actor.generate_sequences(
        lab.put(prompts), samples=3, seed=5, agent=asks_on, max_new_tokens=64, most_failed=1.0
    )
    table = batch.fetch(["prompt_ids", "response_ids", "response_mask", "environment_rewards", "turns", "valid"])
    lab.actor.compute_log_prob(batch)
    assert lab.last_metrics["compute_log_prob"]["rollout_gap/max"] < 1e-4
    return [
        [row.tolist() for row in column.rows()] if isinstance(column, Ragged) else list(column)
        for column in table.values()
    ]


def test_two_ranks_serve_agents_as_one_does(two: wb.Workbench, tmp_path: Path) -> None:
    with tiny_lab("inline", tmp_path, backend="inline", models={"actor": TINY}) as lab:
        prompts = lab.prompts.next(3).fetch()
        expected = drawn(lab, prompts)
    assert len(set(map(int, expected[4]))) > 1
    assert drawn(two, prompts) == expected
