"""Limits of a user's function: `@wb.limits(...)`.

What a shipped reward function says before it is called: what it needs of the machine, that it gives notes, and how
many of its calls may be under way at once.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Annotated, Any, TypeVar

from pydantic import Field

from workbench.errors import BadInput
from workbench.errors.plain_text import shown
from workbench.support.checked_calls import checked_call
from workbench.support.machine import total_bytes
from workbench.support.validation import Whole, settings

F = TypeVar("F", bound=Callable[..., Any])
NAME = "__workbench_limits__"
LEAST_BYTES = 2**26


@settings(called="limits: ")
class Limits:
    """Of the process in which a reward or cost function, or an environment, runs. One process serves a role on a host.

    memory_bytes: of that process, and of each one that it starts, at least 64 MiB, of which Python takes about 30;
        None: a quarter of the machine's memory, 2 to 32 GiB.
    own_process: False runs the function in its host, without a limit, where a call that does not return cannot be
        ended: for functions that hold what no other process can have, such as a live model.
    """

    memory_bytes: Annotated[Whole, Field(ge=LEAST_BYTES)] | None = None
    own_process: bool = True

    @property
    def most_bytes(self) -> int:
        return self.memory_bytes or min(max(total_bytes() // 4, 2**31), 2**35)


@checked_call("wb.limits")
def limits(*, memory_bytes: int | None = None, own_process: bool = True) -> Callable[[F], F]:
    """A decorator of reward and cost functions and of environments, which says how their process is limited.

        @wb.limits(memory_bytes=4 * 2**30)
        def reward(prompt, response, **row): ...

    Raises `BadInput` for values that cannot be. The fields: `Limits`.
    """
    values = {"memory_bytes": memory_bytes, "own_process": own_process}
    Limits(**values)  # type: ignore[arg-type]

    def decorate(function: F) -> F:
        try:
            setattr(function, NAME, values)  # plain values: the process that gets the function imports little
        except AttributeError:
            raise BadInput(
                f"limits of {shown(function)}", "it takes no attributes", "wrap it in a function of your own"
            ) from None
        return function

    return decorate


def limits_of(function: Any) -> Limits:
    """What `limits` has said of a function, of the one that a partial calls, or of an object's class."""
    while isinstance(function, functools.partial) and not hasattr(function, NAME):
        function = function.func
    return Limits(**getattr(function, NAME, {}))


NEEDS, NOTES, AT_ONCE = "__workbench_needs__", "__workbench_notes__", "__workbench_at_once__"


def needs(check: Callable[[], None]) -> Callable[[F], F]:
    """A decorator of a function that cannot work where `check()` raises."""

    def decorate(function: F) -> F:
        setattr(function, NEEDS, check)
        return function

    return decorate


def check_needs(function: Any) -> None:
    """Raise what the check of a function raises, or of the one that a partial calls."""
    getattr(_whole(function), NEEDS, lambda: None)()


def with_notes(function: F) -> F:
    """A decorator of a function that returns `Noted` scores: their notes become a column of text."""
    setattr(function, NOTES, True)
    return function


def gives_notes(function: Any) -> bool:
    """Whether a function, or the one that a partial calls, returns `Noted` scores."""
    return hasattr(_whole(function), NOTES)


def at_once(calls: int) -> Callable[[F], F]:
    """A decorator of a function that waits, and of which so many calls are under way at once unless told otherwise."""

    def decorate(function: F) -> F:
        setattr(function, AT_ONCE, calls)
        return function

    return decorate


def of_itself(function: Any) -> int | None:
    """How many calls of a function, or of the one that a partial calls, are under way at once where nothing is said."""
    found: int | None = getattr(_whole(function), AT_ONCE, None)
    return found


def _whole(function: Any) -> Any:
    while isinstance(function, functools.partial):
        function = function.func
    return function
