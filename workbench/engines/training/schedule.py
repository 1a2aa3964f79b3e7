"""The learning rate as a pure function of the number of optimizer steps taken."""

from __future__ import annotations

import math

from workbench.settings.engines import Training
from workbench.settings.training import factor_of


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
