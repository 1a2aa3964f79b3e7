"""The learning rate at named steps."""

from __future__ import annotations

import math

import pytest

from workbench.engines.training.schedule import learning_rate
from workbench.errors import BadInput
from workbench.settings.engines import Training


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
    with pytest.raises(BadInput, match="warmup_steps=5 with total_steps=3"):
        Training(learning_rate=1.0, schedule="linear", warmup_steps=5, total_steps=3)
    whole = Training(learning_rate=1.0, schedule="linear", warmup_steps=3, total_steps=3)
    assert [learning_rate(whole, steps) for steps in (0, 2, 3)] == [pytest.approx(1 / 3), 1.0, 1.0]
