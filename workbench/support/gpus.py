"""The GPUs of this machine as the driver shows them: memory, and the processes that hold it. CUDA is not started."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Collection, Sequence
from dataclasses import dataclass

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
    for uuid, pid, used in _rows(processes, 3):
        holders.setdefault(uuid, {})[int(pid)] = int(used) * MIB if used.isdigit() else None  # "[N/A]" in containers
    return [
        Gpu(int(index), uuid, name, float(capability), int(total) * MIB, int(used) * MIB, holders.get(uuid, {}))
        for index, uuid, name, capability, total, used in _rows(gpus, 6)
    ]


def _rows(text: str, width: int) -> list[list[str]]:
    rows = [[field.strip() for field in line.split(",")] for line in text.splitlines() if line.strip()]
    if any(len(row) != width for row in rows):
        raise ValueError(f"{text!r:.80} has not {width} fields a line")
    return rows


def visible(gpus: Sequence[Gpu], variable: str | None) -> list[Gpu]:
    """Those that CUDA_VISIBLE_DEVICES names, by index or by the beginning of the uuid; None: all."""
    if variable is None:
        return list(gpus)
    names = [name.strip() for name in variable.split(",") if name.strip()]
    return [gpu for gpu in gpus if any(name == str(gpu.index) or gpu.uuid.startswith(name) for name in names)]
