"""The SPMD program of one rank of one role, and what its host offers it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from workbench.engines.training.groups import ParallelGroups
from workbench.models.spec import Model
from workbench.placement import Layout
from workbench.telemetry import Recorder
from workbench.workers.calls import HostInfo
from workbench.workers.communicator import Communicator
from workbench.workers.process_groups import parallel_groups
from workbench.workers.weight_exchange import WeightExchange


@dataclass(frozen=True, kw_only=True)
class Context:
    """What a host offers its workers.

    layout: of the role: where this rank, `host.rank`, stands in it says `layout.coordinates`.
    communicator: over all ranks of the pool.
    progress(done, total, tokens): said between micro-batches; the controller's progress line shows it.
    seed: the workbench's seed. tokenizer_name: the model whose tokenizer made the tokens.
    folder: where relative paths start from: the working folder of who opened the workbench.
    exchange: where weights are published for other roles, and taken from theirs.
    """

    host: HostInfo
    layout: Layout
    communicator: Communicator
    recorder: Recorder
    progress: Callable[[int, int, int], None]
    seed: int
    tokenizer_name: str
    folder: str
    exchange: WeightExchange

    @property
    def device(self) -> torch.device:
        """The host's device. A slot of a CPU is the CPU; of its GPUs a host sees only its own."""
        return torch.device("cuda:0" if self.host.device.startswith("cuda") else "cpu")

    @property
    def loading_device(self) -> torch.device:
        """Where a model is loaded: at its place, or in the machine's memory where it is cut afterwards."""
        return self.device if self.layout.p * self.layout.t == 1 else torch.device("cpu")

    @cached_property
    def groups(self) -> ParallelGroups:
        """The layout's groups of ranks. What is summed over the rows of a batch is summed over `groups.data`, whose
        ranks see other rows. All ranks of the pool ask for it first at the same time, while the role is built."""
        return parallel_groups(self.layout, self.communicator, self.recorder, self.device.type)


class Worker:
    """Base of all roles. Operations are methods marked with `@register(protocol)`."""

    def __init__(self, spec: Model, context: Context) -> None:
        self.spec, self.context = spec, context

    @property
    def uses_device(self) -> bool:
        """Whether it holds memory on the device, which it leaves and comes back to where roles share it."""
        return False

    def memory_bytes(self) -> dict[str, int]:
        """Bytes that this worker holds on its device, by what they are for; "offloaded": in host memory."""
        return {}

    def offload(self) -> None:
        """Leave the device's memory to other roles; called before their stages, see `wb.open(share_memory=...)`."""

    def load(self, *, generates: bool = False) -> None:
        """Come back for an operation of its own; generates: as it was registered."""

    def state(self) -> dict[str, Any]:
        """Everything that training changes in it, as copies; `load_state` goes back to it. Empty: nothing changes."""
        return {}

    def load_state(self, state: dict[str, Any]) -> None:
        """Go back to what `state` gave."""

    def close(self) -> None:
        """Free what the worker holds."""

    def describe(self) -> dict[str, Any]:
        """What `repr` shows of this worker."""
        return {
            "role": type(self).__name__,
            "model": str(self.spec),
        }
