"""Transfer protocols: how a batch is cut for the ranks of a group, and how their outputs become one result again.

HybridFlow, section 4.1, table 3. A protocol is a pair: `distribute` says which rows each rank gets, `collect` which
ranks' outputs make the result. Both see only row numbers and the layout; the tensors go from host to host.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from workbench.errors import BadInput
from workbench.placement import Layout

Chunks = list[np.ndarray]  # the row numbers of one rank, one array a minibatch


@dataclass(frozen=True, kw_only=True)
class TransferProtocol:
    """distribute(layout, minibatches) -> one list of row arrays a rank, `minibatches` being the row numbers of each
    minibatch of the batch. collect(layout) -> the ranks whose output rows are joined, or None: a list of what every
    rank returned. values_per_rank: arguments that are no batch come as lists, one entry a rank."""

    name: str
    distribute: Callable[[Layout, Chunks], list[Chunks]]
    collect: Callable[[Layout], list[int] | None]
    values_per_rank: bool = False


def minibatch_rows(rows: int, minibatches: int) -> Chunks:
    """Consecutive rows, cut into equally many minibatches."""
    if rows % minibatches:
        raise BadInput(
            f"{rows} rows in {minibatches} minibatches",
            "the minibatches of an update must be equally large",
            f"choose minibatches that divide {rows}, or another number of rows",
        )
    return np.split(np.arange(rows), minibatches)


def _everywhere(layout: Layout, minibatches: Chunks) -> list[Chunks]:
    return [minibatches for _ in range(layout.size)]


def _over_replicas(layout: Layout, minibatches: Chunks) -> list[Chunks]:
    shares = [np.array_split(rows, layout.d) for rows in minibatches]
    return [[share[layout.coordinates(rank)[0]] for share in shares] for rank in range(layout.size)]


ONE_TO_ALL = TransferProtocol(name="ONE_TO_ALL", distribute=_everywhere, collect=lambda layout: None)
DP_PROTO = TransferProtocol(
    name="DP_PROTO",
    distribute=_over_replicas,
    collect=lambda layout: [layout.rank(k, layout.p - 1, 0) for k in range(layout.d)],
)
ALL_TO_ALL = TransferProtocol(
    name="ALL_TO_ALL", distribute=_everywhere, collect=lambda layout: None, values_per_rank=True
)

PROTOCOLS = {protocol.name: protocol for protocol in (ONE_TO_ALL, DP_PROTO, ALL_TO_ALL)}
