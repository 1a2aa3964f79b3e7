from __future__ import annotations

import math
from typing import Any

import numpy as np
import pandas as pd
import pytest

from tests.expected import expect_error
from workbench.checks.compare_evaluations import Evaluation, compare_evaluations, fewest_equal, interval, more_prompts
from workbench.errors import BadInput


def evaluation(
    rewards: Any, *, name: str = "sums", seed: int = 0, first: int = 0, valid: Any = None, conditions: Any = None
) -> Evaluation:
    """Of rewards [prompts, samples], which pass from 1 on."""
    rewards = np.asarray(rewards, dtype=float)
    prompts, samples = rewards.shape
    rows = pd.DataFrame(
        {
            "data": name,
            "prompt_index": np.repeat(np.arange(first, first + prompts), samples),
            "prompt": [f"{n}?" for n in range(first, first + prompts) for _ in range(samples)],
            "sample": np.tile(np.arange(samples), prompts),
            "response": [f"<r{i}>" for i in range(rewards.size)],
            "reward": rewards.ravel(),
            "passed": rewards.ravel() >= 1,
            "valid": True if valid is None else np.asarray(valid, dtype=bool).ravel(),
        }
    )
    table = pd.DataFrame({"prompts": [prompts]}, index=[name])
    return Evaluation.of(table, rows, seed=seed, threshold=1.0, conditions=conditions)


def test_the_difference_is_of_prompts_that_both_have_and_responses_that_are_valid() -> None:
    a = evaluation([[0.0, 1.0], [1.0, 1.0], [0.0, 0.0]], valid=[[1, 0], [1, 1], [1, 1]])
    b = evaluation([[1.0], [1.0], [0.5]], first=1)
    row = compare_evaluations(a, b).df.loc["sums"]
    assert row["prompts"] == 2 and row["left_out"] == 2
    said = "sums: left out are 1 responses of a and 0 of b whose reward failed, and 2 prompts that only one of them has"
    assert said in repr(compare_evaluations(a, b)) and "left out" not in repr(compare_evaluations(b, b))
    assert (row["mean_a"], row["mean_b"], row["difference"]) == (0.5, 1.0, 0.5)
    passed = compare_evaluations(a, b, of="passed").df.loc["sums"]
    assert passed["difference"] == 0.5


def test_the_interval_is_that_of_its_definition() -> None:
    low, high = interval(np.array([0.0, 1.0]))
    assert (low, high) == pytest.approx((0.5 - 12.7062 / 2, 0.5 + 12.7062 / 2), abs=1e-4)  # t_1 = 12.7062, s = 1/sqrt 2
    many = np.random.default_rng(0).normal(size=400)
    low, high = interval(many)
    half = 1.959964 * many.std() / 20  # the central limit
    assert (low, high) == pytest.approx((many.mean() - half, many.mean() + half), abs=0.002)
    assert all(map(math.isnan, interval(np.array([1.0]))))


@pytest.mark.parametrize("prompts", [2, 4, 8, 16])
def test_the_interval_covers_the_difference_as_often_as_it_says(prompts: int) -> None:
    """On few prompts too: of normal differences as often as it says; of those of passes, of one sample and of four,
    not much more rarely."""
    draws, count = np.random.default_rng([1, prompts]), 4000
    passes = [
        draws.binomial(samples, 0.5, (count, prompts)) / samples
        - draws.binomial(samples, 0.5, (count, prompts)) / samples
        for samples in (1, 4)
    ]
    signs = draws.choice([-1.0, 1.0], (count, prompts))
    normal, *others = (
        np.mean([not low <= 0.0 <= high for low, high in map(interval, values)])
        for values in (draws.normal(size=(count, prompts)), signs, *passes)
    )
    assert normal == pytest.approx(0.05, abs=0.012)  # 3.5 standard errors
    assert max(others) < 0.085


@pytest.mark.parametrize("prompts", [2, 5, 6])
def test_few_prompts_that_all_differ_by_the_same_decide_nothing(prompts: int) -> None:
    worse, better = evaluation(np.full((prompts, 1), 0.3)), evaluation(np.full((prompts, 1), 0.4))
    row = compare_evaluations(worse, better).df.loc["sums"]
    assert row["decided"] == (prompts == 6) and row["more_prompts"] == 6 - prompts
    unequal = compare_evaluations(evaluation([[0.1], [0.3]]), evaluation([[0.2], [0.4]])).df.loc["sums"]
    assert unequal["low"] == -math.inf  # equal but for rounding


def test_how_many_equal_differences_decide_depends_on_the_level() -> None:
    assert [fewest_equal(level) for level in (0.5, 0.95, 0.99, 1 - 0.05 / 30)] == [2, 6, 8, 11]
    assert interval(np.full(7, 0.1), 0.99) == (-math.inf, math.inf)
    assert interval(np.full(8, 0.1), 0.99) == pytest.approx((0.1, 0.1))


def test_so_many_prompts_decide_it_with_the_probability_that_is_said() -> None:
    pilot = np.where(np.arange(40) % 4 == 0, 1.0, 0.0) - np.where(np.arange(40) % 5 == 1, 1.0, 0.0)
    assert pilot.mean() == pytest.approx(0.05)
    needed = len(pilot) + more_prompts(pilot)
    assert needed == math.ceil((2.801585 * pilot.std(ddof=1) / 0.05) ** 2)
    draws, decided = np.random.default_rng(2), 0
    for _ in range(200):
        again = draws.choice(pilot, int(needed))
        decided += again.mean() - 1.959964 * again.std(ddof=1) / len(again) ** 0.5 > 0
    assert 0.7 <= decided / 200 <= 0.9
    assert more_prompts(np.array([1.0, -1.0])) == math.inf and math.isnan(more_prompts(np.array([1.0])))


def test_what_it_says() -> None:
    draws = np.random.default_rng(3)
    a = draws.integers(0, 2, (50, 2))
    better = compare_evaluations(evaluation(a), evaluation(np.maximum(a, draws.integers(0, 2, a.shape))))
    assert repr(better).startswith("sums: b - a = +0.") and "b is better" in repr(better)
    assert better.df.loc["sums", "decided"] and better.df.loc["sums", "more_prompts"] == 0
    (drawn,) = better.figure()["data"]
    row = better.df.loc["sums"]
    assert (drawn["name"], drawn["y"]) == ("decided", [row["difference"]])
    assert drawn["error_y"]["array"] == [pytest.approx(row["high"] - row["difference"])]
    other = a.copy()
    other[0] = 1 - other[0]
    other[1:3] = 1
    unclear = compare_evaluations(evaluation(a), evaluation(other, seed=1))
    assert "not decided; about" in repr(unclear) and "seed is 0 in a, 1 in b" in unclear._repr_html_()
    assert "not decided" in repr(compare_evaluations(evaluation(a), evaluation(a)))
    assert "a is better" in repr(compare_evaluations(evaluation(np.ones((30, 1))), evaluation(np.zeros((30, 1)))))


def test_prompts_that_flipped_stand_side_by_side() -> None:
    a = evaluation([[1, 1], [0, 1], [0, 0], [1, 0], [0, 1]])
    b = evaluation([[1, 1], [1, 1], [1, 1], [0, 1], [1, 0]])
    flipped = compare_evaluations(a, b).flipped
    assert flipped["prompt"].tolist() == ["2?", "1?"]  # the last two pass as often, with other samples
    assert flipped["passed_a"].tolist() == [0.0, 0.5] and flipped["passed_b"].tolist() == [1.0, 1.0]
    assert flipped["response_a"].tolist() == flipped["response_b"].tolist() == ["<r4>", "<r2>"]
    html = compare_evaluations(a, b)._repr_html_()
    assert "2 prompts flipped" in html and "&lt;r4&gt;" in html and "<r4>" not in html
    assert compare_evaluations(a, a).flipped.empty


def test_what_cannot_be_compared() -> None:
    one = evaluation([[1.0]])
    with expect_error(BadInput, value="b is a DataFrame", rule="a result of lab.evaluate"):
        compare_evaluations(one, pd.DataFrame(one))
    with expect_error(BadInput, value="no prompt in common"):
        compare_evaluations(one, evaluation([[1.0]], name="other"))
    with expect_error(BadInput, value="of='length'"):
        compare_evaluations(one, one, of="length")
    assert "nan" in repr(compare_evaluations(one, one))


def test_it_says_what_differs_beside_the_policies() -> None:
    a = evaluation([[1.0]] * 8, conditions={"reward": "right (1)", "sampling/temperature": 1.0})
    b = evaluation([[0.0]] * 8, conditions={"reward": "right (2)", "sampling/temperature": 0.7})
    found = compare_evaluations(a, b)
    assert found.differs == {"reward": ("right (1)", "right (2)"), "sampling/temperature": (1.0, 0.7)}
    assert "not only the policies differ: sampling/temperature is 1.0 in a, 0.7 in b" in repr(found)
    assert not compare_evaluations(a, a).differs and "policies differ" not in repr(compare_evaluations(a, a))


def test_a_bootstrap_over_few_prompts_would_say_too_much() -> None:
    """Why the interval is Student's t."""
    draws, prompts, trials = np.random.default_rng(0), 8, 1000
    held = np.zeros(2)
    for _ in range(trials):
        rates = draws.beta(0.6, 1.2, size=prompts)
        differences = (draws.binomial(4, rates) - draws.binomial(4, rates)) / 4  # 0 on average
        low, high = interval(differences)
        again = differences[draws.integers(0, prompts, (500, prompts))].mean(1)
        held += low <= 0 <= high, np.quantile(again, 0.025) <= 0 <= np.quantile(again, 0.975)
    assert held[0] / trials > 0.93 > held[1] / trials
