"""Limits of a user's function: `@wb.limits(...)`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, TypeVar

from pydantic import Field

from workbench.support.calls.needs import LIMITS, mark_of, marked
from workbench.support.checked_calls import checked_call
from workbench.support.machine import total_bytes
from workbench.support.validation import Whole, settings

F = TypeVar("F", bound=Callable[..., Any])
LEAST_BYTES = 2**26


@settings(called="limits: ")
class Limits:
    """Limits of the process that runs a reward or cost function, or an environment: see `limits`. A role has one
    process on a host; Python takes about 30 MiB of it."""

    memory_bytes: Annotated[Whole, Field(ge=LEAST_BYTES)] | None = None
    own_process: bool = True

    @property
    def most_bytes(self) -> int:
        return self.memory_bytes or min(max(total_bytes() // 4, 2**31), 2**35)


@checked_call("wb.limits")
def limits(*, memory_bytes: int | None = None, own_process: bool = True) -> Callable[[F], F]:
    """A decorator of reward and cost functions and of environments that sets the limits of their process.

        @wb.limits(memory_bytes=4 * 2**30)
        def reward(prompt, response, **row): ...

    memory_bytes: of the process, and of each one that it starts; at least 64 MiB. None: a quarter of the machine's
    memory, 2 to 32 GiB. own_process: False: run the function in its host, for what cannot be sent to another process,
    such as a live model; then no limit applies, and a call that hangs cannot be ended. Raises `BadInput`.
    """
    values = {"memory_bytes": memory_bytes, "own_process": own_process}
    Limits(**values)  # type: ignore[arg-type]
    return marked(LIMITS, values)  # plain values: the function's process imports little


def limits_of(function: Any) -> Limits:
    """Return the limits of a function, of the function that a partial calls, or of an object's class."""
    return Limits(**mark_of(function, LIMITS, {}))
