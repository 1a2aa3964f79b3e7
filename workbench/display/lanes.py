"""Where each span goes in a timeline: the order of lanes, and the bars on each."""

from __future__ import annotations

import re
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from workbench.display.idle import Lane

TOUCH_S = 1e-6  # bars that overlap by no more lie one after the other


def lanes_of(seen: Iterable[Lane], devices: Sequence[str]) -> list[Lane]:
    """Lanes in the order in which they are drawn: the devices of one pool together. devices: which come first."""
    lanes = set(seen)
    lanes |= {("", device) for device in devices if device not in {name for _, name in lanes}}

    def order(lane: Lane) -> tuple[int, list[tuple[int, str]]]:
        asked = devices.index(lane[1]) if lane[1] in devices else len(devices)
        # cpu:2 before cpu:10
        return asked, [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", lane[1])]

    ordered = sorted(lanes, key=lambda lane: (order(lane), lane[0]))
    pools = list(dict.fromkeys(pool for pool, _ in ordered))
    return sorted(ordered, key=lambda lane: pools.index(lane[0]))


class Bar(NamedTuple):
    """A span and its place. sublane: bars of one device at the same time have one each. level: 0 for the bar of a
    stage, 1 for a span inside it, 2 for one inside that, 3 for the line of its time in the queue."""

    row: Mapping[str, Any]
    lane: Lane
    sublane: int
    level: int

    @property
    def length_s(self) -> float:
        return float(self.row["end_s"] - self.row["start_s"])


def bars_of(rows: Iterable[Mapping[str, Any]]) -> list[Bar]:
    """A bar for each span: those of the queue, of stages, and of what is inside them, each by their start."""
    ordered = sorted(rows, key=lambda row: (row["start_s"], -row["end_s"]))
    free_s: dict[Lane, list[float]] = {}  # by lane: when each sub-lane is free again
    stages: dict[Hashable, list[Bar]] = {}  # by call

    def lane_of(row: Mapping[str, Any]) -> Lane:
        return row.get("pool", ""), row.get("device", "")

    def stages_of(row: Mapping[str, Any]) -> list[Bar]:
        call = (row["run"], row["stage"], row["role"], row["rank"], lane_of(row))
        return stages.setdefault(call, [])

    def add_stage(row: Mapping[str, Any]) -> None:
        taken = free_s.setdefault(lane_of(row), [])
        at = next((n for n, end_s in enumerate(taken) if end_s <= row["start_s"] + TOUCH_S), len(taken))
        taken[at : at + 1] = [row["end_s"]]
        stages_of(row).append(Bar(row, lane_of(row), at, 0))

    for row in ordered:
        if not row["parent"] and row["kind"] != "queue":
            add_stage(row)
    inside, queued = list[Bar](), list[Bar]()
    for row in ordered:
        if row["kind"] == "queue":  # its line lies under the bar that it leads to
            first = next(iter(stages_of(row)), None)
            queued.append(Bar(row, lane_of(row), first.sublane if first else 0, 3))
        elif row["parent"]:
            middle_s = (row["start_s"] + row["end_s"]) / 2
            held = (bar for bar in stages_of(row) if bar.row["start_s"] <= middle_s <= bar.row["end_s"])
            if bar := next(held, None):
                inside.append(Bar(row, bar.lane, bar.sublane, 1 if row["parent"] == bar.row["kind"] else 2))
            else:  # the bar of its stage has not come, or lies outside of what is drawn
                add_stage(row)
    bars = [bar for found in stages.values() for bar in found]
    # on top lie the deeper bars, and of several stages in the queue the one that runs next
    queued.sort(key=lambda bar: -bar.row["end_s"])
    return [*queued, *sorted(bars, key=lambda bar: bar.row["start_s"]), *sorted(inside, key=lambda bar: bar.level)]
