"""Plans executed by gloo processes: the right bits, the planned bytes, memory for a layer."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, Qwen2Config

from tests.engines.training_ranks import run_ranks
from tests.resharding.engine_ranks import Case, four_ranks, syncs, transitions
from workbench.engines.communicator import Communicator
from workbench.placement import Layout
from workbench.resharding.engine import ReshardingEngine
from workbench.resharding.strategies import plan_transition
from workbench.resharding.weights import ModelWeights, Part, Weight, model_weights
from workbench.telemetry import Recorder


def nothing_wrong(found: list[dict[str, list[str]]], cases: int) -> None:
    assert all(len(rank) == cases for rank in found)
    assert {f"rank {rank}, {case}": wrong for rank, report in enumerate(found)
            for case, wrong in report.items() if wrong} == {}  # fmt: skip


SHAPE: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 8,
}  # fmt: skip


def case(label: str, config: Any) -> Case:
    names = ("num_attention_heads", "num_key_value_heads", "num_hidden_layers", "vocab_size", "tie_word_embeddings")
    return Case(label, SimpleNamespace(**{n: getattr(config, n) for n in names}), model_weights(config))


def cases() -> list[Case]:
    return [
        case("tied", LlamaConfig(**SHAPE, vocab_size=40, num_key_value_heads=2, tie_word_embeddings=True)),
        case("biases", Qwen2Config(**SHAPE, vocab_size=40, num_key_value_heads=4, tie_word_embeddings=False)),
        case("odd vocabulary", LlamaConfig(**SHAPE, vocab_size=37, num_key_value_heads=1, tie_word_embeddings=True)),
    ]


def test_transitions_on_two_ranks() -> None:
    nothing_wrong(run_ranks(transitions, 2, cases(), [(1, 2, 1), (2, 1, 1)]), 3 * 3 * (2 + 2))


@pytest.mark.thorough
def test_transitions_and_reshards_on_four_ranks() -> None:
    sizes = SHAPE | {"hidden_size": 256, "head_dim": 64, "intermediate_size": 512, "vocab_size": 512}
    larger = case("larger", LlamaConfig(**sizes, num_key_value_heads=4, tie_word_embeddings=False))
    found = run_ranks(four_ranks, 4, cases(), larger)
    # three models, three strategies; 3 + 4 + 2 generation layouts
    nothing_wrong([rank[0] for rank in found], 3 * 3 * 9)
    nothing_wrong([rank[1] for rank in found], 3 * 7)
    for memory in (rank[2] for rank in found):
        assert memory.right
        assert memory.held <= memory.peak <= memory.held + memory.layer + memory.bucket


@pytest.mark.parametrize(
    ("ranks", "layouts", "sizes"),
    [
        (2, [(1, 2, 1), (2, 1, 1)], 2 + 1),
        pytest.param(4, [(1, 4, 1), (2, 2, 1), (1, 2, 2)], 3 + 2 + 2, marks=pytest.mark.thorough),
    ],
)
def test_syncs_to_engines_of_consecutive_ranks(ranks: int, layouts: Any, sizes: int) -> None:
    tied, _, odd = cases()
    found = run_ranks(syncs, ranks, [tied, odd], layouts)
    nothing_wrong(found, 2 * 3 * 2 * sizes)  # models, strategies, dtypes, sizes of tensor groups


def test_weights_that_are_complete_are_not_copied() -> None:
    parts = (Part(size=4, units=4),)
    weights = ModelWeights((Weight(name="a", shape=(4, 2), item_bytes=4, axis=0, parts=parts),), 1)
    engine = ReshardingEngine(plan_transition(weights, Layout(1, 1, 1)), Communicator(0, 1, Recorder()))
    mine = torch.ones(4, 2)
    for _ in range(2):
        assert next(engine.layers({"a": mine}))["a"].data_ptr() == mine.data_ptr()
