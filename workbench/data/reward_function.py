"""Runs a user's reward function over rows: several at a time, each call with a time limit."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
from torch import Tensor

from workbench.data.user_calls import accepted, call_each, event_loop, finite_number, parameters_of, short
from workbench.errors import BadInput, RewardError
from workbench.support.named_fields import meant

RewardFunction = Callable[..., Any]
Score = float | list[float]
ALIKE = "all rows of a batch are scored alike: one number each, or one a response token each"


def check_function(function: Any) -> None:
    """Raise `BadInput` for what cannot be called with a prompt and a response."""
    if not callable(function):
        raise BadInput(f"function={function!r:.60}", "must be callable: fn(prompt, response, **row)")
    parameters = parameters_of(function)
    if parameters is None:
        return
    takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    lacks = [name for name in ("prompt", "response") if name not in parameters and not takes_all]
    if lacks:
        raise BadInput(
            f"function={getattr(function, '__name__', function)} takes {', '.join(parameters) or 'nothing'}",
            f"it is called with prompt=, response= and the row's other columns by name, and takes no {lacks[0]!r}",
            "write def fn(prompt, response, **row)",
        )


def check_parameters(function: RewardFunction, given: Sequence[str]) -> None:
    """Raise `BadInput` where a function needs a parameter that no row has. given: the names that rows have."""
    named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    for parameter in (parameters_of(function) or {}).values():
        if parameter.kind in named and parameter.default is parameter.empty and parameter.name not in given:
            near = meant(parameter.name, given, str)
            raise BadInput(
                f"reward function {getattr(function, '__name__', function)} takes {parameter.name!r}",
                f"it is called with what a row has, by name: {', '.join(given)}",
                f"{near + ', ' if near else ''}give it a default, or add the column to the data",
            )


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
    """`function(**row)` for each row, with what of it the function takes: one number, or one a response token.
    `async def` functions work too; all their calls share one event loop.

    Numbers may be Python's, numpy's or torch's; several are a sequence or an array of one axis, the same in all rows.
    concurrency, timeout_s: see `call_each`; a call that takes longer fails the stage.
    Raises `RewardError` naming the prompt, the row and the rank when a call raises, runs out of time, or returns
    neither a finite number nor as many finite numbers as the response has tokens; and when some rows get one number
    and others several.
    """
    scores: dict[int, Score] = {}
    name = getattr(function, "__name__", repr(function))

    def fail(i: int, what: str, rule: str = "", remedy: str = "") -> RewardError:
        prompt = short(str(rows[i].get("prompt", "")))
        return RewardError(
            f"reward function {name} {what} for row {row_numbers[i]} on {where}, prompt {prompt!r}", rule, remedy
        )

    def done(i: int, value: Any) -> None:
        try:
            scores[i] = _checked(value, response_tokens[i])
        except ValueError as problem:
            raise fail(i, str(problem), "it must return one finite number, or one a response token") from None
        progress(len(scores), len(rows), 0)

    calls = [partial(function, **accepted(function, row)) for row in rows]
    with event_loop() as loop:
        call_each(
            calls, concurrency=concurrency, timeout_s=timeout_s, done=done, fail=fail, loop=loop,
            tick=lambda: progress(len(scores), len(rows), 0),
        )  # fmt: skip
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
        return [finite_number(item) for item in value]
    return finite_number(value)
