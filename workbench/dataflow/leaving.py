"""Bringing the ranks of a run to leave their stage, all at the same point: the controller's half of it."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Sequence

from workbench.errors import WorkbenchError
from workbench.workers.backends.base import Backend, Pending
from workbench.workers.stopping import Standing

TO_THE_END = 2**62  # a point that no stage comes to


class Leaving:
    """A run that is to stop; see `workbench.workers.stopping`. Poll it until its ranks have answered their calls."""

    def __init__(self, backend: Backend, hosts: Sequence[str], run: int) -> None:
        self._backend, self._hosts, self._run = backend, hosts, run
        self._asked: dict[int, Pending] = {}
        self._points: dict[int, int] = {}
        self._told: set[int] = set()
        if len(hosts) == 1:  # nobody to agree with: at its next point
            self._tell([0], 0)

    def poll(self, working: Collection[int]) -> None:
        """Ask ranks where they stand, and tell those of whom it is known by now where to leave. working: the ranks that
        have not answered their call."""
        for rank in working:
            if rank in self._told:
                continue
            asked = self._asked.get(rank)
            if asked is None:
                self._asked[rank] = self._backend.ask(self._hosts[rank], "standing", self._run)
            elif asked.done():
                del self._asked[rank]
                with contextlib.suppress(WorkbenchError):  # a host that is gone: its call says so
                    self._hear(rank, asked.result(), working)

    def _hear(self, rank: int, standing: Standing, working: Collection[int]) -> None:
        if standing.point is None:
            return
        self._points[rank] = standing.point
        together = standing.together
        if any(other not in working for other in together):  # one of them has come to the end: so can all
            self._tell(together, TO_THE_END)
        elif all(other in self._points for other in together):
            self._tell(together, max(self._points[other] for other in together))

    def _tell(self, ranks: Collection[int], point: int) -> None:
        for rank in ranks:
            self._told.add(rank)
            self._backend.ask(self._hosts[rank], "leave", self._run, point)
