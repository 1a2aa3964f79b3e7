"""The SPMD program of one rank of one role, and what its host offers it.

The roles of one host take turns on its device: who is not at work leaves its memory (HybridFlow, arXiv:2409.19256,
section 5; verl's `param_offload`, `optimizer_offload` and `free_cache_engine`, in one).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch

from workbench.engines.communicator import Communicator, ParallelGroups, parallel_groups
from workbench.engines.host_memory import overlapping
from workbench.messages.calls import HostInfo
from workbench.models.loading import Limits
from workbench.models.spec import Model
from workbench.placement import Layout
from workbench.placement.estimate import Room
from workbench.settings.training import Training
from workbench.support.calls.sessions import UserCalls
from workbench.support.machine import own_gpu_bytes
from workbench.telemetry import Recorder
from workbench.workers.stopping import Stopping
from workbench.workers.weight_exchange import WeightExchange


@dataclass(frozen=True, kw_only=True)
class Context:
    """What a host offers its workers.

    layout: of the role; `layout.coordinates(host.rank)` is this rank's place in it. communicator: over all ranks of the
    pool. progress(done, total, tokens): called between micro-batches, for the controller's progress line. stopping:
    `stopping.point()` is called where all ranks are at the same line between two units of work, such as micro-batches:
    there an interrupt stops the stage. seed: the workbench's. tokenizer_name: the model whose tokenizer made the
    tokens. folder: where relative paths start: the working folder of the kernel that opened the workbench. exchange:
    for weights that roles publish, and take from each other. waits: whether the worker is built beside the one that it
    replaces: see `Worker.begin`. room: the memory of the role's GPUs that the placement leaves, which decides automatic
    sizes; None: on a CPU. calls: of the user's functions, in a process of the role's own.
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
    stopping: Stopping = field(default_factory=Stopping)
    calls: UserCalls = field(default_factory=UserCalls)

    @property
    def device(self) -> torch.device:
        """The device of the host. A slot of a CPU is the CPU; a host sees only its own GPU."""
        return torch.device("cuda:0" if self.host.device.startswith("cuda") else "cpu")

    def loading_device(self, training: Training | None) -> torch.device:
        """Where a model is loaded: on the device, or in host memory where it is cut afterwards."""
        cut = self.layout.p * self.layout.t > 1 or (training is not None and training.cuts_weights)
        return torch.device("cpu") if cut else self.device

    @cached_property
    def groups(self) -> ParallelGroups:
        """The groups of ranks of the layout. Sums over the rows of a batch are sums over `groups.data`, whose ranks
        have different rows. All ranks of the pool ask for it first at the same time, while the role is built."""
        return parallel_groups(self.layout, self.communicator, self.recorder, self.device.type)

    @cached_property
    def cache_bytes(self) -> int | None:
        """Bytes of vLLM's key-value cache on each GPU of the pool; None: on a CPU, or unknown. All ranks of the pool
        ask first at the same time."""
        if self.room is None:
            return None
        here = torch.tensor([-self.room.cache_bytes(own_gpu_bytes())])
        return -int(self.communicator.all_reduce_max(here).item())

    def advance(self, done: int, total: int, tokens: int) -> None:
        """Between two units of work: report progress, and stop where an interrupt asks for it."""
        self.progress(done, total, tokens)
        self.stopping.point()

    def leave_groups(self) -> None:
        """Destroy the groups that were made for this layout; the pool's own stays."""
        if "groups" in self.__dict__:
            # in one order on all ranks, which NCCL wants
            for communicator in dict.fromkeys((self.groups.data, self.groups.tensor, self.groups.pipeline)):
                communicator.end_group()


class Worker:
    """Base of all roles. Operations are methods marked with `@register(protocol)`."""

    def __init__(self, spec: Model, context: Context) -> None:
        self.spec, self.context = spec, context

    @property
    def layout(self) -> Layout:
        """The layout of its weights on the ranks."""
        return self.context.layout

    @cached_property
    def limits(self) -> Limits:
        """What its model can read; without a model every length will do, and token ids are those of the tokenizer."""
        if self.spec.name is None:
            return replace(Limits.of(self.context.tokenizer_name), context=None)
        return Limits.of(self.spec.name)

    @property
    def uses_device(self) -> bool:
        """Whether it holds memory on the device, which it offloads while other roles of the device work."""
        return False

    def memory_bytes(self) -> dict[str, int]:
        """Bytes on its device, by use; "offloaded": in host memory."""
        return {}

    def take_notes(self) -> tuple[str, ...]:
        """Notes for the user about the last operation, beside `Output.notes`; each once."""
        return ()

    def offload(self) -> None:
        """Free the device's memory for other roles; called before their stages, see `wb.open(share_memory=...)`."""

    def load(self, *, generates: bool = False) -> None:
        """Bring back what an operation needs; generates: as it was registered."""

    def state(self) -> dict[str, Any]:
        """Copies of everything that training changes, for `load_state`. Empty: nothing changes."""
        return {}

    def load_state(self, state: dict[str, Any]) -> None:
        """Go back to what `state` gave."""

    def extra_state(self) -> dict[str, Any]:
        """The small part of its state that moves with the role beside weights, moments and step count. Where the number
        of ranks changes, each new rank gets that of an old one."""
        return {}

    def load_extra_state(self, state: dict[str, Any]) -> None:
        """Take what `extra_state` gave, after weights and moments."""

    def begin(self) -> None:
        """Start what a process can have only once, such as a generation engine: when the worker is made, or, where it
        replaces another worker, after that one is closed."""

    def change(self, spec: Model) -> None:
        """Go on as another model of the same weights: of an actor, one that generates or does not."""
        self.spec = spec

    def retrain(self, training: Training) -> None:
        """Train as other settings of the same engine say, from the next optimizer step on."""
        self.spec = self.spec.changed(training=training)

    def close(self) -> None:
        """Free its memory."""

    def describe(self) -> dict[str, Any]:
        """Its settings and state, for `repr` and reports."""
        return {
            "role": type(self).__name__,
            "model": str(self.spec),
        }


ONE_MEMORY = "on a CPU device and host memory are one"


class SharedDevice:
    """Decides before each stage who leaves the device and who comes back, where `info.share_memory` asks for it.

    Only what is needed moves: a stage of the role that was at work last moves nothing, and so does one without a model,
    such as a reward function. On a CPU nothing moves at all, and a span of 0 bytes says why.
    """

    def __init__(self, info: HostInfo, recorder: Recorder, workers: Mapping[str, Worker]) -> None:
        self._info, self._recorder, self._workers = info, recorder, workers
        self._at_work = ""

    def turn_to(self, role: str, method: str = "") -> None:
        """It is a role's turn, for one of its operations or to have its state read or written."""
        if not self._info.share_memory or not self._workers[role].uses_device:
            return
        with overlapping():  # what comes need not wait for what goes
            if self._at_work != role:
                self.clear_for(role)
            if self._info.offloads:
                operation = getattr(getattr(self._workers[role], method, None), "__operation__", None)
                self._workers[role].load(generates=operation is not None and operation.generates)

    def clear_for(self, role: str) -> None:
        """Have all other roles leave the device for this one, which may still have to be loaded."""
        if self._info.share_memory and not self._info.offloads and self._at_work:
            now_s = self._recorder.now_s()
            self._recorder.add("offload", now_s, now_s, note=f"{self._at_work} stays: {ONE_MEMORY}")
        for other, worker in self._workers.items():
            if self._info.offloads and other != role:
                with self._recorder.bind(role=other):
                    worker.offload()
        self._at_work = role if role in self._workers else ""
