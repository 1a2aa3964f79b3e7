"""Runs a user's reward function over rows: several at a time, each call with a time limit."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from workbench.data.user_functions import Score, checked_score, parameters_of, score, short
from workbench.errors import BadInput, RewardError
from workbench.support.calls.limits import limits_of
from workbench.support.calls.pickling import name_of, pickled
from workbench.support.calls.sessions import UserCalls
from workbench.support.named_fields import meant

RewardFunction = Callable[..., Any]
ALIKE = "all rows of a batch are scored alike: one number each, or one a response token each"


def check_function(function: Any) -> None:
    """Raise `BadInput` for what cannot be called with a prompt and a response, or not be sent to its process."""
    if not callable(function):
        raise BadInput(f"function={function!r:.60}", "must be callable: fn(prompt, response, **row)")
    if limits_of(function).own_process:
        pickled(function)
    parameters = parameters_of(function)
    if parameters is None:
        return
    takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    lacks = [name for name in ("prompt", "response") if name not in parameters and not takes_all]
    if lacks:
        raise BadInput(
            f"function={name_of(function)} takes {', '.join(parameters) or 'nothing'}",
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
                f"reward function {name_of(function)} takes {parameter.name!r}",
                f"it is called with what a row has, by name: {', '.join(given)}",
                f"{near + ', ' if near else ''}give it a default, or add the column to the data",
            )


def score_rows(
    function: RewardFunction,
    rows: Sequence[Mapping[str, Any]],
    response_tokens: Sequence[int],
    *,
    calls: UserCalls,
    concurrency: int,
    timeout_s: float,
    where: str,
    row_numbers: Sequence[int],
    progress: Callable[[int, int, int], None],
) -> list[Score]:
    """`function(**row)` for each row, with what of it the function takes: one number, or one a response token.
    `async def` functions work too; all their calls share one event loop.

    Numbers may be Python's, numpy's or torch's; several are a sequence or an array of one axis, the same in all rows.
    calls: of the functions of this role. concurrency, timeout_s: see `Session.each`; a call that takes longer fails the
    stage.
    Raises `RewardError` naming the prompt, the row and the rank when a call raises, passes a limit, or returns neither
    a finite number nor as many finite numbers as the response has tokens; and when some rows get one number and others
    several.
    """
    scores: dict[int, Score] = {}
    name = name_of(function)

    def fail(i: int, what: str, rule: str = "", remedy: str = "") -> RewardError:
        prompt = short(str(rows[i].get("prompt", "")))
        rule = rule or ("it must return one finite number, or one a response token" * what.startswith("returned"))
        return RewardError(
            f"reward function {name} {what} for row {row_numbers[i]} on {where}, prompt {prompt!r}", rule, remedy
        )

    def done(i: int, value: Score) -> None:
        scores[i] = value
        progress(len(scores), len(rows), 0)

    with calls.session(function) as session:
        session.each(
            score, checked_score, list(zip(rows, response_tokens, strict=True)), concurrency=concurrency,
            timeout_s=timeout_s, done=done, fail=fail, tick=lambda: progress(len(scores), len(rows), 0),
        )  # fmt: skip
    for i, found in sorted(scores.items()):
        if isinstance(found, list) != isinstance(scores[0], list):
            raise fail(i, f"returned {found!r:.60}, but {scores[0]!r:.60} for row {row_numbers[0]},", ALIKE)
    return [scores[i] for i in range(len(rows))]
