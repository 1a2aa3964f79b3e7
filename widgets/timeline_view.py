"""The timeline by device, drawn again while stages run."""

from __future__ import annotations

import threading
from pathlib import Path

import ipywidgets

from workbench.display.timeline import timeline
from workbench.telemetry.store import TelemetryStore


class TimelineView(ipywidgets.HTML):
    """`TimelineView(lab.run_folder)`: the last iterations by device, redrawn when something new was recorded.

    run_folder: of a workbench that lives, in this kernel or another, or of one long closed. iterations: how many to
    show. every_s: seconds between two looks at the folder. `stop()` ends the redrawing; the picture stays.
    """

    def __init__(self, run_folder: str | Path, *, iterations: int = 1, every_s: float = 1.0) -> None:
        super().__init__()
        self._store, self._iterations, self._every_s = TelemetryStore(run_folder), iterations, every_s
        self._seen_bytes = -1
        self._stopped = threading.Event()
        self.redraw()
        threading.Thread(target=self._watch, daemon=True, name="timeline-view").start()

    def redraw(self) -> None:
        """Draw what is on disk now."""
        spans, events = self._store.spans(), self._store.events()
        starts = events[events["event"] == "iteration"]["time_s"].to_list()[-self._iterations :]
        self.value = timeline(spans, start=starts[0] if starts and len(spans) else None)._repr_html_()

    def stop(self) -> None:
        """End the redrawing."""
        self._stopped.set()

    def close(self) -> None:
        self.stop()
        super().close()

    def _watch(self) -> None:
        while not self._stopped.wait(self._every_s):
            size = sum(path.stat().st_size for path in self._store.folder.glob("*.jsonl"))
            if size != self._seen_bytes:
                self._seen_bytes = size
                self.redraw()
