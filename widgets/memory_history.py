"""What one device held over time: columns that grow at their ends, and are thinned where they are long."""

from __future__ import annotations

from collections.abc import Sequence

from workbench.telemetry.memory import MemoryReading

MOST_POINTS = 500
Owner = tuple[str, str]  # role and use
Peak = tuple[float, int, str]  # unix time, bytes, the stage


class MemoryHistory:
    """Readings of one device, and the highest use within each stage: of both at most `MOST_POINTS`.

    Where there are more, the highest of each `each` readings, or `each_peak` stages, stays, and of both the last one.

    times_s, iterations, held_bytes: columns of the readings, the last by owner. last: the last reading, whole.
    """

    def __init__(self) -> None:
        self.times_s: list[float] = []
        self.iterations: list[int] = []
        self.held_bytes: dict[Owner, list[int]] = {}
        self.last: MemoryReading | None = None
        self.peaks: list[Peak] = []
        self.each = self.each_peak = 1
        self._numbers: list[int] = []  # of the readings that stayed, and of such stages, counted from the first
        self._peak_numbers: list[int] = []

    def add(self, reading: MemoryReading) -> None:
        """Take in what was held."""
        shares = reading.shares()
        for owner, n in shares.items():
            if n:
                self.held_bytes.setdefault(owner, [0] * len(self.times_s))
        for owner, column in self.held_bytes.items():
            column.append(shares.get(owner, 0))
        self.times_s.append(reading.time_s)
        self.iterations.append(reading.iteration)
        self._numbers.append(self._numbers[-1] + 1 if self._numbers else 0)
        self.last = reading
        if len(self.times_s) > MOST_POINTS:
            self.each = _stretch(self._numbers[-1] + 1)
            used_bytes = [sum(held) for held in zip(*self.held_bytes.values(), strict=True)]
            kept = _highest(self._numbers, used_bytes, self.each)
            self.times_s = [self.times_s[n] for n in kept]
            self.iterations = [self.iterations[n] for n in kept]
            self.held_bytes = {owner: [column[n] for n in kept] for owner, column in self.held_bytes.items()}
            self._numbers = [self._numbers[n] for n in kept]

    def add_peak(self, peak: Peak) -> None:
        """Take in the highest use within a stage."""
        self.peaks.append(peak)
        self._peak_numbers.append(self._peak_numbers[-1] + 1 if self._peak_numbers else 0)
        if len(self.peaks) > MOST_POINTS:
            self.each_peak = _stretch(self._peak_numbers[-1] + 1)
            kept = _highest(self._peak_numbers, [held for _, held, _ in self.peaks], self.each_peak)
            self.peaks = [self.peaks[n] for n in kept]
            self._peak_numbers = [self._peak_numbers[n] for n in kept]


def _stretch(count: int) -> int:
    """Of how many one stays: the power of two that leaves at most half of `MOST_POINTS`, so that stretches of one
    thinning lie within those of the next."""
    each = 1
    while count > each * MOST_POINTS // 2:
        each *= 2
    return each


def _highest(numbers: Sequence[int], held_bytes: Sequence[int], each: int) -> list[int]:
    """The place of the highest of each stretch of numbers, and of the last of all."""
    places: dict[int, int] = {}
    for place, number in enumerate(numbers):
        best = places.setdefault(number // each, place)
        if held_bytes[place] > held_bytes[best]:
            places[number // each] = place
    return sorted({*places.values(), len(numbers) - 1})
