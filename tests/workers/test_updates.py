"""An update is that of the whole minibatch, whatever its micro-batches and ranks, and whichever rows are skipped."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.engines.training_ranks import asked, run_ranks
from tests.workers.update_ranks import ROWS, Case, run_cases, sync_with_gaps
from workbench.messages.metrics import Mean

ROLES = ("actor", "critic")
MICRO_BATCH_ROWS = (1, 2, 8)
# Largest difference of a gradient, relative to the largest gradient of the same weight: fp32 sums in another order.
TOLERANCE = 5e-5
# How weights moved is a difference of fp32 numbers: the last place of those from 1 to 2, as norms have.
WEIGHT_ROUNDING = 1.2e-7
FEW, ALL = (0, 1, 2, 4, 6), tuple(range(ROWS))  # of two ranks, FEW leaves one of them nothing to do
ENGINES = ("torch", "zero1", "zero3")


def moved_alike(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert one["moved"].keys() == other["moved"].keys()
    for name, expected in other["moved"].items():
        gap = float((one["moved"][name] - expected).abs().max())
        assert gap <= TOLERANCE * float(expected.abs().max()) + WEIGHT_ROUNDING, name


@pytest.fixture(scope="module")
def by_world(request: pytest.FixtureRequest) -> dict[int, list[Any]]:
    """For each world and rank, one update of each role with micro-batches of 1, 2 and 8 rows."""
    cases = [Case(role=role, rows=rows) for role in ROLES for rows in MICRO_BATCH_ROWS]
    return {world: run_ranks(run_cases, world, cases) for world in (1, *asked(request, "ranks"))}


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.thorough)])
@pytest.mark.parametrize("role", ROLES)
def test_micro_batches_and_ranks_do_not_change_the_gradient(
    by_world: dict[int, list[Any]], role: str, ranks: int
) -> None:
    start = ROLES.index(role) * len(MICRO_BATCH_ROWS)
    mine = slice(start, start + len(MICRO_BATCH_ROWS))
    expected = by_world[1][0][mine][-1][0]
    assert all(float(moved.abs().max()) > 1e-5 for name, moved in expected["moved"].items() if "layers.0.mlp" in name)
    for world in (1, ranks):
        for rank in by_world[world]:
            for (outcome,) in rank[mine]:
                moved_alike(outcome, expected)
                norm = outcome["metrics"]["grad_norm"].value
                assert norm == pytest.approx(expected["metrics"]["grad_norm"].value, rel=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("world", [2, pytest.param(1, marks=pytest.mark.thorough)])
def test_rows_without_advantage_are_skipped_and_still_counted(world: int) -> None:
    """Two updates with some rows to skip and a third with no others, in which only AdamW's momentum moves weights."""
    settings: dict[str, Any] = {"rows": 2, "without_advantage": (FEW, FEW, ALL)}
    cases = [Case(engine=kind, skipping=skipping, **settings) for kind in ENGINES for skipping in (True, False)]
    for rank, by_case in enumerate(run_ranks(run_cases, world, cases)):
        for skipped, computed in zip(by_case[::2], by_case[1::2], strict=True):
            for outcome, expected in zip(skipped, computed, strict=True):
                moved_alike(outcome, expected)
                for name in ("loss", "grad_norm", "optimizer_steps"):
                    value = expected["metrics"][name].value
                    assert outcome["metrics"][name].value == pytest.approx(value, rel=1e-4, abs=1e-7), name
            mine = range(rank, ROWS, world)
            fractions = [outcome["metrics"]["skipped_rows/fraction"] for outcome in skipped]
            few = Mean(total=len(set(mine) & set(FEW)), count=len(mine))
            assert fractions == [few, few, Mean(total=len(mine), count=len(mine))]
            last = skipped[-1]
            assert last["metrics"]["grad_norm"].value == 0
            assert any(float(moved.abs().max()) > 0 for moved in last["moved"].values())
            assert all(bool(torch.isfinite(moved).all()) for moved in last["moved"].values())


@pytest.mark.slow
@pytest.mark.parametrize("gap", [float("nan"), pytest.param(0.5, marks=pytest.mark.thorough)])
def test_a_gap_on_one_rank_is_an_error_on_all(gap: float) -> None:
    """A rank that went on to sample would wait in the next collective for the one that raised."""
    for first, second, third in run_ranks(sync_with_gaps, 2, [0.0, gap]):
        assert "engine and trainer differ by" in first
        assert first == second  # it is not taken for synced
        assert third == ""
