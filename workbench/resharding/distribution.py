"""Which rank holds which elements of each weight: a layout on ranks, with or without shards over its replicas."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Literal

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
