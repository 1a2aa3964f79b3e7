"""Carrying out a change of placement: what is new is made beside what is there, and takes its place when it is whole.

    check │ start hosts, join pools, build roles │ publish │ take │ verify │ switch │ end old hosts
          └─ an error in here ends what is new, and the old placement goes on ─┘

Weights and moments go from host to host, and the controller hears of sums of bits and bytes alone.
"""

from __future__ import annotations

import secrets
import time
from contextlib import suppress
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from workbench.dataflow.store import Weights
from workbench.display.progress import Progress
from workbench.errors import BadInput, HostDied, WorkbenchError
from workbench.placement import ROLLOUT, Placement
from workbench.starting import Note, Step, join_pools, load_roles, settle
from workbench.workers.calls import HostInfo
from workbench.workers.role_state import Carried, RoleMove

if TYPE_CHECKING:
    from workbench.controller import Workbench
    from workbench.placement.change import PlacementChange
    from workbench.workers.backends import Pending

# How long hosts get to forget what was built for a move that came to nothing: a healthy one may still be loading it.
ANSWER_S = 60.0


def move(lab: Workbench, placement: Placement) -> PlacementChange:
    """`lab.move(placement)`."""
    lab._check_open()
    lab.description.placed(placement)
    if any(info.offloads for info in lab._infos):
        raise BadInput(
            f"move() with share_memory={lab.description.share_memory!r}",
            "what moves is held twice for a while, where roles that take turns leave no room for it",
            "open the workbench without share_memory, or with the other placement",
        )
    for group in lab.groups.values():
        lab._check_alive(group)
    if lab.overlapping or lab._keeping:
        where = "overlap()" if lab.overlapping else "kept()"
        raise BadInput(
            f"move() inside lab.{where}", "it needs the roles as they are, and none at work", "move after it"
        )
    lab.scheduler.drain()
    lab._release()  # what nobody refers to need not move
    change = lab.diff(placement)
    change.require_fit()
    with Progress(f"moving {lab.name}") as bar:

        def note(text: str) -> None:
            bar.label = f"moving {lab.name}: {text}"
            bar.update(0, 0)

        Move(lab, change, note).carry_out()
    return change


class Move:
    """One change of placement, on its way. infos: the host at each of the change's places; new: those to be started."""

    def __init__(self, lab: Workbench, change: PlacementChange, note: Note) -> None:
        self._lab, self._change, self._note = lab, change, note
        self._description = lab.description.placed(change.new)
        self._key, self._run = f"{lab._id}-move-{secrets.token_hex(4)}", lab._next_run()
        there = {(info.pool, info.rank): info for info in lab._infos}
        pools = {pool.name: pool for pool in change.new.pools}
        again = {info.pool: info.again + 1 for info in lab._infos} | lab._pools_ended
        self.infos = tuple(
            self._description.host(
                pools[place.pool], place.rank, place.device, lab.run_folder, again.get(place.pool, 0)
            )
            if place.new
            else there[place.pool, place.rank]
            for place in change.places
        )
        self.new = [info for info, place in zip(self.infos, change.places, strict=True) if place.new]
        self.ending = [info for info, place in zip(self.infos, change.places, strict=True) if place.ends]
        self._started = False

    def carry_out(self) -> None:
        """Do it. On an error everything is as before, but for one in the very last step."""
        began = time.monotonic()
        self._lab._backend.check_free(self.new)
        try:
            self._build()
            carried = self._publish()
            self._take(carried)
        except BaseException as error:
            self._abandon(error)
            raise
        self._switch()
        self._lab.telemetry.append_event(
            "move", placement=str(self._change.new), before=str(self._change.old),
            moved_bytes=self._change.total_bytes, seconds=time.monotonic() - began,
        )  # fmt: skip

    # --- what there is to do ------------------------------------------------------------------------------------------

    @cached_property
    def _built(self) -> dict[str, list[str]]:
        """The roles that are built, by their pool of after. Advantages are computed where the lead role is."""
        found: dict[str, list[str]] = {pool.name: [] for pool in self._change.new.pools}
        for role in self._change.roles:
            if role.action != "stays":
                found[role.new_pool].append(role.role)
            if role.role == self._description.lead and role.action == "moves":
                found[role.new_pool].append("numeric")
        return found

    @cached_property
    def _closed(self) -> dict[str, list[str]]:
        """The roles that are closed, by their pool of before."""
        found: dict[str, list[str]] = {pool.name: [] for pool in self._change.old.pools}
        for role in self._change.roles:
            if role.action != "stays":
                found[role.old_pool].append(role.role)
            if role.role == self._description.lead and role.action == "moves":
                found[role.old_pool].append("numeric")
        return found

    @cached_property
    def _after(self) -> list[HostInfo]:
        """The hosts of after, pool by pool."""
        left = [i for i, place in zip(self.infos, self._change.places, strict=True) if not place.ends]
        return [info for pool in self._change.new.pools for info in left if info.pool == pool.name]

    @cached_property
    def _kept(self) -> list[HostInfo]:
        """The hosts that stay, and change."""
        new = set(self.new)
        pools = {pool for roles in (self._built, self._closed) for pool, found in roles.items() if found}
        return [info for info in self._after if info not in new and info.pool in pools]

    @cached_property
    def _moves(self) -> list[RoleMove]:
        names = tuple(info.name for info in self.infos)
        change = self._change
        return [
            RoleMove(
                role=role.role, key=self._key, hosts=names, parts=change.parts(role.role),
                source=change.source(role.role), destination=change.destination(role.role),
            )
            for role in change.roles if role.action != "stays"
        ]  # fmt: skip

    # --- before the switch --------------------------------------------------------------------------------------------

    def _build(self) -> None:
        backend = self._lab._backend
        if self.new:
            self._started = True
            self._note("starting hosts")
            backend.start(self.new)
            join_pools(backend, self.new, self._note)
        load_roles(backend, self._after, self._description, self._note, roles=self._built, beside=self._change.kept)

    def _publish(self) -> dict[str, list[Carried]]:
        """Let the hosts of before say what goes along of each role, by rank; what is large they hold ready."""
        steps, roles = [], []
        for move in self._moves:
            for rank, place in enumerate(move.source[1]):
                steps.append(self._work(f"publishing {move.role}", place, "publish_role", move, rank))
                roles.append(move.role)
        found: dict[str, list[Carried]] = {}
        for role, carried in zip(roles, settle(self._lab._backend, steps, self._note), strict=True):
            found.setdefault(role, []).append(carried)
        return found

    def _take(self, carried: dict[str, list[Carried]]) -> None:
        """Let the hosts of after take, and verify, what they need; and the batches of hosts that end."""
        steps, random = [], dict[int, Any]()
        for move in self._moves:
            given = carried[move.role]
            for rank, place in enumerate(move.destination[1]):
                mine = given[rank % len(given)]
                steps.append(self._work(f"taking {move.role}", place, "take_role", move, rank, mine, self._run))
                if self._change.places[place].new:
                    random.setdefault(place, mine.random)
        for place, heir in self._change.heirs.items():
            host = self.infos[place].name
            steps.append(self._work(f"taking the batches of {host}", heir, "take_shards", host, self._run))
        for transfers in settle(self._lab._backend, steps, self._note):
            self._lab.telemetry.append_transfers(transfers)
        last = [self._work("going on", place, "continue_random", state) for place, state in random.items()]
        settle(self._lab._backend, last, self._note)

    def _work(self, what: str, place: int, method: str, *args: Any) -> Step:
        info = self.infos[place]
        return Step(what, info, self._lab._backend.work(info.name, method, *args))

    def _abandon(self, error: BaseException) -> None:
        """End what is new; what was there goes on."""
        lab, backend = self._lab, self._lab._backend
        if self._started:
            with suppress(WorkbenchError):
                backend.end(self.new)
        new = set(self.new)
        old = [info for info in self.infos if info not in new]
        keys, ending = [key for move in self._moves for key in move.published], [info.name for info in self.ending]
        asked: list[tuple[HostInfo, Pending]] = []
        for info in old:
            backend.ask(info.name, "release", keys)
            asked.append((info, backend.work(info.name, "abandon_move", ending)))
        backend.wait([pending for _, pending in asked], ANSWER_S)
        lost = [info for info, pending in asked if not _answered(pending)]
        for info in lost:
            lab._broken[info.pool] = f"a move to {self._change.new}"
        if isinstance(error, WorkbenchError):
            error.value = f"moving to {self._change.new}: {error.value}"
            error.remedy = (
                f"the old placement lost {', '.join(info.name for info in lost)}: open the workbench again with "
                "if_exists='replace'"
                if lost
                else "; ".join(filter(None, ("the old placement goes on as it was", _no_opening(error.remedy))))
            )

    # --- the switch ---------------------------------------------------------------------------------------------------

    def _switch(self) -> None:
        lab, backend = self._lab, self._lab._backend
        lab._stand(replace(self._description, moved=tuple(self._after)))
        if any(role.role == ROLLOUT and role.action != "stays" for role in self._change.roles):
            # its engines were made anew: what they hold is not what they were sent
            lab.weights[ROLLOUT] = Weights(steps=lab.weights[ROLLOUT].steps, state=secrets.token_hex(4))
        lab._heirs |= {self.infos[place].name: self.infos[heir].name for place, heir in self._change.heirs.items()}
        lab._pools_ended |= {info.pool: info.again + 1 for info in self.ending}
        steps = [
            Step("replacing roles", info, backend.work(info.name, "replace_roles", self._closed.get(info.pool, []),
                                                       self._built.get(info.pool, [])))
            for info in self._kept
        ]  # fmt: skip
        try:
            settle(backend, steps, self._note)
        except BaseException:
            for info in self._kept:
                lab._broken[info.pool] = f"the last step of a move to {self._change.new}"
            raise
        finally:
            keys = [key for move in self._moves for key in move.published]
            for info in self._after:
                backend.ask(info.name, "release", keys)
            if self.ending:
                self._note("ending old hosts")
                backend.end(self.ending)
            lab._record_hosts()


def _answered(pending: Pending) -> bool:
    """Whether a host did what it was asked."""
    try:
        if pending.done():
            pending.result()
            return True
    except (HostDied, WorkbenchError):
        pass
    return False


def _no_opening(remedy: str) -> str:
    """A remedy, unless it is to open the workbench again."""
    return "" if "if_exists" in remedy else remedy
