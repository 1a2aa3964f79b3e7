"""Predict the time of a given placement, with the search's cost model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from workbench.errors import BadInput
from workbench.mapping.costs import Constants, Terms
from workbench.mapping.hardware import Hardware
from workbench.mapping.hardware import hardware as hardware_of
from workbench.mapping.options import Option, RoleOptions, options_of
from workbench.mapping.plan import CallPlan, Plan, RolePlan, SetPlan
from workbench.mapping.workload import STAGES, Workload, role_models
from workbench.placement.placement import Placement
from workbench.support.checked_calls import checked_call


@checked_call("wb.mapping.predict")
def predict(
    placement: Placement,
    models: Mapping[str, Any],
    *,
    hardware: str | Hardware = "a100-80g",
    workload: Workload | str = "ppo",
    constants: Constants | None = None,
    t_g: int = 1,
    strategy: str = "hybridflow",
) -> Plan:
    """Return the plan of a placement, also if it does not fit (see `Plan.fits`): then the cache is assumed to hold one
    row. t_g: tensor ranks of generation. Other arguments: as in `search`. Raises `BadInput` for roles without a
    pool."""
    constants, hardware = constants or Constants(), hardware_of(hardware)
    workload = workload if isinstance(workload, Workload) else Workload(algorithm=workload)
    workload = workload.with_models(models)
    placed = role_models(models, workload)
    options = options_of(placed, hardware, workload, constants, strategy=strategy, t_g=None, by_call=False)
    sets = []
    for pool in placement.pools:
        roles = tuple(role for role in pool.roles if role in placed)
        if roles:
            laid_out = [(options[role], placement.layout_of(role)) for role in roles]
            lasting = sum(one.as_given(layout, t_g).lasting for one, layout in laid_out)
            ways = [one.as_given(layout, t_g, hardware.usable_bytes - lasting) for one, layout in laid_out]
            sets.append(set_plan(roles, ways, pool.devices, options))
    if missing := sorted(set(placed) - {role for one in sets for role in one.names}):
        raise BadInput(
            f"role {missing[0]!r} has no pool", f"the placement is {placement}", "put it into one of the pools"
        )
    functions = tuple(role for role, model in models.items() if model is None)
    sets = [_sharing_cores(one, sets, hardware) for one in sets]
    plan = Plan(tuple(sets), devices=placement.devices, workload=workload, hardware=hardware, functions=functions)
    return replace(plan, why=plan.reason(None))


def _sharing_cores(one: SetPlan, sets: Sequence[SetPlan], hardware: Hardware) -> SetPlan:
    """Lengthen a set's calls in stages in which the sets compute on more devices than the CPU machine has cores."""
    if hardware.cores is None:
        return one
    busy = {stage: sum(any(call.stage == stage for role in each.roles for call in role.calls) * each.devices
                       for each in sets) for stage in STAGES}  # fmt: skip
    by = {stage: max(1.0, devices / hardware.cores) for stage, devices in busy.items()}
    roles = [replace(role, calls=tuple(replace(call, terms=call.terms * by[call.stage],
                                               seconds=call.seconds * by[call.stage]) for call in role.calls))
             for role in one.roles]  # fmt: skip
    return replace(one, roles=tuple(roles))


def set_plan(
    roles: tuple[str, ...], ways: Sequence[Option], devices: int, options: Mapping[str, RoleOptions]
) -> SetPlan:
    """Return the plan of a set of roles on `devices` devices. ways: the chosen option of each role."""
    model = next(iter(options.values())).model
    left = float(model.hardware.usable_bytes - sum(way.lasting for way in ways))
    placed, cache = [], 0.0
    for role, way in zip(roles, ways, strict=True):
        one, weights = options[role], 0
        if one.generates:
            weights = one.generation_bytes(way.t_g)
            cache = max(left - weights, model.row_bytes(one.role, way.t_g))
        calls = one.calls_of(way, int(np.ceil(cache)))
        placed.append(RolePlan(role, way.layout, way.inference, way.own_t_g, calls, way.lasting, way.passing, weights,
                               way.recomputed))  # fmt: skip
    return SetPlan(tuple(placed), devices, transfers(roles, devices, options), int(cache))


def transfers(roles: tuple[str, ...], devices: int, options: Mapping[str, RoleOptions]) -> dict[str, CallPlan]:
    """Return, by stage, the transfers of rows from other sets. A call's columns, one per token for a pass and two for
    generation, are sent to each call of another set that reads them."""
    model, constants = next((one.model, one.constants) for one in options.values())
    calls = {call.name: call for call in model.workload.calls}
    found = {stage: Terms() for stage in STAGES}
    for role in roles:
        for call in options[role].calls:
            sent = sum(2 if calls[i].kind == "generate" else 1 for i in call.inputs if calls[i].role not in roles)
            found[call.stage] += model.transfer(sent, devices)
    return {stage: CallPlan("transfer", stage, terms, constants.seconds(terms)) for stage, terms in found.items()}
