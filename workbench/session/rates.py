"""Rates of transfers between processes, on one machine and between machines: from past moves, or from a probe."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from workbench.backends.hosts import Hosts
from workbench.display.html import bytes_text
from workbench.mapping.hardware import Hardware
from workbench.placement.change import PlacementChange
from workbench.stages.group import Groups
from workbench.stages.ledger import Ownership
from workbench.telemetry.store import TelemetryStore
from workbench.workers.weight_intake import PROBE_BYTES, timed_bytes_s

KEPT_S = 30.0  # how long the result of a probe between machines is valid
HERE = "this process"


class Rates:
    """Rates between the processes of a workbench, each measured at its first use."""

    def __init__(self, hosts: Hosts, ownership: Ownership, groups: Groups, telemetry: TelemetryStore) -> None:
        self._hosts, self._ownership, self._groups, self._telemetry = hosts, ownership, groups, telemetry
        self._probes: dict[tuple[str, str], tuple[float, float]] = {}  # by machines: time, bytes per second

    def with_rates(self, change: PlacementChange, machines: Mapping[str, str]) -> PlacementChange:
        """Return the change with the rates of its transfers. machines: of the living hosts, by host name."""
        between = change.between
        if len({*machines.values(), *change.machines} - {""}) < 2:
            bytes_s, measured = self._on_one_machine()
            return replace(change, bandwidth_bytes_s=bytes_s, measured=measured)
        (bytes_s, measured), (link_bytes_s, link_measured) = (
            self._busiest(change, moved, machines) for moved in (change.matrix - between, between)
        )
        return replace(
            change, bandwidth_bytes_s=bytes_s, measured=measured, link_bytes_s=link_bytes_s, link_measured=link_measured
        )

    def _on_one_machine(self) -> tuple[float | None, str]:
        count, moved_bytes, seconds = self._telemetry.transfer_sums.moves()
        if seconds > 0:
            return moved_bytes / seconds, "as in the last move" if count == 1 else f"as in the last {count} moves"
        if self._hosts.inline or not self._ownership.drives:
            return None, ""
        return self.between(self._groups.lead.hosts[0], HERE, {})[0], f"a {PROBE} from a host to {HERE}"

    def _busiest(
        self, change: PlacementChange, moved: np.ndarray, machines: Mapping[str, str]
    ) -> tuple[float | None, str]:
        """Return the rate between the two machines (or inside the one machine) that would exchange most, measured
        between two of their hosts, or from a host to this process where one of two machines has no host yet."""
        if not moved.any() or not self._ownership.drives:
            return None, ""
        source, taker = np.unravel_index(moved.argmax(), moved.shape)
        first, there = change.names[source], (change.machines or [""] * len(change.names))[taker]
        second = next((name for name, machine in machines.items() if machine == there and name != first), HERE)
        if second == HERE and there in ("", machines[first]):
            return None, ""
        bytes_s, age_s = self.between(first, second, machines)
        places = [HERE if name == HERE else machines[name] for name in (first, second)]
        ago = f" {age_s:.0f} s ago" if age_s >= 1 else ""
        return bytes_s, f"a {PROBE} from {' to '.join(places)}{ago}"

    def between(self, source: str, destination: str, machines: Mapping[str, str]) -> tuple[float, float]:
        """Return bytes per second from host to host, or to this process, and the age of the measurement in seconds.
        machines: of hosts, by name."""
        pair = machines.get(source, ""), machines.get(destination, destination)
        when_s, found = self._probes.get(pair, (-KEPT_S, 0.0))
        if not found or (pair[0] != pair[1] and machines and time.monotonic() - when_s > KEPT_S):
            found, when_s = self._probed(source, destination), time.monotonic()
            self._probes[pair] = when_s, found
        return found, time.monotonic() - when_s

    def hardware(self, machines: Mapping[str, str]) -> Hardware:
        """Return CPU machines like the lead role's, with its link to another machine. machines: of hosts, by name."""
        lead, backend = self._groups.lead.hosts[0], self._hosts.backend
        used = Counter(machines.values())
        count = max(used.values())
        found: Hardware = backend.work(lead, "rates", count).result()
        apart = next((name for name, machine in machines.items() if machine != machines[lead]), None)
        if apart is not None:
            bytes_s, _ = self.between(lead, apart, machines)
            answer_s = backend.ask(apart, "probe_answer", lead).result()
            found = replace(found, machine_bytes_s=bytes_s, between_latency_s=answer_s / 2)
        cores = (found.cores or count) * len(used)
        return replace(found, name="these machines", devices_per_machine=count, cores=cores)

    def _probed(self, source: str, destination: str) -> float:
        key = f"{self._ownership.controller}-probe"

        def ask(host: str, method: str, *args: Any) -> Any:
            return self._hosts.backend.ask(host, method, *args).result()

        ask(source, "publish_probe", key)
        try:
            if destination == HERE:
                return timed_bytes_s(key, source, ask)
            return ask(destination, "probe_link", key, source)
        finally:
            ask(source, "release", [key])


PROBE = f"probe of {bytes_text(PROBE_BYTES)}"
