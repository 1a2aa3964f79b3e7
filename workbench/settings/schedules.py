"""Schedules of the learning rate that are functions of a user's: checked before the first step, and at each."""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable
from typing import Any

from workbench.errors import BadInput
from workbench.errors.containing import passes
from workbench.errors.plain_text import said, shown

CHECKED_STEPS = 100  # where `total_steps` does not say how many there are
MOST_CHECKED_STEPS = 10_000


def factor_of(schedule: Callable[[int], Any], steps: int) -> float:
    """The factor of the rate that a function gives for the next optimizer step, when `steps` have been taken.
    `BadInput` where it raises, or gives anything but a finite number of 0 or more."""
    called = f"Training.schedule: {getattr(schedule, '__name__', 'the function')}({steps})"
    rule = "a schedule gives a factor of the learning rate for a number of optimizer steps: finite, 0 or more"
    try:
        factor = schedule(steps)
    except BaseException as error:
        if passes(error):
            raise
        raise BadInput(
            f"{called} raised {type(error).__name__}: {said(error)}", rule, "def schedule(step): return 1.0"
        ) from error
    try:
        wrong = isinstance(factor, bool) or not isinstance(factor, numbers.Real) or not 0 <= float(factor) < math.inf
    except Exception:  # a whole number that no float holds, or an object of any class
        wrong = True
    if wrong:
        raise BadInput(f"{called} = {shown(factor)}", rule, "return a number, such as max(0.1, 0.99**step)")
    return float(factor)


def check_schedule(schedule: Callable[[int], Any], warmup_steps: int, total_steps: int | None) -> None:
    """Raise `BadInput` for a function that gives no factor in the first steps (all of `total_steps`, at most 10,000),
    or another one when it is asked again."""
    name = getattr(schedule, "__name__", "the function")
    if warmup_steps:
        raise BadInput(
            f"Training.schedule={name} with warmup_steps={warmup_steps}", "a function gives the factors of all steps",
            f"leave warmup_steps out, and give min(1, (step + 1) / {warmup_steps}) in the function",
        )  # fmt: skip
    steps = range(min(total_steps or CHECKED_STEPS, MOST_CHECKED_STEPS))
    factors = [factor_of(schedule, step) for step in steps]
    for step, factor in zip(steps, factors, strict=True):
        if (again := factor_of(schedule, step)) != factor:
            raise BadInput(
                f"Training.schedule: {name}({step}) = {factor}, and {again} when it is called again",
                "every rank asks it, and a resumed run asks it again: it must give the same factor for the same step",
                "compute the factor from the step alone",
            )
