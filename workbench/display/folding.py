"""Time as a picture draws it: long stretches in which nothing was called are narrow breaks, so that busy time fills it.

true time   0 s  1 s  2 s  . . . . . . . . . . . . . . . 122 s  123 s
drawn       |####|####|//|####|
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from workbench.display.idle import Gaps

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
        """Times at which the slope changes, and what was left out of the picture until each."""
        times = np.stack([self.start_s, self.end_s], axis=1).ravel()
        left_out = np.cumsum(self.end_s - self.start_s - self.width_s)
        return times, np.stack([np.append(0.0, left_out)[:-1], left_out], axis=1).ravel()

    def drawn(self, time_s: Any) -> Any:
        """Where times are drawn, seconds from the left edge."""
        times, left_out = self._knots
        return time_s - np.interp(time_s, times, left_out) if len(times) else time_s

    def time(self, drawn_s: Any) -> Any:
        """What is drawn there: the inverse of `drawn`."""
        times, left_out = self._knots
        return drawn_s + np.interp(drawn_s, times - left_out, left_out) if len(times) else drawn_s

    def kept(self, start_s: float, end_s: float) -> list[tuple[float, float]]:
        """What of a window lies outside of the breaks."""
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
