"""Where each span goes in a timeline: which lane, which sub-lane of it, how deep inside another bar."""

from __future__ import annotations

import re
from bisect import bisect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from workbench.display.idle import Row

TOUCH_S = 1e-6  # bars that overlap by no more lie one after the other

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
    """A span with its place: which sub-lane of its device, and how deep inside the bar of its stage (0: the bar).

    holds: whether other spans lie inside it.
    """

    row: Row
    sublane: int
    depth: int
    holds: bool = False


class Placer:
    """Gives spans of one device their places as they come: what was placed stays where it is.

    Spans at the same time get a sub-lane each; children go into their parent, which must come with them or before.
    """

    def __init__(self) -> None:
        self._taken: list[list[tuple[float, float]]] = []  # by sub-lane: start and end of its bars, in order
        self._roots: dict[tuple[Any, ...], list[Bar]] = {}

    def add(self, rows: Sequence[Row]) -> list[Bar]:
        """Bars of spans given by start."""
        bars = [self._place(row) for row in rows]
        for bar in bars:  # a queue line lies under the bar that it leads to
            if bar.row["kind"] == "queue":
                led_to = self._roots.get(_call(bar.row), [])
                bar.sublane = led_to[0].sublane if led_to else 0
        return bars

    def _place(self, row: Row) -> Bar:
        if row["kind"] == "queue":
            return Bar(row, 0, 0)
        roots = self._roots.setdefault(_call(row), [])
        if row["parent"]:
            middle = (row["start_s"] + row["end_s"]) / 2
            root = next((bar for bar in roots if bar.row["start_s"] <= middle <= bar.row["end_s"]), None)
            if root is not None:
                root.holds = True
                return Bar(row, root.sublane, 1 if row["parent"] == root.row["kind"] else 2)
        roots.append(Bar(row, self._free(row["start_s"], row["end_s"]), 0))
        return roots[-1]

    def _free(self, start_s: float, end_s: float) -> int:
        """The first sub-lane with nothing between two times, which is taken thereby."""
        for number, taken in enumerate(self._taken):
            at = bisect(taken, (start_s, end_s))
            before = at == 0 or taken[at - 1][1] <= start_s + TOUCH_S
            if before and (at == len(taken) or end_s <= taken[at][0] + TOUCH_S):
                taken.insert(at, (start_s, end_s))
                return number
        self._taken.append([(start_s, end_s)])
        return len(self._taken) - 1


def place(rows: Sequence[Row]) -> list[Bar]:
    """Bars of one device, given by start."""
    return Placer().add(rows)


def _call(row: Row) -> tuple[Any, ...]:
    return row["stage"], row["run"], row["role"], row["rank"]
