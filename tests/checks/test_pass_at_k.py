"""pass@k against every subset, and against every outcome of a coin."""

from __future__ import annotations

from itertools import combinations, product

import pytest

from workbench.checks.evaluation import pass_at_k


def test_it_is_the_share_of_subsets_that_hold_a_pass() -> None:
    for samples in range(1, 8):
        for passed in range(samples + 1):
            outcomes = [True] * passed + [False] * (samples - passed)
            for k in range(1, samples + 1):
                subsets = list(combinations(outcomes, k))
                share = sum(map(any, subsets)) / len(subsets)
                assert pass_at_k(samples, passed, k) == pytest.approx(share, abs=1e-12)


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_it_is_unbiased_where_the_plug_in_estimate_is_not(p: float) -> None:
    samples, k = 5, 3
    expected = plugged = 0.0
    for outcome in product([0, 1], repeat=samples):
        passed = sum(outcome)
        weight = p**passed * (1 - p) ** (samples - passed)
        expected += weight * pass_at_k(samples, passed, k)
        plugged += weight * (1 - (1 - passed / samples) ** k)
    assert expected == pytest.approx(1 - (1 - p) ** k, abs=1e-12)
    assert abs(plugged - expected) > 1e-3
