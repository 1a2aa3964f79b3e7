from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from workbench.batches.location import balanced_shares


@given(st.lists(st.integers(0, 3000), min_size=1, max_size=60), st.data())
def test_shares_hold_every_row_once_and_are_as_large_as_a_contiguous_cut(
    tokens: list[int], data: st.DataObject
) -> None:
    ranks = data.draw(st.integers(1, len(tokens)))
    shares = balanced_shares(np.array(tokens), ranks)
    assert sorted(np.concatenate(shares).tolist()) == list(range(len(tokens)))
    assert [len(share) for share in shares] == [len(part) for part in np.array_split(np.array(tokens), ranks)]


def test_skewed_lengths() -> None:
    """Log-normal lengths, as responses have: the fullest rank is within 4 % of the mean."""
    for rows, ranks in [(64, 4), (256, 8), (250, 8), (1024, 8), (4096, 32)]:
        for seed in range(5):
            tokens = np.random.default_rng(seed).lognormal(6, 0.8, rows).astype(np.int64) + 16
            mean = tokens.sum() / ranks
            before = max(tokens[part].sum() for part in np.array_split(np.arange(rows), ranks)) / mean
            after = max(tokens[share].sum() for share in balanced_shares(tokens, ranks)) / mean
            assert after < 1.04
            assert after < before
