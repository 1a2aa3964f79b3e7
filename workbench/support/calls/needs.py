"""What a shipped reward function says before it is called: what it needs of the machine, that it gives notes, and how
many of its calls may be under way at once."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

F = TypeVar("F", bound=Callable[..., Any])
NAME, NOTES, AT_ONCE = "__workbench_needs__", "__workbench_notes__", "__workbench_at_once__"


def needs(check: Callable[[], None]) -> Callable[[F], F]:
    """A decorator of a function that cannot work where `check()` raises."""

    def decorate(function: F) -> F:
        setattr(function, NAME, check)
        return function

    return decorate


def check_needs(function: Any) -> None:
    """Raise what the check of a function raises, or of the one that a partial calls."""
    getattr(_whole(function), NAME, lambda: None)()


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
