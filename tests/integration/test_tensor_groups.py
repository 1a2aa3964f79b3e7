"""One vLLM model over two ranks of the actor's pool, in a workbench: the rows, the weights and the errors of both."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import workbench as wb
from tests.cases import TINY, vowels
from workbench.batches.columns import Ragged
from workbench.errors import RewardError

if importlib.util.find_spec("vllm") is None:
    pytest.skip("vllm is not installed", allow_module_level=True)
if torch.cuda.is_available():
    pytest.skip("compares fp32 engines on the CPU", allow_module_level=True)
pytestmark = pytest.mark.slow


def open_lab(name: str, runs: Path, size: int) -> wb.Workbench:
    return wb.open(
        name,
        models={"actor": TINY, "reward": vowels},
        prompts="arithmetic/test",
        placement=wb.Placement.colocate(size),
        devices=size,
        training=wb.Training(engine="torch", learning_rate=1e-3),
        generation=wb.Generation(tensor_parallel_size=size, max_model_tokens=128, kv_cache_gib=0.05),
        runs=runs,
    )


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def pair(runs: Path) -> Iterator[wb.Workbench]:
    with open_lab("pair", runs, 2) as lab:
        yield lab


def length(prompt: str, response: str, **row: Any) -> float:
    return len(response) / 10


def step(lab: wb.Workbench, seed: int) -> tuple[list[list[int]], list[bool], float]:
    """A rollout of 3 prompts, which two ranks cannot share equally, and an update on it."""
    batch = lab.actor.generate_sequences(lab.prompts.next(3), samples=3, max_new_tokens=8, seed=seed)
    batch = lab.actor.compute_log_prob(batch)
    gap = lab.last_metrics["compute_log_prob"]["rollout_gap/max"]
    lab.actor.update_actor(lab.compute_advantages(lab.reward.compute_reward(batch, function=length), estimator="rloo"))
    columns = batch.fetch(["response_ids", "finished"])
    responses, finished = columns["response_ids"], columns["finished"]
    assert isinstance(responses, Ragged)
    assert isinstance(finished, torch.Tensor)
    return [row.tolist() for row in responses.rows()], finished.tolist(), gap


@pytest.mark.thorough
def test_a_tensor_group_samples_what_one_rank_samples(pair: wb.Workbench, runs: Path) -> None:
    with open_lab("alone", runs, 1) as alone:
        expected = [step(alone, seed) for seed in range(2)]  # the second after an update and a sync
        whole = alone.topology()["generation_weights_bytes"].max()
    for _, _, gap in (found := [step(pair, seed) for seed in range(2)]):
        assert gap < 1e-4
    assert [one[:2] for one in found] == [one[:2] for one in expected]
    assert max(gap["sync_gap/mean"] for gap in pair.actor.sync_weights()) < 1e-4
    held = pair.topology()
    assert (held[held["role"] == "actor"]["generation_weights_bytes"] < 0.7 * whole).all()
    spans = pair.spans()
    drawn = spans[spans["kind"] == "generate"].groupby("run")["processed_tokens"].sum().tolist()
    assert drawn == [sum(map(len, responses)) for responses, _, _ in found]  # each token counts on one rank


def test_ranks_that_are_scored_unlike_each_other_say_so(pair: wb.Workbench) -> None:
    batch = pair.actor.generate_sequences(pair.prompts.next(4), max_new_tokens=4)
    assert pair.actor.compute_log_prob(batch).columns
    assert pair.last_metrics["compute_log_prob"]["rollout_gap/max"] < 1e-4  # without a seed of ours as well
    table = batch.fetch(["prompt", "response_ids"])
    prompts, responses = table["prompt"], table["response_ids"]
    assert isinstance(prompts, list)
    assert isinstance(responses, Ragged)
    tokens = dict(zip(prompts, responses.lengths.tolist(), strict=True))
    first = set(prompts[:2])

    def unlike(prompt: str, response: str, **row: Any) -> Any:
        return 0.5 if prompt in first else [0.25] * tokens[prompt]

    with pytest.raises(RewardError, match=r"would have one number in some rows, and several in others") as caught:
        pair.reward.compute_reward(batch, function=unlike)
    assert "scored alike" in str(caught.value)
    assert "rewards" in pair.reward.compute_reward(batch).columns
