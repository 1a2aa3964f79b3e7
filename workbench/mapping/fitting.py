"""What is said where nothing fits: the bytes, and the settings that would help, each of which has been tried."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from workbench.display.html import bytes_text
from workbench.errors import BadInput
from workbench.mapping.options import RoleOptions
from workbench.mapping.workload import Workload
from workbench.placement.role_model import RoleModel

Fits = Callable[[Workload, Mapping[str, RoleModel], int], bool]
TIMES = (2, 4, 8)  # as many devices as were asked about


def nothing_fits(options: Mapping[str, RoleOptions], devices: int, placement: str, unit: int, fits: Fits) -> BadInput:
    """The error. unit: devices that allocations are multiples of. fits: whether something would fit."""
    model = next(iter(options.values())).model
    roles, hardware = {name: one.role for name, one in options.items()}, model.hardware
    sizes = range(unit, devices + 1, unit)
    if unit > 1 and not any(one.layouts(n, fit=False) for n in sizes for one in options.values()):
        return BadInput(
            f"granularity={unit}", f"no layout cuts these models over {unit} devices, or a multiple up to {devices}",
            "take one that divides a machine's devices, or leave it out",
        )  # fmt: skip
    needs = {name: role.elements * (16 if role.trained else role.frozen_bytes) for name, role in roles.items()}
    told = ", ".join(f"{name} {bytes_text(n)}" for name, n in needs.items())
    remedies = settings_that_fit(fits, model.workload, roles, devices)
    return BadInput(
        f"{len(roles)} models on {devices} devices of {bytes_text(hardware.memory_bytes)} ({hardware.name}), "
        f"placement {placement!r}",
        f"no layout was found that fits: weights, gradients and optimizers take {bytes_text(sum(needs.values()))} "
        f"({told}), and the devices have {bytes_text(devices * hardware.usable_bytes)} for them",
        f"with {', or '.join(remedies)} they fit" if remedies else "take smaller models, or many more devices",
    )


def settings_that_fit(fits: Fits, workload: Workload, roles: Mapping[str, RoleModel], devices: int) -> list[str]:
    """What to write so that the models fit, as sentences: each setting that is enough by itself, or all of them
    together, and how many devices are enough without any."""
    changes = list(_changes(workload, roles))
    found = [text for text, *change in changes if fits(*_changed(workload, roles, *change), devices)]
    if not found and len(changes) > 1:
        every = workload, roles
        for _, *change in changes:
            every = _changed(*every, *change)
        if fits(*every, devices):
            found.append(" and ".join(text for text, *_ in changes))
    count = next((times * devices for times in TIMES if fits(workload, roles, times * devices)), None)
    return found if count is None else [*found, f"{count} devices"]


def _changes(workload: Workload, roles: Mapping[str, RoleModel]) -> Iterator[tuple[str, Any, dict[str, Any]]]:
    """(what to write, engine of the workload, settings of training)."""
    trained = [role for role in roles.values() if role.trained]
    if workload.engine == "workbench" and any(role.engine == "torch" for role in trained):
        yield 'Workload(engine="cluster"), whose optimizer is cut over replicas', "cluster", {}
    if not all(role.training.activation_checkpointing for role in trained):
        yield "Training(activation_checkpointing=True)", workload.engine, {"activation_checkpointing": True}
    longest = workload.prompt_tokens + max(workload.lengths)
    if any(role.micro_batch_tokens > longest for role in roles.values()):
        yield f"Training(micro_batch_tokens={longest})", workload.engine, {"micro_batch_tokens": longest}
    if any(role.engine in ("zero0", "zero1", "zero2") for role in trained):
        yield "Training(zero_stage=3)", workload.engine, {"zero_stage": 3}


def _changed(
    workload: Workload, roles: Mapping[str, RoleModel], engine: Any, settings: dict[str, Any]
) -> tuple[Workload, Mapping[str, RoleModel]]:
    changed = {name: replace(role, training=replace(role.training, **settings)) for name, role in roles.items()}
    return replace(workload, engine=engine, training=replace(workload.training, **settings)), changed
