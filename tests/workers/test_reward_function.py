from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from workbench.errors import RewardError
from workbench.workers.reward_function import Score, score_rows


def run(function: Callable[..., Any], n: int = 3, concurrency: int = 2, timeout_s: float = 5.0) -> list[Score]:
    return score_rows(
        function,
        [{"prompt": f"p{i}", "response": "r" * i} for i in range(n)],
        [i + 1 for i in range(n)],
        concurrency=concurrency,
        timeout_s=timeout_s,
        where="rank 1 of pool shared",
        row_numbers=[10 + i for i in range(n)],
        progress=lambda done, total, tokens: None,
    )


def test_scores_come_in_row_order_however_they_finish() -> None:
    def slow_first(prompt: str, response: str) -> float:
        time.sleep(0.1 if prompt == "p0" else 0)
        return len(response)

    assert run(slow_first) == [0.0, 1.0, 2.0]


def test_token_scores_and_coroutines() -> None:
    async def score(prompt: str, response: str) -> list[float]:
        await asyncio.sleep(0)
        return [1.0] * (len(response) + 1)

    assert run(score) == [[1.0], [1.0, 1.0], [1.0, 1.0, 1.0]]


def test_calls_run_at_the_same_time() -> None:
    meeting = threading.Barrier(3, timeout=5)

    def meet(prompt: str, response: str) -> int:
        return meeting.wait() * 0

    assert run(meet, concurrency=3) == [0.0, 0.0, 0.0]


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (float("nan"), "returned nan"),
        (None, "returned None"),
        ("1.0", "returned '1.0'"),
        ([1.0, 2.0, 3.0], "returned 3 numbers for a response of 2 tokens"),
        ([1.0, float("inf")], "returned inf"),
    ],
)
def test_a_wrong_value_names_prompt_row_and_rank(value: Any, message: str) -> None:
    with pytest.raises(RewardError, match=message) as caught:
        run(lambda prompt, response: value if prompt == "p1" else 0.0)
    assert "row 11 on rank 1 of pool shared, prompt 'p1'" in str(caught.value)


def test_an_exception_names_prompt_row_and_rank() -> None:
    def broken(prompt: str, response: str) -> float:
        return 1 / len(prompt) if prompt != "p2" else 1 / 0

    with pytest.raises(RewardError, match=r"raised ZeroDivisionError: division by zero for row 12 .* 'p2'"):
        run(broken)


def test_a_call_that_hangs_is_abandoned() -> None:
    begun_s = time.monotonic()
    with pytest.raises(RewardError, match=r"took more than 0.2 s for row 10"):
        run(lambda prompt, response: time.sleep(3) if prompt == "p0" else 0.0, timeout_s=0.2)
    assert time.monotonic() - begun_s < 2
