"""`@wb.batched(over="group")`: reward functions that score many rows in one call."""

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
    """Decorate a reward or cost function that is called once with all rows of the batch, or of a prompt.

        @wb.batched(over="group")
        def distinct(prompt, response, **row):
            return [1 / response.count(one) for one in response]

    Every argument is a list with one value per row, in the order of the batch; the function returns one score per row.
    over: "batch": one call with all rows of the batch, from all ranks; "group": one call for the rows of each prompt.
    Rows whose response failed are left out. If a call fails, all its rows have failed.
    """
    return marked(NAME, over)


def over_of(function: Any) -> Over | None:
    """Return the `over` of a function, or of a partial's function; None: the function is called for each row."""
    return mark_of(function, NAME)
