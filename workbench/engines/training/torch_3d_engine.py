"""3D parallel training with nothing but torch: tensor x pipeline x data, HybridFlow's layout (p, t, d)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from workbench.engines.training.groups import ParallelGroups
from workbench.engines.training.model_shard import shard_model
from workbench.engines.training.passes import Pass
from workbench.engines.training.pipeline import Pipeline
from workbench.engines.training.sharded_engine import ShardedEngine
from workbench.engines.training.torch_engine import TorchEngine
from workbench.errors import BadInput
from workbench.models.heads import PackedModule
from workbench.settings.engines import Training


class Torch3DEngine(ShardedEngine, TorchEngine):
    """Each replica's model is sharded over p pipeline stages of t tensor ranks, see `shard_model`; all its ranks get
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
        self._shard = shard_model(module, groups)
        super().__init__(module, settings, groups.data, device=device, dtype=dtype)
        hidden_size = int(module.get_backbone().config.get_text_config().hidden_size)
        stored = dtype if settings is None else torch.float32
        self._pipeline = Pipeline(module, groups, hidden_size, stored, autocast=self._autocast, span=self._pass_span)

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
    def _summed_gradients(self, over_replicas: bool = True) -> list[Tensor]:
        gradients, shard, groups = super()._summed_gradients(over_replicas), self._shard, self._groups
        for name in sorted(shard.partial & shard.held.keys()):
            groups.tensor.all_reduce(_gradient(shard.held[name]))
        for weight in self._on_two_stages():
            mine = _gradient(shard.held[weight.name])
            theirs, other = torch.empty_like(mine), groups.layout.p - 1 - groups.pipeline.rank
            groups.pipeline.exchange([(other, mine)], [(other, theirs)])
            mine += theirs
        return gradients

    def _norm(self, gradients: list[Tensor]) -> Tensor:
        return self._global_norm(_gradient)

    def gradients(self, passes: Sequence[Pass]) -> Iterator[tuple[str, Tensor]]:
        held = self._shard.held
        with self._whole_gradients(passes):
            for weight in self._shard.weights:
                yield weight.name, self._whole(weight, held[weight.name].grad if weight.name in held else None)


def _gradient(parameter: nn.Parameter) -> Tensor:
    assert parameter.grad is not None
    return parameter.grad
