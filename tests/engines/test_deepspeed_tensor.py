"""DeepSpeed's tensor parallelism with ZeRO over the replicas computes what one process computes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.engines.layout_checks import check_numbers, check_slices
from tests.engines.layout_ranks import outcome, outcomes
from tests.engines.training_ranks import asked, run_ranks
from workbench.engines.training.deepspeed_engine import DeepSpeedEngine, check_deepspeed_layout
from workbench.errors import BadInput
from workbench.placement import Layout
from workbench.settings.training import Training

TWO, FOUR = Layout(1, 2, 1), Layout(1, 2, 2)
# one that generates in tensor groups of two: there the ranks of its training group are not in the pool's order
PERMUTED = Layout(1, 4, 1).generating(2)
GATE = [(TWO, "tied llama", "zero2"), (TWO, "critic", "zero1")]
TRIED = [
    *GATE,
    *(
        pytest.param(*one, marks=pytest.mark.thorough)
        for one in (
            (TWO, "tied llama", "zero0"), (TWO, "qwen2", "zero1"), (TWO, "qwen3", "zero1"),
            (FOUR, "tied llama", "zero1"), (FOUR, "qwen2", "zero2"), (FOUR, "qwen3", "zero0"),
            (FOUR, "critic", "zero2"), (PERMUTED, "wide", "zero1"),
        )
    ),
]  # fmt: skip
MORE = ["zero1", *(pytest.param(kind, marks=pytest.mark.thorough) for kind in ("zero0", "zero2"))]
Seen = dict[tuple[Layout, str, str], list[dict[str, Any]]]


@pytest.fixture(scope="module")
def alone(request: pytest.FixtureRequest) -> dict[str, dict[str, Any]]:
    return {case: outcome(case, Layout()) for case in asked(request, "case")}


@pytest.fixture(scope="module")
def seen(request: pytest.FixtureRequest) -> Seen:
    """What each rank saw, by layout, case and engine. In one process all DeepSpeed engines have the same t."""
    found: Seen = {}
    every = [*asked(request, "layout", "case", "kind"), *((TWO, "more", kind) for kind in asked(request, "promised"))]
    for world in sorted({(layout.size, layout.t) for layout, _, _ in every}):
        tried = [one for one in every if (one[0].size, one[0].t) == world]
        arguments = [(layout, case) for layout, case, _ in tried], tuple(kind for _, _, kind in tried)
        found |= dict(zip(tried, map(list, zip(*run_ranks(outcomes, world[0], *arguments), strict=True)), strict=True))
    return found


pytestmark = pytest.mark.slow


@pytest.mark.parametrize(("layout", "case", "kind"), TRIED, ids=str)
def test_tensor_ranks_change_nothing(seen: Any, alone: Any, layout: Layout, case: str, kind: str) -> None:
    check_numbers(seen[layout, case, kind], alone[case], layout)


@pytest.mark.parametrize(("layout", "case", "kind"), TRIED, ids=str)
def test_a_rank_holds_its_slices(seen: Any, layout: Layout, case: str, kind: str) -> None:
    ranks = seen[layout, case, kind]
    check_slices(ranks, layout, case)
    for rank in ranks:
        held = sum(4 * weight.numel() for weight in rank["local"].values())
        assert held <= rank["memory"]["parameters"] <= 1.05 * held  # ZeRO pads what it flattens
        # two moments; the fp32 masters of ZeRO are the weights themselves, or a copy of its share
        whole = 2 * held / (1 if kind == "zero0" else layout.d)
        assert whole <= rank["memory"]["optimizer"] <= 1.6 * whole


@pytest.mark.parametrize("promised", MORE)
def test_what_else_an_engine_promises(seen: Seen, promised: str) -> None:
    for rank in seen[TWO, "more", promised]:
        assert rank["bf16 losses"][-1] < 0.9 * rank["bf16 losses"][0]
        assert rank["bf16 exported"] == {torch.bfloat16}
        assert rank["bf16 norms"][1] == pytest.approx(rank["bf16 norms"][0], rel=1e-4)
        assert all(norm == pytest.approx(rank["norms"][0], rel=1e-4) for norm in rank["norms"])
        for end in rank["ends"][1:]:
            for name, weight in rank["ends"][0].items():
                torch.testing.assert_close(end[name], weight, rtol=0, atol=1e-5)
        assert rank["skipped"]
        assert "computes something else" in rank["odd model"]


def test_a_process_has_one_size_of_tensor_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DeepSpeedEngine, "_tensor_ranks", 1)
    for size in (1, 2, 2):
        DeepSpeedEngine._require_tensor_ranks(size)
    for size in (1, 4):
        with pytest.raises(BadInput, match=f"t={size} in a process that has had one with t=2.*give the pool another"):
            DeepSpeedEngine._require_tensor_ranks(size)


@pytest.mark.parametrize(
    ("layout", "stage", "message"),
    [(Layout(2, 2, 1), 1, r"p=2.*engine='torch'"), (Layout(1, 2, 2), 3, r"t=2.*zero_stage=3.*use zero_stage=2")],
)
def test_layouts_that_deepspeed_does_not_train_in(layout: Layout, stage: Any, message: str) -> None:
    check_deepspeed_layout(Layout(1, 2, 2), Training(zero_stage=2))
    with pytest.raises(BadInput, match=message):
        check_deepspeed_layout(layout, Training(zero_stage=stage))
