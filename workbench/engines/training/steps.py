"""One optimizer step: its micro-batches, its learning rate, the scale of its losses in fp16, and what it did."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from workbench.settings.training import Training, factor_of

FIRST, LEAST, MOST = 2.0**16, 1.0, 2.0**24  # loss scales
GROWTH_STEPS = 2000  # as in torch.amp.GradScaler


def _nothing() -> None:
    pass


@dataclass(frozen=True, kw_only=True)
class Pass:
    """A micro-batch of an optimizer step.

    inputs: keyword arguments of the module's `forward`. loss: from its output to a scalar already divided by the
    minibatch's denominator; called where the output is, on a pipeline on the last stage. tokens: for the record. begin:
    called on every rank before its forward pass.
    """

    inputs: Mapping[str, Any]
    loss: Callable[[Any], Tensor]
    tokens: int = 0
    begin: Callable[[], None] = _nothing

    def times(self, factor: float) -> Pass:
        """The same with its loss times a factor."""
        return replace(self, loss=lambda output: self.loss(output) * factor)


@dataclass(frozen=True, kw_only=True)
class StepReport:
    """What one optimizer step did: global gradient norm before clipping, learning rate used, steps taken so far.

    skipped: the norm was not finite; weights, optimizer and step count did not change. culprit: then the first weight
    whose gradient is not finite, by transformers' names; empty where the engine does not know. loss_scale: that of this
    step, of an engine in fp16.
    """

    grad_norm: float
    learning_rate: float
    steps: int
    skipped: bool = False
    culprit: str = ""
    loss_scale: float | None = None


def learning_rate(settings: Training, steps: int) -> float:
    """The rate of the next optimizer step, when `steps` have been taken.

    Rises linearly over `warmup_steps` steps (the first step already moves), then stays, or falls to 0 at `total_steps`
    along a line or half a cosine; it is 0 from there on. A function says the factor of each step itself.
    """
    if callable(settings.schedule):
        return settings.peak_learning_rate * factor_of(settings.schedule, steps)
    if steps < settings.warmup_steps:
        return settings.peak_learning_rate * (steps + 1) / settings.warmup_steps
    if settings.schedule == "constant" or settings.total_steps is None:
        return settings.peak_learning_rate
    falling_steps = max(1, settings.total_steps - settings.warmup_steps)
    progress = min(1.0, (steps - settings.warmup_steps) / falling_steps)
    factor = 1 - progress if settings.schedule == "linear" else 0.5 * (1 + math.cos(math.pi * progress))
    return settings.peak_learning_rate * factor


@dataclass(kw_only=True)
class LossScale:
    """What losses are multiplied by before the backward pass, and gradients divided by after it, so that small ones do
    not vanish in fp16 (Micikevicius et al. 2018, arXiv:1710.03740).

    It is a power of two, so that neither rounds; halved where a gradient is not finite, and doubled after
    `growth_steps` steps in a row whose gradients were.

    good_steps: of these, so far.
    """

    scale: float = FIRST
    good_steps: int = 0
    growth_steps: int = GROWTH_STEPS

    def after_step(self, *, finite: bool) -> None:
        if not finite:
            self.scale, self.good_steps = max(LEAST, self.scale / 2), 0
            return
        self.good_steps += 1
        if self.good_steps == self.growth_steps:
            self.scale, self.good_steps = min(MOST, self.scale * 2), 0

    @property
    def state(self) -> tuple[float, int]:
        """What a checkpoint keeps of it."""
        return self.scale, self.good_steps

    def restore(self, state: tuple[float, int]) -> None:
        self.scale, self.good_steps = float(state[0]), int(state[1])


@contextmanager
def finite_gradients(scale: LossScale | None, compute: Callable[[], bool], drop: Callable[[], None]) -> Iterator[None]:
    """Inside, there are gradients, which `compute` has computed and `drop` will drop. In fp16 they are computed again
    with half the loss scale while `compute` says that they overflow; afterwards the scale is as before."""
    kept = None if scale is None else scale.state
    try:
        while not compute() and scale is not None and scale.scale > LEAST:
            drop()
            scale.scale /= 2
        yield
    finally:
        drop()
        if scale is not None and kept is not None:
            scale.restore(kept)
