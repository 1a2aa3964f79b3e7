"""The learning rate at named steps."""

from __future__ import annotations

import math
import random
from typing import Any

import numpy as np
import pytest

from tests.expected import expect_error
from workbench.engines.training.steps import learning_rate
from workbench.errors import BadInput
from workbench.settings.training import Training


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        ("constant", {0: 0.25, 1: 0.5, 3: 1.0, 4: 1.0, 8: 1.0, 100: 1.0}),
        ("linear", {0: 0.25, 3: 1.0, 4: 1.0, 6: 0.75, 8: 0.5, 11: 0.125, 12: 0.0, 100: 0.0}),
        ("cosine", {0: 0.25, 3: 1.0, 4: 1.0, 6: (1 + math.sqrt(0.5)) / 2, 8: 0.5, 12: 0.0, 100: 0.0}),
    ],
)
def test_rates(schedule: str, expected: dict[int, float]) -> None:
    settings = Training(learning_rate=2e-4, schedule=schedule, warmup_steps=4, total_steps=12)  # type: ignore[arg-type]
    for steps, factor in expected.items():
        assert learning_rate(settings, steps) == pytest.approx(2e-4 * factor, abs=1e-12)


def test_without_warmup_the_first_step_has_the_full_rate() -> None:
    assert learning_rate(Training(learning_rate=1e-3, schedule="linear", total_steps=10), 0) == 1e-3


def test_warmup_longer_than_the_run() -> None:
    with expect_error(BadInput, value="warmup_steps=5 with total_steps=3"):
        Training(learning_rate=1.0, schedule="linear", warmup_steps=5, total_steps=3)
    whole = Training(learning_rate=1.0, schedule="linear", warmup_steps=3, total_steps=3)
    assert [learning_rate(whole, steps) for steps in (0, 2, 3)] == [pytest.approx(1 / 3), 1.0, 1.0]


def halves(step: int) -> float:
    return 0.5**step


def test_a_function_gives_the_factors() -> None:
    settings = Training(learning_rate=2e-4, schedule=halves)
    assert [learning_rate(settings, steps) for steps in (0, 1, 3)] == [2e-4, 1e-4, 2.5e-5]
    assert learning_rate(Training(learning_rate=1.0, schedule=lambda step: np.float32(0.25)), 7) == 0.25


def test_a_function_that_fails_late_is_refused_before_its_step() -> None:
    settings = Training(learning_rate=1.0, schedule=lambda step: 1.0 if step < 200 else -1.0)
    assert learning_rate(settings, 199) == 1.0
    with expect_error(BadInput, value=r"\(200\) = -1\.0"):
        learning_rate(settings, 200)


draws = random.Random(3)
WRONG: dict[str, tuple[Any, str]] = {
    "nan": (lambda step: math.nan, r"<lambda>\(0\) = nan.*finite, 0 or more"),
    "negative at the end": (lambda step: 1 - step / 40, r"<lambda>\(41\) = -0\.02"),
    "infinite": (lambda step: math.inf, r"= inf"),
    "text": (lambda step: "1", r"= '1'"),
    "a truth": (lambda step: True, r"= True"),
    "nothing": (lambda step: None, r"= None"),
    "another argument": (lambda: 1.0, r"raised TypeError"),
    "raises": (lambda step: 1 / step, r"<lambda>\(0\) raised ZeroDivisionError"),
    "random": (lambda step: draws.random(), r"when it is called again.*same factor for the same step"),
    "no name of one": ("cosin", r"Training.schedule='cosin'.*'cosine', or a function"),
    "a number": (0.5, r"Training.schedule=0\.5.*or a function"),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_functions_are_refused_when_they_are_given(case: str) -> None:
    schedule, match = WRONG[case]
    with pytest.raises(BadInput, match=match):
        Training(schedule=schedule, total_steps=50)


def test_a_function_has_no_warmup() -> None:
    with expect_error(BadInput, value="schedule=halves with warmup_steps=4", remedy=r"min\(1, \(step \+ 1\) / 4\)"):
        Training(schedule=halves, warmup_steps=4)
