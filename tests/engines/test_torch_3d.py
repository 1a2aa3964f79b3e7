"""Tensor, pipeline and data parallel training compute what one process computes, whatever the layout."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from transformers import Phi3Config

from tests.engines.layout_checks import check_numbers, check_slices
from tests.engines.layout_ranks import CASES, FAMILIES, SHAPE, outcome, outcomes
from tests.engines.training_ranks import asked, run_ranks
from tests.expected import expect_error
from workbench.engines.training.model_shard import check_shardable
from workbench.errors import BadInput
from workbench.placement import Layout

EVERY = [(layout, case) for layout in (Layout(1, 2, 1), Layout(2, 1, 1), Layout(1, 1, 2)) for case in CASES]
EVERY += [(Layout(2, 2, 1), case) for case in CASES]
EVERY += [(Layout(4, 1, 1), "deep"), (Layout(1, 2, 2), "qwen3"), (Layout(2, 1, 2), "tied llama")]
EVERY += [(Layout(2, 2, 2), "tied llama")]
GATE = {(layout, case) for layout in (Layout(1, 2, 1), Layout(2, 1, 1)) for case in ("tied llama", "critic")}
TRIED = [pytest.param(*one, marks=() if one in GATE else pytest.mark.thorough) for one in EVERY]
MORE = [Layout(1, 2, 1), Layout(2, 1, 1)]


@pytest.fixture(scope="module")
def alone(request: pytest.FixtureRequest) -> dict[str, dict[str, Any]]:
    return {case: outcome(case, Layout()) for case in asked(request, "case")}


@pytest.fixture(scope="module")
def seen(request: pytest.FixtureRequest) -> dict[tuple[Layout, str], list[dict[str, Any]]]:
    """What each rank saw, by layout and case."""
    found: dict[tuple[Layout, str], list[dict[str, Any]]] = {}
    every = [*asked(request, "layout", "case"), *((layout, "more") for layout in asked(request, "promised"))]
    for world in sorted({layout.size for layout, _ in every}):
        tried = [(layout, case) for layout, case in every if layout.size == world]
        found |= dict(zip(tried, map(list, zip(*run_ranks(outcomes, world, tried), strict=True)), strict=True))
    return found


pytestmark = pytest.mark.slow


@pytest.mark.parametrize(("layout", "case"), TRIED, ids=str)
def test_a_layout_changes_nothing(seen: Any, alone: Any, layout: Layout, case: str) -> None:
    check_numbers(seen[layout, case], alone[case], layout)


@pytest.mark.parametrize(("layout", "case"), TRIED, ids=str)
def test_a_rank_holds_its_slices_and_no_more(seen: Any, layout: Layout, case: str) -> None:
    check_slices(seen[layout, case], layout, case)
    for rank in seen[layout, case]:
        assert rank["memory"]["parameters"] == sum(4 * weight.numel() for weight in rank["local"].values())


@pytest.mark.parametrize("promised", MORE, ids=str)
def test_what_else_an_engine_promises(seen: Any, promised: Layout) -> None:
    ranks = seen[promised, "more"]
    losses = ranks[-1]["bf16 losses"]
    assert losses[-1] < 0.9 * losses[0]
    for rank in ranks:
        assert rank["bf16 exported"] == {torch.bfloat16}
        assert rank["bf16 norms"][1] == pytest.approx(rank["bf16 norms"][0], rel=1e-4)
        assert all(norm == pytest.approx(rank["norms"][0], rel=1e-4) for norm in rank["norms"])
        for end in rank["ends"][1:]:
            for name, weight in rank["ends"][0].items():
                torch.testing.assert_close(end[name], weight, rtol=0, atol=1e-5)
        assert rank["skipped"]
        assert len(rank["frozen"]) > 10
        assert all(rank["frozen"])
        assert ("use step()" in rank["with gradients"]) == (promised.p > 1)
        # a pipeline alone hands hidden states on from stage to stage
        assert ("computes something else" in rank["odd model"]) == (promised.p > 1)


def config(**changes: Any) -> Any:
    _, kind, options = FAMILIES["qwen2"]
    return kind(**{**SHAPE, "num_hidden_layers": 4, **options, **changes})


@pytest.mark.parametrize(
    ("layout", "changes", "message"),
    [
        (Layout(1, 4, 1), {}, "2 key-value heads over t=4"),
        (Layout(1, 3, 1), {}, "q_proj.*4 units over t=3"),
        (Layout(3, 1, 1), {}, "4 layers over p=3"),
        (Layout(1, 2, 1), {"intermediate_size": 63}, "63 units over t=2"),
    ],
)
def test_layouts_that_do_not_divide_a_model_are_refused(layout: Layout, changes: Any, message: str) -> None:
    with pytest.raises(BadInput, match=message):
        check_shardable(config(**changes), layout, "lm")


def test_fused_projections_are_not_cut_for_training() -> None:
    fused = Phi3Config(**SHAPE)
    check_shardable(fused, Layout(2, 1, 1), "lm")
    with expect_error(BadInput, value="qkv_proj", remedy="use t=1"):
        check_shardable(fused, Layout(1, 2, 1), "lm")


def test_weights_add_up() -> None:
    weights = check_shardable(config(), Layout(2, 2, 1), "lm")
    held = sum(math.prod(w.local_shape(j, 2)) for i in range(2) for j in range(2) for w in weights.of_stage(i, 2))
    whole = sum(weight.numel for weight in weights if weight.axis is None)
    assert held == sum(weight.numel for weight in weights) + whole  # what is not cut is on both tensor ranks
