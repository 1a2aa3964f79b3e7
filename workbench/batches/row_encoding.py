"""Row numbers on their way to a host: small, because most of them are runs of consecutive numbers."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np


class PackedRows(NamedTuple):
    """Run i is `counts[i]` consecutive numbers from `starts[i]`; without `counts`, `starts` are the numbers."""

    starts: np.ndarray
    counts: np.ndarray | None

    def unpack(self) -> np.ndarray:
        """The row numbers [rows], int64."""
        starts = self.starts.astype(np.int64)
        if self.counts is None:
            return starts
        counts = self.counts.astype(np.int64)
        before = np.cumsum(counts) - counts
        return np.arange(counts.sum()) + np.repeat(starts - before, counts)


def pack(rows: np.ndarray) -> PackedRows:
    """Row numbers [rows], not negative, in few bytes; linear in rows."""
    first = np.flatnonzero(np.diff(rows, prepend=-2) != 1)
    if 2 * len(first) < len(rows):
        return PackedRows(_narrow(rows[first]), _narrow(np.diff(first, append=len(rows))))
    return PackedRows(_narrow(rows), None)


def _narrow(numbers: np.ndarray) -> np.ndarray:
    return numbers.astype(np.min_scalar_type(int(numbers.max()))) if len(numbers) else numbers
