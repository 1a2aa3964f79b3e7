"""The controller's half of stopping a stage: its ranks agree on one point, and leave it there."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Collection, Sequence

from workbench.backends.base import Backend, Pending
from workbench.errors import WorkbenchError
from workbench.workers.stopping import PATIENCE_S, StopPoint

TO_THE_END = 2**62  # a point that no stage comes to


class StopCoordinator:
    """A run that is to stop; see `workbench.workers.stopping`. Poll it until its ranks have answered their calls."""

    def __init__(self, backend: Backend, hosts: Sequence[str], run: int) -> None:
        self._backend, self._hosts, self._run = backend, hosts, run
        self._told: set[int] = set()
        self._round = 0
        self._begin_round()
        if len(hosts) == 1:  # nobody to agree with: at its next point
            self._told.add(0)
            backend.ask(hosts[0], "stop_alone", run)

    def _begin_round(self) -> None:
        self._round, self._began_s = self._round + 1, time.monotonic()
        self._asked: dict[int, Pending] = {}
        self._standing: dict[int, StopPoint] = {}

    def poll(self, working: Collection[int]) -> None:
        """Ask ranks where they can leave, and notify those whose stop point is agreed. working: the ranks that have not
        answered their call."""
        left = [rank for rank in working if rank not in self._told]
        if left and time.monotonic() - self._began_s > PATIENCE_S / 2:  # some may soon go on by themselves
            self._begin_round()
        for rank in left:
            asked = self._asked.get(rank)
            if asked is None:
                self._asked[rank] = self._backend.ask(self._hosts[rank], "stop_point", self._run, self._round)
            elif rank not in self._standing and asked.done():
                with contextlib.suppress(WorkbenchError):  # a host that is gone: its call says so
                    self._standing[rank] = asked.result()
        for rank in left:
            if rank in self._standing and rank not in self._told:
                self._agree(self._standing[rank].together, working)

    def _agree(self, together: Collection[int], working: Collection[int]) -> None:
        if any(other not in working for other in together):  # one of them has come to the end: so can all
            self._tell(together, TO_THE_END)
        elif all(other in self._standing for other in together):
            self._tell(together, max(self._standing[other].point for other in together))

    def _tell(self, ranks: Collection[int], point: int) -> None:
        for rank in ranks:
            self._told.add(rank)
            self._backend.ask(self._hosts[rank], "stop_at", self._run, self._round, point)
