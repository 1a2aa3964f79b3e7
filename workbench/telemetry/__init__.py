"""What happened: spans, transfers, syncs, metrics, events, memory; recorded where the work is, kept on disk, read as
frames.

A new kind of span is one line in `spans.KIND_MEANINGS`, and a pattern in `workbench.display.timeline` if it should
be told apart there.
"""

from workbench.telemetry.memory import MemoryReading
from workbench.telemetry.recorder import Recorder, begin_span, span
from workbench.telemetry.spans import Span, Transfer
from workbench.telemetry.store import TelemetryStore

__all__ = ["MemoryReading", "Recorder", "Span", "TelemetryStore", "Transfer", "begin_span", "span"]
