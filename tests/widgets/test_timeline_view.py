from __future__ import annotations

import time
from pathlib import Path

from workbench_widgets import TimelineView

from workbench.telemetry.spans import Span
from workbench.telemetry.store import TelemetryStore


def test_the_picture_follows_what_is_recorded(tmp_path: Path) -> None:
    store = TelemetryStore(tmp_path)
    view = TimelineView(tmp_path, every_s=0.02)
    try:
        assert "update_actor" not in view.value
        store.append_spans(
            [
                Span(
                    stage="update_actor", run=1, role="actor", pool="shared", rank=0, device="cpu:0", kind="compute",
                    start_s=100.0, end_s=101.0,
                )
            ]
        )  # fmt: skip
        deadline = time.monotonic() + 5
        while "update_actor" not in view.value and time.monotonic() < deadline:
            time.sleep(0.02)
        assert "update_actor" in view.value
    finally:
        view.close()
