"""Which rows go to which minibatch, and to which rank so that all ranks have equally much to do."""

from __future__ import annotations

import heapq

import numpy as np

from workbench.errors import BadInput

Chunks = list[np.ndarray]  # the row numbers of one rank, one array a minibatch


def balanced_shares(tokens: np.ndarray, ranks: int) -> list[np.ndarray]:
    """For each rank its row numbers, ascending: as many as `np.array_split` gives it, with nearly equal sums of tokens.

    tokens: of each row, [rows], at least `ranks` of them.

    Longest first (Graham 1969, https://doi.org/10.1137/0117039), with counts given: from the longest row on, each goes
    to the rank with the fewest tokens that has room. On skewed lengths this came out closer than Karmarkar and Karp's
    differencing in its form for equal counts, which has to spread the longest rows over all ranks.
    """
    room = [len(part) for part in np.array_split(tokens, ranks)]
    shares: list[list[int]] = [[] for _ in room]
    open_ranks = [(0, rank) for rank in range(ranks)]
    for row in np.argsort(-tokens, kind="stable").tolist():
        held, rank = heapq.heappop(open_ranks)
        shares[rank].append(row)
        if len(shares[rank]) < room[rank]:
            heapq.heappush(open_ranks, (held + int(tokens[row]), rank))
    return [np.array(sorted(share)) for share in shares]


def minibatch_rows(rows: int, minibatches: int) -> Chunks:
    """Consecutive rows, cut into equally many minibatches."""
    if rows % minibatches:
        raise BadInput(
            f"{rows} rows in {minibatches} minibatches",
            "the minibatches of an update must be equally large",
            f"choose minibatches that divide {rows}, or another number of rows",
        )
    return np.split(np.arange(rows), minibatches)
