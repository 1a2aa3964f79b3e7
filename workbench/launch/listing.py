"""The workbenches that live on this machine: `wb.ls`."""

from __future__ import annotations

import time
from typing import Any

from workbench.backends import registry
from workbench.support.checked_calls import checked_call


@checked_call("wb.ls")
def ls() -> list[dict[str, Any]]:
    """List the workbenches that live on this machine, with their models, memory and processes.

    alive: whether all hosts run; None: unknown, on other machines. processes: host, machine, process id of each. roles:
    the model of each role. devices: how many. memory_bytes: of the hosts on this machine. iteration: the current one.
    idle_s: time since the last call of a stage. driver: process, machine and life of the kernel that drives it.
    """
    found = []
    for record in registry.records():
        processes = [
            {"host": host, "machine": process.machine, "process": process.pid} for host, process in record.hosts.items()
        ]
        shown = {"name": record.name, "id": record.id, "alive": record.alive, "address": record.address}
        found.append({**shown, **_held(record), "processes": processes, "run_folder": record.run_folder})
    for name, lab in registry.opened.items():
        if lab.description.backend == "inline":
            shown = {"name": name, "id": lab.description.id, "alive": True, "address": "inline"}
            roles = {role: str(group.spec) for role, group in lab.groups.items()}
            held = {"roles": roles, "devices": 1, "memory_bytes": None, "iteration": lab.iteration, "idle_s": None}
            found.append({**shown, **held, "driver": None, "processes": [], "run_folder": str(lab.run_folder)})
    return found


def _held(record: registry.Record) -> dict[str, Any]:
    """Return what a workbench holds, from its record and its processes on this machine. Nothing is unpickled."""
    owner, used_s = registry.owner(record.id), registry.last_used_s(record.id)
    driver = None
    if owner is not None:
        driver = {"process": owner.process.pid, "machine": owner.process.machine, "alive": owner.lives}
    return {
        "roles": dict(record.roles),
        "devices": len(record.hosts),
        "memory_bytes": sum(process.memory_info().rss for process in record.running) or None,
        "iteration": registry.counters(record.id).get("iteration"),
        "idle_s": time.time() - used_s if used_s else None,
        "driver": driver,
    }
