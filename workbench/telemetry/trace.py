"""Spans and transfers as Chrome trace events, which Perfetto reads.

Format: Google's "Trace Event Format". Devices are processes and roles are threads. Complete events ("X") of one thread
must nest, which holds for the work of a role on a device; waiting and transfers may overlap anything, so they are
asynchronous events ("b", "e").
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

Row = Mapping[str, Any]
_SPAN_ARGS = ("stage", "run", "kind", "moved_bytes", "processed_tokens", "peak_memory_bytes", "note")
_TRANSFER_ARGS = ("stage", "run", "batch", "columns", "moved_bytes")


def trace_events(spans: Sequence[Row], transfers: Sequence[Row]) -> list[dict[str, Any]]:
    """Rows of the spans and transfers frames -> trace events, microseconds since the first start."""
    origin_s = min((row["start_s"] for row in [*spans, *transfers]), default=0.0)
    tracks = _Tracks()
    events: list[dict[str, Any]] = []
    for number, row in enumerate(spans):
        pid, tid = tracks.number(f"{row['pool']} {row['device']}", f"{row['role']} rank {row['rank']}")
        overlaps = row["parent"] == "" and row["kind"] in ("queue", "transfer")
        name = row["kind"] if row["parent"] or overlaps else row["stage"]
        event = {
            "name": f"{row['stage']} {name}" if overlaps else name, "cat": row["kind"], "pid": pid, "tid": tid,
            "args": _args(row, _SPAN_ARGS),
        }  # fmt: skip
        events += _asynchronous(event, f"s{number}", row, origin_s) if overlaps else [_complete(event, row, origin_s)]
        if row["peak_memory_bytes"] and not row["parent"]:
            peak = {"name": "peak memory", "ph": "C", "pid": pid, "ts": _us(row["end_s"], origin_s)}
            events.append({**peak, "args": {"bytes": row["peak_memory_bytes"]}})
    for number, row in enumerate(transfers):
        pid, tid = tracks.number("transfers", row["source"])
        name = f"{row['source']} to {row['destination']}"
        event = {"name": name, "cat": f"transfer {row['kind']}", "pid": pid, "tid": tid}
        event["args"] = _args(row, _TRANSFER_ARGS)
        events += _asynchronous(event, f"t{number}", row, origin_s)
    return [*tracks.names(), *events]


def _us(time_s: float, origin_s: float) -> int:
    # whole microseconds, rounded at both ends: a child that ends with its parent still does
    return round((time_s - origin_s) * 1e6)


def _complete(event: dict[str, Any], row: Row, origin_s: float) -> dict[str, Any]:
    start, end = _us(row["start_s"], origin_s), _us(row["end_s"], origin_s)
    return {**event, "ph": "X", "ts": start, "dur": end - start}


def _asynchronous(event: dict[str, Any], key: str, row: Row, origin_s: float) -> list[dict[str, Any]]:
    end = {name: event[name] for name in ("name", "cat", "pid", "tid")}
    return [
        {**event, "ph": "b", "id": key, "ts": _us(row["start_s"], origin_s)},
        {**end, "ph": "e", "id": key, "ts": _us(row["end_s"], origin_s)},
    ]


def _args(row: Row, names: Iterable[str]) -> dict[str, Any]:
    return {name: row[name] for name in names if row[name] not in ("", 0)}


class _Tracks:
    """Numbers for process and thread names, given out in order of appearance."""

    def __init__(self) -> None:
        self._threads: dict[str, dict[str, int]] = {}

    def number(self, process: str, thread: str) -> tuple[int, int]:
        threads = self._threads.setdefault(process, {})
        return list(self._threads).index(process) + 1, threads.setdefault(thread, len(threads) + 1)

    def names(self) -> list[dict[str, Any]]:
        named: list[dict[str, Any]] = []
        for pid, (process, threads) in enumerate(self._threads.items(), start=1):
            named.append({"name": "process_name", "ph": "M", "pid": pid, "args": {"name": process}})
            for thread, tid in threads.items():
                named.append({"name": "thread_name", "ph": "M", "pid": pid, "tid": tid, "args": {"name": thread}})
        return named
