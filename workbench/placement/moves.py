"""Compare two placements: which processes stay, which roles move, and the bytes sent from each process to each other.

Pure: nothing is changed. A move does the following, and this module counts its bytes:

- A pool is kept if the new placement has one of the same name with as many devices: its processes stay. Roles that stay
in the pool with the same layout do not change; roles that leave it are closed, roles that join it are built, and roles
with a new layout are rebuilt there.

- Every other pool gets new processes, on the lowest device numbers that no kept pool uses (for GPUs: that no old pool
uses either). Then the old pools that are not kept end.

- A new role is built from its model; a role that is not in the new placement is closed. If rollout workers begin to
generate for an actor, or stop, the actor's generation engine is closed or started; an actor whose ranks get other
numbers by this is rebuilt.

- Any other role that is built or rebuilt gets its state (`state_of`) from the ranks that held it before: each rank
receives exactly what its process lacks. Generation engines are rebuilt and synced from the new trainer ranks.

- Shards of batches on a process that ends go to other processes, in turn: to new ones if there are any, else to all.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

import numpy as np

from workbench.placement.estimate import Models, device_numbers
from workbench.placement.placement import Placement, host_name
from workbench.placement.state import OF_OPTIMIZERS, Part, state_of
from workbench.settings.layout import Layout
from workbench.settings.roles import ROLLOUT

Action = Literal["stays", "engine", "rebuilt", "moves", "added", "dropped"]
STATE_MOVES = ("rebuilt", "moves")  # actions that move the role's state


@dataclass(frozen=True, kw_only=True)
class Place:
    """A host process before or after a change. ends: it exists only before. new: it exists only after."""

    pool: str
    rank: int
    device: int
    name: str
    ends: bool = False
    new: bool = False


@dataclass(frozen=True, kw_only=True)
class RoleChange:
    """The change of one role. action: "stays", "engine" (only its generation engine is started or closed), "rebuilt"
    (another layout in its pool), "moves", "added" or "dropped".

    old_pool, old_layout: "" and None for an added role; new_pool, new_layout: "" and None for a dropped role.
    moved_bytes: of its state, between processes.
    """

    role: str
    action: Action
    old_pool: str
    new_pool: str
    old_layout: Layout | None
    new_layout: Layout | None
    moved_bytes: int


@dataclass(frozen=True, kw_only=True, eq=False)
class Moves:
    """The moves of a change `old` -> `new`.

    models: the models of the roles of `old`; new_models: of `new`, None: the same. numbers: device numbers of the old
    pools; None: counted up. device: "cpu" or "cuda". earlier_pools: by pool name, how many had the name; a new pool's
    number follows these. lost: old pools whose processes do not answer, and whose roles are not in `new`.
    batch_bytes: of batches, by the names of old processes. fresh: trained roles that have not taken an optimizer step,
    so have no moments.
    """

    old: Placement
    new: Placement
    models: Models = field(repr=False)
    new_models: Models | None = field(default=None, repr=False)
    numbers: Mapping[str, Sequence[int]] | None = None
    device: str = "cpu"
    earlier_pools: Mapping[str, int] = field(default_factory=dict)
    batch_bytes: Mapping[str, int] = field(default_factory=dict)
    fresh: Collection[str] = ()
    lost: Collection[str] = ()

    @property
    def models_after(self) -> Models:
        return self.models if self.new_models is None else self.new_models

    @cached_property
    def kept(self) -> tuple[str, ...]:
        old = {pool.name: pool.devices for pool in self.old.pools}
        return tuple(pool.name for pool in self.new.pools if old.get(pool.name) == pool.devices)

    @cached_property
    def old_numbers(self) -> dict[str, tuple[int, ...]]:
        given = device_numbers(self.old) if self.numbers is None else self.numbers
        return {pool.name: tuple(given[pool.name]) for pool in self.old.pools}

    @cached_property
    def new_numbers(self) -> dict[str, tuple[int, ...]]:
        found = {name: self.old_numbers[name] for name in self.kept}
        # old and new processes may share a slot of a CPU machine; a GPU has only one process
        taken = found if self.device == "cpu" else self.old_numbers
        used = {number for numbers in taken.values() for number in numbers}
        free = iter(n for n in range(self.new.devices + len(used)) if n not in used)
        for pool in self.new.pools:
            if pool.name not in found:
                found[pool.name] = tuple(next(free) for _ in range(pool.devices))
        return found

    @cached_property
    def places(self) -> tuple[Place, ...]:
        """Every process, the old ones first. `matrix` uses their indices."""
        found = []
        for pool in self.old.pools:
            earlier, ends = self.earlier_pools.get(pool.name, 0), pool.name not in self.kept
            for rank, device in enumerate(self.old_numbers[pool.name]):
                name = host_name(pool.name, rank, earlier)
                found.append(Place(pool=pool.name, rank=rank, device=device, name=name, ends=ends))
        for pool in self.new.pools:
            if pool.name in self.kept:
                continue
            for rank, device in enumerate(self.new_numbers[pool.name]):
                name = host_name(pool.name, rank, self.earlier_pools_of(pool.name))
                found.append(Place(pool=pool.name, rank=rank, device=device, name=name, new=True))
        return tuple(found)

    def earlier_pools_of(self, pool: str) -> int:
        """Return how many earlier pools had the name of a new pool."""
        there = {pool.name for pool in self.old.pools} | self.earlier_pools.keys()
        return self.earlier_pools.get(pool, 0) + 1 if pool in there else 0

    @cached_property
    def names(self) -> tuple[str, ...]:
        return tuple(place.name for place in self.places)

    def parts(self, role: str) -> tuple[Part, ...]:
        model = self.models[role]
        parts = () if model is None else tuple(state_of(model))
        return tuple(part for part in parts if not (part.what in OF_OPTIMIZERS and role in self.fresh))

    def source(self, role: str) -> tuple[Layout, tuple[int, ...]]:
        """Return a role's layout before the change, and the indices of its places by rank."""
        return self._side(role, self.old, after=False)

    def destination(self, role: str) -> tuple[Layout, tuple[int, ...]]:
        """Return a role's layout after the change, and the indices of its places by rank."""
        return self._side(role, self.new, after=True)

    def _side(self, role: str, placement: Placement, *, after: bool) -> tuple[Layout, tuple[int, ...]]:
        model, layout = (self.models_after if after else self.models)[role], placement.layout_of(role)
        rank_layout = layout if model is None else model.rank_layout(layout)
        pool = placement.pool_of(role).name
        places = ((n, place) for n, place in enumerate(self.places) if place.pool == pool)
        return rank_layout, tuple(n for n, place in places if not (place.ends if after else place.new))

    @cached_property
    def roles(self) -> tuple[RoleChange, ...]:
        return tuple(change for change, _ in self._moved.values())

    @cached_property
    def shard_successors(self) -> dict[int, int]:
        """For each place that ends, the place that takes over its batches; rollout workers hold no batches."""
        keepers = {pool.name for pool in self.new.pools if pool.roles != (ROLLOUT,)}
        there = [n for n, place in enumerate(self.places) if not place.ends and place.pool in keepers]
        takers = [n for n in there if self.places[n].new] or there
        ending = [n for n, place in enumerate(self.places) if place.ends and place.pool not in self.lost]
        return {n: takers[turn % len(takers)] for turn, n in enumerate(ending)}

    @cached_property
    def batch_matrix(self) -> np.ndarray:
        """int64 [places, places]: bytes of batches sent from a row's process to a column's process."""
        matrix = self._nothing()
        for n, taker in self.shard_successors.items():
            matrix[n, taker] += self.batch_bytes.get(self.names[n], 0)
        return matrix

    @property
    def matrix(self) -> np.ndarray:
        """int64 [places, places]: all bytes that move."""
        return sum((of_state for _, of_state in self._moved.values()), self.batch_matrix)

    @property
    def total_bytes(self) -> int:
        return int(self.matrix.sum())

    def _nothing(self) -> np.ndarray:
        return np.zeros((len(self.places),) * 2, dtype=np.int64)

    @cached_property
    def _moved(self) -> dict[str, tuple[RoleChange, np.ndarray]]:
        return {role: self._of(role) for placement in (self.old, self.new) for role in placement.roles}

    def _of(self, role: str) -> tuple[RoleChange, np.ndarray]:
        both = self.old, self.new
        pools = [placement.pool_of(role).name if role in placement.roles else "" for placement in both]
        layouts = [placement.layout_of(role) if role in placement.roles else None for placement in both]
        action = self._action(role, pools, layouts)
        matrix = self._nothing()
        if action in STATE_MOVES:
            for part in self.parts(role):
                plan = part.reshard(self.source(role), self.destination(role))
                matrix[np.ix_(plan.ranks, plan.ranks)] += plan.figures().matrix * part.copies
        change = RoleChange(
            role=role,
            action=action,
            old_pool=pools[0],
            new_pool=pools[1],
            old_layout=layouts[0],
            new_layout=layouts[1],
            moved_bytes=int(matrix.sum()),
        )
        return change, matrix

    def _action(self, role: str, pools: Sequence[str], layouts: Sequence[Layout | None]) -> Action:
        if "" in pools:
            return "dropped" if pools[0] else "added"
        if pools[0] != pools[1] or pools[0] not in self.kept:
            return "moves"
        before, after = self.models[role], self.models_after[role]
        engines = [None if model is None else model.generation for model in (before, after)]
        if layouts[0] != layouts[1]:
            return "rebuilt"
        if engines[0] == engines[1] or before is None or after is None or layouts[0] is None:
            return "stays"
        return "engine" if before.rank_layout(layouts[0]) == after.rank_layout(layouts[0]) else "rebuilt"
