"""Dynamic loss scaling, so that small gradients do not vanish in fp16 (Micikevicius et al. 2018, arXiv:1710.03740)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

FIRST, LEAST, MOST = 2.0**16, 1.0, 2.0**24
GROWTH_STEPS = 2000  # as in torch.amp.GradScaler


@dataclass(kw_only=True)
class LossScale:
    """What losses are multiplied by before the backward pass, and gradients divided by after it.

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
