"""Where each span goes in a timeline: which lane, which sub-lane of it, how deep inside another bar."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from workbench.display.idle import Row

_DEFAULTS = {
    "stage": "", "run": 0, "role": "", "pool": "", "rank": 0, "device": "", "kind": "compute", "parent": "",
    "moved_bytes": 0, "processed_tokens": 0, "peak_memory_bytes": 0, "note": "",
}  # fmt: skip


def records(spans: Any) -> list[dict[str, Any]]:
    """A spans frame, or dicts with its columns, as dicts by start; what a dict lacks is empty."""
    records = spans.to_dict("records") if hasattr(spans, "to_dict") else spans
    return sorted(({**_DEFAULTS, **row} for row in records), key=lambda row: (row["start_s"], -row["end_s"]))


def lanes_of(rows: Sequence[Row], devices: Sequence[str]) -> list[tuple[str, str]]:
    """(pool, device) of each lane: the devices of one pool together."""
    seen = {(row["pool"], row["device"]) for row in rows}
    seen |= {("", device) for device in devices if device not in {name for _, name in seen}}

    def order(lane: tuple[str, str]) -> tuple[int, list[tuple[int, str]]]:
        asked = devices.index(lane[1]) if lane[1] in devices else len(devices)
        # cpu:2 before cpu:10
        return asked, [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", lane[1])]

    ordered = sorted(seen, key=lambda lane: (order(lane), lane[0]))
    pools = list(dict.fromkeys(pool for pool, _ in ordered))
    return sorted(ordered, key=lambda lane: pools.index(lane[0]))


@dataclass
class Bar:
    """A span with its place: which sub-lane of its device, and how deep inside the bar of its stage (0: the bar)."""

    row: Row
    sublane: int
    depth: int


def place(rows: Sequence[Row]) -> list[Bar]:
    """Bars of one device, given by start. Spans at the same time get a sub-lane each; children go into their parent."""
    free_from: list[float] = []
    roots: dict[tuple[Any, ...], list[Bar]] = {}
    bars: list[Bar] = []
    for row in rows:
        call = (row["stage"], row["run"], row["role"], row["rank"])
        middle = (row["start_s"] + row["end_s"]) / 2
        root = None
        if row["parent"] or row["kind"] == "queue":
            candidates = roots.get(call, [])
            root = next((bar for bar in candidates if bar.row["start_s"] <= middle <= bar.row["end_s"]), None)
        if row["kind"] == "queue":
            bars.append(Bar(row, 0, 0))
        elif root is not None:
            bars.append(Bar(row, root.sublane, 1 if row["parent"] == root.row["kind"] else 2))
        else:
            sublane = next((n for n, end in enumerate(free_from) if end <= row["start_s"] + 1e-6), len(free_from))
            free_from[sublane : sublane + 1] = [row["end_s"]]
            bars.append(Bar(row, sublane, 0))
            roots.setdefault(call, []).append(bars[-1])
    # a queue line lies under the bar that it leads to
    for bar in bars:
        if bar.row["kind"] == "queue":
            led_to = roots.get(tuple(bar.row[name] for name in ("stage", "run", "role", "rank")), [])
            bar.sublane = led_to[0].sublane if led_to else 0
    return bars
