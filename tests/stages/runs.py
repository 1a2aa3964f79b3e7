"""Runs without a workbench."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from workbench.messages.calls import Call
from workbench.stages.run import Run


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

    def over(self, run: Run) -> None:
        pass
