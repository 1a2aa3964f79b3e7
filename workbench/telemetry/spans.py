"""Spans (timed work on one rank) and transfers (bytes moved from one rank to another), and their Chrome trace events,
which Perfetto reads.

Trace format: Google's "Trace Event Format". Devices are processes, roles are threads. Complete events ("X") of a thread
must nest, which holds for the work of a role on a device. Waiting and transfers may overlap with all else, so they are
asynchronous events ("b", "e").
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from workbench.errors import BadInput
from workbench.errors.plain_text import shown

KIND_MEANINGS = {
    "queue": "called, but waiting for the device or for inputs of another stage",
    "transfer": "pulling this rank's slices of the inputs",
    "compute": "the operation's whole method; the kinds below are inside it",
    "generate": "sampling responses in the generation engine",
    "forward": "forward passes of the training engine",
    "backward": "backward passes of the training engine",
    "optimizer": "gradient clipping, optimizer and schedule",
    "communication": "collectives between the ranks of a group",
    "weight_sync": "giving the generation engine new weights",
    "offload": "making room on the device for others: tensors moved to host memory, or freed; bytes: how many",
    "load": "moving offloaded tensors back",
    "reward": "the user's reward or cost function",
    "check": "opening, in the notebook: importing packages, checking arguments, reading prompts",
    "start": "opening: starting Ray, the process of a host, or a generation engine",
    "import": "opening: importing packages",
    "join": "opening: the ranks of a pool join their process group",
    "build": "opening: making a role, with its model and engines",
    "read": "reading a model's weights from files",
    "profile": "opening: a generation engine compiles, warms up and measures the memory that it needs",
    "capture": "opening: a generation engine warms up its kernels and records CUDA graphs",
}
TransferKind = Literal["batch", "weights", "move"]


@dataclass(frozen=True, kw_only=True)
class Span:
    """One timed piece of work on one rank.

    A stage leaves one "queue", one "transfer" and one "compute" span on each rank, whose `parent` is ""; the `parent`
    of a span inside another one is the kind of the enclosing span.

    run: number of the stage call. start_s, end_s: unix time. bytes: moved by this piece of work.
    tokens: processed by it (generated, for "generate"). peak_memory_bytes: see `workbench.telemetry.recorder`; 0 where
    nobody measured. note: free text, such as the error that ended it.
    """

    stage: str
    run: int
    role: str
    pool: str
    rank: int
    device: str
    kind: str
    start_s: float
    end_s: float
    bytes: int = 0
    tokens: int = 0
    peak_memory_bytes: int = 0
    note: str = ""
    parent: str = ""

    def row(self) -> dict[str, Any]:
        """Return the span as stored and as a row of the spans frame, with units in the names."""
        return _with_units({**vars(self)}, {"bytes": "moved_bytes", "tokens": "processed_tokens"})


@dataclass(frozen=True, kw_only=True)
class Transfer:
    """One movement of bytes from one rank to another.

    source, destination: "role:rank" or another stable name of the two ends. bytes: counted, not estimated. batch: name
    of the batch ("" for weights). columns: the moved columns, comma-separated; for weights their layer. kind: "batch":
    rows for a stage; "weights": for generation or a reference; "move": state, in a change of placement.
    """

    stage: str
    run: int
    source: str
    destination: str
    bytes: int
    start_s: float
    end_s: float
    batch: str = ""
    columns: str = ""
    kind: TransferKind = "batch"

    def row(self) -> dict[str, Any]:
        """Return the transfer as stored and as a row of the transfers frame, with units in the names."""
        return _with_units({**vars(self)}, {"bytes": "moved_bytes"})


def _with_units(row: dict[str, Any], names: dict[str, str]) -> dict[str, Any]:
    return row | {new: row.pop(old) for old, new in names.items()}


def check_kind(kind: str) -> None:
    """Raise `BadInput` for an unknown kind of span."""
    if kind not in KIND_MEANINGS:
        raise BadInput(f"span kind={shown(kind)}", f"must be one of {', '.join(KIND_MEANINGS)}", "choose the nearest")


def union_s(intervals: Iterable[tuple[float, float]]) -> float:
    total, reached = 0.0, float("-inf")
    for start, end in sorted(intervals):
        if end > max(start, reached):
            total += end - max(start, reached)
            reached = end
    return total


Row = Mapping[str, Any]
_SPAN_ARGS = ("stage", "run", "kind", "moved_bytes", "processed_tokens", "peak_memory_bytes", "note")
_TRANSFER_ARGS = ("stage", "run", "batch", "columns", "moved_bytes")


def trace_events(spans: Sequence[Row], transfers: Sequence[Row]) -> list[dict[str, Any]]:
    """Convert rows of the spans and transfers frames to trace events, in microseconds since the first start."""
    origin_s = min((row["start_s"] for row in [*spans, *transfers]), default=0.0)
    processes: dict[str, int] = {}
    threads: dict[tuple[int, str], int] = {}
    events: list[dict[str, Any]] = []

    def track(process: str, thread: str) -> dict[str, int]:
        """Return the numbers of a process and its thread, in order of first appearance."""
        pid = processes.setdefault(process, len(processes) + 1)
        return {"pid": pid, "tid": threads.setdefault((pid, thread), len(threads) + 1)}

    def us(time_s: float) -> int:
        # whole microseconds, rounded at both ends, so that a child that ends with its parent does so in the trace, too
        return round((time_s - origin_s) * 1e6)

    def add(event: dict[str, Any], row: Row, key: str = "") -> None:
        """Add a complete event, or (key) an asynchronous one."""
        start, end = us(row["start_s"]), us(row["end_s"])
        if not key:
            events.append({**event, "ph": "X", "ts": start, "dur": end - start})
            return
        events.append({**event, "ph": "b", "id": key, "ts": start})
        events.append({name: event[name] for name in ("name", "cat", "pid", "tid")} | {"ph": "e", "id": key, "ts": end})

    for number, row in enumerate(spans):
        where = track(f"{row['pool']} {row['device']}", f"{row['role']} rank {row['rank']}")
        overlaps = row["parent"] == "" and row["kind"] in ("queue", "transfer")
        name = row["kind"] if row["parent"] or overlaps else row["stage"]
        event = {"name": f"{row['stage']} {name}" if overlaps else name, "cat": row["kind"], **where}
        add({**event, "args": _args(row, _SPAN_ARGS)}, row, f"s{number}" if overlaps else "")
        if row["peak_memory_bytes"] and not row["parent"]:
            peak = {"name": "peak memory", "ph": "C", "pid": where["pid"], "ts": us(row["end_s"])}
            events.append({**peak, "args": {"bytes": row["peak_memory_bytes"]}})
    for number, row in enumerate(transfers):
        event = {"name": f"{row['source']} to {row['destination']}", "cat": f"transfer {row['kind']}"}
        add({**event, **track("transfers", row["source"]), "args": _args(row, _TRANSFER_ARGS)}, row, f"t{number}")
    named: list[dict[str, Any]] = [
        {"name": "process_name", "ph": "M", "pid": pid, "args": {"name": name}} for name, pid in processes.items()
    ]
    named += [
        {"name": "thread_name", "ph": "M", "pid": pid, "tid": tid, "args": {"name": name}}
        for (pid, name), tid in threads.items()
    ]
    return [*named, *events]


def _args(row: Row, names: Iterable[str]) -> dict[str, Any]:
    return {name: row[name] for name in names if row[name] not in ("", 0)}
