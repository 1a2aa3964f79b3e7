"""From what ranks hold and what they need to the schedule of slices, and its figures in bytes. Pure: nothing is sent.

T_r are the elements that rank r holds before (in training), G_r those that it needs after (in generation).

Which rank holds which elements of each weight: a layout on ranks, with or without shards over its replicas.
"""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import numpy as np

from workbench.errors import BadInput
from workbench.resharding import boxes
from workbench.resharding.boxes import Boxes
from workbench.resharding.weights import ModelWeights, Weight
from workbench.settings.layout import Layout

Sharding = Literal["replicas", "fsdp", "zero"]


@dataclass(frozen=True)
class WeightShard:
    """What a rank holds of a weight: a tensor of `shape`, which is the boxes row by row, one box after the other."""

    boxes: Boxes
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Distribution:
    """The weights of a model in a layout (p, t, d) on ranks.

    ranks: the layout's rank r is rank `ranks[r]` of the pool; any distinct numbers, in any order. Generation on the
    ranks of training is the layout (p_g, t_g, d*d_g) on these ranks in another order. sharding: "replicas", each of the
    d replicas is whole; "fsdp", each tensor of a replica is sharded over the d replicas in chunks of ceil(rows/d) rows,
    as FSDP2 does; "zero", in flat chunks of ceil(elements/d), as ZeRO-3 does. vocabulary_multiple: the vocabulary is
    rounded up to a multiple of it before it is cut, as generation engines do.
    """

    weights: ModelWeights
    layout: Layout
    ranks: tuple[int, ...]
    sharding: Sharding = "replicas"
    vocabulary_multiple: int = 1

    def __post_init__(self) -> None:
        self.weights.check(self.layout.p, self.layout.t)

    @cached_property
    def _positions(self) -> dict[int, int]:
        return {rank: position for position, rank in enumerate(self.ranks)}

    def __contains__(self, rank: int) -> bool:
        return rank in self._positions

    def coordinates(self, rank: int) -> tuple[int, int, int]:
        """(replica, stage, tensor rank) of a rank of the pool."""
        return self.layout.coordinates(self._positions[rank])

    def replica(self, k: int) -> tuple[int, ...]:
        each = self.layout.p * self.layout.t
        return self.ranks[k * each : (k + 1) * each]

    def stages(self, weight: Weight) -> tuple[int, ...]:
        return self.weights.stages(weight, self.layout.p)

    def shard(self, weight: Weight, rank: int) -> WeightShard | None:
        """What a rank holds of a weight; None: nothing, not even an empty tensor."""
        if rank not in self:
            return None
        k, i, j = self.coordinates(rank)
        if i not in self.stages(weight):
            return None
        t, d = self.layout.t, self.layout.d
        rows, columns = weight.matrix
        cuts = weight.intervals(j, t, self.vocabulary_multiple)
        held = boxes.of((0, rows, *cut) if weight.axis == 1 else (*cut, 0, columns) for cut in cuts)
        shape = weight.local_shape(j, t, self.vocabulary_multiple)
        if self.sharding == "replicas":
            return WeightShard(held, shape)
        total = shape[0] if self.sharding == "fsdp" else boxes.size(held)
        chunk = -(-total // d)
        start, stop = min(k * chunk, total), min((k + 1) * chunk, total)
        if self.sharding == "fsdp":
            return WeightShard(boxes.rows_of(held, start, stop), (stop - start, *shape[1:]))
        return WeightShard(boxes.elements_of(held, start, stop), (stop - start,))

    def boxes(self, weight: Weight, rank: int) -> Boxes:
        shard = self.shard(weight, rank)
        return () if shard is None else shard.boxes


@dataclass(frozen=True)
class Movement:
    """A slice of one weight that one rank sends to others, to each of them directly."""

    weight: Weight
    source: int
    destinations: tuple[int, ...]
    boxes: Boxes

    @property
    def nbytes(self) -> int:
        return boxes.size(self.boxes) * self.weight.item_bytes


@dataclass(frozen=True, eq=False)
class Figures:
    """The cost of a plan; int64 arrays in bytes, one entry a rank of the plan.

    peak_parameter: the most that a rank holds at a time. kept_twice: held beside the generation weights, because
    training needs it again. matrix[source, destination]: sent from one to the other, directly.
    """

    peak_parameter: np.ndarray
    kept_twice: np.ndarray
    matrix: np.ndarray

    @property
    def received(self) -> np.ndarray:
        total: np.ndarray = self.matrix.sum(axis=0)
        return total

    @property
    def sent(self) -> np.ndarray:
        total: np.ndarray = self.matrix.sum(axis=1)
        return total


class Plan(ABC):
    """How weights get from one distribution to another. A subclass defines what each rank materialises, and its
    senders.

    source, destination: the distributions before and after, of the same weights. shares_storage: whether a rank's
    weights of before could share memory with those of after, where they are the same elements, as the paper counts
    (arXiv:2409.19256, section 5.3). Engines here keep weights of their own, which no figure of a plan has.
    """

    shares_storage = True

    def __init__(self, source: Distribution, destination: Distribution) -> None:
        self.weights = source.weights
        self.source, self.destination = source, destination
        self.ranks = tuple(sorted({*source.ranks, *destination.ranks}))
        self._movements: dict[Any, list[Movement]] = {}

    def materialised(self, weight: Weight, rank: int) -> Boxes:
        """The elements that a rank has in memory when everything has arrived; at least those that it needs."""
        return self.destination.boxes(weight, rank)

    @abstractmethod
    def senders(self, rank: int) -> Sequence[Sequence[int]]:
        """Groups of ranks that are asked for what a rank lacks: group after group, in each group the first that holds
        it."""

    @property
    def block(self) -> int:
        """Number of ranks after which the plan repeats, with nothing sent between two such blocks."""
        return len(self.ranks)

    def kept_twice(self, weight: Weight, rank: int) -> int:
        """Elements that a rank keeps beside what it needs: |T_r \\ G_r|, or |T_r| where no memory is shared."""
        shared = self.destination.boxes(weight, rank) if self.shares_storage else ()
        return boxes.size(boxes.subtract(self.source.boxes(weight, rank), shared))

    def movements(self, weight: Weight, block: int = 0) -> Iterator[Movement]:
        first = block * self.block
        for movement in self._first_block(weight):
            source, *others = (self.ranks[first + self._index[r]] for r in (movement.source, *movement.destinations))
            yield Movement(weight, source, tuple(others), movement.boxes)

    def schedule(self) -> Iterator[Movement]:
        for weight in self.weights:
            for block in range(len(self.ranks) // self.block):
                yield from self.movements(weight, block)

    def block_of(self, rank: int) -> int:
        return self._index[rank] // self.block

    @cached_property
    def _index(self) -> dict[int, int]:
        return {rank: index for index, rank in enumerate(self.ranks)}

    def _kind(self, weight: Weight) -> Any:
        """Weights of one kind move alike, such as those of the same layer in other blocks of layers."""
        alike = dataclasses.replace(weight, name="", layers=())
        return alike, self.source.stages(weight), self.destination.stages(weight)

    def _first_block(self, weight: Weight) -> list[Movement]:
        key = self._kind(weight)
        if key not in self._movements:
            self._movements[key] = self._block_movements(weight)
        return self._movements[key]

    def _block_movements(self, weight: Weight) -> list[Movement]:
        """The movements of the first block: each destination asks `senders` in turn for what it still lacks."""
        held = {rank: self.source.boxes(weight, rank) for rank in self.source.ranks}
        found: dict[tuple[int, Boxes], list[int]] = {}
        for rank in self.ranks[: self.block]:
            lacking = boxes.subtract(self.materialised(weight, rank), held.get(rank, ()))
            for group in self.senders(rank) if lacking else ():
                for sender in group:
                    if lacking and held[sender] and (moved := boxes.intersect(lacking, held[sender])):
                        found.setdefault((sender, moved), []).append(rank)
                        lacking = boxes.subtract(lacking, moved)
            if lacking:
                raise BadInput(f"{weight.name} for rank {rank}", "no rank of the source holds all of it")
        return [Movement(weight, source, tuple(ranks), moved) for (source, moved), ranks in found.items()]

    def figures(self) -> Figures:
        """Bytes of the whole plan. Only one weight of a kind, and one block of ranks, is planned."""
        kinds: dict[Any, list[Weight]] = {}
        for weight in self.weights:
            kinds.setdefault(self._kind(weight), []).append(weight)
        size, ranks = self.block, self.ranks[: self.block]
        matrix = np.zeros((size, size), dtype=np.int64)
        peak, kept = np.zeros(size, dtype=np.int64), np.zeros(size, dtype=np.int64)
        for weights in kinds.values():
            weight, each = weights[0], weights[0].item_bytes * len(weights)
            for movement in self._first_block(weight):
                receivers = np.searchsorted(ranks, movement.destinations)
                matrix[self._index[movement.source], receivers] += movement.nbytes * len(weights)
            for index, rank in enumerate(ranks):
                whole, held = self.materialised(weight, rank), self.source.boxes(weight, rank)
                peak[index] += (boxes.size(whole) + boxes.size(boxes.subtract(held, whole))) * each
                kept[index] += self.kept_twice(weight, rank) * each
        blocks = len(self.ranks) // size
        everywhere = np.kron(np.eye(blocks, dtype=np.int64), matrix)
        return Figures(np.tile(peak, blocks), np.tile(kept, blocks), everywhere)


class Reshard(Plan):
    """From any layout on any ranks to any other: every rank gets exactly what it lacks, G_r \\ T_r.

    From whole replicas a rank that trained asks its own replica first; other ranks use the replicas in turn, so that no
    single replica serves them all. Else the lowest-ranked holder sends.
    """

    def senders(self, rank: int) -> Sequence[Sequence[int]]:
        everyone = tuple(sorted(self.source.ranks))
        if self.source.sharding != "replicas" or rank not in self.destination:
            return (everyone,)
        k = self.source.coordinates(rank)[0] if rank in self.source else self.destination.coordinates(rank)[0]
        return tuple(sorted(self.source.replica(k % self.source.layout.d))), everyone
