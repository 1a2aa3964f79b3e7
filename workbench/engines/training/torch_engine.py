"""Data-parallel training with nothing but torch; also what runs a model that is not trained."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from workbench.engines.training.base import (
    MOMENTS,
    StateKind,
    StepReport,
    TrainingEngine,
    adamw,
    make_moments,
    place,
    recompute_activations,
    release_gradients,
    require_equal_parameters,
    require_passes,
    set_optimizer_steps,
    state_names,
    transformers_names,
)
from workbench.engines.training.groups import Collectives
from workbench.engines.training.passes import Pass
from workbench.engines.training.schedule import learning_rate
from workbench.errors import BadInput
from workbench.settings.engines import Training
from workbench.telemetry import span

# Elements of gradients summed over the ranks in one call: few calls, 100 MB of extra memory.
BUCKET_ELEMENTS = 25_000_000


class TorchEngine(TrainingEngine):
    """Every rank holds the whole module.

    Trained parameters are kept in fp32, whatever `dtype`, and frozen ones in `dtype`; with bfloat16 a trained module
    computes under autocast. A module with `settings=None` is only run: there are no gradients and no optimizer.
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
            self._optimizer = adamw(module, settings)
            if settings.activation_checkpointing:
                recompute_activations(module)

    def forward(self, **inputs: Any) -> Any:
        self.load("parameters")
        with self._autocast():
            return self.module(**inputs)

    def _autocast(self) -> AbstractContextManager[Any]:
        enabled = self._optimizer is not None and self._dtype == torch.bfloat16
        return torch.autocast(self._device.type, torch.bfloat16, enabled=enabled)

    def step(self, passes: Sequence[Pass], rate_scale: float = 1.0) -> StepReport:
        if self.settings is None or self._optimizer is None:
            raise BadInput("step() on a module that is not trained", "a trained module has settings", "give Training()")
        rate = rate_scale * learning_rate(self.settings, self.steps)
        self.load()
        try:
            self._backward(passes)
            norm = self._norm(self._summed_gradients())
            skipped, culprit = not bool(torch.isfinite(norm)), ""
            if skipped:
                culprit = self._not_finite()
            else:
                if self.settings.max_grad_norm > 0:
                    torch.nn.utils.clip_grads_with_norm_(self.module.parameters(), self.settings.max_grad_norm, norm)
                for group in self._optimizer.param_groups:
                    group["lr"] = rate
                with span("optimizer"):
                    self._optimizer.step()
                self.steps += 1
        finally:
            release_gradients(self.module)
        return StepReport(grad_norm=float(norm), learning_rate=rate, steps=self.steps, skipped=skipped, culprit=culprit)

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

    @contextmanager
    def _whole_gradients(self, passes: Sequence[Pass]) -> Iterator[None]:
        """Inside, the parameters have the gradients of these micro-batches."""
        self.load("parameters", "gradients")
        try:
            self._backward(passes)
            self._summed_gradients()
            yield
        finally:
            release_gradients(self.module)

    def _backward(self, passes: Sequence[Pass]) -> None:
        require_passes(passes)
        for micro in passes:
            value = self._loss_of(micro)
            with self._pass_span("backward"):
                value.backward()

    def _norm(self, gradients: list[Tensor]) -> Tensor:
        return torch.nn.utils.get_total_norm(gradients)

    @torch.no_grad()
    def _summed_gradients(self) -> list[Tensor]:
        """The gradients of all trained parameters, summed over the ranks in place."""
        gradients = []
        for parameter in self.module.parameters():
            if not parameter.requires_grad:
                continue
            # A parameter that no micro-batch of this rank used still takes part in the sum.
            parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            gradients.append(parameter.grad)
        if self._communicator.world_size > 1:
            for bucket in _buckets(gradients):
                flat = self._communicator.all_reduce(torch.cat([gradient.flatten() for gradient in bucket]))
                for gradient, total in zip(bucket, flat.split([g.numel() for g in bucket]), strict=True):
                    gradient.copy_(total.view_as(gradient))
        return gradients

    def gathered(self, parameters: Sequence[nn.Parameter]) -> AbstractContextManager[Any]:
        return nullcontext()

    def _parameters(self) -> dict[str, nn.Parameter]:
        """This rank's parameters, by `state_names`."""
        names = state_names(self.module)
        return {names[name]: parameter for name, parameter in self.module.named_parameters()}

    @property
    def has_moments(self) -> bool:
        return self._optimizer is not None and bool(self._optimizer.state)

    def held_state(self, kind: StateKind) -> Iterator[tuple[str, Tensor]]:
        for name, parameter in self._parameters().items():
            if kind in MOMENTS:
                if self._optimizer is not None and parameter in self._optimizer.state:
                    yield name, self._optimizer.state[parameter][kind]
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
