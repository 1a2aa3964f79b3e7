"""What a shipped reward function says before it is called: what it needs of the machine, and that it gives notes."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

F = TypeVar("F", bound=Callable[..., Any])
NAME, NOTES = "__workbench_needs__", "__workbench_notes__"


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


def _whole(function: Any) -> Any:
    while isinstance(function, functools.partial):
        function = function.func
    return function
