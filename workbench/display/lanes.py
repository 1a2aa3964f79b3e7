"""Where each span goes in a timeline: the order of lanes, and which sub-lane is free."""

from __future__ import annotations

import re
from bisect import bisect
from collections.abc import Iterable, Sequence

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


class SubLanes:
    """Gives bars of one device that are there at the same time a sub-lane each."""

    def __init__(self) -> None:
        self._taken: list[list[tuple[float, float]]] = []  # by sub-lane: start and end of its bars, in order

    def take(self, start_s: float, end_s: float) -> int:
        """The first sub-lane with nothing between two times, which is taken from now on."""
        for number, taken in enumerate(self._taken):
            at = bisect(taken, (start_s, end_s))
            before = at == 0 or taken[at - 1][1] <= start_s + TOUCH_S
            if before and (at == len(taken) or end_s <= taken[at][0] + TOUCH_S):
                taken.insert(at, (start_s, end_s))
                return number
        self._taken.append([(start_s, end_s)])
        return len(self._taken) - 1
