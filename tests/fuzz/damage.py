"""Files as a bad disk, or a stranger, would leave them; and text that a terminal would obey."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator

from hypothesis import HealthCheck, settings


def cases(usual: int, most: int = 20_000) -> int:
    """How many cases: FUZZ_CASES, where `make fuzz` sets it, but at most so many of slow ones."""
    return min(int(os.environ.get("FUZZ_CASES") or 0), most) or usual


STEP = 1 if cases(0) else 29  # bytes that are passed over unless `make fuzz` runs


def profile(usual: int, most: int = 20_000) -> settings:
    """Of hypothesis: the same cases each time, but under `make fuzz`."""
    count = cases(usual, most)
    return settings(
        max_examples=count, deadline=None, suppress_health_check=list(HealthCheck), derandomize=not cases(0)
    )


def cut_and_flipped(data: bytes, step: int = 1) -> Iterator[bytes]:
    """The data cut at every byte, and with one bit of every byte turned around; another bit in each. step: bytes that
    are passed over, of files that are not small."""
    for at in range(0, len(data), step):
        yield data[:at]
        flipped = bytearray(data)
        flipped[at] ^= 1 << at % 8
        yield bytes(flipped)


def harmless(text: str) -> bool:
    """Whether a terminal can print it, and obeys nothing in it."""
    return re.search("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]", text) is None
