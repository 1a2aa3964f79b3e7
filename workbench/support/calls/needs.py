"""Marks on functions that are read before a call: what a function needs of the machine, whether it returns notes, how
many of its calls may run at once. This module imports little, see `workbench.support.calls.server`."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

F = TypeVar("F", bound=Callable[..., Any])
LIMITS, NEEDS = "__workbench_limits__", "__workbench_needs__"
NOTES, AT_ONCE = "__workbench_notes__", "__workbench_at_once__"


def marked(name: str, value: Any) -> Callable[[F], F]:
    """Return a decorator that sets an attribute of a function."""

    def decorate(function: F) -> F:
        setattr(function, name, value)
        return function

    return decorate


def mark_of(function: Any, name: str, default: Any = None) -> Any:
    """Return what `marked` has set on a function, on the function that a partial calls, or on an object's class."""
    while isinstance(function, functools.partial) and not hasattr(function, name):
        function = function.func
    return getattr(function, name, default)


def needs(check: Callable[[], None]) -> Callable[[F], F]:
    """A decorator of a function that cannot work if `check()` raises."""
    return marked(NEEDS, check)


def check_needs(function: Any) -> None:
    """Raise the error of the check of a function, or of the function that a partial calls."""
    mark_of(function, NEEDS, lambda: None)()


def with_notes(function: F) -> F:
    """A decorator of a function that returns `Noted` scores: their notes become a column of text."""
    return marked(NOTES, True)(function)


def at_once(calls: int) -> Callable[[F], F]:
    """A decorator of a function that waits: this many calls run at once, unless told otherwise."""
    return marked(AT_ONCE, calls)
