"""What a host reports of its process and of the roles in it, read from the live objects."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from typing import Any

import torch

from workbench.messages.calls import HostInfo
from workbench.support.machine import available_bytes, own_gpu_bytes, total_bytes
from workbench.workers.worker import Worker


def describe_process(info: HostInfo) -> dict[str, Any]:
    """The process of a host, its machine and its device."""
    import psutil

    on_gpu = info.device.startswith("cuda")
    return {
        "host": info.name,
        "pool": info.pool,
        "rank": info.rank,
        "device": info.device,
        "process": os.getpid(),
        "machine": socket.gethostname(),
        "available_bytes": available_bytes(),
        "machine_bytes": total_bytes(),
        "device_bytes": own_gpu_bytes() if on_gpu else None,
        "device_used_bytes": _used_gpu_bytes() if on_gpu else None,
        "threads": info.threads,
        "resident_bytes": psutil.Process().memory_info().rss,
    }


def describe_roles(workers: Mapping[str, Worker]) -> dict[str, Any]:
    """Layouts, bytes and settings of roles, and which of their optimizers have taken a step."""
    engines = {role: getattr(worker, "engine", None) for role, worker in workers.items()}
    return {
        "moments": [role for role, engine in engines.items() if engine is not None and engine.has_moments],
        "layouts": {role: worker.layout for role, worker in workers.items()},
        "roles": {role: {**worker.describe(), **worker.memory_bytes()} for role, worker in workers.items()},
    }


def _used_gpu_bytes() -> int:
    """What all processes together hold of this process's GPU, contexts and caches included."""
    free, total = torch.cuda.mem_get_info(0)
    return int(total - free)
