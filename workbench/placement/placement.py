"""Placements: which roles share which devices."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Annotated, Any

from workbench.display.html import table
from workbench.errors import BadInput
from workbench.errors.plain_text import shown
from workbench.settings.layout import Layout
from workbench.settings.roles import ENVIRONMENT, ROLES, ROLLOUT, check_role
from workbench.support.checked_calls import checks_calls
from workbench.support.validation import PositiveInt, Rule, check_fields, whole

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True)
class Pool:
    """A named set of devices and the roles that share them; every role runs on all of them. With the role "environment"
    its `devices` are processes, see `Placement`."""

    name: str
    devices: int
    roles: tuple[str, ...]

    def __post_init__(self) -> None:
        check_fields(self, "Pool.")
        whole(f"pool {self.name!r}: devices", self.devices, 1)
        if not self.name.isidentifier():
            raise BadInput(f"pool name {self.name!r}", "must be a plain identifier, such as 'policy'")
        for role in self.roles:
            check_role(role, more=(ENVIRONMENT,))
        if ENVIRONMENT in self.roles and len(self.roles) > 1:
            raise BadInput(
                f"pool {self.name!r} of {', '.join(self.roles)}",
                "environments need their own processes, which have no device",
                f'give them their own pool: Placement.of({{..., "environments": ({self.devices}, ["{ENVIRONMENT}"])}})',
            )

    def share(self, rank: int, ranks: int) -> int:
        """Return how many of the devices (or processes) belong to one of `ranks` ranks."""
        return self.devices // ranks + (rank < self.devices % ranks)


def host_name(pool: str, rank: int, earlier_pools: int = 0) -> str:
    """Return the name of a rank's process. earlier_pools: how many the workbench had by that name."""
    return f"{pool}-{rank}" + (f".{earlier_pools}" if earlier_pools else "")


EXAMPLE = 'Placement.of({"a": (4, ["actor", "reference"]), "b": (1, ["critic", "reward"])})'
Pools = Annotated[
    Mapping[str, tuple[int, Iterable[str]]], Rule("must be pools by name, each (devices, roles)", f"write {EXAMPLE}")
]
Layouts = Mapping[str, Layout | tuple[int, ...]]


@checks_calls("Placement")
@dataclass(frozen=True)
class Placement:
    """The pool and layout of each role. Roles of one pool are colocated: they share host processes and run in call
    order. Different pools run at the same time. Pools do not overlap; any partition of the roles is allowed.

    layouts: of roles that are not purely data parallel, as `Layout(p, t, d)` or as the numbers (p, t, d). The ranks of
    a role are the devices of its pool, so p * t * d must equal their number; a role without a layout has
    (1, 1, devices). DeepSpeed trains in layouts with p = 1, torch in any.

    A pool with the role "rollout", separate from the actor's, generates for the actor: its ranks are rollout workers,
    which hold the generation engine in groups of `Generation.tensor_parallel_size` and receive the actor's weights.
    Without such a pool the actor generates on its own ranks.

    A pool with the role "environment" has processes instead of devices, for the environments of rollouts. They are
    divided among the ranks that generate, run near them on the CPU, and each has a share of its rank's conversations.
    The pool is in `environments`, not in `pools`. Without such a pool, each of these ranks has one process.

    Placements are values: `==` compares them, `repr` is an expression that recreates the placement, `str` is one line
    for display. `with_role`, `with_layout`, `with_devices` and `without` return a placement that differs in one point.
    """

    pools: tuple[Pool, ...]
    layouts: Layouts = field(default_factory=dict, hash=False)
    environments: Pool | None = None

    def __post_init__(self) -> None:
        check_fields(self, "Placement.")
        every = self._every
        object.__setattr__(self, "pools", tuple(pool for pool in every if ENVIRONMENT not in pool.roles))
        object.__setattr__(self, "environments", next((p for p in every if ENVIRONMENT in p.roles), None))
        if not self.pools:
            raise BadInput(
                "a placement without pools of devices", "it needs at least one", "write Placement.colocate(devices=1)"
            )
        names = [pool.name for pool in every]
        for what, seen in (("pool", names), ("role", [role for pool in every for role in pool.roles])):
            twice = sorted({name for name in seen if seen.count(name) > 1})
            if twice:
                raise BadInput(f"{what} {twice[0]!r} twice in one placement", f"each {what} may be in it only once")
        if any({"actor", ROLLOUT} <= set(pool.roles) for pool in self.pools):
            raise BadInput(
                "roles 'actor' and 'rollout' in one pool",
                "on its own ranks the actor itself generates",
                "leave out 'rollout', or give it its own pool",
            )
        if ROLLOUT in self.layouts:
            raise BadInput(
                f"layouts={{{ROLLOUT!r}: {self.layouts[ROLLOUT]!r}}}",
                "rollout workers generate in groups of Generation.tensor_parallel_size",
                "set that, and leave out this layout",
            )
        if ENVIRONMENT in self.layouts:
            raise BadInput(f"layouts[{ENVIRONMENT!r}]", "environments have processes, but no devices", "leave it out")
        layouts = {role: _layout(role, given, self.pool_of(role)) for role, given in self.layouts.items()}
        # drop explicit defaults, so that such placements are equal to those without them
        changed = {role: layout for role, layout in layouts.items() if layout.p * layout.t > 1}
        object.__setattr__(self, "layouts", changed)

    @classmethod
    def of(cls, pools: Pools, layouts: Layouts | None = None) -> Placement:
        """Make any partition: `Placement.of({"a": (4, ["actor", "reference"]), "b": (1, ["critic", "reward"])})`.

        layouts: `{"actor": (1, 2, 2)}`, see `Placement`.
        """
        made = tuple(Pool(name, devices, tuple(roles)) for name, (devices, roles) in pools.items())
        return cls(made, layouts or {})

    @classmethod
    def colocate(cls, devices: int = 1, layouts: Layouts | None = None) -> Placement:
        """Place all roles on the same devices (DeepSpeed-Chat's placement)."""
        return cls.of({"shared": (devices, ROLES)}, layouts)

    @classmethod
    def split(cls, devices: int = 2, layouts: Layouts | None = None) -> Placement:
        """Place actor and reference on half of the devices, other roles on the others (NeMo-Aligner's placement)."""
        if devices < 2 or devices % 2:
            raise BadInput(
                f"Placement.split(devices={devices})",
                "two halves need an even number of devices, at least 2",
                "use Placement.of({...}) for uneven pools",
            )
        half = devices // 2
        scorers = ("critic", "reward", "cost", "cost_critic")
        pools = {"policy": (half, ("actor", "reference")), "scorers": (half, scorers)}
        return cls.of(pools, layouts)

    @classmethod
    def standalone(cls, *, layouts: Layouts | None = None, **devices: int) -> Placement:
        """Place each role on its own devices (OpenRLHF's placement): `Placement.standalone(actor=2, critic=1, ...)`."""
        return cls.of({check_role(role): (count, (role,)) for role, count in devices.items()}, layouts)

    @property
    def _every(self) -> tuple[Pool, ...]:
        """All pools, the pool of environments last."""
        return self.pools if self.environments is None else (*self.pools, self.environments)

    @property
    def devices(self) -> int:
        """The total number of devices."""
        return sum(pool.devices for pool in self.pools)

    @property
    def roles(self) -> tuple[str, ...]:
        """All roles, pool by pool."""
        return tuple(role for pool in self.pools for role in pool.roles)

    def pool_of(self, role: str) -> Pool:
        for pool in self._every:
            if role in pool.roles:
                return pool
        raise BadInput(
            f"role {check_role(role, more=(ENVIRONMENT,))!r} has no pool",
            f"this placement has {self}",
            f"put {role!r} into one of its pools",
        )

    def layout_of(self, role: str) -> Layout:
        """Return the layout of a role over the devices of its pool."""
        layout = self.layouts.get(role) or Layout(d=self.pool_of(role).devices)
        assert isinstance(layout, Layout)
        return layout

    @property
    def has_rollout(self) -> bool:
        """Whether rollout workers generate for the actor."""
        return ROLLOUT in self.roles

    def restrict(self, roles: Iterable[str]) -> Placement:
        """Return this placement with only these roles. `BadInput` if a role has no pool, or a pool keeps no role."""
        wanted = set(roles)
        for role in sorted(wanted):
            self.pool_of(role)
        kept = tuple(Pool(p.name, p.devices, tuple(r for r in p.roles if r in wanted)) for p in self.pools)
        for pool in kept:
            if not pool.roles:
                raise BadInput(
                    f"pool {pool.name!r} has no role of this workbench",
                    f"its roles are {', '.join(sorted(wanted))}",
                    "drop the pool from the placement, or declare its role in models=",
                )
        layouts = {role: layout for role, layout in self.layouts.items() if role in wanted}
        return Placement(kept, layouts, self.environments)

    def with_role(self, role: str, pool: str, devices: int | None = None) -> Placement:
        """Return this placement with a role moved or added to a pool; a pool left without a role is removed.

        devices: the size of a new pool, if there is none of that name yet. The role keeps its layout if the layout fits
        the devices of its new pool; else it is data parallel there.
        """
        check_role(role, more=(ENVIRONMENT,))
        known = {other.name: other.devices for other in self._every}
        if pool not in known and devices is None:
            raise BadInput(
                f"with_role({role!r}, {pool!r})",
                f"the pools are {', '.join(known)}",
                f"choose one of these, or make it: with_role({role!r}, {pool!r}, devices=1)",
            )
        if devices not in (None, known.get(pool, devices)):
            raise BadInput(
                f"with_role({role!r}, {pool!r}, devices={devices})",
                f"the pool of that name has {known[pool]} devices",
                "leave out devices=, or use a new name",
            )
        pools = self._every if devices is None or pool in known else (*self._every, Pool(pool, devices, ()))
        if role in next((p.roles for p in pools if p.name == pool), ()):
            return self
        others = [replace(p, roles=tuple(r for r in p.roles if r != role)) for p in pools]
        moved = [replace(p, roles=(*p.roles, role)) if p.name == pool else p for p in others]
        size = next(p.devices for p in moved if p.name == pool)
        layouts = {r: layout for r, layout in self._layouts.items() if r != role or layout.size == size}
        return Placement(tuple(p for p in moved if p.roles), layouts)

    def with_layout(self, role: str, layout: Layout | tuple[int, ...]) -> Placement:
        """Return this placement with another layout of one role: a `Layout`, or the numbers (p, t, d)."""
        self.pool_of(role)
        return Placement(self._every, {**self.layouts, role: layout})

    def with_devices(self, pool: str, devices: PositiveInt) -> Placement:
        """Return this placement with another size of a pool. Layouts keep p and t if p * t divides the new size."""
        known = {other.name: other for other in self._every}
        if pool not in known:
            raise BadInput(
                f"with_devices({pool!r}, {devices})", f"the pools are {', '.join(known)}", "choose one of these"
            )
        pools = tuple(replace(other, devices=devices) if other.name == pool else other for other in self._every)
        layouts = dict(self._layouts)
        for role in known[pool].roles:
            layout = layouts.get(role)
            if layout is not None and devices % (layout.p * layout.t) == 0:
                layouts[role] = replace(layout, d=devices // (layout.p * layout.t))
        return Placement(pools, layouts)

    def without(self, role: str) -> Placement:
        """Return this placement without one role; a pool left without a role is removed."""
        self.pool_of(role)
        pools = [replace(pool, roles=tuple(r for r in pool.roles if r != role)) for pool in self._every]
        layouts = {r: layout for r, layout in self._layouts.items() if r != role}
        return Placement(tuple(pool for pool in pools if pool.roles), layouts)

    @property
    def _layouts(self) -> dict[str, Layout]:
        return {role: self.layout_of(role) for role in self.layouts}

    def rows(self) -> list[dict[str, Any]]:
        """Return one dict per role: role, pool, devices, and the layout's p, t and d."""
        found = []
        for pool in self._every:
            for role in pool.roles:
                layout = self.layout_of(role)
                sizes = {"p": layout.p, "t": layout.t, "d": layout.d}
                found.append({"role": role, "pool": pool.name, "devices": pool.devices, **sizes})
        return found

    def frame(self) -> pd.DataFrame:
        """Return a frame with one row per role: role, pool, devices, p, t, d."""
        import pandas as pd

        return pd.DataFrame(self.rows())

    def __repr__(self) -> str:
        pools = {pool.name: (pool.devices, list(pool.roles)) for pool in self._every}
        layouts = f", layouts={self.layouts!r}" if self.layouts else ""
        return f"Placement.of({pools!r}{layouts})"

    def _repr_html_(self) -> str:
        return table(self.rows(), caption=f"Placement on {self.devices} device{'s' if self.devices > 1 else ''}")

    def __str__(self) -> str:
        def shown(role: str) -> str:
            return f"{role} {self.layouts[role]}" if role in self.layouts else role

        return " | ".join(f"{p.name}[{p.devices}]: {', '.join(map(shown, p.roles))}" for p in self._every)


def _layout(role: str, given: Layout | tuple[int, ...], pool: Pool) -> Layout:
    if isinstance(given, Layout):
        layout = given
    elif isinstance(given, Sequence) and len(given) == 3 and all(type(size) is int for size in given):
        layout = Layout(*given)
    else:
        raise BadInput(f"layouts[{role!r}]={shown(given)}", "must be a Layout, or the three numbers (p, t, d)")
    if layout.size != pool.devices:
        replica = layout.p * layout.t
        raise BadInput(
            f"layouts[{role!r}]={layout} in pool {pool.name!r} of {pool.devices} devices",
            f"a role runs on all devices of its pool, and p*t*d is {layout.size}",
            f"use d={pool.devices // replica}"
            if pool.devices % replica == 0
            else f"give the pool {layout.size} devices, or choose p and t so that p*t divides {pool.devices}",
        )
    return layout


def named_placements(roles: Sequence[str], devices: int) -> dict[str, Placement | BadInput]:
    """Return placements by name: "colocate", "split" (policy and scorers) and "standalone"; or, for a name, the
    `BadInput` that says which devices or roles are missing.

    roles: the roles to place; "standalone" gives the first ones more devices. Rollout workers are left out: the actor
    generates. devices: all of them are used, as evenly as possible.
    """
    placed = [role for role in roles if role != ROLLOUT]

    def standalone() -> Placement:
        if devices < len(placed):
            raise BadInput(
                f"{len(placed)} roles on {devices} device{'s' if devices > 1 else ''}",
                "a standalone placement needs at least one device per role",
                "give the workbench more devices",
            )
        each, more = divmod(devices, len(placed))
        return Placement.of({role: (each + (n < more), (role,)) for n, role in enumerate(placed)})

    ways: dict[str, Callable[[], Placement]] = {
        "colocate": lambda: Placement.colocate(devices),
        "split": lambda: Placement.split(devices),
        "standalone": standalone,
    }
    found: dict[str, Placement | BadInput] = {}
    for name, way in ways.items():
        try:
            found[name] = way().restrict(placed)
        except BadInput as error:
            found[name] = error
    return found
