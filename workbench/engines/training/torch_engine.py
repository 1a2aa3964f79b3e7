"""Data-parallel training with nothing but torch; also what runs a model that is not trained."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from workbench.engines.training.base import (
    MOMENTS,
    StateKind,
    StepReport,
    TrainingEngine,
    make_moments,
    make_optimizer,
    moment_of,
    place,
    recompute_activations,
    release_gradients,
    require_equal_parameters,
    require_passes,
    set_optimizer_steps,
    set_rates,
    transformers_names,
)
from workbench.engines.training.groups import Collectives
from workbench.engines.training.loss_scale import LossScale, finite_gradients
from workbench.engines.training.passes import Pass
from workbench.engines.training.schedule import learning_rate
from workbench.errors import BadInput
from workbench.settings.engines import Training
from workbench.telemetry import span

# Elements of gradients summed over the ranks in one call: few calls, 100 MB of extra memory.
BUCKET_ELEMENTS = 25_000_000


class TorchEngine(TrainingEngine):
    """Every rank holds the whole module.

    Trained parameters are kept in fp32, whatever `dtype`, and frozen ones in `dtype`. With bfloat16 or float16 a
    trained module computes under autocast, with float16 on scaled losses, see `LossScale`. A module with
    `settings=None` is only run: there are no gradients and no optimizer.
    """

    def __init__(
        self,
        module: nn.Module,
        settings: Training | None,
        communicator: Collectives,
        *,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        if settings is None:
            module.requires_grad_(False)
        self.module = place(module, device, trained=torch.float32, frozen=dtype)
        self.settings, self.steps = settings, 0
        self._communicator, self._device, self._dtype = communicator, device, dtype
        self._optimizer = None
        if settings is not None:
            require_equal_parameters(module, communicator)
            self._optimizer = make_optimizer(self._parameters(), settings)
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

    def step(self, passes: Sequence[Pass], rate_scale: float = 1.0) -> StepReport:
        if self.settings is None or self._optimizer is None:
            raise BadInput("step() on a module that is not trained", "a trained module has settings", "give Training()")
        rate = rate_scale * learning_rate(self.settings, self.steps)
        scale = None if self.loss_scale is None else self.loss_scale.scale
        self.load()
        try:
            self._backward(self._scaled(passes))
            norm = self._norm(self._unscaled(self._summed_gradients()))
            skipped, culprit = not bool(torch.isfinite(norm)), ""
            if skipped:
                culprit = self._not_finite()
            else:
                if self.settings.max_grad_norm > 0:
                    torch.nn.utils.clip_grads_with_norm_(self.module.parameters(), self.settings.max_grad_norm, norm)
                set_rates(self._optimizer, self.settings, rate)
                with span("optimizer"):
                    self._optimizer.step()
                self.steps += 1
            if self.loss_scale is not None:
                self.loss_scale.after_step(finite=not skipped)
        finally:
            release_gradients(self.module)
        return StepReport(
            grad_norm=float(norm), learning_rate=rate, steps=self.steps, skipped=skipped, culprit=culprit,
            loss_scale=scale,
        )  # fmt: skip

    def _scaled(self, passes: Sequence[Pass]) -> Sequence[Pass]:
        """The same with scaled losses, in fp16."""
        if self.loss_scale is None:
            return passes
        scale = self.loss_scale.scale

        def scaled(micro: Pass) -> Pass:
            return replace(micro, loss=lambda output: micro.loss(output) * scale)

        return [scaled(micro) for micro in passes]

    @torch.no_grad()
    def _unscaled(self, gradients: list[Tensor]) -> list[Tensor]:
        """Gradients of the losses, in place, from those of scaled ones."""
        if self.loss_scale is not None:
            torch._foreach_mul_(gradients, 1 / self.loss_scale.scale)
        return gradients

    def _not_finite(self) -> str:
        names = transformers_names(self.module)
        for name, parameter in self.module.named_parameters():
            if parameter.grad is not None and not torch.isfinite(parameter.grad).all():
                return names.get(name, name)
        return ""

    def gradients(self, passes: Sequence[Pass]) -> Iterator[tuple[str, Tensor]]:
        names = transformers_names(self.module)
        with self._whole_gradients(passes):
            for name, parameter in self.module.named_parameters():
                if parameter.grad is not None:
                    yield names.get(name, name), parameter.grad

    def _whole_gradients(self, passes: Sequence[Pass], over_replicas: bool = True) -> AbstractContextManager[None]:
        """Inside, the parameters have the gradients of these micro-batches; over_replicas: of all replicas."""

        def compute() -> bool:
            self.load("parameters", "gradients")
            self._backward(self._scaled(passes))
            gradients = self._unscaled(self._summed_gradients(over_replicas))
            return self.loss_scale is None or bool(self._norm(gradients).isfinite())

        return finite_gradients(self.loss_scale, compute, lambda: release_gradients(self.module))

    def gradient_norms(self, passes: Sequence[Pass]) -> list[float]:
        norms: list[float] = []
        for micro in passes:
            with self._whole_gradients([micro], over_replicas=False):
                norms.append(float(self._norm(self._trained_gradients())))
        return norms

    def _backward(self, passes: Sequence[Pass]) -> None:
        require_passes(passes)
        for micro in passes:
            value = self._loss_of(micro)
            with self._pass_span("backward"):
                value.backward()

    def _norm(self, gradients: list[Tensor]) -> Tensor:
        return torch.nn.utils.get_total_norm(gradients)

    def _trained_gradients(self) -> list[Tensor]:
        """The gradients of all trained parameters: zeros where no micro-batch of this rank used one."""
        gradients = []
        for parameter in self.module.parameters():
            if not parameter.requires_grad:
                continue
            parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            gradients.append(parameter.grad)
        return gradients

    @torch.no_grad()
    def _summed_gradients(self, over_replicas: bool = True) -> list[Tensor]:
        """The gradients of all trained parameters, summed in place over the ranks that have parts of them."""
        gradients = self._trained_gradients()
        if over_replicas and self._communicator.world_size > 1:
            for bucket in _buckets(gradients):
                flat = self._communicator.all_reduce(torch.cat([gradient.flatten() for gradient in bucket]))
                for gradient, total in zip(bucket, flat.split([g.numel() for g in bucket]), strict=True):
                    gradient.copy_(total.view_as(gradient))
        return gradients

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

    def end_state(self, steps: int) -> None:
        self.steps = steps
        if self._optimizer is not None:
            set_optimizer_steps(self._optimizer, steps)

    def tensors(self) -> dict[str, list[Tensor]]:
        parameters = list(self.module.parameters())
        kept = [] if self._optimizer is None else self._optimizer.state.values()
        return {
            "parameters": [*parameters],
            "gradients": [parameter.grad for parameter in parameters if parameter.grad is not None],
            "optimizer": [t for entry in kept for t in entry.values() if isinstance(t, Tensor)],
        }


def _buckets(tensors: list[Tensor]) -> Iterator[list[Tensor]]:
    """Consecutive tensors in groups of about BUCKET_ELEMENTS elements."""
    bucket: list[Tensor] = []
    elements = 0
    for tensor in tensors:
        bucket.append(tensor)
        elements += tensor.numel()
        if elements >= BUCKET_ELEMENTS:
            yield bucket
            bucket, elements = [], 0
    if bucket:
        yield bucket
