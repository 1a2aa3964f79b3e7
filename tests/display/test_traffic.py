"""The matrix of who sent how much to whom."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cases import tiny_lab
from tests.expected import expect_error
from workbench.display.traffic import traffic
from workbench.errors import BadInput, NotFound
from workbench.telemetry.spans import Transfer
from workbench.telemetry.store import TelemetryStore


def moved(source: str, destination: str, n: int, kind: str = "weights") -> Transfer:
    return Transfer(
        stage="update_actor",
        run=1,
        source=source,
        destination=destination,
        bytes=n,
        start_s=1.0,
        end_s=1.5,
        kind=kind,  # type: ignore[arg-type]
    )


@pytest.fixture
def store(tmp_path: Path) -> TelemetryStore:
    store = TelemetryStore(tmp_path)
    store.append_transfers([moved("a-0", "a-1", 100), moved("a-0", "a-1", 20), moved("a-1", "b-0", 7)])
    return store


def test_sums_by_pair_in_the_order_of_the_hosts(store: TelemetryStore) -> None:
    shown = traffic(store.transfers(), names=["b-0", "a-0", "a-1"], what="weights", minimum_bytes=100)
    assert list(shown.matrix.index) == list(shown.matrix.columns) == ["b-0", "a-0", "a-1"]
    assert shown.matrix.loc["a-0", "a-1"] == 120
    assert shown.matrix.loc["a-1", "b-0"] == 7
    assert shown.total_bytes == 127
    assert shown.frame().to_dict("records")[0] == {"source": "a-0", "destination": "a-1", "moved_bytes": 120}
    assert shown.seconds["a-1"] == pytest.approx(1.0)
    assert "at least 100 B needed (1.27 times)" in shown._repr_html_()
    assert "a-0 to a-1: 120 bytes" in shown._repr_html_()


def test_a_process_that_is_gone_is_shown_all_the_same(store: TelemetryStore) -> None:
    assert list(traffic(store.transfers(), names=["a-0"], what="weights").matrix.index) == ["a-0", "a-1", "b-0"]


def test_nothing_moved(tmp_path: Path) -> None:
    with tiny_lab("still", tmp_path, backend="inline") as lab:
        shown = lab.traffic()
        assert shown.total_bytes == 0
        assert "0 B in all" in shown._repr_html_()
        with expect_error(NotFound, value="stage 'nowhere'"):
            lab.traffic(stage="nowhere")
        with expect_error(BadInput, value="kind='gradients'", rule="'batch', 'weights'"):
            lab.transfers("gradients")  # type: ignore[arg-type]
