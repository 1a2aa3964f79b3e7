"""The interface of training engines, and code that the engines share."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import cached_property
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from workbench.engines.communicator import Communicator, ParallelGroups
from workbench.engines.host_memory import HostMemory, distinct_storages
from workbench.engines.training.steps import MOMENTS, LossScale, Pass, StateKind, StepReport, learning_rate
from workbench.errors import BadInput
from workbench.models.heads import PackedModule
from workbench.models.lora import ADAPTER, adapted_layers, adapter_names, merged_weight
from workbench.settings.training import Training
from workbench.telemetry import span

Part = Literal["parameters", "gradients", "optimizer"]
PARTS: tuple[Part, ...] = get_args(Part)


class TrainingEngine(ABC):
    """Holds one module, or this rank's shard of it, with its gradients, optimizer and schedule.

    `module` is always in eval mode: dropout would make probability ratios wrong. Parameters that require a gradient are
    trained: all, or those of an adapter.
    """

    module: PackedModule
    settings: Training | None
    steps: int
    loss_scale: LossScale | None = None  # for a trained module in fp16
    half_moved = False  # whether the last step broke off after the optimizer began to change weights
    _dtype: torch.dtype
    _groups: ParallelGroups

    def _reduce(self, module: PackedModule) -> None:  # noqa: B027  (most engines hold it whole)
        """Reduce a module that is sharded over ranks to this rank's shard, in place."""

    @abstractmethod
    def forward(self, **inputs: Any) -> Any:
        """Run the module on one micro-batch. Under `torch.no_grad()` nothing is kept for a backward pass.

        If weights are sharded over ranks (ZeRO stage 3, tensor and pipeline parallel), every rank must call it equally
        often. On a pipeline the output is on the last stage, see `everywhere`.
        """

    def everywhere(self, output: Tensor) -> Tensor:
        """Broadcast an output of `forward`, in place, to all pipeline stages; every rank must call it."""
        return output

    @property
    def moved_bytes(self) -> int:
        """The bytes sent so far inside layers, to ranks that compute them together with this one."""
        return 0

    def step(self, passes: Sequence[Pass], rate_scale: float = 1.0) -> StepReport:
        """Take one optimizer step on the sum of the losses of micro-batches, each a scalar already divided by the
        global denominator: gradients are *summed* over micro-batches and over data-parallel ranks, then clipped by the
        global norm. Every rank must pass equally many micro-batches, at least one.
        rate_scale: factor of the scheduled learning rate in this step, the same on every rank.

        If a loss raises, the state is as before the step. A step whose gradient norm is not finite is skipped.
        """
        assert self.settings is not None
        rate = rate_scale * learning_rate(self.settings, self.steps)
        scale = None if self.loss_scale is None else self.loss_scale.scale
        self.load()
        self.half_moved = False
        norm, culprit = self._update(passes, rate)
        self.half_moved = False
        skipped = not math.isfinite(norm)
        self.steps += not skipped
        if self.loss_scale is not None:
            self.loss_scale.after_step(finite=not skipped)
        return StepReport(
            grad_norm=norm, learning_rate=rate, steps=self.steps, skipped=skipped, culprit=culprit, loss_scale=scale
        )

    @abstractmethod
    def _update(self, passes: Sequence[Pass], rate: float) -> tuple[float, str]:
        """Do a step's update, unless the gradient's norm is not finite; return the norm and `StepReport.culprit`."""

    def _begin_to_move(self, *_: Any) -> None:
        self.half_moved = True

    def retrain(self, settings: Training) -> None:
        """Use other settings, which differ in fields of `LIVE`, for the next steps."""
        self.settings = settings

    def close(self) -> None:  # noqa: B027  (most engines have nothing to release)
        """Release everything that keeps the module in memory; the engine must not be used afterwards."""

    def gradients(self, passes: Sequence[Pass]) -> Iterator[tuple[str, Tensor]]:
        """Yield the full gradient of each weight that `step` would apply for these micro-batches, unclipped, by
        transformers' names, one at a time (every rank must iterate to the end). Afterwards, and if a loss raises,
        nothing has changed."""
        with self.whole_gradients(passes):
            for name, parameter in self._named_parameters():
                if (gradient := self._gradient(parameter)) is not None:
                    yield name, gradient

    @abstractmethod
    def whole_gradients(self, passes: Sequence[Pass]) -> AbstractContextManager[None]:
        """Inside the block, `_gradient` returns the gradients of these micro-batches, over all replicas."""

    @abstractmethod
    def _gradient(self, parameter: nn.Parameter) -> Tensor | None:
        """Return the gradient of a parameter, or of this rank's slice of it; None: it is not trained."""

    @abstractmethod
    def gradient_norms(self, passes: Sequence[Pass]) -> list[float]:
        """Return the norm of the gradient of each of these micro-batches, over this replica's rows alone; every rank
        must pass equally many. Afterwards, and if a loss raises, nothing has changed."""

    @property
    def _held_gradients(self) -> list[Tensor]:
        return [parameter.grad for parameter in self.module.parameters() if parameter.grad is not None]

    def _norm(self) -> Tensor:
        """Return the global norm of the parameters' gradients."""
        return get_total_norm(self._held_gradients)

    def _clip(self, norm: Tensor) -> None:
        if self.settings is not None and self.settings.max_grad_norm > 0:
            clip_grads_with_norm_(self.module.parameters(), self.settings.max_grad_norm, norm)

    def _unscale(self) -> None:
        """Turn gradients of scaled losses into gradients of the losses, in place."""
        if self.loss_scale is not None:
            torch._foreach_mul_(self._held_gradients, 1 / self.loss_scale.scale)

    def _loss_of(self, micro: Pass) -> Tensor:
        micro.begin()
        with self._pass_span("forward", micro.tokens):
            return micro.loss(self.forward(**micro.inputs))

    @contextmanager
    def _pass_span(self, kind: str, tokens: int = 0) -> Iterator[None]:
        """Record a span of a forward or backward pass, with the bytes sent inside layers."""
        before = self.moved_bytes
        with span(kind, tokens=tokens) as counted:
            yield
            counted.bytes += self.moved_bytes - before

    @abstractmethod
    def gathered(self, parameters: Sequence[nn.Parameter]) -> AbstractContextManager[Any]:
        """Inside the block, these parameters are whole on every rank; every rank must enter it."""

    def stored_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield weights as `named_weights` does, but in their stored dtype, and without adding an adapter: equal on
        data-parallel ranks."""
        for name, parameter in self._named_parameters():
            with self.gathered([parameter]):
                yield name, parameter.detach()

    def named_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield full weights by transformers' names, one at a time (gathered if sharded; every rank must iterate to the
        end). An adapter is added to the weights that it changes.

        They are in the dtype with which the engine was made. A tensor may be a live parameter: copy it if it must
        outlast a step.
        """
        names, adapted = self.module.weight_names(), adapted_layers(self.module)
        for name, parameter in self.module.named_parameters():
            if name not in names:  # an adapter's parameter
                continue
            layer = adapted.get(name)
            with self.gathered([parameter] if layer is None else list(layer.parameters())):
                weight = parameter.detach() if layer is None else merged_weight(layer)
                yield names[name], weight.to(self._dtype)

    def local_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield this rank's part of the weights, live, by transformers' names, in the stored dtype; without any
        communication. With a layout (p, t, d) these are slices of the weights of its stage, cut as
        `workbench.resharding.weights` defines; with ZeRO-3 flat shards without their padding."""
        for name, parameter in self._named_parameters():
            yield name, parameter.detach()

    def named_adapter(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the weights of the module's adapter by peft's names, as they are stored; else like `named_weights`."""
        for name, file_name in adapter_names(self.module).items():
            parameter = self.module.get_parameter(name)
            with self.gathered([parameter]):
                yield file_name, parameter.detach()

    def scaled_adapter(self) -> Iterator[tuple[str, Tensor]]:
        """Yield weights as `named_adapter` does, with B times alpha / rank, for engines that know no scale."""
        scales = {name: layer.scaling[ADAPTER] for name, layer in adapted_layers(self.module).items()}
        for name, weight in self.named_adapter():
            layer, is_b, _ = name.removeprefix("base_model.").partition(".lora_B.")
            yield name, weight * scales[f"{layer}.base_layer.weight"] if is_b else weight

    def _named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield the module's parameters by transformers' names, those of an adapter by their own."""
        names = self.module.weight_names()
        return ((names.get(name, name), parameter) for name, parameter in self.module.named_parameters())

    def _parameters(self) -> dict[str, nn.Parameter]:
        """Return this rank's parameters by the names of their state: transformers', and for those of an adapter their
        layer's with ".lora_A.weight" or ".lora_B.weight"."""
        names, own = self.module.weight_names(), self.module.named_parameters()
        return {names.get(n) or n.removeprefix("model.").replace(f".{ADAPTER}.", "."): p for n, p in own}

    def state_dict(self) -> dict[str, Any]:
        """Return step count, trained weights and their moments on this rank, as CPU copies."""
        self.load()
        kinds: tuple[StateKind, ...] = ("parameters", *MOMENTS) if self.has_moments else ("parameters",)
        held = {kind: {name: tensor.to("cpu", copy=True) for name, tensor in self.held_state(kind)} for kind in kinds}
        scale = {} if self.loss_scale is None else {"loss_scale": self.loss_scale.state}
        return {"steps": self.steps, "held": held, **scale}

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned, on the same rank of the same layout; `state` does not change."""
        self.load()
        self.begin_state(len(state["held"]) > 1)
        for kind, saved in state["held"].items():
            held = dict(self.held_state(kind))
            if held.keys() != saved.keys():
                raise BadInput(
                    f"a state of {len(saved)} tensors",
                    f"{type(self.module).__name__} has {len(held)}, and their names differ",
                )
            for name, tensor in held.items():
                tensor.copy_(saved[name])
        self.end_state(state["steps"], state.get("loss_scale"))

    @abstractmethod
    def held_state(self, kind: StateKind) -> Iterator[tuple[str, Tensor]]:
        """Yield this rank's part of the weights, or of their moments, live, by the names of `_parameters`; without
        communication. Cut as `workbench.placement.state` defines: fp32, and weights that are not trained in their
        dtype. Before the first optimizer step there are no moments."""

    @abstractmethod
    def begin_state(self, moments: bool) -> None:
        """Prepare for writing state into the tensors of `held_state`. moments: True allocates the moments that will be
        written; False drops the optimizer's moments."""

    def end_state(self, steps: int, loss_scale: tuple[float, int] | None = None) -> None:
        """Finish writing state: the engine is then as after `steps` optimizer steps. Every rank calls it. loss_scale:
        its state; None: the state is of an engine without a loss scale."""
        self.steps = steps
        if self.loss_scale is not None and loss_scale is not None:
            self.loss_scale.scale, self.loss_scale.good_steps = loss_scale

    @property
    @abstractmethod
    def has_moments(self) -> bool:
        """Whether the optimizer has taken a step."""

    @abstractmethod
    def tensors(self) -> dict[str, list[Tensor]]:
        """Return all tensors of this rank, by part. Memory shared by two parts belongs to the first of them."""

    def memory_bytes(self) -> dict[str, int]:
        """Return the bytes on this rank's device: {"parameters": .., "gradients": .., "optimizer": ..}."""
        held = distinct_storages(self.tensors())
        return {part: sum(storage.nbytes() for storage in storages) for part, storages in held.items()}

    @property
    def offloaded_bytes(self) -> int:
        return self._host_memory.nbytes

    def offload(self, *parts: Part) -> int:
        """Move parts (none named: all) to host memory, and free the device's memory; return the bytes moved. Parts that
        are already offloaded cost nothing.

        On a CPU this moves them to other memory of the same kind, which only tests need.
        """
        return self._host_memory.offload(self.tensors(), parts or PARTS)

    def load(self, *parts: Part) -> int:
        """Load parts (none named: all) back onto the device, bit for bit; return the bytes moved. `forward`, `step`,
        `gradients` and the state dicts load what they need; code that reads weights loads the parameters first."""
        return self._host_memory.load(parts or PARTS)

    @cached_property
    def _host_memory(self) -> HostMemory:
        return HostMemory()


def place(module: PackedModule, device: torch.device, *, trained: torch.dtype, frozen: torch.dtype) -> PackedModule:
    """Put `module` in eval mode on `device`, with trained and frozen parameters in these dtypes; buffers, such as
    rotary frequencies, keep theirs."""
    for parameter in module.to(device).parameters():
        parameter.data = parameter.data.to(trained if parameter.requires_grad else frozen)
    return module.eval()


def recompute_activations(module: nn.Module) -> None:
    """Turn on transformers' activation checkpointing, with the module in eval mode.

    transformers recomputes a layer only if that layer's own `training` flag is set; its children, dropout among them,
    stay in eval mode.
    """
    from transformers import PreTrainedModel
    from transformers.modeling_layers import GradientCheckpointingLayer

    models = [part for part in module.modules() if isinstance(part, PreTrainedModel)]
    layers = [part for part in module.modules() if isinstance(part, GradientCheckpointingLayer)]
    if not models or not layers:
        raise BadInput(
            f"activation_checkpointing=True for {type(module).__name__}",
            "the model's layers must be transformers' GradientCheckpointingLayer",
            "leave activation_checkpointing=False",
        )
    models[0].gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    for layer in layers:
        layer.training = True


@torch.no_grad()
def require_equal_parameters(module: nn.Module, communicator: Communicator) -> None:
    """Raise `BadInput` unless every rank holds the same bits: data-parallel ranks must start equal."""
    if communicator.world_size == 1:
        return
    total = 0
    for i, parameter in enumerate(module.parameters(), start=1):
        bits = parameter.detach().view({2: torch.int16, 4: torch.int32}[parameter.element_size()])
        total = (total + i * int(bits.sum(dtype=torch.int64))) % 2**52
    largest = torch.tensor([total, -total], dtype=torch.int64, device=next(module.parameters()).device)
    communicator.all_reduce_max(largest)
    if int(largest[0]) != -int(largest[1]):
        raise BadInput(
            f"rank {communicator.rank} has other initial weights than another rank",
            "data-parallel ranks must start from equal weights",
            "load the model from the same folder, and seed new heads equally, on every rank",
        )
