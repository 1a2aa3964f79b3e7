"""The three transitions: against the paper's formulas on every small layout, and against an independent count."""

from __future__ import annotations

import itertools
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from transformers import LlamaConfig, Qwen2Config

from tests.cases import generation_groups
from tests.expected import expect_error
from tests.resharding.counting import Held, count, generation_ranks
from workbench.errors import BadInput
from workbench.models.loading import load_config
from workbench.placement import Layout
from workbench.resharding.strategies import STRATEGIES, plan_sync, plan_transition
from workbench.resharding.weights import ModelWeights, Part, Weight, model_weights


def divisors(n: int) -> list[int]:
    return [m for m in range(1, n + 1) if n % m == 0]


def layouts(most: int) -> Iterator[Layout]:
    for p, t, d in itertools.product(range(1, most + 1), repeat=3):
        if p * t * d <= most:
            for p_g, t_g in itertools.product(divisors(p), divisors(t)):
                yield Layout(p, t, d, p_g, t_g)


def even_layers(layout: Layout) -> ModelWeights:
    """Two layers a stage, each a matrix cut by rows and one cut by columns, whose elements all ranks divide."""
    size = 2 * layout.size
    parts = (Part(size=size, units=size),)
    cut = [(f"layers.{n}.{axis}", axis, n) for n in range(2 * layout.p) for axis in (0, 1)]
    weights = (
        Weight(name=name, shape=(size, size), item_bytes=2, axis=axis, parts=parts, layers=(n,))
        for name, axis, n in cut
    )
    return ModelWeights(tuple(weights), 2 * layout.p)


@pytest.mark.parametrize(("most", "least"), [(8, 50), pytest.param(16, 300, marks=pytest.mark.thorough)])
def test_every_layout_costs_what_the_paper_says(most: int, least: int) -> None:
    seen = 0
    for layout in layouts(most):
        p, t, d, p_g, t_g = layout.p, layout.t, layout.d, layout.p_g or 0, layout.t_g or 0
        weights = even_layers(layout)
        M = weights.nbytes
        expected = {
            "full": (M * (p * t * d - 1) // (p * t * d), M, {M // (p * t * d)}),
            "v": (M * (t * p - 1) // (t * p), M, {0, M // (t * p)}),
            "hybridflow": (M * (t * p - t_g * p_g) // (t_g * p_g * t * p), M // (t_g * p_g), {0}),
        }
        for strategy, (received, peak, kept) in expected.items():
            plan = plan_transition(weights, layout, strategy)
            figures = plan.figures()
            case = f"{strategy} {layout}"
            assert set(figures.received.tolist()) == {received}, case
            assert set(figures.peak_parameter.tolist()) == {peak}, case
            assert set(figures.kept_twice.tolist()) <= kept, case
            assert figures.sent.sum() == figures.received.sum(), case
            scheduled = np.zeros_like(figures.matrix)
            for movement in plan.schedule() if layout.size <= 8 else ():
                for destination in movement.destinations:
                    scheduled[movement.source, destination] += movement.nbytes
            assert layout.size > 8 or np.array_equal(scheduled, figures.matrix), case
            seen += 1
        apart = plan_transition(weights, layout, "v")
        for rank, twice in enumerate(apart.figures().kept_twice):
            weight = next(w for w in weights if apart.source.boxes(w, rank))
            overlaps = _overlap(apart, weight, rank)
            assert twice == (0 if overlaps else M // (t * p)), f"rank {rank} of {layout}"
    assert seen > least


def _overlap(plan: Any, weight: Weight, rank: int) -> bool:
    cells = [
        {(row, column) for r0, r1, c0, c1 in held for row in range(r0, r1) for column in range(c0, c1)}
        for held in (plan.source.boxes(weight, rank), plan.destination.boxes(weight, rank))
    ]
    return bool(cells[0] & cells[1])


def test_the_papers_example_of_groups() -> None:
    layout = Layout(1, 4, 2, 1, 2)
    weights = even_layers(layout)
    strided = plan_transition(weights, layout, "hybridflow")
    assert strided.generation_tensor_groups() == [[0, 2], [1, 3], [4, 6], [5, 7]]
    assert strided.micro_data_groups() == [[0, 1], [2, 3], [4, 5], [6, 7]]
    plain = plan_transition(weights, layout, "v")
    assert plain.generation_tensor_groups() == [[0, 1], [2, 3], [4, 5], [6, 7]]
    kept = plain.figures().kept_twice  # ranks 2, 3, 6, 7 of the paper, counted from 1
    assert [rank for rank, twice in enumerate(kept) if twice] == [1, 2, 5, 6]


def test_a_sync_to_engines_of_consecutive_ranks_costs_what_the_paper_says() -> None:
    for layout in (layout for layout in layouts(12) if layout.p_g == 1):
        p, t, d, t_g = layout.p, layout.t, layout.d, layout.t_g or 0
        weights = even_layers(layout)
        M = weights.nbytes
        expected = {
            "full": (M * (p * t * d - 1) // (p * t * d), M // (p * t * d)),
            "v": (M * (t * p - 1) // (t * p), 0),  # in HybridFlow's groups nothing lies apart
            "hybridflow": (M * (t * p - t_g) // (t_g * t * p), 0),
        }
        for strategy, (received, kept) in expected.items():
            plan = plan_sync(weights, layout.generating(t_g), strategy)
            consecutive = np.arange(layout.size).reshape(-1, t_g).tolist()
            assert plan.generation_tensor_groups() == consecutive
            figures = plan.figures()
            assert set(figures.received.tolist()) == {received}, f"{strategy} {layout}"
            assert set(figures.kept_twice.tolist()) == {kept}, f"{strategy} {layout}"
            if layout.size <= 8:
                scheduled = np.zeros_like(figures.matrix)
                for movement in plan.schedule():
                    scheduled[movement.source, list(movement.destinations)] += movement.nbytes
                assert np.array_equal(scheduled, figures.matrix)


def test_strided_groups_are_those_of_the_layout() -> None:
    for layout in layouts(12):
        plan = plan_transition(even_layers(layout), layout, "hybridflow")
        assert plan.generation_tensor_groups() == generation_groups(layout, "tensor")
        assert plan.micro_data_groups() == generation_groups(layout, "micro_data")


SMALL: dict[str, Any] = {
    "vocab_size": 13, "hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 4, "num_hidden_layers": 4,
    "head_dim": 4,
}  # fmt: skip
CONFIGS = {
    "odd vocabulary, tied": LlamaConfig(**SMALL, num_key_value_heads=2, tie_word_embeddings=True),
    "qwen": Qwen2Config(**SMALL, num_key_value_heads=1, tie_word_embeddings=False),
    "biases": LlamaConfig(
        **SMALL, num_key_value_heads=4, tie_word_embeddings=False, attention_bias=True, mlp_bias=True
    ),
}


def compare(config: Any, layout: Layout, strategy: str) -> None:
    p, t, d, p_g, t_g = layout.p, layout.t, layout.d, layout.p_g or layout.p, layout.t_g or layout.t
    ranks = list(range(layout.size))
    order = generation_ranks(p, t, d, p_g, t_g, strided=strategy == "hybridflow")
    after = Held(config, (p_g, t_g, layout.size // (p_g * t_g)), order)
    before = Held(config, (p, t, d), ranks)
    if strategy == "full":
        before = Held(config, (1, 1, layout.size), ranks, "zero")

    def nearest(rank: int) -> list[list[int]]:
        replica = [other for other in ranks if other // (p * t) == rank // (p * t)]
        place = order.index(rank) % (p_g * t_g)
        same = [other for other in replica if order.index(other) % (p_g * t_g) == place]
        return {"full": [ranks], "v": [replica], "hybridflow": [same, replica]}[strategy]

    expected = count(config, before, after, ranks, 4, everything=strategy != "hybridflow", nearest=nearest)
    figures = plan_transition(model_weights(config, dtype="float32"), layout, strategy).figures()
    assert np.array_equal(figures.matrix, expected.matrix), f"{strategy} {layout}"
    assert np.array_equal(figures.peak_parameter, expected.peak), f"{strategy} {layout}"
    assert np.array_equal(figures.kept_twice, expected.kept), f"{strategy} {layout}"


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize(
    "config",
    [
        pytest.param(config, id=name, marks=() if name.startswith("odd") else pytest.mark.thorough)
        for name, config in CONFIGS.items()
    ],
)
def test_small_models_move_what_an_independent_count_says(config: Any, strategy: str) -> None:
    for sizes in ((1, 1, 1), (1, 4, 1), (2, 2, 1), (1, 2, 2), (4, 1, 2), (2, 4, 1), (2, 2, 2), (1, 1, 3)):
        for p_g, t_g in itertools.product(divisors(sizes[0]), divisors(sizes[1])):
            compare(config, Layout(*sizes, p_g, t_g), strategy)


def test_all_layers_of_a_real_model_move_as_two_of_them_do() -> None:
    config = load_config("smollm2-135m")
    layout = Layout(2, 3, 1, 1, 1)
    received = {}
    for layers in (2, 4, 30):
        config.num_hidden_layers = layers
        plan = plan_transition(model_weights(config), layout, "hybridflow")
        received[layers] = plan.figures().matrix
    assert np.array_equal(received[30] - received[2], 14 * (received[4] - received[2]))


def test_wrong_input_is_said_before_anything_is_planned() -> None:
    weights = model_weights(load_config("tiny-llama"))
    with expect_error(BadInput, rule="'hybridflow', 'v', 'full'"):
        plan_transition(weights, Layout(1, 2, 1), "ring")
    for strategy in STRATEGIES:
        with expect_error(BadInput, value="4 units over t=3"):
            plan_transition(weights, Layout(1, 3, 1), strategy)
        with expect_error(BadInput, value="2 layers over p=4"):
            plan_transition(weights, Layout(4, 1, 1), strategy)


def test_planning_imports_no_runtime() -> None:
    heavy = ["torch", "ray", "deepspeed", "vllm", "transformers"]
    code = (
        "import sys, workbench.resharding.strategies, workbench.resharding.strategies; "
        f"print([name for name in {heavy} if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
