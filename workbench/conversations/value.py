"""The value of a turn by Monte Carlo: the mean return of continuations, with its interval."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist, fmean, stdev

CONFIDENCE = 0.95


@dataclass(frozen=True, kw_only=True)
class Value:
    """The mean of n returns, and the ends of its 95 % interval: by Student's t, as returns of few continuations ask
    for. NaN of one return. Where all are equal the interval is a point: it knows only of what was seen."""

    mean: float
    low: float
    high: float
    n: int

    @classmethod
    def of(cls, returns: Sequence[float]) -> Value:
        mean = fmean(returns)
        if len(returns) < 2:
            return cls(mean=mean, low=math.nan, high=math.nan, n=len(returns))
        half = t_quantile(0.5 + CONFIDENCE / 2, len(returns) - 1) * stdev(returns) / math.sqrt(len(returns))
        return cls(mean=mean, low=mean - half, high=mean + half, n=len(returns))

    def __str__(self) -> str:
        if self.n < 2:
            return f"{self.mean:.3g} (of 1)"
        return f"{self.mean:.3g} [{self.low:.3g}, {self.high:.3g}] (of {self.n})"


def t_quantile(p: float, degrees: int) -> float:
    """The p-quantile of Student's t distribution: exact for 1 and 2 degrees of freedom, else Hill's expansion (1970,
    "Algorithm 396", Communications of the ACM 13, in the form of Abramowitz and Stegun, 26.7.5), within 0.5 % from
    p = 0.9 to 0.975."""
    if degrees == 1:
        return math.tan(math.pi * (p - 0.5))
    if degrees == 2:
        return (2 * p - 1) * math.sqrt(2 / (4 * p * (1 - p)))
    z, n = NormalDist().inv_cdf(p), degrees
    terms = (
        z,
        (z**3 + z) / (4 * n),
        (5 * z**5 + 16 * z**3 + 3 * z) / (96 * n**2),
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / (384 * n**3),
        (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / (92160 * n**4),
    )
    return sum(terms)
