"""Where each span goes in a timeline: the order of lanes, and the bars on each.

Time as a picture draws it: long stretches in which nothing was called are narrow breaks, so that busy time fills it.

true time   0 s  1 s  2 s  . . . . . . . . . . . . . . . 122 s  123 s
drawn       |####|####|//|####|
"""

from __future__ import annotations

import re
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from workbench.display.idle import Gaps, Lane

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
    """A span and its place. sublane: separates bars that overlap in time on one device. level: 0 for the bar of a
    stage, 1 for a span inside it, 2 for a span inside that, 3 for the line of its queue time."""

    row: Mapping[str, Any]
    lane: Lane
    sublane: int
    level: int

    @property
    def length_s(self) -> float:
        return float(self.row["end_s"] - self.row["start_s"])


def bars_of(rows: Iterable[Mapping[str, Any]]) -> list[Bar]:
    """A bar for each span (queue, stage, and nested spans), by start."""
    ordered = sorted(rows, key=lambda row: (row["start_s"], -row["end_s"]))
    free_s: dict[Lane, list[float]] = {}  # by lane: when each sub-lane is free again
    stages: dict[Hashable, list[Bar]] = {}  # by call

    def lane_of(row: Mapping[str, Any]) -> Lane:
        return row.get("pool", ""), row.get("device", "")

    def stages_of(row: Mapping[str, Any]) -> list[Bar]:
        return stages.setdefault((row["run"], row["stage"], row["role"], row["rank"], lane_of(row)), [])

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
    # deeper bars are drawn on top, and of several queued stages the one that runs next
    queued.sort(key=lambda bar: -bar.row["end_s"])
    return [*queued, *sorted(bars, key=lambda bar: bar.row["start_s"]), *sorted(inside, key=lambda bar: bar.level)]


LEAST_S = 0.2  # shorter stretches are never folded
REST = 0.05  # what stretches that are not folded take in all at most, as a share of the other time
BREAK, BREAKS = 0.02, 0.25  # width of a break, and of all of them at most, as shares of the other time


@dataclass(frozen=True)
class Folding:
    """A piecewise-linear map of seconds to the seconds that they are drawn as.

    start_s, end_s: of the breaks, in order; they do not touch. width_s: what each break is drawn as. Between breaks a
    second is a second, so that the map grows everywhere and can be inverted.
    """

    start_s: NDArray[np.float64]
    end_s: NDArray[np.float64]
    width_s: float = 0.0

    @cached_property
    def _knots(self) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Times at which the slope changes, and the seconds left out before each."""
        times = np.stack([self.start_s, self.end_s], axis=1).ravel()
        left_out = np.cumsum(self.end_s - self.start_s - self.width_s)
        return times, np.stack([np.append(0.0, left_out)[:-1], left_out], axis=1).ravel()

    def drawn(self, time_s: Any) -> Any:
        """The drawn position of times, in seconds from the left edge."""
        times, left_out = self._knots
        return time_s - np.interp(time_s, times, left_out) if len(times) else time_s

    def time(self, drawn_s: Any) -> Any:
        """The time at a drawn position: the inverse of `drawn`."""
        times, left_out = self._knots
        return drawn_s + np.interp(drawn_s, times - left_out, left_out) if len(times) else drawn_s

    def kept(self, start_s: float, end_s: float) -> list[tuple[float, float]]:
        """The parts of a window outside the breaks."""
        edges = np.clip(np.concatenate([[start_s], self._knots[0], [end_s]]), start_s, end_s).reshape(-1, 2)
        return [(a, b) for a, b in edges.tolist() if b > a]


NOTHING_FOLDED = Folding(np.empty(0), np.empty(0))


def folding_of(gaps: Gaps, window: tuple[float, float]) -> Folding:
    """The folding of a window, of seconds from its start.

    The longest stretches without a call are folded, until the others take at most `REST` of the time that is left.
    """
    start_s, end_s = gaps.uncalled(*window)
    length = end_s - start_s
    ordered, called_s = np.sort(length), float(window[1] - window[0] - length.sum())
    over = np.flatnonzero(np.cumsum(ordered) > REST * called_s)
    if called_s <= 0 or not len(over):
        return NOTHING_FOLDED
    fold = length >= max(float(ordered[over[0]]), LEAST_S)
    width_s = called_s * min(BREAK, BREAKS / max(int(fold.sum()), 1))
    fold &= length > 2 * width_s  # else a break would save nothing
    return Folding(start_s[fold] - window[0], end_s[fold] - window[0], width_s)
