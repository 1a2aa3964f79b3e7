"""Sketches of gradients: a few numbers per weight, enough to compare gradients, and small enough to send."""

from __future__ import annotations

import math
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from workbench.engines.training import Pass, StepReport, TrainingEngine

BUCKETS = 257  # a prime, so that the elements of a weight's column spread over buckets
CHUNK = BUCKETS << 12  # elements at a time: 4 MB of signs


@dataclass(frozen=True)
class Sketch:
    """A count sketch of one weight's gradient. norm: the gradient's norm. buckets: sums of the gradient's numbers, each
    with a fixed random sign; number n is in bucket n mod BUCKETS.

    The inner product of the buckets of two gradients of one weight is an unbiased estimate of the gradients' inner
    product (Charikar, Chen and Farach-Colton 2002, https://doi.org/10.1007/3-540-45465-9_59).
    """

    norm: float
    buckets: tuple[float, ...]

    @classmethod
    def of(cls, name: str, gradient: Tensor) -> Sketch:
        """Return the sketch of a weight's gradient; its signs depend on the name alone."""
        flat = gradient.detach().flatten().to("cpu", torch.float32)
        draws = torch.Generator().manual_seed(zlib.crc32(name.encode()))
        sums = torch.zeros(BUCKETS, dtype=torch.float64)
        for chunk in flat.split(CHUNK):
            signs = 2 * torch.randint(0, 2, (len(chunk),), generator=draws, dtype=torch.float32) - 1
            whole = torch.nn.functional.pad(signs * chunk, (0, -len(chunk) % BUCKETS))
            sums += whole.view(-1, BUCKETS).double().sum(0)
        return cls(float(flat.double().norm()), tuple(sums.tolist()))

    def inner(self, other: Sketch) -> float:
        """Return an estimate of the inner product of two gradients of one weight."""
        return sum(a * b for a, b in zip(self.buckets, other.buckets, strict=True))

    def distance(self, other: Sketch) -> float:
        """Return an estimate of the norm of the difference of two gradients of one weight."""
        return float(sum((a - b) ** 2 for a, b in zip(self.buckets, other.buckets, strict=True)) ** 0.5)


@dataclass(frozen=True)
class Minibatch:
    """share: this rank's share of the minibatch's loss; all ranks' shares add up to it. sketches: by weight."""

    share: float
    sketches: Mapping[str, Sketch]

    @property
    def norm(self) -> float:
        return float(sum(sketch.norm**2 for sketch in self.sketches.values()) ** 0.5)


@dataclass(frozen=True, kw_only=True)
class GradientReport:
    """One rank's metrics and minibatches of an update that took no step.

    counts: False on a rank that has the same rows as another rank, whose metrics and shares of the loss count.
    """

    counts: bool
    metrics: Mapping[str, float]
    minibatches: tuple[Minibatch, ...]


def cosine(one: Sequence[GradientReport], two: Sequence[GradientReport]) -> float:
    """Estimate the cosine between the gradients of two updates, over all weights and minibatches, from rank 0's
    sketches; NaN if a gradient is 0."""

    def inner(first: GradientReport, second: GradientReport) -> float:
        pairs = zip(first.minibatches, second.minibatches, strict=True)
        return sum(
            sketch.inner(there.sketches[name]) for here, there in pairs for name, sketch in here.sketches.items()
        )

    size = math.sqrt(inner(one[0], one[0]) * inner(two[0], two[0]))
    return inner(one[0], two[0]) / size if size else math.nan


class GradientProbe:
    """Stands in for a training engine while an update runs: it sketches the gradient instead of taking a step.

    counts: see `GradientReport`.
    """

    def __init__(self, engine: TrainingEngine, counts: bool) -> None:
        self._engine, self._counts = engine, counts
        self.minibatches: list[Minibatch] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def step(self, passes: Sequence[Pass], rate_scale: float = 1.0) -> StepReport:
        """Do what `TrainingEngine.step` does, without the step."""
        shares: dict[int, float] = {}  # by pass: in fp16 the engine may repeat passes with a smaller loss scale

        def noted(number: int, micro: Pass) -> Pass:
            def loss(output: Any) -> Tensor:
                value = micro.loss(output)
                shares[number] = float(value.detach()) * self._counts
                return value

            return replace(micro, loss=loss)

        gradients = self._engine.gradients([noted(number, micro) for number, micro in enumerate(passes)])
        sketches = {name: Sketch.of(name, gradient) for name, gradient in gradients}
        minibatch = Minibatch(sum(shares.values()), sketches)
        self.minibatches.append(minibatch)
        return StepReport(grad_norm=minibatch.norm, learning_rate=0.0, steps=self._engine.steps)
