"""The SPMD program that one rank runs for one role, and the services that its host offers to it.

The roles of one host take turns on its device: a role that is not at work frees the device's memory (HybridFlow,
arXiv:2409.19256, section 5; verl's `param_offload`, `optimizer_offload` and `free_cache_engine` in one).
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
    """The services and settings that a host gives to a worker.

    layout: the role's; `layout.coordinates(host.rank)` is this rank's place in it. communicator: over all ranks of the
    pool. progress(done, total, tokens): called between micro-batches, for the controller's progress line. stopping: a
    worker calls `stopping.point()` between two units of work, such as micro-batches, where all ranks are at the same
    line: an interrupt stops the stage there. seed: the workbench's. tokenizer_name: the model whose tokenizer made the
    tokens. max_model_tokens: of the engine that generates, for all roles. folder: relative paths start here: the
    working folder of the kernel that opened the workbench. exchange: the weights that roles publish and take from each
    other. replaces_live: whether the worker is built beside the one that it replaces, see `Worker.begin`. room: the
    memory that the placement leaves on the role's GPUs, which decides automatic sizes; None on a CPU. calls: runs the
    user's functions, in a process of the role's own.
    """

    host: HostInfo
    layout: Layout
    communicator: Communicator
    recorder: Recorder
    progress: Callable[[int, int, int], None]
    seed: int
    tokenizer_name: str
    folder: str
    max_model_tokens: int
    exchange: WeightExchange
    replaces_live: bool = False
    room: Room | None = None
    stopping: Stopping = field(default_factory=Stopping)
    calls: UserCalls = field(default_factory=UserCalls)

    @property
    def device(self) -> torch.device:
        """The device of the host: the CPU, or the host's only visible GPU ("cuda:0")."""
        return torch.device("cuda:0" if self.host.device.startswith("cuda") else "cpu")

    def loading_device(self, training: Training | None) -> torch.device:
        """Return the device on which a model is loaded: host memory where the model is cut into slices afterwards."""
        cut = self.layout.p * self.layout.t > 1 or (training is not None and training.cuts_weights)
        return torch.device("cpu") if cut else self.device

    @cached_property
    def groups(self) -> ParallelGroups:
        """The groups of ranks of the layout. Sums over the rows of a batch are sums over `groups.data`, whose ranks
        have different rows. All ranks of the pool first read this at the same time, while the role is built."""
        return parallel_groups(self.layout, self.communicator, self.recorder, self.device.type)

    @cached_property
    def cache_bytes(self) -> int | None:
        """The bytes of vLLM's key-value cache on each GPU of the pool; None on a CPU or where unknown. All ranks of the
        pool first read this property at the same time."""
        if self.room is None:
            return None
        here = torch.tensor([-self.room.cache_bytes(own_gpu_bytes())])
        return -int(self.communicator.all_reduce_max(here).item())

    def advance(self, done: int, total: int, tokens: int) -> None:
        """Between two units of work: report progress, and stop where an interrupt asks for it."""
        self.progress(done, total, tokens)
        self.stopping.point()

    def leave_groups(self) -> None:
        """Destroy the process groups that were made for this layout; the pool's own group stays."""
        if "groups" in self.__dict__:
            # all ranks end them in the same order: NCCL requires it
            for communicator in dict.fromkeys((self.groups.data, self.groups.tensor, self.groups.pipeline)):
                communicator.end_group()


class Worker:
    """Base class of all roles. Operations are methods marked with `@register(protocol)`."""

    def __init__(self, spec: Model, context: Context) -> None:
        self.spec, self.context = spec, context
        self._notes: list[str] = []  # for the user, about the current operation

    @property
    def layout(self) -> Layout:
        """The layout of this worker's weights on the ranks."""
        return self.context.layout

    @cached_property
    def limits(self) -> Limits:
        """The model's limits of length and token ids; without a model no limit of length, and the tokenizer's ids."""
        if self.spec.name is None:
            return replace(Limits.of(self.context.tokenizer_name), context=None)
        return Limits.of(self.spec.name, self.context.max_model_tokens)

    @property
    def uses_device(self) -> bool:
        """Whether the worker holds device memory, which it offloads while other roles of the device work."""
        return False

    def memory_bytes(self) -> dict[str, int]:
        """Return the bytes held on the device, by use; "offloaded": bytes in host memory."""
        return {}

    def take_notes(self) -> tuple[str, ...]:
        """Return notes for the user about the last operation, beside `Output.notes`; each note is returned once."""
        notes, self._notes = tuple(self._notes), []
        return notes

    def offload(self) -> None:
        """Free the device's memory for other roles; called before their stages, see `wb.open(share_memory=...)`."""

    def load(self, *, generates: bool = False) -> None:
        """Load what an operation needs back onto the device. generates: as the operation was registered."""

    def state(self) -> dict[str, Any]:
        """Return copies of everything that training changes, for `load_state`; empty if training changes nothing."""
        return {}

    def load_state(self, state: dict[str, Any]) -> None:
        """Restore a state that `state` returned."""

    def extra_state(self) -> dict[str, Any]:
        """Return the small part of the state that moves with the role beside weights, moments and step count. When the
        number of ranks changes, each new rank gets the extra state of an old rank."""
        return {}

    def load_extra_state(self, state: dict[str, Any]) -> None:
        """Restore what `extra_state` returned, after weights and moments were restored."""

    def begin(self) -> None:
        """Start resources of which a process can have only one, such as a generation engine. Called when the worker is
        made, or, if it replaces another worker, after that worker is closed."""

    def change(self, spec: Model) -> None:
        """Continue with another spec of the same weights, such as an actor that generates or no longer generates."""
        self.spec = spec

    def retrain(self, training: Training) -> None:
        """Train with other settings of the same engine from the next optimizer step on."""
        self.spec = self.spec.changed(training=training)

    def close(self) -> None:
        """Free the worker's memory."""

    def describe(self) -> dict[str, Any]:
        """Return the worker's settings and state, for `repr` and reports."""
        return {"role": type(self).__name__, "model": str(self.spec)}


ONE_MEMORY = "on a CPU, device and host memory are the same"


class SharedDevice:
    """Decides before each stage which roles leave the device and which come back, if `info.share_memory` asks for it.

    Only what is needed moves: nothing moves for a stage of the role that worked last, or of a role without a model,
    such as a reward function. On a CPU nothing moves at all, and a span of 0 bytes says why.
    """

    def __init__(self, info: HostInfo, recorder: Recorder, workers: Mapping[str, Worker]) -> None:
        self._info, self._recorder, self._workers = info, recorder, workers
        self._at_work = ""

    def turn_to(self, role: str, method: str = "") -> None:
        """Prepare the device for a role's turn: for one of its operations, or to read or write its state."""
        if not self._info.share_memory or not self._workers[role].uses_device:
            return
        with overlapping():  # loads need not wait for offloads
            if self._at_work != role:
                self.clear_for(role)
            if self._info.offloads:
                operation = getattr(getattr(self._workers[role], method, None), "__operation__", None)
                self._workers[role].load(generates=operation is not None and operation.generates)

    def clear_for(self, role: str) -> None:
        """Offload all other roles for this role, which may still have to be loaded."""
        if self._info.share_memory and not self._info.offloads and self._at_work:
            now_s = self._recorder.now_s()
            self._recorder.add("offload", now_s, now_s, note=f"{self._at_work} stays: {ONE_MEMORY}")
        for other, worker in self._workers.items():
            if self._info.offloads and other != role:
                with self._recorder.bind(role=other):
                    worker.offload()
        self._at_work = role if role in self._workers else ""
