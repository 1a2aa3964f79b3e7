"""What a run is given: its ranks, its own steps, and what follows from it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from workbench.messages.calls import Call
from workbench.placement.placement import Pool
from workbench.settings.layout import Layout

if TYPE_CHECKING:
    from workbench.stages.run import Run


class Ranks(Protocol):
    """The ranks of a role: a `WorkerGroup`."""

    role: str
    pool: Pool
    hosts: tuple[str, ...]
    layout: Layout


class Steps(Protocol):
    """What a run does of its own. It holds the batch that the run reads, and is dropped when the run has ended."""

    def plan(self, run: Run) -> list[Call]:
        """Make the calls, once the inputs are there."""

    def finish(self, run: Run) -> Any:
        """Make the result of the replies."""

    def failed(self, run: Run, error: Exception) -> None:
        """Called with an error of its own, before waiters are woken."""


class RunOutcomes(Protocol):
    """What follows from runs."""

    def clean_up(self, run: Run) -> None:
        """Have the hosts forget what a run that failed has left."""

    def not_received(self, run: Run) -> None:
        """Called when the waiter was interrupted and never gets the result."""

    def received(self, run: Run) -> None:
        """Called when its result has been returned to its caller."""

    def over(self, run: Run) -> None:
        """Called when its ranks have ended it."""
