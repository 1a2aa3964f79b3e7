"""Runs without a workbench."""

from __future__ import annotations

import types
from collections.abc import Sequence
from typing import Any

from workbench.messages.calls import Call
from workbench.stages.run import Run
from workbench.stages.scheduler import Scheduler


class NoSteps:
    """Sends the calls that it is given, and makes nothing of the replies."""

    def __init__(self, calls: Sequence[Any] = ()) -> None:
        self._calls = list(calls)

    def plan(self, run: Run) -> list[Call]:
        return self._calls

    def finish(self, run: Run) -> None:
        pass

    def failed(self, run: Run, error: Exception) -> None:
        pass


class NoOutcomes:
    """Nothing follows from its runs."""

    def clean_up(self, run: Run) -> None:
        pass

    def not_received(self, run: Run) -> None:
        pass

    def received(self, run: Run) -> None:
        pass

    def over(self, run: Run) -> None:
        pass


def run_of(number: int, stage: str, role: str = "actor", hosts: Sequence[str] = (), calls: Sequence[Any] = ()) -> Run:
    """A run of a group on pool "a" that is in no scheduler's queue."""
    nowhere: Any = None
    group: Any = types.SimpleNamespace(role=role, hosts=tuple(hosts), pool=types.SimpleNamespace(name="a"))
    return Run(
        number=number, stage=stage, group=group, inputs=[], steps=NoSteps(calls), outcomes=NoOutcomes(),
        scheduler=Scheduler(nowhere),
    )  # fmt: skip
