"""Carries out a change of placement or of roles: new hosts and roles are made beside the old ones, and replace them
when they are complete.

    check │ publish │ start hosts, join pools │ build roles, take and verify their state │ switch │ end old hosts
          └─ an error in here ends the new hosts, and the old placement goes on ────────┘

Hosts that stay build roles and receive state while new hosts start; each host receives as soon as it has built.
Weights and moments go from host to host; the controller gets only checksums and byte counts.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from workbench.backends import registry
from workbench.backends.base import Pending
from workbench.backends.starting import Note, Step, begin_loading, join_pools, settle
from workbench.batches.store import Weights
from workbench.display.interrupts import stoppable, uninterrupted
from workbench.display.progress import Progress
from workbench.errors import BadInput, NotDriving, StageInterrupted, WorkbenchError
from workbench.errors.plain_text import shown
from workbench.messages.calls import HostInfo
from workbench.models.spec import Model
from workbench.placement import ROLLOUT, Placement, check_role
from workbench.placement.moves import STATE_MOVES, RoleChange
from workbench.session.topology import Topology
from workbench.stages.runner import StageRunner
from workbench.support.notebook_cell import running_cell, running_position, variable_of
from workbench.telemetry.spans import union_s
from workbench.workers.role_state import RankState, Received, RoleMove

if TYPE_CHECKING:
    from workbench.config.description import Description
    from workbench.placement.change import PlacementChange

# After a failed move, how long to wait until hosts have dropped what they built for it; a healthy host may still be
# loading a role.
ANSWER_S = 60.0
LEFT = ("the placement is unchanged", "run the same call again to make the change")


class Mover:
    """Changes the placement of a living workbench, and its roles."""

    def __init__(self, runner: StageRunner, topology: Topology) -> None:
        self._runner, self._topology = runner, topology

    @stoppable("lab.move()", LEFT)
    def move(self, placement: Placement) -> PlacementChange:
        """Change the placement while the models live: `lab.move(wb.Placement.split(4))`. Returns what moved, in the
        form of `lab.diff`, and how long it took.

        A pool keeps its processes where the new placement has a pool of its name with as many devices; other pools get
        new processes beside the old ones. Weights, moments of Adam and step counts of the roles that move go from host
        to host: each rank gets exactly what its process lacks. Batches on hosts that end move, too. Generation engines
        are built again, and synced before they generate. Counters and random draws continue: the next stage gives the
        numbers that it would have given without the move.

        Until all state has arrived and its checksums are right, the old placement stays as it is: an error ends the new
        hosts, says which step failed on which host, and the old placement goes on.

        Raises `BadInput`, with nothing touched, for a placement that this workbench could not have been opened with, or
        that has no room. On GPUs new pools need free devices beside those of the old pools; the inline backend has only
        its one process. A placement with a pool for "rollout" adds rollout workers, one without it drops them.
        """
        return self._carry_out(self._runner.hosts.description.placed(placement), f"moving to {placement}")

    @stoppable("lab.add()", LEFT)
    def add(self, role: str, model: Any = None, pool: str | None = None, devices: int | None = None) -> PlacementChange:
        """Add a role while the others live: `lab.add("cost", too_long)`; `lab.add("critic", "smollm2-135m", "scorers",
        devices=2)`; `lab.add("rollout", pool="engines", devices=1)`. Returns the change, in the form of `lab.diff`.

        model: as in `wb.open`; None for rollout workers, which have the actor's model. pool: default: the only pool.
        devices: how many a new pool of that name gets. For all else see `move`.
        """
        self._runner.ownership.check_open()
        hosts = self._runner.hosts
        description, where = hosts.description, f"add({role!r})"
        if check_role(role) in description.models:
            raise BadInput(
                where, f"this workbench has a {role}, on pool {hosts.placement.pool_of(role).name!r}",
                f"move it with lab.{role}.move(pool), or lab.drop({role!r}) first",
            )  # fmt: skip
        if role == "actor":
            raise BadInput(
                where, f"all roles read tokens of the {description.lead}'s tokenizer", "open a workbench with an actor"
            )
        if role == ROLLOUT and model is not None:
            raise BadInput(
                f"add({role!r}, {shown(model, 40)})", "rollout workers have the actor's model", "leave it out"
            )
        if role != ROLLOUT and model is None:
            raise BadInput(where, "a role needs a model, or a function", f"lab.add({role!r}, 'smollm2-135m')")
        pools = [other.name for other in hosts.placement.pools]
        if pool is None and (len(pools) > 1 or role == ROLLOUT):
            own = f"make a new one: lab.add({role!r}, ..., pool='mine', devices=1)"
            raise BadInput(
                where, f"a role is in one pool, and the pools are {', '.join(pools)}",
                own if role == ROLLOUT else f"choose one, pool={pools[0]!r}, or {own}",
            )  # fmt: skip
        models = description.declared if role == ROLLOUT else description.declaring({role: model})
        placement = hosts.placement.with_role(role, pool or pools[0], devices)
        return self._carry_out(description.placed(placement, models), f"adding {role}")

    @stoppable("lab.drop()", LEFT)
    def drop(self, role: str) -> PlacementChange:
        """Close a role, and free all that it holds, also what it has learned: `lab.drop("cost")`. A pool that is left
        without a role ends; batches on its hosts move to other hosts. Also drops a role that was lost with its pool, if
        it was alone there: what those hosts kept is gone."""
        self._runner.ownership.check_open()
        hosts = self._runner.hosts
        description, where = hosts.description, f"drop({role!r})"
        if check_role(role) not in description.models:
            alone = role in self._runner.groups.by_role
            raise BadInput(
                where, f"the {role} is the actor without its adapter, and holds no memory" if alone else
                f"this workbench has {', '.join(description.models)}",
            )  # fmt: skip
        if role == description.lead:
            raise BadInput(
                where, "all roles read tokens of its tokenizer, and its hosts hold the tables of lab.put",
                "close the workbench, and open one without this role",
            )  # fmt: skip
        models = {name: model for name, model in description.declared.items() if name != role}
        return self._carry_out(description.placed(hosts.placement.without(role), models), f"dropping {role}")

    def resize(self, pool: str, devices: int) -> PlacementChange:
        """Give a pool more or fewer devices: `lab.resize("policy", 4)`; see `move`."""
        return self.move(self._runner.hosts.placement.with_devices(pool, devices))

    def _carry_out(self, description: Description, title: str) -> PlacementChange:
        """Change the workbench to another description. title: begins the message of an error during the change."""
        runner = self._runner
        runner.require_alone(title, "roles are not idle there, or their states are not final")
        lost = self._topology.given_up(description)
        for group in runner.groups.by_role.values():
            if group.pool.name not in lost:
                runner.groups.check_alive(group)
        runner.scheduler.drain()
        runner.batches.release_unused()  # batches that no variable refers to need not move
        change = self._topology.change(description)
        change.require_fit()
        with Progress(title) as bar:
            return Move(runner, change, description, title, bar.note).carry_out()


class Move:
    """One change to a new description. infos: the host at each place of the change. new: the hosts to be started."""

    def __init__(
        self, runner: StageRunner, change: PlacementChange, description: Description, title: str, note: Note
    ) -> None:
        self._runner, self._hosts, self._change, self._note = runner, runner.hosts, change, note
        self._description, self._title = description, title
        self._key, self._run = f"{runner.ownership.controller}-move-{secrets.token_hex(4)}", runner.counters.next_run()
        there = {(info.pool, info.rank): info for info in runner.hosts.infos}
        self.new = runner.hosts.starting(change, description)
        starting = iter(self.new)
        self.infos = tuple(next(starting) if place.new else there[place.pool, place.rank] for place in change.places)
        self.ending = [info for info, place in zip(self.infos, change.places, strict=True) if place.ends]
        self._started = False

    def carry_out(self) -> PlacementChange:
        """Carry out the change; return it with its times. An error leaves all as before, except in the very last
        step."""
        began = time.monotonic()
        with ExitStack() as switching:
            try:
                transfer_s = self._bring_up(self._publish())
                self._hosts.check_room(self._description)
                if not self._hosts.inline:  # from here to the end of the switch, no other kernel can take over
                    switching.enter_context(registry.driving(self._description.id))
                self._runner.ownership.check_drives()  # past this line there is no going back
            except KeyboardInterrupt:
                interrupted = StageInterrupted("it was interrupted", "nothing was moved")
                self._abandon(interrupted)
                raise interrupted from None
            except BaseException as error:
                try:
                    self._runner.ownership.check_drives()  # a takeover by another kernel can fail the move in many ways
                except NotDriving as taken:
                    self._abandon(taken)
                    raise taken from error
                self._abandon(error)
                raise
            left = ("its last step cannot be undone, so it was finished", "the next stage runs on the new placement")
            with stoppable(self._title, left), uninterrupted():
                self._switch()
                self._runner.live.others[f"placement {self._change.new!r}"] = None
                self._runner.telemetry.append_event(
                    "move", placement=repr(self._change.new), before=repr(self._change.old),
                    moved_bytes=self._change.total_bytes, seconds=(took_s := time.monotonic() - began),
                    transfer_seconds=transfer_s, start_seconds=self._change.start_s, starts_processes=bool(self.new),
                    cell=cell.number if (cell := running_cell()) is not None else 0, at=running_position(),
                    lab=variable_of(registry.opened.get(self._description.name)), by=self._runner.driver,
                )  # fmt: skip
        return replace(self._change, took_s=took_s, transfer_s=transfer_s)

    # --- the parts of the change --------------------------------------------------------------------------------------

    @cached_property
    def _built(self) -> dict[str, list[str]]:
        return self._by_pool(self._change.new, (*STATE_MOVES, "added"), lambda role: role.new_pool)

    @cached_property
    def _closed(self) -> dict[str, list[str]]:
        return self._by_pool(self._change.old, (*STATE_MOVES, "dropped"), lambda role: role.old_pool)

    def _by_pool(
        self, placement: Placement, actions: Collection[str], pool_of: Callable[[RoleChange], str]
    ) -> dict[str, list[str]]:
        """Return, by pool, the roles with one of these actions; "numeric" (advantages) moves with the lead role."""
        found: dict[str, list[str]] = {pool.name: [] for pool in placement.pools}
        for role in self._change.roles:
            if role.action in actions:
                found[pool_of(role)].append(role.role)
            if role.role == self._description.lead and role.action == "moves":
                found[pool_of(role)].append("numeric")
        return found

    @cached_property
    def _engines(self) -> dict[str, dict[str, Model]]:
        """By pool and role: the new model of each role whose generation engine begins or ends."""
        found: dict[str, dict[str, Model]] = {}
        for role in self._change.roles:
            if role.action == "engine":
                found.setdefault(role.new_pool, {})[role.role] = self._description.models[role.role]
        return found

    @cached_property
    def _hosts_after(self) -> list[HostInfo]:
        """The hosts of the new placement, pool by pool."""
        left = [i for i, place in zip(self.infos, self._change.places, strict=True) if not place.ends]
        return [info for pool in self._change.new.pools for info in left if info.pool == pool.name]

    @cached_property
    def _moves(self) -> list[RoleMove]:
        names = tuple(info.name for info in self.infos)
        change = self._change
        return [
            RoleMove(
                role=role.role, key=self._key, hosts=names, parts=change.parts(role.role),
                source=change.source(role.role), destination=change.destination(role.role),
            )
            for role in change.roles if role.action in STATE_MOVES
        ]  # fmt: skip

    # --- before the switch --------------------------------------------------------------------------------------------

    def _publish(self) -> dict[str, list[RankState]]:
        """Have the old hosts publish weights and moments, and return the small state of each role, by rank."""
        steps, roles = [], []
        for move in self._moves:
            for rank, place in enumerate(move.source[1]):
                steps.append(self._work(f"publishing {move.role}", place, "publish_role", move, rank))
                roles.append(move.role)
        found: dict[str, list[RankState]] = {}
        for role, state in zip(roles, settle(self._hosts.backend, steps, self._note), strict=True):
            found.setdefault(role, []).append(state)
        return found

    def _bring_up(self, rank_states: dict[str, list[RankState]]) -> float:
        """Start new hosts, and have the hosts of the new placement build, receive and verify their roles. Returns for
        how many seconds any host received state."""
        backend, new = self._hosts.backend, set(self.new)
        steps = self._build_and_receive([info for info in self._hosts_after if info not in new], rank_states)
        if self.new:
            self._started = True
            self._note("starting hosts")
            backend.start(self.new)
            join_pools(backend, self.new, self._note)
            steps += self._build_and_receive(self.new, rank_states)
        taken = [found for found in settle(backend, steps, self._note) if isinstance(found, Received)]
        for part in taken:
            self._runner.telemetry.append_transfers(part.transfers)
        return union_s((part.start_s, part.end_s) for part in taken)

    def _build_and_receive(self, hosts: Sequence[HostInfo], rank_states: dict[str, list[RankState]]) -> list[Step]:
        """Ask hosts to build roles, and to receive their state and the batches of hosts that end: one after the other,
        in the same order on all ranks of a pool."""
        steps = begin_loading(
            self._hosts.backend, hosts, self._description, self._note, roles=self._built, beside=self._change.kept
        )
        random: dict[int, Any] = {}
        for move in self._moves:
            given = rank_states[move.role]
            for rank, place in enumerate(move.destination[1]):
                if self.infos[place] in hosts:
                    mine = given[rank % len(given)]
                    new = self._change.places[place].new
                    asked = "take_role", move, rank, mine, self._run
                    steps.append(self._work(f"taking {move.role}", place, *asked, beside=not new))
                    if new:
                        random.setdefault(place, mine.random)
        for place, successor in self._change.shard_successors.items():
            host = self.infos[place].name
            if self.infos[successor] in hosts:
                steps.append(self._work(f"taking the batches of {host}", successor, "take_shards", host, self._run))
        return steps + [self._work("going on", place, "continue_random", state) for place, state in random.items()]

    def _work(self, what: str, place: int, method: str, *args: Any, **kwargs: Any) -> Step:
        info = self.infos[place]
        return Step(what, info, self._hosts.backend.work(info.name, method, *args, **kwargs))

    @uninterrupted()
    def _abandon(self, error: BaseException) -> None:
        """End the new hosts; the old placement goes on."""
        backend = self._hosts.backend
        if self._started:
            with suppress(WorkbenchError):
                backend.end(self.new)
        if isinstance(error, NotDriving):  # another kernel drives the old hosts now
            return
        new = set(self.new)
        old = [info for info in self.infos if info not in new and info.pool not in self._change.lost]
        keys, ending = [key for move in self._moves for key in move.published], [info.name for info in self.ending]
        asked: list[tuple[HostInfo, Pending]] = []
        for info in old:
            backend.ask(info.name, "release", keys)
            asked.append((info, backend.work(info.name, "abandon_move", ending)))
        backend.wait([pending for _, pending in asked], ANSWER_S)
        noted = {info.name: self._hosts.note_outcome(info.pool, self._title, pending) for info, pending in asked}
        lost, late = ([name for name, how in noted.items() if how == kind] for kind in ("lost", "late"))
        if isinstance(error, WorkbenchError):
            error.value = f"{self._title}: {error.value}"
        then = "the old placement is still in use, unchanged"
        if lost:
            then = f"the old placement lost {', '.join(lost)}: lab.recover() restarts them"
        elif late:
            then += f"; it can run stages as soon as {', '.join(late)} finish their current work"
        if isinstance(error, WorkbenchError):
            more = "" if lost or "if_exists" in error.remedy else error.remedy  # no advice to reopen it
            error.remedy = "; ".join(filter(None, (then, more)))
        elif lost or late:
            error.add_note(f"{self._title} failed; {then}")

    # --- the switch ---------------------------------------------------------------------------------------------------

    def _switch(self) -> None:
        hosts, backend = self._hosts, self._hosts.backend
        threads = self._description.threads
        for info in self._hosts_after:
            if info.threads != threads:
                backend.work(info.name, "set_threads", threads)
        moved = tuple(replace(info, threads=threads) for info in self._hosts_after)
        with hosts.changing:  # settings may have been assigned since the move began
            hosts.set_description(replace(self._description.retrained_as(hosts.description), moved=moved))
            self._runner.groups.follow_hosts()
        if any(role.role == ROLLOUT and role.action in STATE_MOVES for role in self._change.roles):
            # its engines are new: they lack the weights that were sent before
            weights = self._runner.counters.weights
            weights[ROLLOUT] = Weights.fresh(weights[ROLLOUT].steps)
        successors = self._change.shard_successors
        hosts.shard_successors |= {self.infos[old].name: self.infos[new].name for old, new in successors.items()}
        hosts.pools_ended |= {info.pool: info.again for info in self.ending}
        new = set(self.new)
        pools = {pool for roles in (self._built, self._closed, self._engines) for pool, found in roles.items() if found}
        steps = [
            Step("replacing roles", info, backend.work(info.name, "replace_roles",
                self._closed.get(info.pool, []), self._built.get(info.pool, []), self._engines.get(info.pool, {}),
            ))
            for info in self._hosts_after if info not in new and info.pool in pools
        ]  # fmt: skip
        for info in self.ending:
            hosts.lost.pop(info.pool, None)
        try:
            self._runner.ownership.record()
            hosts.record()
            settle(backend, steps, self._note)
        except BaseException:
            for step in steps:
                hosts.note_outcome(step.host.pool, f"the last step of {self._title}", step.pending)
            raise
        finally:
            keys = [key for move in self._moves for key in move.published]
            for info in self._hosts_after:
                backend.ask(info.name, "release", keys)
            if self.ending:
                self._note("ending old hosts")
                backend.end(self.ending)
