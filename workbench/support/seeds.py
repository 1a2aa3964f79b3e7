"""Seeds that depend only on what is drawn, not on the place or order of drawing."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence


def derive_seed(*parts: int | str) -> int:
    """Derive a 63-bit seed from any parts, the same in every process and on every machine."""
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def sample_seed(stage_seed: Sequence[int], prompt_uid: int, sample: int) -> int:
    """Return the seed of one response. stage_seed: (workbench's seed, iteration, draw)."""
    return derive_seed(*stage_seed, prompt_uid, sample)


def turn_seed(sample_seed: int, turn: int) -> int:
    """Return the seed of one turn of a response; the first turn has the sample's own seed."""
    return derive_seed(sample_seed, turn) if turn else sample_seed
