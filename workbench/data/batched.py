"""Reward functions that are given many rows at once: `@wb.batched(over="group")`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, TypeVar

from workbench.support.calls.needs import mark_of, marked
from workbench.support.checked_calls import checked_call

F = TypeVar("F", bound=Callable[..., Any])
NAME = "__workbench_batched__"
Over = Literal["batch", "group"]


@checked_call("wb.batched")
def batched(*, over: Over = "batch") -> Callable[[F], F]:
    """A decorator of reward and cost functions that are called once with all rows, of the batch or of a prompt.

        @wb.batched(over="group")
        def distinct(prompt, response, **row):
            return [1 / response.count(one) for one in response]

    Every argument is a list with a value a row, in the order of the batch; it returns a list with a score a row.
    over: "batch", all rows of the batch, on however many ranks they lie; "group", the rows of one prompt, a call each.
    Rows whose response failed are not among them. Where a call fails, all its rows have failed.
    """
    return marked(NAME, over, "batched")


def over_of(function: Any) -> Over | None:
    """Over what a function is called, or the one that a partial calls; None: a row at a time."""
    found: Over | None = mark_of(function, NAME)
    return found
