from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.data.test_user_calls import run as score
from tests.expected import expect_error
from workbench.data.batched import batched
from workbench.data.reward_function import FunctionCaller, Score, score_rows
from workbench.errors import BadInput, RewardError
from workbench.support.calls.sessions import UserCalls


@pytest.fixture(scope="module", autouse=True)
def processes() -> Iterator[None]:
    yield
    CALLS.close()


CALLS = UserCalls()


run: Callable[..., list[Any]] = functools.partial(score, CALLS, timeout_s=5.0)


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


def test_calls_run_at_the_same_time(tmp_path: Path) -> None:
    def meet(prompt: str, response: str) -> int:
        (tmp_path / prompt).touch()
        while len(list(tmp_path.iterdir())) < 3:
            time.sleep(0.001)
        return 0

    assert run(meet, concurrency=3) == [0.0, 0.0, 0.0]


def test_what_a_function_keeps_stays_in_its_process_from_call_to_call_until_it_has_to_be_killed() -> None:
    seen: list[str] = []

    def count(prompt: str, response: str) -> float:
        if prompt == "hang":
            time.sleep(60)
        seen.append(prompt)
        return float(len(seen))

    assert sorted(run(count)) == [1.0, 2.0, 3.0]
    assert run(lambda prompt, response: 7.0) == [7.0] * 3
    assert sorted(run(count)) == [4.0, 5.0, 6.0]
    seen.append("a cell changed it")
    assert sorted(run(count)) == [2.0, 3.0, 4.0]
    with expect_error(RewardError, value="took more than 0.2 s"):
        run(lambda prompt, response: time.sleep(60), timeout_s=0.2)
    assert sorted(run(count)) == [2.0, 3.0, 4.0]
    assert seen == ["a cell changed it"]


@pytest.mark.parametrize(
    ("value", "score"),
    [
        (torch.tensor(0.5), 0.5),
        (torch.tensor(2, dtype=torch.int64), 2.0),
        (torch.tensor(0.5, requires_grad=True), 0.5),
        (np.float32(0.5), 0.5),
        (np.array(0.5), 0.5),
        (np.bool_(True), 1.0),
        (torch.tensor([0.5]), [0.5]),  # one axis: a number a response token, though there is one token
        (np.array([1, 2]), [1.0, 2.0]),
        (torch.tensor([0.5, 1.0], dtype=torch.bfloat16), [0.5, 1.0]),
        ((np.float64(0.5), torch.tensor(1.0)), [0.5, 1.0]),
    ],
)
def test_numbers_of_torch_and_numpy(value: Any, score: Score) -> None:
    tokens = len(score) if isinstance(score, list) else 3
    caller = FunctionCaller(calls=CALLS, concurrency=1, timeout_s=5)
    scores, failures = score_rows(
        lambda **row: value, [{}] * 2, [tokens] * 2, caller=caller, where="rank 0", row_numbers=[0, 1]
    )
    assert not failures
    assert scores == [score, score]
    assert type(scores[0]) is type(score)


def test_one_number_here_and_several_there_are_refused() -> None:
    def mixed(prompt: str, response: str) -> Any:
        return 0.25 if prompt == "p2" else [0.5] * (len(response) + 1)

    with expect_error(
        RewardError, value=r"mixed returned 0.25, but \[0.5\] for row 10, for row 12 on rank 1 .* 'p2'"
    ) as e:
        run(mixed)
    assert "scored alike" in e.value.rule


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (float("nan"), "returned nan"),
        (float("-inf"), "returned -inf"),
        (torch.tensor(float("nan")), "returned nan"),
        (np.array([1.0, float("inf")]), "returned inf"),
        (torch.zeros(2, 1), r"returned \[0.0\]"),
        (np.zeros(3), "returned 3 numbers for a response of 2 tokens"),
        (None, "returned None"),
        ({"right": 1.0, "tidy": 0.5}, r"returned \{'right'.*a function for each number"),
        ("1.0", "returned '1.0'"),
        ([1.0, 2.0, 3.0], "returned 3 numbers for a response of 2 tokens"),
        ([1.0, float("inf")], "returned inf"),
        (10**400, "too large for a float"),
        (3.5e38, "more than a column"),
    ],
)
def test_a_wrong_value_names_prompt_row_and_rank(value: Any, message: str) -> None:
    with pytest.raises(RewardError, match=message) as caught:
        run(lambda prompt, response: value if prompt == "p1" else 0.0)
    assert "row 11 on rank 1 of pool shared, prompt 'p1'" in str(caught.value)


def test_an_exception_names_prompt_row_and_rank() -> None:
    def broken(prompt: str, response: str) -> float:
        return 1 / len(prompt) if prompt != "p2" else 1 / 0

    with expect_error(RewardError, value="raised ZeroDivisionError: division by zero for row 12 .* 'p2'"):
        run(broken)


def test_coroutines_share_one_event_loop_and_one_that_hangs_is_cancelled() -> None:
    kept: dict[str, Any] = {}

    async def score(prompt: str, response: str) -> float:
        loop = asyncio.get_running_loop()
        before = kept.setdefault("loop", loop)
        if before is not loop:
            assert before.is_closed()
            return -1.0
        async with kept.setdefault("one at a time", asyncio.Semaphore(1)):  # another loop would refuse it
            await asyncio.sleep(0.01)
        return float(len(response))

    assert run(score, n=6, concurrency=4) == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]
    assert run(score) == [-1.0] * 3
    with expect_error(RewardError, value="took more than 0.1 s"):
        run(hangs, timeout_s=0.1)


async def hangs(prompt: str, response: str) -> float:
    await asyncio.sleep(60)
    return 0.0


def test_batched_without_brackets_says_that_they_are_missing() -> None:
    with expect_error(BadInput, remedy=r"above a function write @wb\.batched\(\.\.\.\), with brackets"):
        batched(len_of_all)  # type: ignore[call-arg, arg-type]


def len_of_all(prompt: list[str], response: list[str]) -> list[int]:
    return [len(one) for one in response]
