"""Traffic as a view: what is shown is what the ledger has."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pandas as pd
import pytest

import workbench as wb
from tests.cases import tiny_lab
from workbench.telemetry import TelemetryStore, Transfer


def test_nothing_has_moved(tmp_path: Path) -> None:
    with tiny_lab("still", tmp_path, backend="inline") as lab:
        view = lab.panel("traffic").views["traffic"]
        assert "Nothing of this kind has moved" in view.picture()
        assert view.svg() is None
        assert len(lab.sync_plans()) == 0


def moved(lab: wb.Workbench, run: int, n: int, kind: Any = "batch", **more: Any) -> None:
    given = {"stage": "update_actor", "source": "a", "destination": "b", "columns": "rewards", **more}
    lab.telemetry.append_transfers([Transfer(run=run, bytes=n, start_s=1.0, end_s=1.5, kind=kind, **given)])


def test_what_moved_is_summed_as_it_comes_and_no_file_is_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with tiny_lab("sums", tmp_path, backend="inline") as lab:
        wb.PPO(lab, prompts=2, sampling=wb.Sampling(max_new_tokens=2)).run(1)
        view, editor = (lab.panel("traffic", "placement").views[name] for name in ("traffic", "placement"))
        monkeypatch.setattr(TelemetryStore, "_read", _no_reading)
        for run in range(3):
            moved(lab, run, 3 * 2**20)
            moved(lab, run, 10, kind="weights", stage="generate_sequences", columns="layer.0")
        moved(lab, 9, 10, kind="weights", stage="take_weights", destination="c", columns="layer.0")
        assert "9.4 MB" in view.picture()
        assert "update_actor" in view.controls()
        view.act("kind", {"value": "weights"})
        assert "40 B" in view.picture()
        assert lab.history._syncs_of(None) == 3
        assert lab.history._syncs_of("take_weights") == 0

        def assumed() -> tuple[float | None, str]:
            change = lab.diff(lab.placement)
            return change.bandwidth_bytes_s, change.measured

        assert assumed() == (None, "")  # nothing has been moved
        for n in (2**24, 2**24):  # side by side, in half a second
            moved(lab, 10, n, kind="move", stage="move")
        assert assumed() == (2**26, "as in the last move")
        moved(lab, 11, 10, kind="move", stage="move")  # too little to say how fast that is
        moved(lab, 12, 2**25, kind="move", stage="move")
        assert assumed() == (2**26, "as in the last 2 moves")
        assert "asking" not in editor.picture()
        monkeypatch.undo()
        whole = lab.transfers().groupby(["kind", "stage", "source", "destination", "columns"])["moved_bytes"].sum()
        sums = lab.telemetry.transfer_sums.frame().set_index(["kind", "stage", "source", "destination", "columns"])
        pd.testing.assert_series_equal(sums["moved_bytes"].sort_index(), whole.sort_index())


def _no_reading(*_: Any, **__: Any) -> Any:
    raise AssertionError("a whole file is read")


@pytest.mark.thorough  # on Ray; what strategies move: tests/resharding; syncs: integration/test_weight_sync.py
@pytest.mark.slow
def test_strategies_beside_what_was_measured(tmp_path: Path) -> None:
    """An actor in two tensor ranks that generates with whole weights: what moved is what the plan in use says."""
    placement = wb.Placement.colocate(2, layouts={"actor": wb.Layout(t=2)})
    with tiny_lab("cut", tmp_path, devices=2, placement=placement) as lab:
        wb.PPO(lab, prompts=4, sampling=wb.Sampling(max_new_tokens=2)).run(2)  # the second one needs a sync
        plans = lab.sync_plans().set_index("strategy")
        used = plans[plans["in_use"]].iloc[0]
        moved = lab.transfers("weights")
        syncs = moved[moved["stage"] != "take_weights"]["run"].nunique()
        assert syncs == 1
        assert lab.traffic("weights").total_bytes == used["moved_bytes"] * syncs
        assert (plans["moved_bytes"] >= plans["least_bytes"]).all()
        view = lab.panel("traffic").views["traffic"]
        view.act("kind", {"value": "weights"})
        assert "hybridflow (in use)" in view.picture()
        made = lab.history._planned[1]
        lab.sync_plans()
        assert lab.history._planned[1] is made  # and made again where the actor stands otherwise
        lab.actor.relayout((1, 1, 2))
        assert not len(lab.sync_plans())
