"""The parallel layout of one role: how many ranks along each axis, and where each rank stands."""

from __future__ import annotations

from dataclasses import dataclass

from workbench.engines.settings import at_least


@dataclass(frozen=True)
class Layout:
    """(p, t, d): pipeline, tensor and data parallel sizes (HybridFlow, section 5.1).

    Rank r = k*p*t + i*t + j stands at replica k, pipeline stage i, tensor rank j.
    """

    p: int = 1
    t: int = 1
    d: int = 1

    def __post_init__(self) -> None:
        for axis in "ptd":
            at_least(f"Layout.{axis}", getattr(self, axis), 1)

    @property
    def size(self) -> int:
        """Ranks in all."""
        return self.p * self.t * self.d

    def coordinates(self, rank: int) -> tuple[int, int, int]:
        """(replica k, pipeline stage i, tensor rank j) of a rank."""
        k, rest = divmod(rank, self.p * self.t)
        i, j = divmod(rest, self.t)
        return k, i, j

    def rank(self, k: int, i: int, j: int) -> int:
        """The rank at replica k, pipeline stage i, tensor rank j."""
        return k * self.p * self.t + i * self.t + j
