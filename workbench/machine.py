"""The machine that this process runs on, and processes on it."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterable
from dataclasses import dataclass

import psutil


def cores() -> int:
    """Cores that this process may use: fewer than the machine has under `taskset`, a batch system or a container."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


@dataclass(frozen=True, kw_only=True)
class Process:
    """A process that can be told from a later one of the same id, and from one on another machine.

    machine: the host name of the machine. created_s: when it was started, seconds since the epoch.
    """

    machine: str
    pid: int
    created_s: float

    @classmethod
    def current(cls) -> Process:
        """The process that asks."""
        return cls(machine=socket.gethostname(), pid=os.getpid(), created_s=psutil.Process().create_time())

    @property
    def here(self) -> psutil.Process | None:
        """A handle, if it runs on this machine."""
        if self.machine != socket.gethostname():
            return None
        try:
            process = psutil.Process(self.pid)
            same = process.create_time() == self.created_s and process.status() != psutil.STATUS_ZOMBIE
        except psutil.Error:
            return None
        return process if same else None

    @property
    def alive(self) -> bool | None:
        """Whether it runs; None: it is on another machine, where its id says nothing to this one."""
        return self.here is not None if self.machine == socket.gethostname() else None


def end(processes: Iterable[Process], grace_s: float) -> None:
    """Wait until those of this machine have ended, and kill what still runs after `grace_s` seconds."""
    _, left = psutil.wait_procs([here for process in processes if (here := process.here)], timeout=grace_s)
    for process in left:
        process.kill()
    psutil.wait_procs(left, timeout=grace_s)
