"""Runs a user's reward function over rows: several at a time, each within a time limit."""

from __future__ import annotations

import asyncio
import inspect
import math
import queue
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from torch import Tensor

from workbench.errors import RewardError

RewardFunction = Callable[..., Any]
Score = float | list[float]
ALIKE = "all rows of a batch are scored alike: one number each, or one a response token each"


def score_rows(
    function: RewardFunction,
    rows: Sequence[Mapping[str, Any]],
    response_tokens: Sequence[int],
    *,
    concurrency: int,
    timeout_s: float,
    where: str,
    row_numbers: Sequence[int],
    progress: Callable[[int, int, int], None],
) -> list[Score]:
    """`function(**row)` for each row: one number, or one number a response token. `async def` functions work too.

    Numbers may be Python's, numpy's or torch's; several are a sequence or an array of one axis, the same in all rows.
    concurrency: calls under way at once, in threads (for functions that wait on a network or a sandbox).
    timeout_s: for one call; a call past it is abandoned (Python cannot end a thread) and the stage fails.
    Raises `RewardError` naming the prompt, the row and the rank when a call raises, runs out of time, or returns
    neither a finite number nor as many finite numbers as the response has tokens; and when some rows get one number
    and others several.
    """
    work: queue.SimpleQueue[int] = queue.SimpleQueue()
    done: queue.SimpleQueue[tuple[int, Any, BaseException | None, str]] = queue.SimpleQueue()
    started_s: dict[int, float] = {}
    stop = threading.Event()
    for i in range(len(rows)):
        work.put(i)

    def serve() -> None:
        while not stop.is_set():
            try:
                i = work.get_nowait()
            except queue.Empty:
                return
            started_s[i] = time.monotonic()
            try:
                value = function(**rows[i])
                if inspect.iscoroutine(value):
                    value = asyncio.run(value)
                done.put((i, value, None, ""))
            except BaseException as error:
                done.put((i, None, error, traceback.format_exc(limit=-4)))

    for _ in range(min(concurrency, len(rows))):
        threading.Thread(target=serve, daemon=True, name="reward").start()
    scores: dict[int, Score] = {}
    name = getattr(function, "__name__", repr(function))

    def fail(i: int, what: str, rule: str = "", remedy: str = "") -> RewardError:
        prompt = str(rows[i].get("prompt", ""))
        short = prompt if len(prompt) <= 80 else prompt[:77] + "..."
        return RewardError(
            f"reward function {name} {what} for row {row_numbers[i]} on {where}, prompt {short!r}", rule, remedy
        )

    try:
        while len(scores) < len(rows):
            try:
                i, value, error, trace = done.get(timeout=0.05)
            except queue.Empty:
                late = [i for i, t in list(started_s.items()) if i not in scores and time.monotonic() - t > timeout_s]
                if late:
                    raise fail(
                        late[0],
                        f"took more than {timeout_s} s",
                        "timeout_s is the limit of one call",
                        "raise timeout_s, or mend the function: until it returns it goes on taking a core of its host",
                    ) from None
                continue
            if error is not None:
                raise fail(i, f"raised {type(error).__name__}: {error}", f"its frames:\n{trace}") from error
            try:
                scores[i] = _checked(value, response_tokens[i])
            except ValueError as problem:
                raise fail(i, str(problem), "it must return one finite number, or one a response token") from None
            progress(len(scores), len(rows), 0)
    finally:
        stop.set()
    for i, score in sorted(scores.items()):
        if isinstance(score, list) != isinstance(scores[0], list):
            raise fail(i, f"returned {score!r:.60}, but {scores[0]!r:.60} for row {row_numbers[0]},", ALIKE)
    return [scores[i] for i in range(len(rows))]


def _checked(value: Any, tokens: int) -> Score:
    if isinstance(value, Tensor | np.ndarray):
        value = value.tolist()
    if isinstance(value, Sequence) and not isinstance(value, str):
        if len(value) != tokens:
            raise ValueError(f"returned {len(value)} numbers for a response of {tokens} tokens")
        return [_number(item) for item in value]
    return _number(value)


def _number(value: Any) -> float:
    try:
        number = float(value)
    except (TypeError, ValueError):
        raise ValueError(f"returned {value!r:.60}") from None
    if isinstance(value, str):
        raise ValueError(f"returned {value!r:.60}")
    if not math.isfinite(number):
        raise ValueError(f"returned {number}")
    return number
