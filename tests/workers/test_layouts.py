"""Workers whose model is cut over ranks say and learn what a worker with the whole model does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engines.training_ranks import asked, run_ranks
from tests.workers.layout_ranks import stages, stages_of
from workbench.models.heads import load_token_values
from workbench.placement import Layout

pytestmark = pytest.mark.slow

FIRST_RATIO = "first_minibatch/ratio/max_deviation"


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], Path]:
    folder = tmp_path_factory.mktemp("alone")
    return stages(Layout(), folder), folder


@pytest.fixture(scope="module")
def cut(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[Layout, tuple[Any, Path]]:
    """What the ranks of each layout saw, and where models are saved."""
    folder, layouts = tmp_path_factory.mktemp("cut"), asked(request, "layout")
    seen = zip(*run_ranks(stages_of, 2, layouts, folder), strict=True)
    return {layouts[n]: (ranks, folder / str(n)) for n, ranks in enumerate(seen)}


@pytest.mark.parametrize(
    "layout", [Layout(1, 2, 1), pytest.param(Layout(2, 1, 1), marks=pytest.mark.thorough)], ids=str
)
def test_the_stages_of_an_iteration(
    alone: tuple[dict[str, Any], Path], cut: dict[Layout, tuple[Any, Path]], layout: Layout
) -> None:
    (expected, folder), (ranks, saved_in) = alone, cut[layout]
    (counting,) = (rank for rank in ranks if rank["counts"])
    for stage, columns in expected["columns"].items():
        assert counting["columns"][stage].keys() == columns.keys()
        for name, values in columns.items():
            mine = counting["columns"][stage][name]
            if isinstance(values, torch.Tensor) and values.is_floating_point():
                torch.testing.assert_close(mine, values, rtol=1e-4, atol=1e-4)
            else:
                assert str(mine) == str(values), name
    for stage, metrics in expected["metrics"].items():
        assert counting["metrics"][stage].keys() == metrics.keys()
        for name in metrics.keys() - {FIRST_RATIO}:
            assert counting["metrics"][stage][name] == pytest.approx(metrics[name], rel=1e-3, abs=1e-4), (stage, name)
    assert counting["metrics"]["actor"][FIRST_RATIO] <= 1e-6
    assert counting["metrics"]["actor again"] == counting["metrics"]["actor"]
    assert sum(rank["share"] for rank in ranks) == pytest.approx(expected["share"], rel=1e-4)
    for rank in ranks:
        # every rank samples the replica's rows, and knows what is the same for all
        assert str(rank["columns"]["after"]["response_ids"]) == str(expected["columns"]["after"]["response_ids"])
        assert rank["norm"] == pytest.approx(expected["norm"], rel=1e-4)
        assert rank["gap"] < 1e-4
        compared = rank["compared"]
        assert compared.read > 10
        assert (compared.differ, compared.moved_differ) == ((), ())
        assert compared.moved_gap is not None
        assert compared.moved_gap < 1e-3
        assert rank["digests"] == ranks[0]["digests"]
        assert rank["reference"] == expected["reference"]
    saved, one = load_token_values(saved_in / "scores"), load_token_values(folder / "scores")
    torch.testing.assert_close(saved.score.bias, one.score.bias, rtol=1e-4, atol=1e-4)
    for (name, mine), theirs in zip(saved.named_parameters(), one.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-4, msg=name)
