"""The machine that this process runs on, and the processes on it."""

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
# The driver itself may use this much memory of an idle GPU.
IDLE_BYTES = 1024 * MIB


@dataclass(frozen=True)
class Gpu:
    """One GPU. capability: its compute capability, such as 9.0. holders: process id -> bytes that the process holds on
    it; None: the driver does not say how many."""

    index: int
    uuid: str
    name: str
    capability: float
    total_bytes: int
    used_bytes: int
    holders: dict[int, int | None]

    def taken_bytes(self, mine: Collection[int] = ()) -> int:
        """Return the bytes that processes other than `mine` hold; 0 for an idle GPU: the driver holds a little."""
        taken = self.used_bytes - sum(self.holders.get(pid) or 0 for pid in mine)
        others = self.holders.keys() - set(mine)
        return taken if others or taken > IDLE_BYTES else 0


def read_gpus() -> list[Gpu]:
    """Return the GPUs that this process may use; empty where there is no driver, or the driver does not answer."""
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
    """Parse the driver's output: "index, uuid, name, capability, total MiB, used MiB" for each GPU, "uuid, pid, used
    MiB" for each process on a GPU. Raises `ValueError` for anything else."""
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
    """Return the GPUs that CUDA_VISIBLE_DEVICES names, by index or by the beginning of the uuid; None: all."""
    if variable is None:
        return list(gpus)
    names = [name.strip() for name in variable.split(",") if name.strip()]
    return [gpu for gpu in gpus if any(name == str(gpu.index) or gpu.uuid.startswith(name) for name in names)]


_CGROUP = Path("/sys/fs/cgroup")
_libc = ctypes.CDLL(None)
_returned_s = 0.0  # monotonic


def cores() -> int:
    """Return the number of cores that this process may use; `taskset`, a batch system or a container may limit it."""
    return len(os.sched_getaffinity(0))


def device_count(device: str) -> int:
    """Return how many devices this machine has: GPUs, or CPU slots, one per core."""
    import torch

    return torch.cuda.device_count() if device == "cuda" else cores()


def computing_threads(processes: int) -> int:
    """Return the threads of each of `processes` processes: its share of the cores, and at most OMP_NUM_THREADS."""
    share = max(1, cores() // processes)
    said = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0]  # a list has one number per nested level
    return min(share, int(said)) if said.isdigit() and int(said) else share


def return_freed_memory() -> None:
    """Return freed memory of this process to the system, at most once in 10 seconds. glibc keeps it between small
    objects that live long, which adds up to megabytes in a thousand iterations."""
    global _returned_s
    now_s = time.monotonic()
    if now_s - _returned_s >= 10:
        _returned_s = now_s
        _libc.malloc_trim(0)


def available_bytes() -> int:
    """Return the memory that processes can still get, swap included: of the machine, or of the container if that has
    less (cgroup version 2, whose limit psutil does not know)."""
    found = psutil.virtual_memory().available + psutil.swap_memory().free
    try:
        limit, used = ((_CGROUP / name).read_text().strip() for name in ("memory.max", "memory.current"))
        fields = dict(line.split() for line in (_CGROUP / "memory.stat").read_text().splitlines())
        # the kernel frees inactive file pages when memory is short
        left = int(limit) - int(used) + int(fields["inactive_file"])
    except (OSError, KeyError, ValueError):  # no such group, or "max": no limit
        return found
    return min(found, max(left, 0))


def total_bytes() -> int:
    """Return the memory of the machine, or of the container if that may have less."""
    found = psutil.virtual_memory().total
    try:
        return min(found, int((_CGROUP / "memory.max").read_text()))
    except (OSError, ValueError):  # no such group, or "max": no limit
        return int(found)


def gpu_bytes(gpus: Iterable[Gpu]) -> int:
    """Return the memory that this process may use on the smallest of these GPUs, without starting CUDA; 0 for none."""
    return int(min((gpu.total_bytes for gpu in gpus), default=0) * _allowed_share())


def own_gpu_bytes() -> int:
    """Return the memory that this process may use on its GPU. Starts CUDA."""
    import torch

    return int(torch.cuda.get_device_properties(0).total_memory * _allowed_share())


def own_gpu_free_bytes() -> int:
    """Return the memory of its GPU that this process can still get beside torch's allocator. Starts CUDA."""
    import torch

    free = int(torch.cuda.mem_get_info(0)[0])
    if _allowed_share() == 1:  # else the driver does not know; torch counts what vLLM has unmapped as reserved
        return free
    return max(0, min(free, own_gpu_bytes() - torch.cuda.memory_reserved(0)))


def _allowed_share() -> float:
    """Return the share of a GPU that `torch.cuda.set_per_process_memory_fraction` has left to this process."""
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
        """A handle of the process, if it runs on this machine."""
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
        """Whether it runs; None: it is on another machine, where its id means nothing to this one."""
        return self.here is not None if self.machine == socket.gethostname() else None


def end(processes: Iterable[Process], grace_s: float) -> None:
    """Wait until the processes on this machine have ended, and kill those that still run after `grace_s` seconds."""
    _, left = psutil.wait_procs([here for process in processes if (here := process.here)], timeout=grace_s)
    for process in left:
        process.kill()
    psutil.wait_procs(left, timeout=grace_s)
