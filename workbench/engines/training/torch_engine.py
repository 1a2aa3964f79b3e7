"""Data-parallel training with nothing but torch; this engine also runs models that are not trained.

Also 3D parallel training with nothing but torch: tensor x pipeline x data, HybridFlow's layout (p, t, d).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from workbench.engines.communicator import ParallelGroups
from workbench.engines.training.base import (
    TrainingEngine,
    place,
    recompute_activations,
    require_equal_parameters,
)
from workbench.engines.training.model_shard import ShardedEngine, gradient_of
from workbench.engines.training.pipeline import Pipeline
from workbench.engines.training.steps import (
    MOMENTS,
    LossScale,
    Pass,
    StateKind,
    finite_gradients,
    make_moments,
    make_optimizer,
    moment_of,
    set_optimizer_steps,
    set_rates,
    with_moments,
)
from workbench.errors import BadInput
from workbench.models.heads import PackedModule
from workbench.placement.memory import BUCKET_ELEMENTS
from workbench.settings.training import Training
from workbench.telemetry import span


class TorchEngine(TrainingEngine):
    """A torch engine whose ranks each hold the whole module.

    Trained parameters are kept in fp32, whatever `dtype`, and frozen ones in `dtype`. With bfloat16 or float16 a
    trained module computes under autocast, with float16 on scaled losses, see `LossScale`. A module with
    `settings=None` is only run: there are no gradients and no optimizer.
    """

    def __init__(
        self,
        module: PackedModule,
        settings: Training | None,
        groups: ParallelGroups,
        *,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        self._groups = groups
        self._reduce(module)
        if settings is None:
            module.requires_grad_(False)
        self.module = place(module, device, trained=torch.float32, frozen=dtype)
        self.settings, self.steps = settings, 0
        self._device, self._dtype = device, dtype
        self._optimizer = None
        if settings is not None:
            require_equal_parameters(module, groups.data)
            self._optimizer = make_optimizer(self._parameters(), settings)
            self._optimizer.register_step_pre_hook(self._begin_to_move)
            self.loss_scale = LossScale() if dtype == torch.float16 else None
            if settings.activation_checkpointing:
                recompute_activations(module)

    def forward(self, **inputs: Any) -> Any:
        self.load("parameters")
        with self._autocast():
            return self.module(**inputs)

    def _autocast(self) -> AbstractContextManager[Any]:
        enabled = self._optimizer is not None and self._dtype != torch.float32
        return torch.autocast(self._device.type, self._dtype if enabled else None, enabled=enabled)

    def _update(self, passes: Sequence[Pass], rate: float) -> tuple[float, str]:
        assert self.settings is not None and self._optimizer is not None
        try:
            self._backward(self._scaled(passes))
            self._sum_gradients()
            self._unscale()
            norm = self._norm()
            if not torch.isfinite(norm):
                return float(norm), self._not_finite()
            self._clip(norm)
            set_rates(self._optimizer, self.settings, rate)
            with span("optimizer"):
                trained = (p for p in self.module.parameters() if p.requires_grad)
                with with_moments(self._optimizer, trained, lambda: self.half_moved):
                    self._optimizer.step()
            return float(norm), ""
        finally:
            self.module.zero_grad()

    def _scaled(self, passes: Sequence[Pass]) -> Sequence[Pass]:
        """Return the passes, in fp16 with scaled losses."""
        scale = self.loss_scale
        return passes if scale is None else [micro.times(scale.scale) for micro in passes]

    def _not_finite(self) -> str:
        for name, parameter in self._named_parameters():
            if parameter.grad is not None and not torch.isfinite(parameter.grad).all():
                return name
        return ""

    def _gradient(self, parameter: nn.Parameter) -> Tensor | None:
        return parameter.grad

    def whole_gradients(self, passes: Sequence[Pass], over_replicas: bool = True) -> AbstractContextManager[None]:
        def compute() -> bool:
            self.load("parameters", "gradients")
            self._backward(self._scaled(passes))
            self._sum_gradients(over_replicas)
            self._unscale()
            return self.loss_scale is None or bool(self._norm().isfinite())

        return finite_gradients(self.loss_scale, compute, self.module.zero_grad)

    def gradient_norms(self, passes: Sequence[Pass]) -> list[float]:
        norms: list[float] = []
        for micro in passes:
            with self.whole_gradients([micro], over_replicas=False):
                norms.append(float(self._norm()))
        return norms

    def _backward(self, passes: Sequence[Pass]) -> None:
        for micro in passes:
            value = self._loss_of(micro)
            with self._pass_span("backward"):
                value.backward()

    @torch.no_grad()
    def _sum_gradients(self, over_replicas: bool = True) -> None:
        """Sum the gradients of all trained parameters, in place, over the ranks that have parts of them: zeros if no
        micro-batch of this rank used a parameter."""
        for parameter in self.module.parameters():
            if parameter.requires_grad and parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        if over_replicas and self._groups.data.world_size > 1:
            for bucket in _buckets(self._held_gradients):
                flat = self._groups.data.all_reduce(torch.cat([gradient.flatten() for gradient in bucket]))
                for gradient, total in zip(bucket, flat.split([g.numel() for g in bucket]), strict=True):
                    gradient.copy_(total.view_as(gradient))

    def gathered(self, parameters: Sequence[nn.Parameter]) -> AbstractContextManager[Any]:
        return nullcontext()

    @property
    def has_moments(self) -> bool:
        return self._optimizer is not None and bool(self._optimizer.state)

    def held_state(self, kind: StateKind) -> Iterator[tuple[str, Tensor]]:
        for name, parameter in self._parameters().items():
            if kind in MOMENTS:
                entry = {} if self._optimizer is None else self._optimizer.state.get(parameter, {})
                if (moment := moment_of(entry, kind)) is not None:
                    yield name, moment
            elif parameter.requires_grad == (kind == "parameters"):
                yield name, parameter.detach()

    def begin_state(self, moments: bool) -> None:
        if self._optimizer is None:
            return
        if not moments:
            self._optimizer.state.clear()
        elif not self.has_moments:
            trained = (p for p in self.module.parameters() if p.requires_grad)
            make_moments(self._optimizer, trained, torch.empty_like)

    def end_state(self, steps: int, loss_scale: tuple[float, int] | None = None) -> None:
        super().end_state(steps, loss_scale)
        if self._optimizer is not None:
            set_optimizer_steps(self._optimizer, steps)

    def tensors(self) -> dict[str, list[Tensor]]:
        parameters = list(self.module.parameters())
        kept = [] if self._optimizer is None else self._optimizer.state.values()
        return {
            "parameters": [*parameters],
            "gradients": self._held_gradients,
            "optimizer": [t for entry in kept for t in entry.values() if isinstance(t, Tensor)],
        }


def _buckets(tensors: list[Tensor]) -> Iterator[list[Tensor]]:
    """Yield consecutive tensors in groups of about `BUCKET_ELEMENTS` elements; one call sums a group over the ranks."""
    bucket: list[Tensor] = []
    elements = 0
    for tensor in tensors:
        bucket.append(tensor)
        elements += tensor.numel()
        if elements >= BUCKET_ELEMENTS["torch"]:
            yield bucket
            bucket, elements = [], 0
    if bucket:
        yield bucket


class Torch3DEngine(ShardedEngine, TorchEngine):
    """Each replica's model is sharded over p pipeline stages of t tensor ranks, see `shard_model`; all its ranks get
    the same rows.

    `forward` returns the output on the last stage, and zeros of the same shape on the other stages. Weights that all
    tensor ranks hold, and a tied embedding on the first and last stage, have equal gradients on these ranks, and count
    once in the norm.
    """

    @cached_property
    def _pipeline(self) -> Pipeline:
        hidden_size = int(self.module.get_backbone().config.get_text_config().hidden_size)
        stored = self._dtype if self.settings is None else torch.float32
        return Pipeline(self.module, self._groups, hidden_size, stored, autocast=self._autocast, span=self._pass_span)

    def forward(self, **inputs: Any) -> Any:
        if self._groups.layout.p == 1:
            return super().forward(**inputs)
        if torch.is_grad_enabled():
            value = f"forward() with gradients over p={self._groups.layout.p} pipeline stages"
            raise BadInput(value, "the losses are on the last stage", "use step(), or torch.no_grad()")
        self.load("parameters")
        return self._pipeline.forward(inputs)

    def everywhere(self, output: Tensor) -> Tensor:
        return self._groups.pipeline.broadcast(output.contiguous(), self._groups.layout.p - 1)

    def _backward(self, passes: Sequence[Pass]) -> None:
        if self._groups.layout.p == 1:
            super()._backward(passes)
        else:
            self._pipeline.step(passes)

    @torch.no_grad()
    def _sum_gradients(self, over_replicas: bool = True) -> None:
        super()._sum_gradients(over_replicas)
        shard, groups = self._shard, self._groups
        for name in sorted(shard.partial & shard.held.keys()):
            groups.tensor.all_reduce(gradient_of(shard.held[name]))
        for weight in self._on_two_stages():
            mine = gradient_of(shard.held[weight.name])
            theirs, other = torch.empty_like(mine), groups.layout.p - 1 - groups.pipeline.rank
            groups.pipeline.exchange([(other, mine)], [(other, theirs)])
            mine += theirs
