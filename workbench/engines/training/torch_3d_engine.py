"""3D parallel training with nothing but torch: tensor x pipeline x data, HybridFlow's layout (p, t, d)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

from workbench.engines.settings import Training
from workbench.engines.training.cut import cut_model
from workbench.engines.training.groups import ParallelGroups
from workbench.engines.training.passes import Pass
from workbench.engines.training.pipeline import Pipeline
from workbench.engines.training.torch_engine import TorchEngine
from workbench.errors import BadInput
from workbench.models.heads import PackedModule
from workbench.resharding.weights import Weight


class Torch3DEngine(TorchEngine):
    """Each replica's model is cut over p pipeline stages of t tensor ranks, see `cut_model`; all its ranks are given
    the same rows.

    `forward` gives the output on the last stage, and zeros in its shape on the others. Weights that all tensor ranks
    hold, and a tied embedding, which the first and the last stage hold, have equal gradients there, and count once in
    the norm.
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
        self._cut = cut_model(module, groups)
        super().__init__(module, settings, groups.data, device=device, dtype=dtype)
        hidden_size = int(module.get_backbone().config.get_text_config().hidden_size)
        stored = dtype if settings is None else torch.float32
        self._pipeline = Pipeline(module, groups, hidden_size, stored, autocast=self._autocast, span=self._pass_span)

    @property
    def moved_bytes(self) -> int:
        return self._groups.moved_bytes

    def forward(self, **inputs: Any) -> Any:
        if self._groups.layout.p == 1:
            return super().forward(**inputs)
        if torch.is_grad_enabled():
            raise BadInput(
                f"forward() with gradients over p={self._groups.layout.p} pipeline stages",
                "outputs are on the last stage, and their gradients come from its losses",
                "give step() the losses, or call it under torch.no_grad()",
            )
        self.load("parameters")
        return self._pipeline.forward(inputs)

    def everywhere(self, output: Tensor) -> Tensor:
        return self._groups.pipeline.broadcast(output.contiguous(), self._groups.layout.p - 1)

    def _backward(self, passes: Sequence[Pass]) -> None:
        if self._groups.layout.p == 1 or not passes:
            super()._backward(passes)
        else:
            self._pipeline.step(passes)

    @torch.no_grad()
    def _summed_gradients(self) -> list[Tensor]:
        gradients, cut, groups = super()._summed_gradients(), self._cut, self._groups
        for name in sorted(cut.partial & cut.held.keys()):
            groups.tensor.all_reduce(_gradient(cut.held[name]))
        for weight in self._on_two_stages():
            mine = _gradient(cut.held[weight.name])
            theirs, other = torch.empty_like(mine), groups.layout.p - 1 - groups.pipeline.rank
            groups.pipeline.exchange([(other, mine)], [(other, theirs)])
            mine += theirs
        return gradients

    def _on_two_stages(self) -> list[Weight]:
        """The weights of this stage that another one holds too: a tied embedding."""
        weights, p = self._cut.weights, self._groups.layout.p
        return [w for w in weights.of_stage(self._groups.pipeline.rank, p) if len(weights.stages(w, p)) > 1]

    @torch.no_grad()
    def _norm(self, gradients: list[Tensor]) -> Tensor:
        squares = torch.zeros((), dtype=torch.float64, device=self._device)
        elsewhere = {weight.name for weight in self._on_two_stages()} if not self._groups.first else set()
        for weight in self._cut.weights.of_stage(self._groups.pipeline.rank, self._groups.layout.p):
            mine = weight.axis is not None or self._groups.tensor.rank == 0
            if mine and weight.name not in elsewhere:
                squares += torch.linalg.vector_norm(_gradient(self._cut.held[weight.name])).double().square()
        return self._groups.pipeline.all_reduce(self._groups.tensor.all_reduce(squares)).sqrt().float()

    def gradients(self, passes: Sequence[Pass]) -> Iterator[tuple[str, Tensor]]:
        held = self._cut.held
        with self._whole_gradients(passes):
            for weight in self._cut.weights:
                yield weight.name, self._whole(weight, held[weight.name].grad if weight.name in held else None)

    def gathered(self, parameters: Sequence[nn.Parameter]) -> AbstractContextManager[Any]:
        raise BadInput("gathered() of a parameter that is cut", "its parts are slices", "use named_weights()")

    def stored_weights(self) -> Iterator[tuple[str, Tensor]]:
        return self._whole_weights(self._stored)

    def named_weights(self) -> Iterator[tuple[str, Tensor]]:
        return self._whole_weights(self._dtype)

    def local_weights(self) -> Iterator[tuple[str, Tensor]]:
        for name, parameter in self._cut.held.items():
            yield name, parameter.detach()

    def weight_shapes(self) -> dict[str, tuple[int, ...]]:
        return {weight.name: weight.shape for weight in self._cut.weights}

    @torch.no_grad()
    def load_weights(self, weights: Any) -> None:
        t, j = self._groups.layout.t, self._groups.tensor.rank
        for weight in self._cut.weights:
            if weight.name in self._cut.held:
                self._cut.held[weight.name].copy_(weight.cut(weights[weight.name], j, t))

    @property
    def _stored(self) -> torch.dtype:
        return next(iter(self._cut.held.values())).dtype

    def _whole_weights(self, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
        for weight in self._cut.weights:
            held = self._cut.held.get(weight.name)
            yield weight.name, self._whole(weight, None if held is None else held.detach().to(dtype), dtype)

    @torch.no_grad()
    def _whole(self, weight: Weight, held: Tensor | None, dtype: torch.dtype = torch.float32) -> Tensor:
        """The whole of what each rank holds a part of, on all of them: gathered in the tensor group of the first stage
        that has it, then given to the other stages."""
        groups, t = self._groups, self._groups.layout.t
        source = self._cut.weights.stages(weight, groups.layout.p)[0]
        whole = torch.empty(weight.shape, dtype=dtype, device=self._device)
        if groups.pipeline.rank == source:
            assert held is not None
            if weight.axis is None or t == 1:
                whole = held
            else:
                parts = groups.tensor.all_gather(held.movedim(weight.axis, 0).contiguous())
                for j, part in enumerate(parts):
                    begin = 0
                    for start, stop in weight.intervals(j, t):
                        piece = part[begin : begin + stop - start].movedim(0, weight.axis)
                        whole.narrow(weight.axis, start, stop - start).copy_(piece)
                        begin += stop - start
        return groups.pipeline.broadcast(whole, source)


def _gradient(parameter: nn.Parameter) -> Tensor:
    assert parameter.grad is not None
    return parameter.grad
