"""What one gets that samples a prompt k times and keeps one response: by a vote, or by a score. Pure, of one prompt."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Hashable, Iterable, Sequence

import numpy as np

MOST_SUBSETS = 2000


def majority_at_k(answers: Sequence[Hashable], passed: Sequence[float], k: int, seed: int = 0) -> float:
    """The probability that the answer which most of k samples give passes: the mean over the k-subsets of the samples.

    answers [samples]: what each response answers, None where it answers nothing: that is no vote. passed [samples]: 1
    or 0. Of several answers with equally many votes each is taken equally often; where nobody votes nothing passes. Of
    more than 2,000 subsets so many are drawn, by the seed. Wang et al. 2023, https://arxiv.org/abs/2203.11171.
    """
    right: dict[Hashable, list[float]] = {}
    for answer, one in zip(answers, passed, strict=True):
        right.setdefault(answer, []).append(float(one))
    rates = {answer: sum(found) / len(found) for answer, found in right.items()}
    found = [_voted([answers[i] for i in subset], rates) for subset in _subsets(len(answers), k, seed)]
    return sum(found) / len(found)


def _voted(answers: Iterable[Hashable], rates: dict[Hashable, float]) -> float:
    votes = Counter(answer for answer in answers if answer is not None)
    first = [answer for answer, count in votes.items() if count == max(votes.values())]
    return sum(rates[answer] for answer in first) / len(first) if first else 0.0


def _subsets(n: int, k: int, seed: int) -> Iterable[Sequence[int]]:
    if math.comb(n, k) <= MOST_SUBSETS:
        return itertools.combinations(range(n), k)
    draws = np.random.default_rng([seed, n, k])
    return [draws.permutation(n)[:k].tolist() for _ in range(MOST_SUBSETS)]


def best_of_k(scores: Sequence[float], rewards: Sequence[float], k: int) -> float:
    """The expected reward of the sample with the highest score among k: the mean over the k-subsets of the n samples,

        sum over the values s of the scores  (C(m_s, k) - C(b_s, k)) / C(n, k)  mean reward of the samples with score s

    with m_s samples of a score of at most s and b_s below it; of equal scores each is taken equally often. scores,
    rewards [samples]: of the selector, and of what counts. Nakano et al. 2021, https://arxiv.org/abs/2112.09332,
    appendix I.
    """
    order = sorted(range(len(scores)), key=scores.__getitem__)
    expected, below = 0.0, 0
    for _, group in itertools.groupby(order, key=scores.__getitem__):
        members = list(group)
        up_to = below + len(members)
        share = (math.comb(up_to, k) - math.comb(below, k)) / math.comb(len(scores), k)
        expected += share * sum(rewards[i] for i in members) / len(members)
        below = up_to
    return expected
