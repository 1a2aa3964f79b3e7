"""The training settings of a role as an object that can be assigned to: `lab.actor.training.learning_rate = 5e-6`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from typing import Any

from workbench.settings.engines import Training

Assign = Callable[[str, Mapping[str, Any]], None]
"""Of a role, fields of its training and their new values: checks them, and has them hold from the next stage on."""


class LiveTraining:
    """Reads and changes the `Training` of a role. Every value is checked at once; a wrong one changes nothing.

    The fields in `workbench.settings.engines.LIVE` can be assigned. They go to the ranks with each update, so that all
    ranks, and processes that are started later, have the same. An update that is under way keeps what it was called
    with.
    """

    def __init__(self, role: str, now: Callable[[], Training | None], assign: Assign | None) -> None:
        self.__dict__.update(_role=role, _now=now, _assign=assign)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._now(), name)

    def __setattr__(self, name: str, value: Any) -> None:
        self.take({name: value})

    def take(self, values: Mapping[str, Any]) -> None:
        """Assign several fields at once: those that must fit together, such as schedule and total_steps."""
        self._assign(self._role, values)

    def __eq__(self, other: object) -> bool:
        return bool(self._now() == (other._now() if isinstance(other, LiveTraining) else other))

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Copies of it, and what is pickled, are the settings as they are now, which are frozen."""
        return replace, (self._now(),)

    def __copy__(self) -> Training:
        return replace(self._now())

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return repr(self._now())

    def __dir__(self) -> list[str]:
        return [field.name for field in fields(Training)]
