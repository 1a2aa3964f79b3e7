"""The machine that this process runs on, and processes on it."""

from __future__ import annotations

import ctypes
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

MIB = 2**20
TIMEOUT_S = 10
# Of an idle GPU the driver itself holds up to this much.
IDLE_BYTES = 1024 * MIB


@dataclass(frozen=True)
class Gpu:
    """One GPU. capability: of its instructions, such as 9.0.
    holders: process id -> bytes of it that the process holds; None: the driver does not say how many."""

    index: int
    uuid: str
    name: str
    capability: float
    total_bytes: int
    used_bytes: int
    holders: dict[int, int | None]

    def taken_bytes(self, mine: Collection[int] = ()) -> int:
        """Bytes that processes other than these hold; 0 for an idle GPU, of which the driver holds a little."""
        taken = self.used_bytes - sum(self.holders.get(pid) or 0 for pid in mine)
        others = self.holders.keys() - set(mine)
        return taken if others or taken > IDLE_BYTES else 0


def read_gpus() -> list[Gpu]:
    """The GPUs that this process may use; empty where there is no driver, or it does not answer."""
    if shutil.which("nvidia-smi") is None:
        return []
    try:
        gpus = _ask("--query-gpu=index,uuid,name,compute_cap,memory.total,memory.used")
        processes = _ask("--query-compute-apps=gpu_uuid,pid,used_memory")
        return visible(parse_gpus(gpus, processes), os.environ.get("CUDA_VISIBLE_DEVICES"))
    except (OSError, subprocess.SubprocessError, ValueError):
        return []


def _ask(query: str) -> str:
    command = ["nvidia-smi", query, "--format=csv,noheader,nounits"]
    return subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=True).stdout


def parse_gpus(gpus: str, processes: str) -> list[Gpu]:
    """From what the driver prints: "index, uuid, name, capability, total MiB, used MiB" for each GPU, "uuid, pid,
    used MiB" for each process on one. `ValueError` for anything else."""
    holders: dict[str, dict[int, int | None]] = {}
    for uuid, pid, used in _rows(processes):
        holders.setdefault(uuid, {})[int(pid)] = int(used) * MIB if used.isdigit() else None  # "[N/A]" in containers
    return [
        Gpu(int(index), uuid, name, float(capability), int(total) * MIB, int(used) * MIB, holders.get(uuid, {}))
        for index, uuid, name, capability, total, used in _rows(gpus)
    ]


def _rows(text: str) -> list[list[str]]:
    return [[field.strip() for field in line.split(",")] for line in text.splitlines() if line.strip()]


def visible(gpus: Sequence[Gpu], variable: str | None) -> list[Gpu]:
    """Those that CUDA_VISIBLE_DEVICES names, by index or by the beginning of the uuid; None: all."""
    if variable is None:
        return list(gpus)
    names = [name.strip() for name in variable.split(",") if name.strip()]
    return [gpu for gpu in gpus if any(name == str(gpu.index) or gpu.uuid.startswith(name) for name in names)]


_CGROUP = Path("/sys/fs/cgroup")
_libc = ctypes.CDLL(None)
_returned_s = 0.0  # monotonic


def cores() -> int:
    """Cores that this process may use: fewer than the machine has under `taskset`, a batch system or a container."""
    return len(os.sched_getaffinity(0))


def device_count(device: str) -> int:
    """How many devices this machine has: GPUs, or slots of a CPU, one a core."""
    import torch

    return torch.cuda.device_count() if device == "cuda" else cores()


def computing_threads(processes: int) -> int:
    """Threads of each of so many processes: its share of the cores, and no more than OMP_NUM_THREADS says."""
    share = max(1, cores() // processes)
    said = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0]  # a list has a number a nested level
    return min(share, int(said)) if said.isdigit() and int(said) else share


def return_freed_memory() -> None:
    """Return to the system what this process has freed, at most once in 10 seconds. glibc keeps it: between small
    objects that live long, what is freed adds up to megabytes in a thousand iterations."""
    global _returned_s
    now_s = time.monotonic()
    if now_s - _returned_s >= 10:
        _returned_s = now_s
        _libc.malloc_trim(0)


def available_bytes() -> int:
    """Memory that processes can still get, swap included: of the machine, or of the container (cgroup version 2, whose
    limit psutil does not know) where that has less left."""
    found = psutil.virtual_memory().available + psutil.swap_memory().free
    try:
        limit, used = ((_CGROUP / name).read_text().strip() for name in ("memory.max", "memory.current"))
        fields = dict(line.split() for line in (_CGROUP / "memory.stat").read_text().splitlines())
        # file pages that nobody has touched for a while are given back when memory is short
        left = int(limit) - int(used) + int(fields["inactive_file"])
    except (OSError, KeyError, ValueError):  # no such group, or "max": no limit
        return found
    return min(found, max(left, 0))


def total_bytes() -> int:
    """Memory of the machine, or what the container may have of it."""
    found = psutil.virtual_memory().total
    try:
        return min(found, int((_CGROUP / "memory.max").read_text()))
    except (OSError, ValueError):  # no such group, or "max": no limit
        return int(found)


def gpu_bytes(gpus: Iterable[Gpu]) -> int:
    """Memory that this process may take of the smallest of these GPUs, without starting CUDA; 0: of none."""
    return int(min((gpu.total_bytes for gpu in gpus), default=0) * _allowed_share())


def own_gpu_bytes() -> int:
    """Memory that this process may take of its GPU; it starts CUDA."""
    import torch

    return int(torch.cuda.get_device_properties(0).total_memory * _allowed_share())


def own_gpu_free_bytes() -> int:
    """Memory of its GPU that this process may still take beside what torch's allocator holds; it starts CUDA."""
    import torch

    free = int(torch.cuda.mem_get_info(0)[0])
    if _allowed_share() == 1:  # else the driver does not know; torch counts what vLLM has unmapped as reserved
        return free
    return max(0, min(free, own_gpu_bytes() - torch.cuda.memory_reserved(0)))


def _allowed_share() -> float:
    """What `torch.cuda.set_per_process_memory_fraction` has left this process of a GPU."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return 1.0
    return float(torch.cuda.get_per_process_memory_fraction(0))


@dataclass(frozen=True, kw_only=True)
class Process:
    """A process, distinguished from a later one of the same id and from one on another machine.

    machine: the host name of the machine. created_s: when it was started, seconds since the epoch.
    """

    machine: str
    pid: int
    created_s: float

    @classmethod
    def current(cls) -> Process:
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
