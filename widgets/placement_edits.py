"""What the placement editor's gestures make of a placement: pure functions, each giving another one."""

from __future__ import annotations

from typing import Any

from workbench.errors import BadInput
from workbench.placement import ROLLOUT, Layout, Placement
from workbench_widgets.view import whole_number

NEW_POOL = "new pool"  # no identifier, so no pool has this name


def same(one: Placement, other: Placement) -> bool:
    """Whether two placements differ in nothing but the order of what they name."""
    return _as_sets(one) == _as_sets(other)


def _as_sets(placement: Placement) -> tuple[Any, ...]:
    pools = {p.name: (p.devices, frozenset(p.roles)) for p in placement.pools}
    return pools, dict(placement.layouts), placement.environments


def put(placement: Placement, role: str, pool: str) -> Placement:
    """A role in a pool, or in one of its own with one device."""
    if pool != NEW_POOL:
        return placement.with_role(role, pool)
    here = placement.pool_of(role)
    if len(here.roles) == 1:
        raise BadInput(f"{role} in a new pool", f"it has pool {here.name!r} for itself already", "drag it onto another")
    taken = {other.name for other in placement.pools}
    name = next(name for name in (role, *(f"{role}_{n}" for n in range(2, 99))) if name not in taken)
    return placement.with_role(role, name, devices=1)


def step(placement: Placement, role: str, by: int) -> Placement:
    """A role in the pool before or after its own; behind the last one is a new pool, before the first one nothing."""
    names = [pool.name for pool in placement.pools]
    at = names.index(placement.pool_of(role).name) + by
    if at < 0:
        raise BadInput(f"{role} before pool {names[0]!r}", "that is the first one", "go right, to the others")
    return put(placement, role, [*names, NEW_POOL][at])


def take_back(placement: Placement, role: str, live: Placement) -> Placement:
    """A role as it is live: in that pool, made again if it has gone, with that layout if the pool has its devices."""
    if role not in live.roles:
        return placement.without(role)
    home, layout = live.pool_of(role), live.layout_of(role)
    there = any(pool.name == home.name for pool in placement.pools)
    back = placement.with_role(role, home.name, None if there else home.devices)
    devices = back.pool_of(role).devices
    return back.with_layout(role, layout if layout.size == devices else Layout(d=devices))


def lay_out(placement: Placement, role: str, axis: str, size: Any) -> Placement:
    """A role with another p or t; d follows from the devices of its pool."""
    size, layout, devices = whole_number(axis, size), placement.layout_of(role), placement.pool_of(role).devices
    p, t = (size, layout.t) if axis == "p" else (layout.p, size)
    return placement.with_layout(role, (p, t, max(1, devices // (p * t))))


def resize(placement: Placement, pool: str, devices: Any) -> Placement:
    """A pool with so many devices."""
    return placement.with_devices(pool, whole_number("devices", devices))


def with_rollout(placement: Placement) -> Placement:
    """Rollout workers on a pool of their own, with one device."""
    return placement.with_role(ROLLOUT, "rollout", devices=1)
