"""The parallel layout of one role: the ranks along each axis, and the coordinates of each rank. Pure arithmetic."""

from __future__ import annotations

from dataclasses import field, replace
from typing import Literal, NamedTuple

import numpy as np

from workbench.errors import BadInput
from workbench.support.validation import PositiveInt, Whole, settings

Axis = Literal["pipeline", "tensor", "data"]
Numbering = Literal["training", "generation"]


class GenerationPlace(NamedTuple):
    """The coordinates of a rank in generation: training replica, pipeline stage, micro replica, tensor rank."""

    replica: int
    stage: int
    micro: int
    tensor: int


@settings(kw_only=False)
class Layout:
    """(p, t, d): pipeline, tensor and data parallel sizes (HybridFlow, section 5.1), in training and inference.

    Rank k*p*t + i*t + j is replica k, pipeline stage i, tensor rank j. In generation, the same ranks form replicas of
    p_g x t_g ranks (None: as in training), so that each training replica becomes d_g = p*t / (p_g*t_g) generation
    replicas: p_g divides p, and t_g divides t. The grouping is HybridFlow's, in which a rank's training shard lies
    inside its generation shard (section 5.3): with u = t/t_g and v = p/p_g, rank (k, i, j) has tensor rank j // u,
    stage i // v and micro replica (i % v)*u + j % u.

    numbering: "training": as above, tensor groups of training are consecutive ranks. "generation": tensor groups of
    generation are consecutive ranks, as some engines require: rank k*p*t + m*p_g*t_g + s*t_g + g is micro replica m,
    stage s and tensor rank g of generation; groups and coordinates are the same, with other rank numbers.
    """

    p: PositiveInt = 1
    t: PositiveInt = 1
    d: PositiveInt = 1
    p_g: Whole | None = None
    t_g: Whole | None = None
    numbering: Numbering = field(default="training", kw_only=True)

    def __post_init__(self) -> None:
        for own, axis in (("p_g", "p"), ("t_g", "t")):
            size, limit = getattr(self, own), getattr(self, axis)
            if size is not None and (size < 1 or limit % size):
                raise BadInput(
                    f"Layout.{own}={size}",
                    f"must divide {axis}={limit}: a generation replica is part of a training replica",
                    f"use one of {', '.join(str(n) for n in range(1, min(limit, 128) + 1) if limit % n == 0)}",
                )

    @property
    def size(self) -> int:
        """The total number of ranks."""
        return self.p * self.t * self.d

    @property
    def d_g(self) -> int:
        """Generation replicas in one training replica (micro data parallel size)."""
        return self.p * self.t // (self._stages * self._tensors)

    @property
    def _stages(self) -> int:
        return self.p if self.p_g is None else self.p_g

    @property
    def _tensors(self) -> int:
        return self.t if self.t_g is None else self.t_g

    def generating(self, t_g: int) -> Layout:
        """Return this layout for an engine that generates in replicas of `t_g` consecutive ranks, without stages."""
        return replace(self, p_g=1, t_g=t_g, numbering="generation")

    def mesh(self) -> np.ndarray:
        """Return the rank numbers as an array [d, p, t]."""
        ranks = np.arange(self.size)
        if self.numbering == "generation":
            u, v = self.t // self._tensors, self.p // self._stages
            ranks = ranks.reshape(self.d, v, u, self._stages, self._tensors).transpose(0, 3, 1, 4, 2)
        return ranks.reshape(self.d, self.p, self.t)

    def coordinates(self, rank: int) -> tuple[int, int, int]:
        """Return (replica k, pipeline stage i, tensor rank j) of a rank; `BadInput` for a rank outside the layout."""
        if not 0 <= rank < self.size:
            raise BadInput(f"rank {rank} of {self}", f"its ranks are 0 to {self.size - 1}")
        k, rest = divmod(rank, self.p * self.t)
        if self.numbering == "training":
            return (k, *divmod(rest, self.t))
        u, v = self.t // self._tensors, self.p // self._stages
        micro, rest = divmod(rest, self._stages * self._tensors)
        stage, tensor = divmod(rest, self._tensors)
        return k, stage * v + micro // u, tensor * u + micro % u

    def rank(self, k: int, i: int, j: int) -> int:
        """Return the rank at replica k, pipeline stage i, tensor rank j."""
        for name, value, size in (("k", k, self.d), ("i", i, self.p), ("j", j, self.t)):
            if not 0 <= value < size:
                raise BadInput(f"{name}={value} in {self}", f"must lie between 0 and {size - 1}")
        return int(self.mesh()[k, i, j])

    def generation_place(self, rank: int) -> GenerationPlace:
        """Return the coordinates of a rank in generation."""
        k, i, j = self.coordinates(rank)
        u, v = self.t // self._tensors, self.p // self._stages
        return GenerationPlace(replica=k, stage=i // v, micro=(i % v) * u + j % u, tensor=j // u)

    def groups(self, axis: Axis) -> list[list[int]]:
        """Return the groups of ranks that differ along one axis only; every rank is in exactly one group."""
        mesh = np.moveaxis(self.mesh(), {"data": 0, "pipeline": 1, "tensor": 2}[axis], -1)
        return mesh.reshape(-1, mesh.shape[-1]).tolist()

    def __str__(self) -> str:
        same = self.p_g in (None, self.p) and self.t_g in (None, self.t)
        generation = "" if same else f", generating (p_g={self._stages}, t_g={self._tensors}, d_g={self.d_g})"
        return f"(p={self.p}, t={self.t}, d={self.d}{generation})"
