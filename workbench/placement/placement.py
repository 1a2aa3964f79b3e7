"""Which roles share which devices."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from workbench.engines.settings import at_least
from workbench.errors import BadInput
from workbench.placement.layout import Layout

ROLES = ("actor", "critic", "reference", "reward", "cost", "cost_critic")
TRAINED_ROLES = ("actor", "critic", "cost_critic")


def check_role(role: str) -> str:
    """Return `role`, or raise `BadInput` naming the roles there are."""
    if role not in ROLES:
        raise BadInput(f"unknown role {role!r}", f"a role is one of {', '.join(ROLES)}")
    return role


@dataclass(frozen=True)
class Pool:
    """A named set of devices and the roles that share them; every role runs data parallel over all of them."""

    name: str
    devices: int
    roles: tuple[str, ...]

    def __post_init__(self) -> None:
        at_least(f"pool {self.name!r}: devices", self.devices, 1)
        if not self.name.isidentifier():
            raise BadInput(f"pool name {self.name!r}", "must be a plain identifier, such as 'policy'")
        for role in self.roles:
            check_role(role)

    @property
    def layout(self) -> Layout:
        """The layout of every role of this pool."""
        return Layout(1, 1, self.devices)


@dataclass(frozen=True)
class Placement:
    """role -> pool. Same pool: colocated, the roles share host processes and run in call order. Different pools run at
    the same time. Pools do not overlap; any set partition of the roles is legal."""

    pools: tuple[Pool, ...]

    def __post_init__(self) -> None:
        if not self.pools:
            raise BadInput("a placement without pools", "needs at least one", "write Placement.colocate(devices=1)")
        names = [pool.name for pool in self.pools]
        roles = [role for pool in self.pools for role in pool.roles]
        for what, seen in (("pool", names), ("role", roles)):
            twice = sorted({name for name in seen if seen.count(name) > 1})
            if twice:
                raise BadInput(f"{what} {twice[0]!r} twice in one placement", f"each {what} stands in it once")

    @classmethod
    def of(cls, pools: Mapping[str, tuple[int, Iterable[str]]]) -> Placement:
        """Any partition: `Placement.of({"a": (2, ["actor", "reference"]), "b": (1, ["critic", "reward"])})`."""
        return cls(tuple(Pool(name, devices, tuple(roles)) for name, (devices, roles) in pools.items()))

    @classmethod
    def colocate(cls, devices: int = 1) -> Placement:
        """All roles on the same devices (DeepSpeed-Chat's placement)."""
        return cls.of({"shared": (devices, ROLES)})

    @classmethod
    def split(cls, devices: int = 2) -> Placement:
        """Actor and reference on one half, the rest on the other (NeMo-Aligner's placement)."""
        if devices < 2 or devices % 2:
            raise BadInput(
                f"Placement.split(devices={devices})",
                "two halves need an even number of devices, at least 2",
                "use Placement.of({...}) for uneven pools",
            )
        half = devices // 2
        return cls.of(
            {"policy": (half, ("actor", "reference")), "scorers": (half, ("critic", "reward", "cost", "cost_critic"))}
        )

    @classmethod
    def standalone(cls, **devices: int) -> Placement:
        """Each role on devices of its own (OpenRLHF's placement): `Placement.standalone(actor=2, critic=1, ...)`."""
        return cls.of({check_role(role): (count, (role,)) for role, count in devices.items()})

    @property
    def devices(self) -> int:
        """Devices in all."""
        return sum(pool.devices for pool in self.pools)

    def pool_of(self, role: str) -> Pool:
        """The pool of a role."""
        for pool in self.pools:
            if role in pool.roles:
                return pool
        raise BadInput(
            f"role {check_role(role)!r} has no pool", f"this placement has {self}", f"name {role!r} in one of its pools"
        )

    def restrict(self, roles: Iterable[str]) -> Placement:
        """This placement with only those roles. Every role needs a pool; a pool left without a role is an error."""
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
        return Placement(kept)

    def __str__(self) -> str:
        return " | ".join(f"{p.name}[{p.devices}]: {', '.join(p.roles)}" for p in self.pools)
