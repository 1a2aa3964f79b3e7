"""The constants of the cost model from what calls really took: least squares of relative errors, none below zero."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np

from workbench.errors import BadInput
from workbench.mapping.costs import Constants, Terms

SWEEPS = 500
# Gradients are summed while a backward pass goes on, so "data" may take less than its links' seconds.
AT_LEAST_ONE = ("training", "inference", "memory", "tensor", "transition", "transfer")
NAMES = tuple(field.name for field in fields(Terms))


@dataclass(frozen=True)
class Sample:
    """Something that was measured: its terms, its seconds."""

    terms: Terms
    seconds: float
    name: str = ""


def fit(
    samples: Sequence[Sample], start: Constants | None = None, *, pull: float = 1e-3, peaks: bool = True
) -> Constants:
    """Constants c >= 0 of least  sum over samples of (terms . c / seconds - 1)^2 + pull * sum of (c / start - 1)^2.

    Relative errors, so that a short call counts as much as a long one. pull: how strongly constants stay near those of
    `start`, which alone decide where no sample has a term. peaks: nothing is faster than the hardware's peak rates, so
    constants of `AT_LEAST_ONE` are at least 1; where rates were measured only roughly, at least a tenth. The sum is
    convex: coordinates are descended one after another, and those that no bound holds are solved for, until nothing
    changes. Raises `BadInput` without a sample, or for one that took no time.
    """
    start = start or Constants()
    if not samples:
        raise BadInput("nothing was measured", "constants are fitted to calls that were made", "run an iteration first")
    for sample in samples:
        if not sample.seconds > 0:
            raise BadInput(f"{sample.name or 'a sample'} took {sample.seconds} s", "must be more than 0")
    scale = np.array([getattr(start, name) or 1e-9 for name in NAMES])
    terms = np.array([[getattr(sample.terms, name) for name in NAMES] for sample in samples])
    matrix = terms * scale / np.array([[sample.seconds] for sample in samples])
    gram = matrix.T @ matrix + pull * np.eye(len(NAMES))
    aim = matrix.sum(axis=0) + pull
    floors = np.array([(1.0 if peaks else 0.1) * (name in AT_LEAST_ONE) for name in NAMES]) / scale
    found = np.maximum(1.0, floors)
    for _ in range(SWEEPS):
        before = found.copy()
        for n in range(len(NAMES)):
            found[n] = max(floors[n], found[n] + (aim[n] - gram[n] @ found) / gram[n, n])
        free = found > floors  # those that no bound holds are where the gradient is 0: solved for at once
        exact = found.copy()
        exact[free] = np.linalg.solve(gram[np.ix_(free, free)], aim[free] - gram[np.ix_(free, ~free)] @ found[~free])
        if (exact >= floors).all():
            found = exact
        if np.abs(found - before).max() < 1e-12 * max(1.0, np.abs(found).max()):
            break
    return Constants(*(float(value) for value in found * scale))
