"""3D parallel training with nothing but torch: tensor x pipeline x data, HybridFlow's layout (p, t, d)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from workbench.engines.training.groups import ParallelGroups
from workbench.engines.training.model_shard import ShardedEngine, gradient_of, shard_model
from workbench.engines.training.pipeline import Pipeline
from workbench.engines.training.steps import Pass
from workbench.engines.training.torch_engine import TorchEngine
from workbench.errors import BadInput
from workbench.models.heads import PackedModule
from workbench.settings.training import Training


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
