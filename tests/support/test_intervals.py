from __future__ import annotations

import math

import mpmath
import numpy as np
import pytest

from workbench.support.intervals import clustered_half_width, student_quantile, wilson_bounds


def test_quantiles_of_student_s_distribution() -> None:
    for probability in [0.6, 0.9, 0.975, 0.999]:
        for degrees in [1, 2, 3, 4, 7, 10, 31, 200, 1023]:
            t = student_quantile(probability, degrees)
            x = mpmath.mpf(degrees) / (degrees + mpmath.mpf(t) ** 2)
            below = 1 - mpmath.betainc(mpmath.mpf(degrees) / 2, 0.5, 0, x, regularized=True) / 2
            assert float(below) == pytest.approx(probability, abs=1e-12)


def test_of_clusters_of_one_size_it_is_the_interval_of_their_means() -> None:
    means = np.array([0.1, 0.5, 0.2, 0.9])
    expected = 3.182446305284263 * means.std(ddof=1) / 2  # t of 3 degrees of freedom, from printed tables
    assert clustered_half_width((means * 3).tolist(), [3] * 4) == pytest.approx(expected)
    single = np.array([1.0, 0.0, 0.0, 1.0, 1.0])
    alone = clustered_half_width(single.tolist(), [1] * 5)
    assert alone == pytest.approx(2.7764451051977987 * single.std(ddof=1) / math.sqrt(5))


def test_it_covers_the_mean_as_often_as_it_says() -> None:
    """Clusters of random sizes and a shared part each: the interval that takes samples as independent covers less."""
    draws, covered, naive, trials = np.random.default_rng(0), 0, 0, 2000
    for _ in range(trials):
        sizes = draws.integers(1, 9, 12)
        parts = [draws.normal() + draws.normal(size=n) for n in sizes]
        scores = np.concatenate(parts)
        half = clustered_half_width([float(p.sum()) for p in parts], sizes.tolist())
        covered += abs(scores.mean()) <= half
        naive += abs(scores.mean()) <= 1.96 * scores.std(ddof=1) / math.sqrt(len(scores))
    assert 0.92 <= covered / trials <= 0.97 and naive / trials < 0.8


def test_one_cluster_says_nothing_of_others() -> None:
    assert math.isnan(clustered_half_width([3.0], [4]))
    assert math.isnan(clustered_half_width([3.0, 0.0], [4, 0]))  # a prompt all of whose responses failed


@pytest.mark.parametrize(("rate", "trials"), [(0.5, 20), (0.9, 50), (0.97, 100), (0.65, 300)])
def test_the_interval_covers_the_true_rate_about_19_times_in_20(rate: float, trials: int) -> None:
    """Exactly, by summing the binomial distribution over the counts whose interval holds the rate."""
    covered = 0.0
    for k in range(trials + 1):
        low, high = wilson_bounds(k, trials)
        assert 0 <= low < k / trials + 1e-12 and k / trials - 1e-12 < high <= 1
        covered += math.comb(trials, k) * rate**k * (1 - rate) ** (trials - k) * (low <= rate <= high)
    assert 0.92 < covered < 0.98


def test_the_interval_of_a_known_case() -> None:
    """Newcombe 1998, table I, case (a): 81 of 263 by Wilson's score method without continuity correction."""
    assert wilson_bounds(81, 263) == pytest.approx((0.2553, 0.3662), abs=5e-5)
