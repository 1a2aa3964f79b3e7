"""Describes the workbenches and processes that hold devices, for the error of an opening that finds no room."""

from __future__ import annotations

import getpass
import time
from collections.abc import Callable, Collection, Sequence
from typing import Any

import psutil

from workbench.backends import registry
from workbench.display.html import bytes_text
from workbench.errors import DevicesTaken, WorkbenchError
from workbench.support.machine import Gpu

POLL_S = 1.0
WAIT = "wait for the devices with wb.open(..., wait_s=600)"


def taken(
    error: DevicesTaken, gpus: Sequence[Gpu], records: Sequence[registry.Record] = (), *, mine: Collection[int] = ()
) -> DevicesTaken:
    """Return the error with the holders of the devices, and remedies.

    gpus: of this machine. records: of workbenches that hold devices, in addition to those with processes on these GPUs.
    mine: processes that do not count.
    """
    on_gpus = {pid for gpu in gpus for pid in gpu.holders} - set(mine)
    found = {record.id: record for record in [*records, *(r for r in registry.records() if _pids(r) & on_gpus)]}
    known = {pid for record in found.values() for pid in _pids(record)}
    who = [_workbench(record, gpus) for record in found.values()]
    who += [_process(pid, gpus) for pid in sorted(on_gpus - known)]
    remedies = [f"stop it with `wb stop {record.name}`" for record in found.values()]
    remedies += [f"use it with wb.attach({record.name!r}) and lab.add(role, model)" for record in found.values()]
    held = "; ".join(who) or "a process that is not visible here"
    return DevicesTaken(error.value, f"{error.rule}. Held by: {held}", "; or ".join([*remedies, WAIT]))


def on_cluster(address: str | None, device: str) -> list[registry.Record]:
    """Return the workbenches on a cluster that hold devices of that kind. address: None: this user's own head."""

    def has(record: registry.Record) -> bool:
        try:
            return registry.description(record).device == device
        except WorkbenchError:  # its code cannot be imported here
            return True

    return [record for record in registry.records() if record.address == address and has(record)]


def _pids(record: registry.Record) -> set[int]:
    return {process.pid for process in record.running}


def _workbench(record: registry.Record, gpus: Sequence[Gpu]) -> str:
    on_gpu = _bytes_on(gpus, _pids(record))
    memory = on_gpu or sum(process.memory_info().rss for process in record.running)
    places = ", ".join(f"process {process.pid} on {process.machine}" for process in record.hosts.values())
    since = min(process.created_s for process in record.hosts.values())
    owner = registry.owner(record.id)
    driver = f", driven by process {owner.process.pid}" if owner is not None and owner.lives else ", without a driver"
    return (
        f"workbench {record.name!r} of {getpass.getuser()}, {len(record.hosts)} device(s), "
        f"{bytes_text(memory)}{' of GPU memory' if on_gpu else ''}, {places}, since {_clock(since)}{driver}"
    )


def _process(pid: int, gpus: Sequence[Gpu]) -> str:
    memory = _bytes_on(gpus, {pid})
    held = f", {bytes_text(memory)} of GPU memory" if memory else ""
    try:
        process = psutil.Process(pid)
        with process.oneshot():
            command, user = " ".join(process.cmdline())[:80] or process.name(), process.username()
            since = process.create_time()
    except psutil.Error:
        return f"process {pid}, of another user or outside of this container{held}"
    return f"process {pid} of {user} ({command}){held}, since {_clock(since)}"


def _bytes_on(gpus: Sequence[Gpu], pids: Collection[int]) -> int:
    return sum(gpu.holders.get(pid) or 0 for gpu in gpus for pid in pids)


def _clock(time_s: float) -> str:
    return time.strftime("%d %b %H:%M", time.localtime(time_s))


def when_free(wait_s: float, note: Callable[[str], None], attempt: Callable[[], Any]) -> Any:
    """Return what `attempt` returns; repeat it for `wait_s` seconds while it raises `DevicesTaken`."""
    deadline = time.monotonic() + wait_s
    while True:
        try:
            return attempt()
        except DevicesTaken:
            if time.monotonic() > deadline:
                raise
        note("waiting for devices that others hold")
        time.sleep(POLL_S)
