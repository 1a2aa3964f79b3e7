"""States of roles that are kept on their hosts for a while, to go back to: `lab.kept(...)`."""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from workbench.backends.hosts import Hosts
from workbench.backends.starting import Step, settle
from workbench.errors import BadInput
from workbench.messages.calls import HostInfo
from workbench.placement import ROLLOUT
from workbench.stages.counters import Counters
from workbench.stages.groups import Groups
from workbench.stages.ownership import Ownership
from workbench.stages.scheduler import Scheduler
from workbench.telemetry.store import TelemetryStore


class Snapshots:
    """open: of each snapshot that is kept now, the hosts and the optimizer steps of the roles, as plain values. A later
    kernel can go back to it."""

    def __init__(
        self, scheduler: Scheduler, hosts: Hosts, ownership: Ownership, groups: Groups, counters: Counters,
        telemetry: TelemetryStore,
    ) -> None:  # fmt: skip
        self._scheduler, self._hosts, self._ownership, self._groups = scheduler, hosts, ownership, groups
        self._counters, self._telemetry = counters, telemetry
        self.open: dict[str, dict[str, Any]] = {}

    def refuse(self, what: str, rule: str) -> None:
        """Raise `BadInput` while one is open."""
        if self.open:
            raise BadInput(f"{what} inside lab.kept()", rule, "do it afterwards")

    @contextlib.contextmanager
    def kept(self, *roles: str) -> Iterator[Callable[[], None]]:
        """See `Workbench.kept`."""
        for role in roles:
            if role not in self._groups.by_role:
                raise BadInput(f"role {role!r}", f"this workbench has {', '.join(self._groups.by_role)}")
        self._scheduler.drain()
        counters = self._counters
        key, draws = f"kept-{secrets.token_hex(4)}", dict(counters.draws)
        # what rollout workers hold is what they were sent last: they are not put back, but synced when they are needed
        weights = {role: counters.weights[role] for role in roles if role in counters.weights and role != ROLLOUT}
        here = self._by_host(roles)

        def go_back() -> None:
            self._scheduler.drain()
            self._everywhere("restoring", here, "restore", key)
            counters.weights.update(weights)
            counters.draws = dict(draws)
            self._ownership.record()

        self._everywhere("keeping", here, "snapshot", key, which=True)
        steps = {role: kept.steps for role, kept in weights.items()}
        self.open[key] = {"hosts": [info.name for info in here], "steps": steps}
        self._ownership.record()
        before, self._telemetry.aside = self._telemetry.aside, True
        try:
            yield go_back
        finally:
            try:
                go_back()  # waits for the stages that are still under way
            finally:
                self._telemetry.aside = before
                self._everywhere("dropping the kept", here, "drop_snapshot", key)
                del self.open[key]
                self._ownership.record()

    def _everywhere(
        self, doing: str, roles: Mapping[HostInfo, list[str]], method: str, key: str, *, which: bool = False
    ) -> None:
        backend = self._hosts.backend
        settle(backend, [
            Step(f"{doing} {', '.join(mine)}", info, backend.work(info.name, method, key, *([mine] if which else [])))
            for info, mine in roles.items()
        ], lambda _: None)  # fmt: skip

    def _by_host(self, roles: Sequence[str]) -> dict[HostInfo, list[str]]:
        """The hosts that keep something, each with the roles; a role without workers of its own holds nothing."""
        groups = self._groups.by_role
        own = [role for role in roles if groups[role].worker_role == role]
        here = {info: [role for role in own if groups[role].pool.name == info.pool] for info in self._hosts.infos}
        return {info: mine for info, mine in here.items() if mine}
