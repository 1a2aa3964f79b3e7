"""The memory of one host at one time, by owner and use."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any


def capacity_bytes(seen: Mapping[str, Any]) -> int:
    """Return the memory of a host's device, from the answer of `Host.describe`: of the GPU, or of the machine, whose
    processes share it."""
    return int(seen["device_bytes"] or seen["machine_bytes"])


@dataclass(frozen=True, kw_only=True)
class MemoryReading:
    """The memory of one host, as it answered.

    time_s: unix time. device: such as "cuda:0". held: bytes by role and use, on the device, except "offloaded", which
    is in host memory. batch_bytes, published_bytes: rows of batches, and weights that wait for receivers: in host
    memory. resident_bytes: of its process. used_bytes: of its GPU, by all processes; 0 on a CPU. capacity_bytes: of the
    GPU, or of the machine, whose processes share it. error: why it did not answer; then all figures are 0.
    """

    time_s: float
    iteration: int
    host: str
    device: str
    machine: str = ""
    process: int = 0
    held: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    batch_bytes: int = 0
    published_bytes: int = 0
    resident_bytes: int = 0
    used_bytes: int = 0
    capacity_bytes: int = 0
    error: str = ""

    @classmethod
    def of(cls, seen: Mapping[str, Any], *, time_s: float, iteration: int) -> MemoryReading:
        """Make a reading from the answer of `Host.describe`."""
        held = {
            role: {use: n for use, n in held.items() if isinstance(n, int) and use != "micro_batch_tokens"}
            for role, held in seen["roles"].items()
            if role != "numeric"
        }
        return cls(
            time_s=time_s, iteration=iteration, host=seen["host"], device=seen["device"], machine=seen["machine"],
            process=seen["process"], held=held, batch_bytes=seen["batch_bytes"],
            published_bytes=seen["published_bytes"], resident_bytes=seen["resident_bytes"],
            used_bytes=seen["device_used_bytes"] or 0, capacity_bytes=capacity_bytes(seen),
        )  # fmt: skip

    @property
    def on_gpu(self) -> bool:
        """Whether the device has memory of its own."""
        return self.device.startswith("cuda")

    def shares(self) -> dict[tuple[str, str], int]:
        """Return bytes of the device's memory by owner and use; the last entry is the rest of the used memory.

        On a GPU: roles, and "other" on the device: contexts, allocators' caches, other processes. On a CPU: roles,
        batches and published weights, and "other" of the process: code, libraries, activations, allocators' caches.
        They sum to the memory that the device, or the process, uses, or to more, where some memory was never touched.
        """
        found = {
            (role, use): n
            for role, held in self.held.items()
            for use, n in held.items()
            if not (self.on_gpu and use == "offloaded")
        }
        if not self.on_gpu:
            found |= {("batch", "batches"): self.batch_bytes, ("batch", "published weights"): self.published_bytes}
        used = self.used_bytes if self.on_gpu else self.resident_bytes
        return {
            **found,
            ("other", "on the device" if self.on_gpu else "of the process"): max(used - sum(found.values()), 0),
        }

    def row(self) -> dict[str, Any]:
        return asdict(self)
