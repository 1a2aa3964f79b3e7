"""Time as a picture draws it: long stretches in which nothing was called are narrow breaks, so that busy time fills it.

true time   0 s  1 s  2 s  . . . . . . . . . . . . . . . 122 s  123 s
drawn       |####|####|//|####|
"""

from __future__ import annotations

from collections.abc import Sequence
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


def foldings(gaps: Gaps, windows: Sequence[tuple[float, float]]) -> list[Folding]:
    """A folding for each window, of seconds from its start, with breaks of one width.

    The longest stretches without a call are folded, until the others take at most `REST` of the time that is left.
    """
    stretches = [gaps.uncalled(*window) for window in windows]
    lengths = [end_s - start_s for start_s, end_s in stretches]
    called_s = [end_s - start_s - length.sum() for (start_s, end_s), length in zip(windows, lengths, strict=True)]
    folds = [_folded(length, other_s) for length, other_s in zip(lengths, called_s, strict=True)]
    widest_s, most = max(called_s, default=0.0), max((int(fold.sum()) for fold in folds), default=0)
    width_s = widest_s * min(BREAK, BREAKS / max(most, 1))
    found = []
    for (from_s, _), (start_s, end_s), fold in zip(windows, stretches, folds, strict=True):
        fold &= end_s - start_s > 2 * width_s  # else a break would save nothing
        found.append(Folding(start_s[fold] - from_s, end_s[fold] - from_s, width_s))
    return found


def _folded(length: NDArray[np.float64], other_s: float) -> NDArray[np.bool_]:
    """Which stretches are folded, where the other time is so long."""
    ordered = np.sort(length)
    over = np.flatnonzero(np.cumsum(ordered) > REST * other_s)
    if other_s <= 0 or not len(over):
        return np.zeros(len(length), bool)
    return length >= max(float(ordered[over[0]]), LEAST_S)
