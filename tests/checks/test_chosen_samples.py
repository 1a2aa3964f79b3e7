from __future__ import annotations

import itertools
from collections import Counter

import numpy as np
import pytest

from workbench.checks import evaluation
from workbench.checks.evaluation import best_of_k, majority_at_k


@pytest.mark.parametrize("k", [1, 2, 3, 5])
def test_the_best_of_k_is_the_mean_over_all_subsets(k: int) -> None:
    draws = np.random.default_rng(k)
    scores, rewards = draws.integers(0, 3, 5).tolist(), draws.random(5).tolist()  # with ties
    expected = []
    for subset in itertools.combinations(range(5), k):
        top = max(scores[i] for i in subset)
        best = [rewards[i] for i in subset if scores[i] == top]
        expected.append(sum(best) / len(best))
    assert best_of_k(scores, rewards, k) == pytest.approx(np.mean(expected))


def test_a_selector_that_is_the_reward_gives_the_maximum_and_one_without_a_view_the_mean() -> None:
    rewards = [0.1, 0.9, 0.4, 0.3]
    assert best_of_k(rewards, rewards, 4) == pytest.approx(0.9)
    assert best_of_k([1.0] * 4, rewards, 3) == pytest.approx(np.mean(rewards))
    assert best_of_k([-x for x in rewards], rewards, 4) == pytest.approx(0.1)


@pytest.mark.parametrize(("k", "expected"), [(1, 2 / 5), (5, 0.5)])
def test_votes_by_hand(k: int, expected: float) -> None:
    """Two votes for 7, which is right, two for 8, and one response without an answer."""
    assert majority_at_k(["7", "8", None, "7", "8"], [1, 0, 0, 1, 0], k) == pytest.approx(expected)


def test_the_majority_is_the_mean_over_all_subsets() -> None:
    answers, passed = [1, 2, 2, 3, 1, 1, None, 2], [1, 0, 0, 0, 1, 1, 0, 0]
    for k in (2, 3, 6):
        found = []
        for subset in itertools.combinations(range(8), k):
            votes = Counter(answers[i] for i in subset if answers[i] is not None)
            most = [one for one, count in votes.items() if count == max(votes.values())]
            found.append(most.count(1) / len(most) if most else 0.0)
        assert majority_at_k(answers, passed, k) == pytest.approx(np.mean(found))


def test_of_many_subsets_some_are_drawn_by_the_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    draws = np.random.default_rng(0)
    answers = draws.integers(0, 4, 16).tolist()
    passed = [int(one == 1) for one in answers]
    sampled = majority_at_k(answers, passed, 8)
    assert sampled == majority_at_k(answers, passed, 8)
    monkeypatch.setattr(evaluation, "MOST_SUBSETS", 13_000)
    assert sampled == pytest.approx(majority_at_k(answers, passed, 8), abs=4 * 0.5 / 2000**0.5)


def test_where_nobody_answers_nothing_passes() -> None:
    assert majority_at_k([None, None], [0, 0], 2) == 0.0
