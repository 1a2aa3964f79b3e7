"""Runs a user's reward function over rows: several calls at a time, each with a time limit."""

from __future__ import annotations

import inspect
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, TypeVar

from pydantic import Field

from workbench.data.user_functions import (
    MOST,
    Score,
    Steps,
    checked_score,
    checked_scores,
    failure_of,
    parameters_of,
    score,
    score_together,
)
from workbench.errors import BadInput, RewardError, StageError
from workbench.errors.plain_text import shown
from workbench.support.calls.limits import limits_of
from workbench.support.calls.needs import check_needs
from workbench.support.calls.pickling import name_of, pickled
from workbench.support.calls.server import CallFailed
from workbench.support.calls.sessions import UserCalls
from workbench.support.named_fields import remedy_for
from workbench.support.validation import Number

RewardFunction = Callable[..., Any]
Weight = Annotated[Number, Field(ge=-MOST, le=MOST)]  # the weight of a reward component
E = TypeVar("E", bound=StageError)
NOT_ASKED = "was not called"
RULE = "it must return one finite number, or one a response token"
RULE_OF_STEPS = "with steps= it must return one finite number a step, or with steps=True (last token, number) pairs"
RULE_OF_MANY = "it must return a list with a finite number a row, or with a list of one a response token"
ALIKE = "all rows of a batch must be scored alike: one number each, or one a response token each"


def check_function(function: Any) -> None:
    """Raise `BadInput` for a function that cannot be called with a prompt and a response, or cannot be sent to its
    process; another of our errors if the function needs something that this machine lacks."""
    if not callable(function):
        raise BadInput(f"function={shown(function)}", "must be callable: fn(prompt, response, **row)")
    check_needs(function)
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
            f"it is called with prompt=, response= and the row's other columns by name, but takes no {lacks[0]!r}",
            "write def fn(prompt, response, **row)",
        )


def check_parameters(function: RewardFunction, given: Sequence[str]) -> None:
    """Raise `BadInput` if a function needs a parameter that rows do not have. given: the names of the rows' values."""
    named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    for parameter in (parameters_of(function) or {}).values():
        if parameter.kind in named and parameter.default is parameter.empty and parameter.name not in given:
            near = remedy_for(parameter.name, given, repr)
            raise BadInput(
                f"reward function {name_of(function)} takes {parameter.name!r}",
                f"it is called with the values of a row, by name: {', '.join(given)}",
                f"{near + ', ' if near else ''}give it a default, or add the column to the data",
            )


class _TooManyFailures(Exception):
    """So many calls have failed that the stage fails, whatever the results of the others."""


@dataclass(frozen=True, kw_only=True)
class FunctionCaller:
    """How a user's function is called. calls: the user calls of this role. concurrency, timeout_s: see `Session.each`.
    retries: how often a failed call is repeated, after all others. most: with more failed rows than this, no further
    call is begun. tick: called twenty times a second with the number of ended calls."""

    calls: UserCalls
    concurrency: int | None
    timeout_s: float
    retries: int = 0
    most: float = math.inf
    tick: Callable[[int], None] = lambda ended: None

    def call_all(
        self,
        function: Any,
        invoke: Callable[..., Any],
        finish: Callable[..., Any],
        arguments: Sequence[Sequence[Any]],
        error: Callable[[int, CallFailed], RewardError],
        rows: Sequence[int] | None = None,
    ) -> tuple[dict[int, Any], dict[int, RewardError]]:
        """Make calls. Return the results, and the errors of failed calls, each by the number of the call.

        A call fails alone: if one ends the process in which others are running, all of these are made again in a new
        process, one at a time, so that only this call fails. error: makes the error of a call from its number. rows:
        the number of rows of each call; default 1.
        """
        answers: dict[int, Any] = {}
        failures: dict[int, RewardError] = {}
        tries, again = Counter[int](), list[int]()
        sizes = rows or [1] * len(arguments)

        def failed(i: int, why: CallFailed) -> None:
            tries[i] += 1
            if tries[i] <= self.retries:
                again.append(i)
                return
            failures[i] = error(i, why)
            if sum(sizes[one] for one in failures) > self.most:
                raise _TooManyFailures

        rounds: list[tuple[list[int], int | None]] = [(list(range(len(arguments))), self.concurrency)]
        try:
            while rounds or again:
                if not rounds:
                    rounds, again = [(again, self.concurrency)], []
                numbers, at_once = rounds.pop()
                with self.calls.session(function) as session:
                    begun, others = session.each(
                        invoke, finish, {i: arguments[i] for i in numbers}, concurrency=at_once,
                        timeout_s=self.timeout_s, done=answers.__setitem__, failed=failed,
                        tick=lambda: self.tick(len(answers) + len(failures)),
                    )  # fmt: skip
                rounds += [some for some in ((others, at_once), (begun, 1)) if some[0]]
        except _TooManyFailures:
            for i in range(len(arguments)):
                if i not in answers and i not in failures:
                    failures[i] = error(i, CallFailed(NOT_ASKED, "too many rows had failed, so the stage fails"))
        self.tick(len(arguments))
        return answers, failures


def first_failure(failures: Mapping[int, E]) -> E:
    """Return the error of the first call that was made and failed."""
    asked = [number for number, error in failures.items() if error.what != NOT_ASKED]
    return failures[min(asked or failures)]


def score_rows(
    function: RewardFunction,
    rows: Sequence[Mapping[str, Any]],
    response_tokens: Sequence[int | Steps],
    *,
    caller: FunctionCaller,
    where: str,
    row_numbers: Sequence[int],
) -> tuple[list[Score | None], dict[int, RewardError]]:
    """Call `function(**row)` for each row, with the values that the function takes. Return each row's score, one number
    or one per response token; None, and an error by row, if its call raises, passes a limit, crashes its process, or
    returns neither a finite number nor as many finite numbers as the response has tokens. `async def` functions work
    too; all their calls share one event loop.

    Numbers may be Python's, NumPy's or PyTorch's; several numbers are a sequence or a 1-D array. A row whose score is
    of another kind than the first row's has failed. Errors name the prompt, the row and the rank.
    """

    def error(i: int, why: CallFailed) -> RewardError:
        returns = RULE_OF_STEPS if isinstance(response_tokens[i], Steps) else RULE
        of = f"row {row_numbers[i]} on {where}"
        if why.what.startswith("returned {"):
            remedy = 'give components, a function for each number: function={"right": right, "format": (tidy, 0.2)}'
            why = why._replace(remedy=remedy)
        return failure_of(RewardError, f"reward function {name_of(function)}", of, rows[i], why, returns)

    scores: dict[int, Score]
    calls = list(zip(rows, response_tokens, strict=True))
    scores, failures = caller.call_all(function, score, checked_score, calls, error)
    first = next((i for i in range(len(rows)) if i in scores), 0)
    for i, found in sorted(scores.items()):
        if isinstance(found, list) != isinstance(scores[first], list):
            said = f"returned {shown(found)}, but {shown(scores[first])} for row {row_numbers[first]},"
            failures[i] = error(i, CallFailed(said, ALIKE))
            del scores[i]
    return [scores.get(i) for i in range(len(rows))], failures


def score_groups(
    function: RewardFunction,
    groups: Sequence[Sequence[Mapping[str, Any]]],
    response_tokens: Sequence[Sequence[int | Steps]],
    *,
    caller: FunctionCaller,
    where: str,
    row_numbers: Sequence[Sequence[int]],
) -> tuple[dict[int, list[Score]], dict[int, RewardError]]:
    """Call a `batched` function for each group of rows. Return the rows' scores, and the errors, by number of group."""

    def error(i: int, why: CallFailed) -> RewardError:
        of = f"{len(row_numbers[i])} rows, the first is row {row_numbers[i][0]}, on {where}"
        return failure_of(RewardError, f"reward function {name_of(function)}", of, groups[i][0], why, RULE_OF_MANY)

    calls = list(zip(groups, response_tokens, strict=True))
    return caller.call_all(function, score_together, checked_scores, calls, error, list(map(len, groups)))
