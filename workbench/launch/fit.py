"""Whether a placement fits into the memory of this machine, before a host starts."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Sequence

import psutil

from workbench.backends import registry
from workbench.backends.cluster import joined_address, joined_head
from workbench.backends.holders import taken
from workbench.config.description import Description
from workbench.errors import BadInput, DevicesTaken
from workbench.placement.estimate import check_fit, estimate_memory
from workbench.support.gpus import read_gpus
from workbench.support.machine import available_bytes, gpu_bytes


def processes_of(name: str) -> list[psutil.Process]:
    """The processes of this machine in which the workbench of that name lives; inline, this one."""
    record = registry.find(name)
    if record is None:
        return [psutil.Process()]
    return [here for process in record.hosts.values() if (here := process.here)]


def check_memory(description: Description, replaced: Sequence[psutil.Process]) -> None:
    """Raise `BadInput` where the placement cannot fit in this machine's memory, and warn where it may not. What other
    machines have is not known. replaced: whose memory will be free."""
    ray = sys.modules.get("ray")
    joined = ray is not None and ray.is_initialized() and joined_head() is None  # by the user, to a cluster of any kind
    if description.address is not None or (joined and joined_address(ray)):
        return
    mine, gpus = {process.pid for process in replaced}, read_gpus() if description.device == "cuda" else []
    if description.device == "cuda":
        has = gpu_bytes()
    else:
        has = available_bytes() + sum(process.memory_info().rss for process in replaced)
    if has is None:
        return
    models, gpu = description.role_models(), has if description.device == "cuda" else None
    try:
        estimate = estimate_memory(
            description.placement, models, device=description.device, device_bytes=gpu,
            take_turns=description.takes_turns,
        )  # fmt: skip
    except BadInput:  # a model whose weights cannot be told from its configuration may well load
        return
    doubt = check_fit(estimate, has_bytes=has, models=models)
    # others may hold some of the GPUs: the cluster gives the placement as many as it asks for
    others = sorted(gpu.taken_bytes(mine) for gpu in gpus)[: description.placement.devices][-1:]
    if any(others):
        try:
            doubt = check_fit(estimate, has_bytes=has - others[0], models=models)
        except BadInput as error:
            raise taken(DevicesTaken(error.value, error.rule), gpus, mine=mine) from None
    if doubt:
        warnings.warn(doubt, stacklevel=7)  # in the line that opens
