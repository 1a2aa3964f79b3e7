"""Gradients as a few numbers a weight: enough to tell two of them apart, and small enough to send to the controller."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from workbench.engines.training import Pass, StepReport, TrainingEngine

PROJECTIONS = 4
CHUNK = 1 << 20  # elements projected at a time: 16 MB of signs


@dataclass(frozen=True)
class Sketch:
    """norm: of one weight's gradient. projections: its inner products with fixed vectors of random signs.

    The mean square of the difference of two gradients' projections estimates the square of the norm of their difference
    (Johnson-Lindenstrauss; Achlioptas 2003, https://doi.org/10.1016/S0022-0000(03)00025-4).
    """

    norm: float
    projections: tuple[float, ...]

    @classmethod
    def of(cls, name: str, gradient: Tensor) -> Sketch:
        """The sketch of a weight's gradient; its vectors depend on the name alone."""
        flat = gradient.detach().flatten().to("cpu", torch.float32)
        signs = torch.Generator().manual_seed(zlib.crc32(name.encode()))
        sums = torch.zeros(PROJECTIONS, dtype=torch.float64)
        for chunk in flat.split(CHUNK):
            drawn = torch.randint(0, 2, (PROJECTIONS, len(chunk)), generator=signs, dtype=torch.float32)
            sums += ((2 * drawn - 1) @ chunk).double()
        return cls(float(flat.double().norm()), tuple(sums.tolist()))

    def distance(self, other: Sketch) -> float:
        """An estimate of the norm of the difference of two gradients of one weight."""
        squares = [(a - b) ** 2 for a, b in zip(self.projections, other.projections, strict=True)]
        return float((sum(squares) / len(squares)) ** 0.5)


@dataclass(frozen=True)
class Minibatch:
    """share: this rank's share of the loss; the shares of all ranks add up to it. sketches: by weight."""

    share: float
    sketches: Mapping[str, Sketch]

    @property
    def norm(self) -> float:
        return float(sum(sketch.norm**2 for sketch in self.sketches.values()) ** 0.5)


@dataclass(frozen=True, kw_only=True)
class GradientReport:
    """What one rank saw of an update that took no step: its metrics, and each minibatch.

    counts: False on a rank that sees the rows of another one, whose metrics and shares of the loss count.
    """

    counts: bool
    metrics: Mapping[str, float]
    minibatches: tuple[Minibatch, ...]


class GradientProbe:
    """Stands in for a training engine while an update runs: where a step would be taken, the gradient is sketched.

    counts: see `GradientReport`.
    """

    def __init__(self, engine: TrainingEngine, counts: bool) -> None:
        self._engine, self._counts = engine, counts
        self.minibatches: list[Minibatch] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def step(self, passes: Sequence[Pass], rate_scale: float = 1.0) -> StepReport:
        """As `TrainingEngine.step`, without the step."""
        shares: list[float] = []

        def noted(micro: Pass) -> Pass:
            def loss(output: Any) -> Tensor:
                value = micro.loss(output)
                shares.append(float(value.detach()) * self._counts)
                return value

            return replace(micro, loss=loss)

        gradients = self._engine.gradients([noted(micro) for micro in passes])
        sketches = {name: Sketch.of(name, gradient) for name, gradient in gradients}
        minibatch = Minibatch(sum(shares), sketches)
        self.minibatches.append(minibatch)
        return StepReport(grad_norm=minibatch.norm, learning_rate=0.0, steps=self._engine.steps)
