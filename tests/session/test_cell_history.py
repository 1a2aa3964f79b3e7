"""Which cells ran, whatever comes in between."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

from IPython.core.interactiveshell import InteractiveShell

from workbench.session.run_record import _History, digest_of
from workbench.telemetry.store import TelemetryStore


class InterruptedStore(TelemetryStore):
    def append_event(self, event: str, **details: Any) -> None:
        signal.raise_signal(signal.SIGINT)
        super().append_event(event, **details)


def test_a_cell_is_recorded_though_the_stop_button_is_pressed_at_its_end(tmp_path: Path) -> None:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    shell = InteractiveShell()
    history = _History(shell)
    store = InterruptedStore(tmp_path)
    history.followers.append((store, lambda: False))
    try:
        shell.run_cell("x = 1 + 1", store_history=True)
    finally:
        signal.signal(signal.SIGINT, before)
    assert [cell.digest for cell in history.cells] == [digest_of("x = 1 + 1\n")]
    events = store.events()
    assert list(events["event"]) == ["cell"] and events["details"][0]["digest"] == digest_of("x = 1 + 1")
    assert "1 + 1" not in (tmp_path / "events.jsonl").read_text()
