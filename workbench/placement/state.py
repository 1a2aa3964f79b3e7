"""The state of a role that moves with it, and which rank holds which elements. Pure."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from workbench.placement.memory import ALIGNMENT, blocks_8bit, padded, parameter_groups
from workbench.placement.role_model import RoleModel, local_sizes
from workbench.resharding import boxes
from workbench.resharding.plan import Distribution, Reshard, WeightShard
from workbench.resharding.weights import ModelWeights, Weight
from workbench.settings.layout import Layout
from workbench.settings.training import Training

MOMENTS = 2
OF_OPTIMIZERS = ("moments", "momentum", "codes", "scales")
"""The parts that exist once an optimizer has taken a step."""


@dataclass(frozen=True)
class Part:
    """Tensors of a role's state with the same distribution.

    weights: the tensors' shapes and item bytes. copies: of each tensor, for example two moments. sharding: over the
    replicas: as `Distribution.sharding`, or "flat": ZeRO-1 and 2's optimizer state, by `training`'s parameter groups.
    """

    what: str
    weights: ModelWeights
    copies: int
    sharding: str
    training: Training = field(default_factory=Training)

    def distribution(self, layout: Layout, ranks: tuple[int, ...]) -> Distribution:
        if self.sharding == "flat":
            return FlatDistribution(self.weights, layout, ranks, training=self.training)
        return Distribution(self.weights, layout, ranks, self.sharding)  # type: ignore[arg-type]

    def reshard(self, source: tuple[Layout, tuple[int, ...]], destination: tuple[Layout, tuple[int, ...]]) -> Reshard:
        """Return the plan to move one copy from a layout on ranks to another."""
        plan = FlatReshard if self.sharding == "flat" else Reshard
        return plan(self.distribution(*source), self.distribution(*destination))


def state_of(role: RoleModel) -> Iterator[Part]:
    """Yield the parts of a role's state that move with it: untrained weights, in their dtype; for trained weights, fp32
    parameters and both moments of Adam (8-bit: codes and scales) or Muon's one, also before the first step.

    ZeRO's bfloat16 weights are made from the fp32 ones. Step counts and random states, a few kilobytes, are not
    counted. Generation engines have no state: they are synced.
    """
    if len(role.frozen_weights):
        sharding = "zero" if role.engine == "zero3" else "replicas"
        yield Part("weights", _in_bytes(role.frozen_weights, role.frozen_bytes), 1, sharding)
    if not role.trained:
        return
    trained, groups = _in_bytes(role.trained_weights, 4), Training(rates=role.training.rates)
    if role.engine in ("zero1", "zero2"):
        masters = role.stored_bytes < 4
        yield Part("parameters", trained, 1, "flat" if masters else "replicas", groups)
        yield Part("moments", trained, MOMENTS, "flat", groups)
    else:
        sharding = "zero" if role.engine == "zero3" else "replicas"
        yield Part("parameters", trained, 1, sharding)
        of_muon = [role.training.is_for_muon(weight.name, len(weight.shape)) for weight in trained]
        of_8bit = [role.training.is_8bit(math.prod(weight.shape)) for weight in trained]
        others = [not (muon or small) for muon, small in zip(of_muon, of_8bit, strict=True)]
        yield Part("moments", _only(trained, others), MOMENTS, sharding)
        if any(of_8bit):
            codes = _only(_in_bytes(trained, 1), of_8bit)
            yield Part("codes", codes, MOMENTS, sharding)
            scales = (  # one number per block of elements
                replace(weight, shape=(blocks_8bit(math.prod(weight.shape)),), item_bytes=4, axis=None, parts=())
                for weight in codes
            )
            yield Part("scales", replace(codes, weights=tuple(scales)), MOMENTS, sharding)
        if any(of_muon):
            yield Part("momentum", _only(trained, of_muon), 1, sharding)


def _only(weights: ModelWeights, chosen: Sequence[bool]) -> ModelWeights:
    return replace(weights, weights=tuple(itertools.compress(weights, chosen)))


def _in_bytes(weights: ModelWeights, item_bytes: int) -> ModelWeights:
    return replace(weights, weights=tuple(replace(weight, item_bytes=item_bytes) for weight in weights))


@dataclass(frozen=True)
class FlatDistribution(Distribution):
    """Optimizer state as ZeRO-1 and 2 shard it: a rank's weights of each parameter group of `training` are concatenated
    and split into d equal parts."""

    training: Training = field(default_factory=Training)

    @cached_property
    def _starts(self) -> dict[tuple[int, str], tuple[int, int]]:
        """(rank of the layout, weight) -> the weight's offset in its concatenated group, and the length of a part."""
        found: dict[tuple[int, str], tuple[int, int]] = {}
        d = self.layout.d
        for position in range(self.layout.size):
            for run in parameter_groups(local_sizes(self.weights, self.layout, position), self.training).values():
                each = padded(sum(size for _, size in run), ALIGNMENT * d) // d
                start = 0
                for weight, size in run:
                    found[position, weight.name] = start, each
                    start += size
        return found

    def shard(self, weight: Weight, rank: int) -> WeightShard | None:
        whole = super().shard(weight, rank)
        if whole is None:
            return None
        k, _, _ = self.coordinates(rank)
        start, each = self._starts[self.ranks.index(rank), weight.name]
        size = boxes.size(whole.boxes)
        low, high = (min(max(n * each - start, 0), size) for n in (k, k + 1))
        return WeightShard(boxes.elements_of(whole.boxes, low, high), (high - low,))


class FlatReshard(Reshard):
    """A reshard in which no two weights move alike, because each begins at another offset of its group."""

    def _kind(self, weight: Weight) -> Any:
        return weight.name
