"""Transfer protocols: how a batch is distributed to the ranks of a group, and how their outputs become one result.

HybridFlow, section 4.1, table 3. A protocol is a pair: `distribute` says which rows each rank gets, `collect` which
ranks' outputs make the result. Both see only row numbers and the layout; the tensors go from host to host.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from workbench.batches.location import Chunks
from workbench.errors import BadInput
from workbench.placement import Layout
from workbench.support.checked_calls import checked_call


@dataclass(frozen=True, kw_only=True)
class TransferProtocol:
    """How an operation's batch is distributed over a layout, and how the outputs are collected.

    distribute(layout, minibatches): returns for each rank the row numbers of its part of each minibatch. minibatches:
        the row numbers of each whole minibatch.
    collect(layout): returns the ranks whose outputs make the result.
    joins: the result is a batch of the collected ranks' output rows; else a list of the values that they returned.
    values_per_rank: arguments other than the batch are lists with one entry per rank.
    """

    name: str
    distribute: Callable[[Layout, Chunks], list[Chunks]]
    collect: Callable[[Layout], list[int]]
    joins: bool = True
    values_per_rank: bool = False

    def deal(self, layout: Layout, minibatches: Chunks, operation: str) -> list[Chunks]:
        """Return the checked result of `distribute`: for each rank, one array of row numbers per minibatch."""
        rows = sum(map(len, minibatches))
        try:
            given = self.distribute(layout, minibatches)
            dealt = [[np.asarray(chunk, dtype=np.int64) for chunk in rank] for rank in given]
        except Exception as error:  # a user's function
            raise BadInput(
                f"{operation}: {self.name}.distribute ({type(error).__name__}: {error})",
                "it must return a list for each rank, with one array of row numbers for each minibatch",
                "correct it",
            ) from error
        if len(dealt) != layout.size:
            raise BadInput(
                f"{operation}: {self.name}.distribute gave {len(dealt)} parts",
                f"layout {layout} has {layout.size} ranks",
                "return one part for each rank",
            )
        for rank, chunks in enumerate(dealt):
            if len(chunks) != len(minibatches):
                raise BadInput(
                    f"{operation}: {self.name}.distribute gave rank {rank} {len(chunks)} arrays of rows",
                    f"there are {len(minibatches)} minibatches",
                    "return one array for each minibatch",
                )
            held = np.concatenate(chunks)
            if len(wrong := held[(held < 0) | (held >= rows)]):
                raise BadInput(
                    f"{operation}: {self.name}.distribute gave rank {rank} row {wrong[0]}",
                    f"the batch has rows 0 to {rows - 1}",
                )
        return dealt

    def gather(self, layout: Layout, dealt: list[Chunks], rows: int, operation: str) -> list[int]:
        """Return the checked result of `collect`: ranks. With `joins`, they hold each row of the batch exactly once."""
        try:
            ranks = list(map(operator.index, self.collect(layout)))
        except Exception as error:  # a user's function
            raise BadInput(
                f"{operation}: {self.name}.collect ({type(error).__name__}: {error})",
                "it must return a list of ranks",
                "correct it",
            ) from error
        if not ranks or not all(0 <= rank < layout.size for rank in ranks):
            raise BadInput(
                f"{operation}: {self.name}.collect gave ranks {ranks}", f"layout {layout} has 0 to {layout.size - 1}"
            )
        if self.joins:
            held = np.concatenate([chunk for rank in ranks for chunk in dealt[rank]])
            if not (np.bincount(held, minlength=rows) == 1).all():
                raise BadInput(
                    f"{operation}: {self.name} collects {len(held)} rows of {rows} from ranks {ranks}",
                    "together the collected ranks must hold every row of the batch exactly once",
                    "change its distribute or its collect, or give joins=False",
                )
        return ranks


def split_over(part_of: Callable[[Layout, int], int], parts: Callable[[Layout], int]) -> Callable[..., list[Chunks]]:
    """Return a `distribute` that makes `parts(layout)` nearly equal parts; rank r gets part `part_of(layout, r)`."""

    def distribute(layout: Layout, minibatches: Chunks) -> list[Chunks]:
        shares = [np.array_split(rows, parts(layout)) for rows in minibatches]
        return [[share[part_of(layout, rank)] for share in shares] for rank in range(layout.size)]

    return distribute


def to_all(layout: Layout, minibatches: Chunks) -> list[Chunks]:
    """A `distribute` that gives every row to every rank."""
    return [minibatches for _ in range(layout.size)]


def all_ranks(layout: Layout) -> list[int]:
    """A `collect` that returns every rank, in order."""
    return list(range(layout.size))


def _micro_replica(layout: Layout, rank: int) -> int:
    place = layout.generation_place(rank)
    return place.replica * layout.d_g + place.micro


def _one_of_each_micro_replica(layout: Layout) -> list[int]:
    """Return the lowest rank of every generation replica: its first stage, tensor rank 0."""
    replicas = [_micro_replica(layout, rank) for rank in range(layout.size)]
    return [replicas.index(replica) for replica in range(layout.d * layout.d_g)]


_over_replicas = split_over(lambda layout, rank: layout.coordinates(rank)[0], lambda layout: layout.d)

ONE_TO_ALL = TransferProtocol(name="ONE_TO_ALL", distribute=to_all, collect=all_ranks, joins=False)
THREE_D_PROTO = TransferProtocol(
    name="3D_PROTO",
    distribute=_over_replicas,
    collect=lambda layout: [layout.rank(k, layout.p - 1, 0) for k in range(layout.d)],
)
THREE_D_ALL_MICRO_DP = TransferProtocol(
    name="3D_ALL_MICRO_DP",
    distribute=split_over(_micro_replica, lambda layout: layout.d * layout.d_g),
    collect=_one_of_each_micro_replica,
)
THREE_D_PP_ONLY = TransferProtocol(
    name="3D_PP_ONLY",
    distribute=to_all,
    collect=lambda layout: [layout.rank(0, i, 0) for i in range(layout.p)],
    joins=False,
)
DP_PROTO = TransferProtocol(
    name="DP_PROTO", distribute=split_over(lambda layout, rank: rank, lambda layout: layout.size), collect=all_ranks
)
ALL_TO_ALL = TransferProtocol(
    name="ALL_TO_ALL", distribute=to_all, collect=all_ranks, joins=False, values_per_rank=True
)

# rows as for training, and the value of every rank: for operations that inspect the ranks themselves
VALUES_OF_RANKS = TransferProtocol(name="VALUES_OF_RANKS", distribute=_over_replicas, collect=all_ranks, joins=False)

# the protocols by the paper's names
PROTOCOLS = {
    protocol.name: protocol
    for protocol in (ONE_TO_ALL, THREE_D_PROTO, THREE_D_ALL_MICRO_DP, THREE_D_PP_ONLY, DP_PROTO, ALL_TO_ALL)
}


@checked_call("wb.protocol")
def protocol(
    name: str,
    *,
    distribute: Callable[[Layout, Chunks], list[Chunks]] = to_all,
    collect: Callable[[Layout], list[int]] = all_ranks,
    joins: bool = True,
) -> TransferProtocol:
    """Add a protocol, to be named in `@register(...)`. A new protocol replaces a user's protocol of the same name.

        wb.protocol("LAST_STAGE", collect=lambda layout: [layout.size - 1])

    distribute, collect, joins: as in `TransferProtocol`; default: every rank gets every row, all outputs are collected.
    """
    if name in PAPERS:
        raise BadInput(
            f"protocol name {name!r}", f"the paper has these names: {', '.join(PAPERS)}", "choose another name"
        )
    PROTOCOLS[name] = TransferProtocol(name=name, distribute=distribute, collect=collect, joins=joins)
    return PROTOCOLS[name]


PAPERS = tuple(PROTOCOLS)
