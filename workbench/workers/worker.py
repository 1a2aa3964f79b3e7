"""The SPMD program of one rank of one role, and what its host offers it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch

from workbench.engines.training.groups import ParallelGroups
from workbench.errors import BadInput
from workbench.messages.calls import HostInfo
from workbench.models.spec import Model
from workbench.placement import Layout
from workbench.placement.room import Room
from workbench.support.machine import own_gpu_bytes
from workbench.telemetry import Recorder
from workbench.workers.communicator import Communicator
from workbench.workers.process_groups import parallel_groups
from workbench.workers.stopping import Stopping
from workbench.workers.weight_exchange import WeightExchange


@dataclass(frozen=True, kw_only=True)
class Context:
    """What a host offers its workers.

    layout: of the role: where this rank, `host.rank`, stands in it says `layout.coordinates`.
    communicator: over all ranks of the pool.
    progress(done, total, tokens): said between micro-batches; the controller's progress line shows it.
    stopping: `stopping.point()` is called where nothing is half done and all ranks are at the same line, such as
        between micro-batches: there an interrupt leaves the stage.
    seed: the workbench's seed. tokenizer_name: the model whose tokenizer made the tokens.
    folder: where relative paths start from: the working folder of who opened the workbench.
    exchange: where weights are published for other roles, and taken from theirs.
    waits: whether the worker is built beside the one that it is to replace: see `Worker.begin`.
    room: what the placement holds on the role's GPUs, which decides its automatic sizes; None: on a CPU.
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
    waits: bool = False
    room: Room | None = None
    stopping: Stopping = field(default_factory=lambda: Stopping(1))

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

    @cached_property
    def cache_bytes(self) -> int | None:
        """Of vLLM's key-value cache on each GPU of the pool; None: on a CPU, or not known. All ranks of the pool ask
        first at the same time."""
        if self.room is None:
            return None
        here = torch.tensor([-self.room.cache_bytes(own_gpu_bytes())])
        return -int(self.communicator.all_reduce_max(here).item())

    def leave_groups(self) -> None:
        """End the groups that were made for this layout; the pool's own stays."""
        if "groups" in self.__dict__:
            for communicator in {self.groups.data, self.groups.tensor, self.groups.pipeline}:
                communicator.end_group()  # type: ignore[attr-defined]


class Worker:
    """Base of all roles. Operations are methods marked with `@register(protocol)`."""

    def __init__(self, spec: Model, context: Context) -> None:
        self.spec, self.context = spec, context

    @property
    def layout(self) -> Layout:
        """How its weights lie on the ranks."""
        return self.context.layout

    @property
    def uses_device(self) -> bool:
        """Whether it holds memory on the device, which it leaves and comes back to where roles share it."""
        return False

    def memory_bytes(self) -> dict[str, int]:
        """Bytes that this worker holds on its device, by what they are for; "offloaded": in host memory."""
        return {}

    def take_notes(self) -> tuple[str, ...]:
        """What the user should know of the last operation, beside `Output.notes`; each once."""
        return ()

    def offload(self) -> None:
        """Leave the device's memory to other roles; called before their stages, see `wb.open(share_memory=...)`."""

    def load(self, *, generates: bool = False) -> None:
        """Come back for an operation of its own; generates: as it was registered."""

    def state(self) -> dict[str, Any]:
        """Everything that training changes in it, as copies; `load_state` goes back to it. Empty: nothing changes."""
        return {}

    def load_state(self, state: dict[str, Any]) -> None:
        """Go back to what `state` gave."""

    def extra_state(self) -> dict[str, Any]:
        """What goes along, beside weights, moments and step count, when the role moves to other processes: small. Of
        ranks that become more or fewer, each new one is given some old one's."""
        if not type(self).state.__module__.startswith("workbench."):
            raise BadInput(
                f"moving {type(self).__name__}", "it keeps a state of its own kind",
                "give it `extra_state` and `load_extra_state`, beside `state` and `load_state`",
            )  # fmt: skip
        return {}

    def load_extra_state(self, state: dict[str, Any]) -> None:
        """Take what `extra_state` gave, once weights and moments are there."""

    def begin(self) -> None:
        """Start what a process can have only once, such as a generation engine: while the worker is made, or, where it
        replaces another, when that one is closed."""

    def change(self, spec: Model) -> None:
        """Go on as another model of the same weights: of an actor, whether it generates."""
        self.spec = spec

    def close(self) -> None:
        """Free what the worker holds."""

    def describe(self) -> dict[str, Any]:
        """What `repr` shows of this worker."""
        return {
            "role": type(self).__name__,
            "model": str(self.spec),
        }
