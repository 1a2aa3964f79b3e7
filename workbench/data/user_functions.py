"""What is called in the process of a user's function, beside it: how a reward function or an environment is called, and
what it may return. It imports little, see `workbench.support.calls.server`."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from workbench.models.tokenizers import is_text
from workbench.support.calls.server import WrongValue

Score = float | list[float]
MOST = 3.4e38  # of float32
# What reward functions and `step` of an environment get where they have a parameter of that name: a response (a turn)
# with its special tokens, as text and as token ids.
RAW_RESPONSE = ("raw_response", "response_ids")


def parameters_of(function: Callable[..., Any]) -> Mapping[str, inspect.Parameter] | None:
    """The parameters of a function by name; None for a callable that does not say."""
    try:
        return inspect.signature(function).parameters
    except (TypeError, ValueError):
        return None


def accepted(function: Callable[..., Any], row: Mapping[str, Any]) -> dict[str, Any]:
    """Those values of a row that a function takes by name: all of them where it has **, or does not say."""
    parameters = parameters_of(function)
    if parameters is None or any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        return dict(row)
    return {name: value for name, value in row.items() if name in parameters}


def asks_for(function: Callable[..., Any], name: str) -> bool:
    """Whether a function has a parameter of that name. A function with ** alone gets no more than it always did."""
    return name in (parameters_of(function) or ())


def short(text: str, characters: int = 80) -> str:
    """The beginning of a text, for messages."""
    return text if len(text) <= characters else text[: characters - 3] + "..."


def finite_number(value: Any) -> float:
    """`value` as a finite float; `WrongValue`, which says what was returned, for anything else."""
    try:
        number = float(value)
    except (TypeError, ValueError):
        raise WrongValue(f"returned {value!r:.60}") from None
    except OverflowError:
        raise WrongValue("returned a number that is too large for a float") from None
    if isinstance(value, str):
        raise WrongValue(f"returned {value!r:.60}")
    if not math.isfinite(number):
        raise WrongValue(f"returned {number}")
    if abs(number) > MOST:
        raise WrongValue(f"returned {number}, which is more than a column of float32 can hold")
    return number


# --- reward functions -------------------------------------------------------------------------------------------------


def score(function: Callable[..., Any], state: object, row: Mapping[str, Any], tokens: int) -> Any:
    """What a reward function gives for a row."""
    return function(**accepted(function, row))


def checked_score(value: Any, row: object, tokens: int) -> Score:
    """One finite number, or one a response token; of torch's and numpy's what Python has."""
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, Sequence) and not isinstance(value, str):
        if len(value) != tokens:
            raise WrongValue(f"returned {len(value)} numbers for a response of {tokens} tokens")
        return [finite_number(item) for item in value]
    return finite_number(value)


def score_together(
    function: Callable[..., Any], state: object, rows: Sequence[Mapping[str, Any]], tokens: Sequence[int]
) -> Any:
    """What a function of many rows gives for them."""
    return function(**{name: [row[name] for row in rows] for name in accepted(function, rows[0])})


def checked_scores(value: Any, rows: Sequence[object], tokens: Sequence[int]) -> list[Score]:
    """As `checked_score`, of each row."""
    if hasattr(value, "tolist"):
        value = value.tolist()
    if not isinstance(value, Sequence) or isinstance(value, str) or len(value) != len(rows):
        raise WrongValue(f"returned {value!r:.60} for {len(rows)} rows,")
    return [checked_score(one, row, n) for one, row, n in zip(value, rows, tokens, strict=True)]


# --- environments: `state` holds those of a session, by row -----------------------------------------------------------


def reset(make: Callable[[], Any], state: dict[int, Any], row: int, values: Mapping[str, Any]) -> Any:
    """Make the environment of a row, and what its `reset` gives. `TypeError` where that needs something that the row
    does not have."""
    environment = state[row] = make()
    method = getattr(environment, "reset", None)
    if method is None:
        return None
    given = accepted(method, values)
    try:
        inspect.signature(method).bind(**given)
    except TypeError as error:
        raise TypeError(f"reset{inspect.signature(method)}: {error}; the row has {', '.join(values)}") from None
    except ValueError:  # one that does not say what it takes
        pass
    return method(**given)


def checked_text(text: Any, row: int, values: object) -> str | None:
    """What `reset` may return."""
    if text is not None and not is_text(text):
        raise WrongValue(f"returned {text!r:.60}")
    return text


def step(make: object, state: Mapping[int, Any], row: int, text: str, raw: str, token_ids: list[int]) -> Any:
    """What the environment of a row answers. raw, token_ids: see `RAW_RESPONSE`."""
    method = state[row].step
    given = zip(RAW_RESPONSE, (raw, token_ids), strict=True)
    return method(text, **{name: value for name, value in given if asks_for(method, name)})


def checked_reply(reply: Any, *call: object) -> tuple[str | list[dict[str, Any]] | None, float, bool]:
    """Observation, reward, whether it is over."""
    try:
        observation, reward, over = reply
        number = finite_number(reward)
    except (TypeError, ValueError):
        raise WrongValue(f"returned {reply!r:.60}") from None
    messages = isinstance(observation, list) and all(
        isinstance(message, dict) and isinstance(message.get("role"), str) and is_text(message.get("content", ""))
        for message in observation
    )
    if not (messages or observation is None or is_text(observation)) or over not in (True, False):
        raise WrongValue(f"returned {reply!r:.60}")
    return observation, number, bool(over)


def close(make: object, state: dict[int, Any], row: int) -> Any:
    """Close the environment of a row, if it was made and can be."""
    method = getattr(state.get(row), "close", None)
    return method() if callable(method) else None


def nothing(value: object, row: int) -> None:
    """Whatever `close` returns."""
