"""Spans, transfers, syncs, metrics, events and memory readings: recorded where the work is done, kept on disk, read as
frames.

To add a kind of span, add a line to `spans.KIND_MEANINGS`, and a pattern in `workbench.display.timeline` if the
timeline should distinguish it.
"""

from workbench.telemetry.memory import MemoryReading
from workbench.telemetry.recorder import Recorder, begin_span, span
from workbench.telemetry.spans import Span, Transfer
from workbench.telemetry.store import TelemetryStore

__all__ = ["MemoryReading", "Recorder", "Span", "TelemetryStore", "Transfer", "begin_span", "span"]
