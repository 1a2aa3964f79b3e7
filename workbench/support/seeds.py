"""Seeds that depend on what is drawn, never on where or in which order."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence


def derive_seed(*parts: int | str) -> int:
    """A 63-bit seed from any parts, the same in every process and on every machine."""
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def sample_seed(stage_seed: Sequence[int], prompt_uid: int, sample: int) -> int:
    """The seed of one response: (workbench's seed, iteration, draw), the prompt, the number of the sample."""
    return derive_seed(*stage_seed, prompt_uid, sample)


def turn_seed(sample_seed: int, turn: int) -> int:
    """The seed of one turn of a response; that of the first turn is the sample's own."""
    return derive_seed(sample_seed, turn) if turn else sample_seed
