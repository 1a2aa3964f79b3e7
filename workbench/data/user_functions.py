"""Calls reward functions and environments in the process of the user's functions, and checks their results. Imports few
modules, see `workbench.support.calls.server`."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, TypeVar

from workbench.errors import StageError
from workbench.errors.plain_text import shown
from workbench.models.tokenizers import has_texts, is_text
from workbench.support.calls.server import CallFailed, WrongValue

E = TypeVar("E", bound=StageError)
Score = float | list[float]
MOST = 3.4e38  # the largest number in a float32
# Optional parameters of reward functions and of an environment's `step`: the response (or turn) with its special
# tokens, as text and as token ids.
RAW_RESPONSE = ("raw_response", "response_ids")
LAST_TURN = "last_turn"  # an optional parameter of reward functions: the text of a conversation's last turn
MESSAGE = "message"  # an optional parameter of `step`: the turn as a message, see `workbench.models.turn_messages`


def parameters_of(function: Callable[..., Any]) -> Mapping[str, inspect.Parameter] | None:
    """Return the parameters of a function by name; None for a callable without a readable signature."""
    try:
        return inspect.signature(function).parameters
    except Exception:  # an object of any class, whose signature may be anything
        return None


def accepted(function: Callable[..., Any], row: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of a row that a function takes by name: all if it has ** or no readable signature."""
    parameters = parameters_of(function)
    if parameters is None or any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        return dict(row)
    return {name: value for name, value in row.items() if name in parameters}


def asks_for(function: Callable[..., Any], name: str) -> bool:
    """Whether a function has a parameter of that name; ** does not count."""
    return name in (parameters_of(function) or ())


def short(text: str, characters: int = 80) -> str:
    """Return the beginning of a text, for messages."""
    return text if len(text) <= characters else text[: characters - 3] + "..."


def failure_of(kind: type[E], function: str, of: str, row: Mapping[str, Any], why: CallFailed, returns: str = "") -> E:
    """Return the error of a user's function for a row, with the row's prompt. of: names the rows. returns: the rule for
    the function's result."""
    prompt = short(str(row.get("prompt", "")))
    rule = why.rule or returns * why.what.startswith("returned")
    error = kind(f"{function} {why.what} for {of}, prompt {prompt!r}", rule, why.remedy)
    error.what, error.__cause__ = why.what, why.cause
    return error


def is_flag(value: Any) -> bool:
    """Whether a value is True or False, or equal to one of them."""
    try:
        return bool(value in (True, False))
    except Exception:  # an array of several numbers, or an object of any class
        return False


def finite_number(value: Any) -> float:
    """Return `value` as a finite float that a float32 can hold; raise `WrongValue` with the value for anything else."""
    try:
        number = float(value)
    except (TypeError, ValueError):
        raise WrongValue(f"returned {shown(value)}") from None
    except OverflowError:
        raise WrongValue("returned a number that is too large for a float") from None
    if isinstance(value, str):
        raise WrongValue(f"returned {shown(value)}")
    if not math.isfinite(number):
        raise WrongValue(f"returned {number}")
    if abs(number) > MOST:
        raise WrongValue(f"returned {number}, which is more than a column of float32 can hold")
    return number


# --- reward functions -------------------------------------------------------------------------------------------------


def score(function: Callable[..., Any], state: object, row: Mapping[str, Any], tokens: int | Steps) -> Any:
    return function(**accepted(function, row))


class Noted(float):
    """A score with its reason."""

    note: str = ""

    @classmethod
    def of(cls, score: float, note: str) -> Noted:
        noted = cls(score)
        noted.note = note
        return noted


class StepScores(list[float]):
    """Scores per token: a score on the last token of each step, 0 on the others. ends: the last token of each step."""

    ends: Sequence[int] = ()


@dataclass(frozen=True)
class Steps:
    """The steps of a response. tokens: its length. ends: the last token of each step; None: the function gives them."""

    tokens: int
    ends: Sequence[int] | None

    def scores(self, value: Sequence[Any]) -> StepScores:
        """Return the scores per token from a function's result: one number per step, or (last token, number) pairs."""
        ends, numbers = self.ends, value
        if ends is None:
            try:
                ends, numbers = [int(end) for end, _ in value], [number for _, number in value]
            except (TypeError, ValueError):
                raise WrongValue(f"returned {shown(value)}") from None
            if wrong := [end for end in ends if not 0 <= end < self.tokens]:
                raise WrongValue(f"returned a step that ends at token {wrong[0]} of a response of {self.tokens} tokens")
            if any(one >= two for one, two in pairwise(ends)):
                raise WrongValue(f"returned steps that end at tokens {ends!s:.60}, not in increasing order")
        elif len(value) != len(ends):
            raise WrongValue(f"returned {len(value)} numbers for a response of {len(ends)} steps")
        found = StepScores([0.0] * self.tokens)
        for end, number in zip(ends, numbers, strict=True):
            found[end] = finite_number(number)
        found.ends = ends
        return found


def checked_score(value: Any, row: object, tokens: int | Steps) -> Score:
    """Return a checked score as Python numbers: one, or one per response token. tokens: response length, or steps."""
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, Sequence) and not isinstance(value, str):
        if isinstance(tokens, Steps):
            return tokens.scores(value)
        if len(value) != tokens:
            raise WrongValue(f"returned {len(value)} numbers for a response of {tokens} tokens")
        return [finite_number(item) for item in value]
    return Noted.of(finite_number(value), value.note) if isinstance(value, Noted) else finite_number(value)


def score_together(
    function: Callable[..., Any], state: object, rows: Sequence[Mapping[str, Any]], tokens: Sequence[int | Steps]
) -> Any:
    return function(**{name: [row[name] for row in rows] for name in accepted(function, rows[0])})


def checked_scores(value: Any, rows: Sequence[object], tokens: Sequence[int | Steps]) -> list[Score]:
    if hasattr(value, "tolist"):
        value = value.tolist()
    if not isinstance(value, Sequence) or isinstance(value, str):
        raise WrongValue(f"returned {shown(value)} instead of {len(rows)} scores")
    if len(value) != len(rows):
        raise WrongValue(f"returned {len(value)} instead of {len(rows)} scores")
    return [checked_score(one, row, n) for one, row, n in zip(value, rows, tokens, strict=True)]


# --- environments: `state` holds those of a session, by row -----------------------------------------------------------


def reset(make: Callable[[], Any], state: dict[int, Any], row: int, values: Mapping[str, Any]) -> Any:
    """Make the environment of a row. Return the result of its `reset`, and whether its `step` takes messages. Raises
    `TypeError` if `reset` needs a value that the row lacks."""
    environment = state[row] = make()
    asks = asks_for(getattr(environment, "step", reset), MESSAGE)
    value = None
    if (method := getattr(environment, "reset", None)) is not None:
        given = accepted(method, values)
        try:
            inspect.signature(method).bind(**given)
        except TypeError as error:
            raise TypeError(f"reset{inspect.signature(method)}: {error}; the row has {', '.join(values)}") from None
        value = method(**given)
    if not inspect.iscoroutine(value):
        return value, asks

    async def awaited() -> tuple[Any, bool]:
        return await value, asks

    return awaited()


def checked_beginning(beginning: tuple[Any, bool], *call: object) -> tuple[str | list[dict[str, Any]] | None, bool]:
    """Return a checked result of `reset`, and whether `step` takes messages."""
    first, asks = beginning
    if first is not None and not is_text(first) and not (first and are_messages(first)):
        raise WrongValue(f"returned {shown(first)}")
    return first, asks


def step(make: object, state: Mapping[int, Any], row: int, text: str, more: Mapping[str, Any]) -> Any:
    """Call `step` of a row's environment. more: values for optional parameters, see `RAW_RESPONSE` and `MESSAGE`."""
    method = state[row].step
    given = {name: value for name, value in {"response": text, **more}.items() if asks_for(method, name)}
    return method(**given) if next(iter(parameters_of(method) or ()), None) in given else method(text, **given)


def are_messages(value: Any) -> bool:
    """Whether a value is a list of messages with a content, or calls, of texts that a tokenizer accepts."""

    def fits(message: Any) -> bool:
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            return False
        return is_text(message.get("content", "" if message.get("tool_calls") else None))

    return isinstance(value, list) and all(map(fits, value)) and has_texts(value)


def checked_reply(reply: Any, *call: object) -> tuple[str | list[dict[str, Any]] | None, float, bool]:
    """Return a checked result of `step`: observation, reward, whether the conversation is over."""
    try:
        observation, reward, over = reply
        number = finite_number(reward)
    except (TypeError, ValueError):
        raise WrongValue(f"returned {shown(reply)} and not (observation, reward, done)") from None
    fits = observation is None or is_text(observation) or are_messages(observation)
    if not fits or not is_flag(over):
        raise WrongValue(f"returned {shown(reply)} and not (observation, reward, done)")
    return observation, number, bool(over)


def close(make: object, state: dict[int, Any], row: int) -> Any:
    method = getattr(state.get(row), "close", None)
    return method() if callable(method) else None


def nothing(value: object, row: int) -> None:
    """Ignore the result of `close`."""
