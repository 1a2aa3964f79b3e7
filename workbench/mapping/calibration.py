"""The constants of the cost model from what calls really took: least squares of relative errors, none below zero."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields

import numpy as np

from workbench.errors import BadInput
from workbench.mapping.costs import Constants, Terms

SWEEPS = 500
NAMES = tuple(field.name for field in fields(Terms))


@dataclass(frozen=True)
class Sample:
    """Something that was measured: its terms, its seconds."""

    terms: Terms
    seconds: float
    name: str = ""


def fit(samples: Sequence[Sample], start: Constants | None = None, *, pull: float = 1e-3) -> Constants:
    """Constants c >= 0 of least  sum over samples of (terms . c / seconds - 1)^2 + pull * sum of (c / start - 1)^2.

    Relative errors, so that a short call counts as much as a long one. pull: how strongly constants stay near those of
    `start`, which alone decide where no sample has a term. The sum is convex: coordinates are descended one after
    another, and those that no bound holds are solved for, until nothing changes. Whether what was found is plausible,
    the caller judges. Raises `BadInput` without a sample, or for one that took no time.
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
    found = np.ones(len(NAMES))
    for _ in range(SWEEPS):
        before = found.copy()
        for n in range(len(NAMES)):
            found[n] = max(0.0, found[n] + (aim[n] - gram[n] @ found) / gram[n, n])
        free = found > 0  # those that no bound holds are where the gradient is 0: solved for at once
        exact = found.copy()
        exact[free] = np.linalg.solve(gram[np.ix_(free, free)], aim[free])
        if (exact >= 0).all():
            found = exact
        if np.abs(found - before).max() < 1e-12 * max(1.0, np.abs(found).max()):
            break
    return Constants(*(float(value) for value in found * scale))


def spread(samples: Mapping[tuple[str, int, str], Sample], start: Constants) -> float:
    """The relative error to expect of the prediction of an iteration. samples: by placement, iteration and call.

    Each placement's iterations are predicted by constants that are fitted to the samples of the others: the root mean
    square of log(predicted / measured). With one placement there are no others, and it is that of single calls, by
    constants that are fitted to all of them.
    """
    placements = dict.fromkeys(placement for placement, _, _ in samples)
    errors: list[float] = []
    for left_out in placements if len(placements) > 1 else ():
        constants = fit([sample for key, sample in samples.items() if key[0] != left_out], start)
        sums: dict[int, tuple[float, float]] = {}
        for (placement, iteration, _), sample in samples.items():
            if placement == left_out:
                predicted, measured = sums.get(iteration, (0.0, 0.0))
                sums[iteration] = predicted + constants.seconds(sample.terms), measured + sample.seconds
        errors += [math.log(predicted / measured) for predicted, measured in sums.values()]
    if not errors:
        constants = fit(list(samples.values()), start)
        errors = [math.log(constants.seconds(one.terms) / one.seconds) for one in samples.values()]
    return math.sqrt(sum(error * error for error in errors) / len(errors))
