"""When the panels of a workbench draw by themselves: together."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

REST = 150  # times as long as the drawings of a round took, until the next round: less than 1 % of the kernel's time
LEAST_REST_S, MOST_REST_S = 0.3, 5.0


class Pace:
    """Rounds in which all panels of a workbench draw what has changed, so that none is an iteration ahead of another.

    A panel that sees a change begins a round, and the others take part in it. Then all rest. What an action of the
    page asks for is drawn at once, in no round.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._panels: dict[object, Callable[[], None]] = {}
        self._rest_until_s = self._began_s = self._spent_s = 0.0  # monotonic, monotonic, processor time

    def join(self, panel: object, take_part: Callable[[], None]) -> None:
        """take_part: is called in each round that another panel begins; it returns at once."""
        with self._lock:
            self._panels[panel] = take_part

    def leave(self, panel: object) -> None:
        with self._lock:
            self._panels.pop(panel, None)

    def begin(self, panel: object) -> bool:
        """Begin a round, and call the others; False while all rest."""
        with self._lock:
            now_s = time.monotonic()
            if now_s < self._rest_until_s:
                return False
            self._began_s, self._spent_s, self._rest_until_s = now_s, 0.0, now_s + LEAST_REST_S
            others = [take_part for one, take_part in self._panels.items() if one is not panel]
        for take_part in others:
            take_part()
        return True

    def took(self, processor_s: float) -> None:
        """A drawing of this round took so long."""
        with self._lock:
            self._spent_s += processor_s
            rest_s = min(max(REST * self._spent_s, LEAST_REST_S), MOST_REST_S)
            self._rest_until_s = self._began_s + rest_s
