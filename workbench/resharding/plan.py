"""Plan which slices ranks send each other, from the elements they hold and need, with figures in bytes. Sends nothing.

T_r: the elements that rank r holds before (in training). G_r: the elements that it needs after (in generation).

A `Distribution` says which rank holds which elements: a layout on ranks, with or without shards over its replicas.
"""

from __future__ import annotations

import dataclasses
import math
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
    """A rank's part of a weight: a tensor of `shape` with the elements of the boxes, row by row, box after box."""

    boxes: Boxes
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Distribution:
    """The weights of a model in a layout (p, t, d) on ranks.

    ranks: the layout's rank r is rank `ranks[r]` of the pool; any distinct numbers, in any order. Generation on the
    ranks of training is the layout (p_g, t_g, d*d_g) on these ranks in another order. sharding: "replicas": each of the
    d replicas is complete; "fsdp": each tensor of a replica is sharded over the d replicas in chunks of ceil(rows/d)
    rows, as in FSDP2; "zero": in flat chunks of ceil(elements/d), as in ZeRO-3. vocabulary_multiple: the vocabulary is
    rounded up to a multiple of this number before it is split, as in generation engines.
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
        """Return (replica, stage, tensor rank) of a rank of the pool."""
        return self.layout.coordinates(self._positions[rank])

    def replica(self, k: int) -> tuple[int, ...]:
        each = self.layout.p * self.layout.t
        return self.ranks[k * each : (k + 1) * each]

    def stages(self, weight: Weight) -> tuple[int, ...]:
        return self.weights.stages(weight, self.layout.p)

    def shard(self, weight: Weight, rank: int) -> WeightShard | None:
        """Return a rank's part of a weight; None: the rank has nothing of it, not even an empty tensor."""
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
        tail = shape[1:] if self.sharding == "fsdp" else ()
        width = math.prod(tail)  # elements of a row, which stay together
        total = math.prod(shape) // max(1, width)
        chunk = -(-total // d)
        start, stop = min(k * chunk, total), min((k + 1) * chunk, total)
        return WeightShard(boxes.elements_of(held, start * width, stop * width), (stop - start, *tail))

    def boxes(self, weight: Weight, rank: int) -> Boxes:
        shard = self.shard(weight, rank)
        return () if shard is None else shard.boxes


@dataclass(frozen=True)
class Movement:
    """A slice of one weight that one rank sends to other ranks, to each of them directly."""

    weight: Weight
    source: int
    destinations: tuple[int, ...]
    boxes: Boxes

    @property
    def nbytes(self) -> int:
        return boxes.size(self.boxes) * self.weight.item_bytes


@dataclass(frozen=True, eq=False)
class Figures:
    """The cost of a plan: int64 arrays in bytes, with one entry per rank of the plan.

    peak_parameter: the most that a rank holds at a time. kept_twice: held in addition to the generation weights,
    because training needs it again. matrix[source, destination]: sent directly from source to destination.
    """

    peak_parameter: np.ndarray
    kept_twice: np.ndarray
    matrix: np.ndarray

    @property
    def received(self) -> np.ndarray:
        return self.matrix.sum(axis=0)

    @property
    def sent(self) -> np.ndarray:
        return self.matrix.sum(axis=1)


class Plan(ABC):
    """A plan to move weights from one distribution to another. A subclass defines the senders, and the elements that
    each rank materialises.

    source, destination: the distributions before and after, of the same weights. shares_storage: whether a rank's old
    and new weights could share memory for common elements, as the paper counts (arXiv:2409.19256, section 5.3). Engines
    in this project keep their own weights, which no figure of a plan includes.
    """

    shares_storage = True

    def __init__(self, source: Distribution, destination: Distribution) -> None:
        self.weights = source.weights
        self.source, self.destination = source, destination
        self.ranks = tuple(sorted({*source.ranks, *destination.ranks}))
        self._movements: dict[Any, list[Movement]] = {}

    def materialised(self, weight: Weight, rank: int) -> Boxes:
        """Return the elements in a rank's memory when everything has arrived; these include all that it needs."""
        return self.destination.boxes(weight, rank)

    @abstractmethod
    def senders(self, rank: int) -> Sequence[Sequence[int]]:
        """Return groups of ranks that may send to `rank` what it lacks: tried group after group, and in each group the
        first rank that holds the elements sends them."""

    @property
    def block(self) -> int:
        """The number of ranks after which the plan repeats; nothing is sent between two such blocks of ranks."""
        return len(self.ranks)

    def kept_twice(self, weight: Weight, rank: int) -> int:
        """Return the elements that a rank keeps in addition to G_r: |T_r \\ G_r|, or |T_r| if no memory is shared."""
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
        """Return a key that is equal for weights that move alike, for example the same module in different layers."""
        alike = dataclasses.replace(weight, name="", layers=())
        return alike, self.source.stages(weight), self.destination.stages(weight)

    def _first_block(self, weight: Weight) -> list[Movement]:
        key = self._kind(weight)
        if key not in self._movements:
            self._movements[key] = self._block_movements(weight)
        return self._movements[key]

    def _block_movements(self, weight: Weight) -> list[Movement]:
        """Return the first block's movements: each destination takes what it still lacks from `senders`, in order."""
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
                raise BadInput(f"{weight.name} for rank {rank}", "the ranks of the source do not hold all of it")
        return [Movement(weight, source, tuple(ranks), moved) for (source, moved), ranks in found.items()]

    def figures(self) -> Figures:
        """Return the bytes of the whole plan, computed from one weight of each kind and one block of ranks."""
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
    """A plan from any layout on any ranks to any other: every rank receives exactly what it lacks, G_r \\ T_r.

    If replicas are complete, a rank of the source receives from its own replica first; other ranks use the replicas in
    turn, so that no single replica serves them all. Else the lowest rank that holds the elements sends them.
    """

    def senders(self, rank: int) -> Sequence[Sequence[int]]:
        everyone = tuple(sorted(self.source.ranks))
        if self.source.sharding != "replicas" or rank not in self.destination:
            return (everyone,)
        k = self.source.coordinates(rank)[0] if rank in self.source else self.destination.coordinates(rank)[0]
        return tuple(sorted(self.source.replica(k % self.source.layout.d))), everyone
