"""The processes of one workbench, and their state."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

from workbench.backends import registry
from workbench.backends.base import Backend, Pending, failure
from workbench.backends.inline import InlineBackend
from workbench.backends.ray import RayBackend
from workbench.backends.starting import Step, Wait, begin_loading, join_pools, settle
from workbench.config.description import Description
from workbench.errors import HostDied, StageError, WorkbenchError
from workbench.messages.calls import HostInfo
from workbench.placement import ROLLOUT, Layout, Placement, Pool
from workbench.placement.change import PlacementChange


class Hosts:
    """The hosts of a description. `start` or `attach` sets the backend that reaches them.

    lost: the pools that are no longer whole, each with the operation in which it was lost. pending_cleanup: by pool,
    work of cancelled operations that its hosts have not ended yet. shard_successors: for a host that has ended, the
    host that keeps its rows now. pools_ended: `HostInfo.again` of the last pool of each name that has ended. changing:
    a lock held from reading the description to `set_description` with the changed one, so that no change in between is
    lost. outdated: whether an edit was refused that only new processes take: `recover` then restarts all.
    """

    backend: Backend

    def __init__(self, description: Description, run_folder: Path) -> None:
        self.run_folder = run_folder
        self.changing = threading.RLock()
        self.lost: dict[str, str] = {}
        self.pending_cleanup: dict[str, list[tuple[str, Pending]]] = {}
        self.shard_successors: dict[str, str] = {}
        self.pools_ended: dict[str, int] = {}
        self.outdated = False
        self.set_description(description)

    def set_description(self, description: Description) -> None:
        self.description = description
        self.infos: Sequence[HostInfo] = description.hosts(self.run_folder)

    @property
    def placement(self) -> Placement:
        return self.description.placement

    @property
    def inline(self) -> bool:
        return self.description.backend == "inline"

    @property
    def whole(self) -> list[HostInfo]:
        return [info for info in self.infos if info.pool not in self.lost]

    def starting(self, change: PlacementChange, description: Description) -> list[HostInfo]:
        """Return the hosts that a change of placement starts."""
        pools = {pool.name: pool for pool in change.new.pools}
        return [
            description.host(
                pools[place.pool], place.rank, place.device, self.run_folder, change.earlier_pools_of(place.pool)
            )
            for place in change.places
            if place.new
        ]

    def place_of(self, role: str) -> tuple[Pool, tuple[str, ...], Layout]:
        pool = self.placement.pool_of(self.description.lead if role == "numeric" else role)
        names = tuple(info.name for info in self.infos if info.pool == pool.name)
        # advantages are reductions over the whole batch, without a model that could be sharded
        return pool, names, Layout(d=pool.devices) if role == "numeric" else self.description.layout_of(role)

    # --- starting and ending ------------------------------------------------------------------------------------------

    def start(self, controller: str, note: Callable[[str], None], began_s: float, wait_s: float) -> list[Wait]:
        """Start the processes, join each pool's process group, load the models. Returns what all devices waited for.

        note: called with a text about what is waited for. began_s: when the opening began, unix time. wait_s: how long
        to wait for devices that others hold.
        """
        description, checked_s = self.description, time.time()
        self.backend = (
            InlineBackend()
            if self.inline
            else RayBackend(description.id, description.address, driver=controller, note=note, wait_s=wait_s)
        )
        waits = [Wait("check", began_s, checked_s, "this process")]
        waits += [] if self.inline else [Wait("start", checked_s, time.time(), "Ray")]
        self.backend.start(self.infos)
        join_pools(self.backend, self.infos, note)
        settle(self.backend, begin_loading(self.backend, self.infos, description, note), note)
        return waits

    def attach(self, controller: str, address: str | None) -> set[str]:
        """Find the processes that another kernel started; return the names of those that are gone."""
        backend = RayBackend(self.description.id, address, driver=controller, start=False)
        self.backend = backend
        gone = backend.attach(self.infos)
        self.lost |= {info.pool: f"the end of host {info.name}" for info in self.infos if info.name in gone}
        return gone

    def drive(self) -> None:
        """Make the hosts refuse the calls of other kernels from now on."""
        if isinstance(self.backend, RayBackend):
            self.backend.drive()

    def end_others(self) -> None:
        """End processes of this workbench that are in no placement: a killed earlier kernel left them."""
        if isinstance(self.backend, RayBackend):
            self.backend.end_others(self.infos)

    def record(self) -> None:
        """Record the current hosts, so that a later kernel can reattach."""
        if isinstance(self.backend, RayBackend):
            processes = self.backend.processes
            registry.rewrite(self.description, {info.name: processes[info.name] for info in self.infos})

    def check_room(self, description: Description) -> None:
        """Raise `WriteFailed` where the disk has no room to record hosts of this description."""
        if isinstance(self.backend, RayBackend):
            registry.check_room(description)

    # --- asking -------------------------------------------------------------------------------------------------------

    def step(self, what: str, host: str, method: str, *args: Any) -> Step:
        """Ask a host for set-up work, such as "restoring critic"; `settle` waits for it."""
        info = next(info for info in self.infos if info.name == host)
        return Step(what, info, self.backend.work(host, method, *args))

    def describe(self, without: Collection[str] = ()) -> list[dict[str, Any]]:
        """Return every host's description of itself, in the order of `infos`. without: pools that are not asked."""
        asked = [self.backend.ask(info.name, "describe") for info in self.infos if info.pool not in without]
        return [answer.result() for answer in asked]

    def require_whole(self, pool: Pool, role: str) -> None:
        """Raise `StageError` while the pool's hosts still work on a cancelled operation, `HostDied` if it was lost."""
        for what, pending in self.pending_cleanup.pop(pool.name, []):
            self.note_outcome(pool.name, what, pending)
        if late := self.pending_cleanup.get(pool.name):
            raise StageError(
                f"pool {pool.name!r} still works on {late[0][0]}, which was cancelled",
                "its hosts are loading or waiting for each other, and answer when they have finished",
                "try again in a while; if this does not end, lab.recover() restarts the hosts",
            )
        if pool.name in self.lost:
            remedy = "lab.recover() restarts it and continues from the newest checkpoint"
            if pool.roles == (ROLLOUT,):
                remedy = "lab.recover() restarts it; nothing goes back to a checkpoint"
            elif len(pool.roles) == 1 and role != self.description.lead:
                remedy = f"lab.drop({role!r}), then lab.add(...) it again: the other roles are not affected"
            raise HostDied(
                f"pool {pool.name!r} was lost during {self.lost[pool.name]}",
                "one of its hosts has ended, or its ranks no longer have the same state",
                remedy,
            )

    def note_outcome(self, pool: str, what: str, pending: Pending) -> str:
        """Note and return whether a host has not finished a request ("late"), or failed in it ("lost"); else ""."""
        if not pending.done():
            self.clean_up_later(pool, what, pending)
            return "late"
        if failure(pending) is not None:
            self.lost[pool] = what
            return "lost"
        return ""

    def clean_up_later(self, pool: str, what: str, pending: Pending) -> None:
        """Note work that hosts of a pool have to end before they take another stage."""
        self.pending_cleanup.setdefault(pool, []).append((what, pending))

    def lost_pools(self, timeout_s: float) -> set[str]:
        """Return the pools that are not whole: a process has ended or does not answer, or ranks no longer agree."""
        lost, asked = {*self.lost, *self.pending_cleanup}, {}
        for info in self.infos:
            try:
                asked[info] = self.backend.ask(info.name, "status")
            except WorkbenchError:
                lost.add(info.pool)
        self.backend.wait(list(asked.values()), timeout_s)
        lost |= {info.pool for info, pending in asked.items() if not pending.done() or failure(pending) is not None}
        return lost & {info.pool for info in self.infos}
