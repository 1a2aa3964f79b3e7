"""The error if no placement fits: what uses the memory, and settings that make the models fit, each of them checked."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields, replace
from functools import cache
from typing import Any

from workbench.display.html import bytes_text
from workbench.errors import BadInput
from workbench.mapping.options import RoleOptions
from workbench.mapping.workload import Workload
from workbench.placement.role_model import RoleModel
from workbench.settings.training import Training

Fewest = Callable[[Workload, Mapping[str, RoleModel]], float]  # returns the least number of devices on which these fit
Change = tuple[str, Any]  # a setting and its new value
OF_WORKLOAD = ("engine", "take_turns")  # settings of the workload; others are settings of its `training`


def nothing_fits(
    fewest: Fewest, options: Mapping[str, RoleOptions], devices: int, placement: str, unit: int
) -> BadInput:
    """Return the error. unit: allocations are multiples of this many devices."""
    model = next(iter(options.values())).model
    roles, hardware = {name: one.role for name, one in options.items()}, model.hardware
    sizes = range(unit, devices + 1, unit)
    if unit > 1 and not any(one.layouts(n, fit=False) for n in sizes for one in options.values()):
        return BadInput(
            f"granularity={unit}", f"no layout shards these models over {unit} devices, or a multiple up to {devices}",
            "use one that divides a machine's devices, or leave it out",
        )  # fmt: skip
    needs = {name: role.elements * (16 if role.trained else role.frozen_bytes) for name, role in roles.items()}
    told = ", ".join(f"{name} {bytes_text(n)}" for name, n in needs.items())
    tokens = max(one.tokens_bound for one in options.values())
    passing = max(one.passing_bytes(devices) for one in options.values())
    remedies, room = _settings_that_fit(fewest, model.workload, roles, devices), hardware.usable_bytes
    return BadInput(
        f"{len(roles)} models on {devices} devices of {bytes_text(hardware.memory_bytes)} ({hardware.name}), "
        f"placement {placement!r}",
        f"no layout was found that fits: weights, gradients and optimizers take {bytes_text(sum(needs.values()))} "
        f"({told}), and the devices have {bytes_text(devices * room)} for them; beside those, a row or micro-batch of "
        f"{tokens:,} tokens takes at least {bytes_text(passing)} of a device's {bytes_text(room)}",
        f"with {', or '.join(remedies)} they fit" if remedies else
        f"use {'shorter rows' if passing > room else 'smaller models, or many more devices'}",
    )  # fmt: skip


def _settings_that_fit(fewest: Fewest, workload: Workload, roles: Mapping[str, RoleModel], devices: int) -> list[str]:
    """Return changes with which the models fit, as code: each setting that suffices alone (if none does, the fewest
    that suffice together, on more devices if needed), and the number of devices that suffices without any."""

    few = tuple(_changes(workload, roles))

    @cache
    def needed(*changes: Change) -> float:
        changed = {name: replace(role, training=_trained(role.training, changes)) for name, role in roles.items()}
        return fewest(_changed(workload, changes), changed)

    found = [_written(workload, [one]) for one in few if needed(one) <= devices]
    most, count = max(devices, needed(*few)), needed()
    if not found and most < count:
        for one in few:
            fewer = tuple(other for other in few if other != one)
            few = fewer if needed(*fewer) <= most else few
        found = [_written(workload, few) + f" on {most} devices" * (most > devices)]
    return [*found, *([f"{count} devices"] if count < math.inf else [])]


def _changes(workload: Workload, roles: Mapping[str, RoleModel]) -> Iterator[Change]:
    trained = [role for role in roles.values() if role.trained]
    if workload.engine == "workbench" and any(role.engine == "torch" for role in trained):
        yield "engine", "cluster"
    if not workload.take_turns and len(roles) > 1:
        yield "take_turns", True
    if not all(role.training.activation_checkpointing for role in trained):
        yield "activation_checkpointing", True
    if any(role.micro_batch_tokens > workload.longest_row for role in roles.values()):
        yield "micro_batch_tokens", workload.longest_row
    if any(role.engine in ("zero0", "zero1", "zero2") for role in trained):
        yield "zero_stage", 3


def _trained(training: Training, changes: Sequence[Change]) -> Training:
    return replace(training, **{name: value for name, value in changes if name not in OF_WORKLOAD})


def _changed(workload: Workload, changes: Sequence[Change]) -> Workload:
    own = {name: value for name, value in changes if name in OF_WORKLOAD}
    return replace(workload, training=_trained(workload.training, changes), **own)


def _written(workload: Workload, changes: Sequence[Change]) -> str:
    """Return the changes as code; `training` is written with all values that differ from `Training`'s defaults."""
    written = [f"{name}={value!r}" for name, value in changes if name in OF_WORKLOAD]
    if len(written) < len(changes):
        training = _trained(workload.training, changes)
        set_to = [(one.name, getattr(training, one.name), one.default) for one in fields(training)]
        told = ", ".join(f"{name}={value!r}" for name, value, default in set_to if value != default)
        written.append(f"training=wb.Training({told})")
    return f"wb.mapping.Workload({', '.join(written)})"
