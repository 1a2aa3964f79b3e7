"""What took how long in a stage, by rank, with a word on what each figure covers."""

from __future__ import annotations

from html import escape
from typing import Any

from workbench.display.html import bytes_text, seconds_text, table
from workbench.telemetry.spans import KIND_MEANINGS


def times(record: Any, spans: Any) -> str:
    """The spans of a stage's call as a table; "" where it left none. spans: a frame, as `lab.spans(run)` gives it."""
    found = spans.to_dict("records")
    if not found:
        return ""
    rows = [
        {
            "rank": row["rank"], "device": row["device"], "kind": ("· " if row["parent"] else "") + row["kind"],
            "took": seconds_text(row["duration_s"]), "tokens": row["processed_tokens"] or "",
            "moved": bytes_text(row["moved_bytes"]) if row["moved_bytes"] else "",
        }
        for row in found
    ]  # fmt: skip
    told = {kind: KIND_MEANINGS[kind] for kind in dict.fromkeys(row["kind"] for row in found)}
    if record.ended_s and record.started_s:
        took = seconds_text(max(record.ended_s - record.started_s, 0.0))
        told = {f"{took}, in the graph": "from when it was sent to its ranks until the last one answered"} | told
    words = "".join(f"<li><b>{escape(name)}</b>: {escape(meaning)}</li>" for name, meaning in told.items())
    shown = table(rows, caption="timing, by rank (· lies inside the row without a dot above it)", max_rows=12)
    return f'{shown}<details><summary>what each time covers</summary><ul style="margin:2px 0">{words}</ul></details>'
