"""Confidence intervals of means over samples that come in clusters, such as the responses to one prompt. Pure."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any, TypeVar

import numpy as np

N = TypeVar("N", bound=Any)  # a number, or an array of them
DEVIATIONS = 1.959964  # standard deviations on either side that hold 95 % of a normal distribution


def clustered_half_width(totals: Sequence[float], counts: Sequence[float]) -> float:
    """Return half the width of the 95 % confidence interval of a mean over all samples, where clusters are independent
    of each other, but samples within a cluster are not.

        m = sum_g s_g / N,  N = sum_g n_g,  u_g = s_g - n_g m
        half width = t_{G-1} sqrt(G / (G - 1) sum_g u_g^2) / N

    totals, counts [clusters]: sum s_g and number n_g of the samples of each cluster; t_{G-1}: the quantile of Student's
    distribution. Liang and Zeger 1986, https://doi.org/10.1093/biomet/73.1.13, with the correction for few clusters of
    Cameron and Miller 2015, https://doi.org/10.3368/jhr.50.2.317, section VI. NaN for fewer than two clusters.
    """
    pairs = [(s, n) for s, n in zip(totals, counts, strict=True) if n]
    if len(pairs) < 2:
        return math.nan
    whole = math.fsum(n for _, n in pairs)
    mean = math.fsum(s for s, _ in pairs) / whole
    squares = math.fsum((s - n * mean) ** 2 for s, n in pairs)
    clusters = len(pairs)
    return student_quantile(0.975, clusters - 1) * math.sqrt(clusters / (clusters - 1) * squares) / whole


def wilson_bounds(successes: N, trials: N) -> tuple[N, N]:
    """Return the 95 % interval of rates (numbers or arrays) after `successes` in `trials`, at least 1.

    Wilson's score interval (1927, https://doi.org/10.1080/01621459.1927.10502953): it stays within [0, 1] and is right
    for few trials and for rates near 0 and 1.
    """
    rate, z2 = successes / trials, DEVIATIONS**2
    middle = (rate + z2 / (2 * trials)) / (1 + z2 / trials)
    half = DEVIATIONS / (1 + z2 / trials) * (rate * (1 - rate) / trials + z2 / (4 * trials**2)) ** 0.5
    return np.clip(middle - half, 0, 1), np.clip(middle + half, 0, 1)  # only rounding can leave [0, 1]


@functools.cache
def student_quantile(probability: float, degrees: int) -> float:
    """Return the t below which a share `probability`, in [0.5, 1), of Student's distribution lies; by bisection."""
    low, high = 0.0, 1.0
    while _below(high, degrees) < probability:
        low, high = high, 2 * high
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (middle, high) if _below(middle, degrees) < probability else (low, middle)
    return high


def _below(t: float, degrees: int) -> float:
    """Return Student's distribution function at t >= 0 (Abramowitz and Stegun 1964, equations 26.7.3 and 26.7.4)."""
    angle = math.atan(t / math.sqrt(degrees))
    cosine, sine = math.cos(angle), math.sin(angle)
    odd = degrees % 2
    term = cosine if odd else 1.0
    found = 0.0
    for step in range(degrees // 2):
        found += term
        term *= cosine**2 * ((2 * step + 2) / (2 * step + 3) if odd else (2 * step + 1) / (2 * step + 2))
    inside = 2 / math.pi * (angle + sine * found) if odd else sine * found
    return (1 + inside) / 2
