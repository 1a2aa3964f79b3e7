"""Checks of plain values: each raises `BadInput` that names value and rule."""

from __future__ import annotations

import numbers

from workbench.errors import BadInput


def one_of(name: str, value: object, choices: tuple[object, ...]) -> None:
    """Raise `BadInput` unless `value` is one of `choices`."""
    if value not in choices:
        raise BadInput(f"{name}={value!r}", f"must be one of {', '.join(map(repr, choices))}")


def at_least(name: str, value: float, least: float, *, strictly: bool = False) -> None:
    """Raise `BadInput` unless `value` is at least (or, `strictly`, more than) `least`."""
    if not isinstance(value, numbers.Real) or isinstance(value, bool):
        raise BadInput(f"{name}={value!r}", "must be a number")
    if not (value > least if strictly else value >= least):
        raise BadInput(f"{name}={value!r}", f"must be {'more than' if strictly else 'at least'} {least}")


def between(name: str, value: float, low: float, high: float, *, open_below: bool = False) -> None:
    """Raise `BadInput` unless `value` lies in [low, high] (or, `open_below`, in (low, high])."""
    if not isinstance(value, numbers.Real) or isinstance(value, bool):
        raise BadInput(f"{name}={value!r:.60}", "must be a number")
    if not low <= value <= high or (open_below and value == low):
        raise BadInput(f"{name}={value!r}", f"must lie in {'(' if open_below else '['}{low:g}, {high:g}]")


def true_or_false(name: str, value: object) -> None:
    """Raise `BadInput` unless `value` is one of the two."""
    if not isinstance(value, bool):
        raise BadInput(f"{name}={value!r:.60}", "must be True or False")


def whole(name: str, value: int, least: int = 1) -> None:
    """Raise `BadInput` unless `value` is a whole number of at least `least`."""
    if not isinstance(value, numbers.Integral) or isinstance(value, bool):
        raise BadInput(f"{name}={value!r}", "must be a whole number")
    at_least(name, value, least)
