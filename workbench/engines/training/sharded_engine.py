"""What engines of sharded models share: whole weights gathered from slices, the norm of sliced gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

from workbench.engines.training.base import TrainingEngine
from workbench.engines.training.groups import ParallelGroups
from workbench.engines.training.model_shard import ModelShard
from workbench.errors import BadInput
from workbench.resharding.weights import Weight


class ShardedEngine(TrainingEngine):
    """Each rank holds `_shard.held`, slices of the weights of its stage."""

    _groups: ParallelGroups
    _shard: ModelShard
    _device: torch.device

    def _parameters(self) -> dict[str, nn.Parameter]:
        return self._shard.held

    @property
    def moved_bytes(self) -> int:
        return self._groups.moved_bytes

    def gathered(self, parameters: Sequence[nn.Parameter]) -> AbstractContextManager[Any]:
        raise BadInput("gathered() of a parameter that is sliced", "a rank holds a slice of it", "use named_weights()")

    def stored_weights(self) -> Iterator[tuple[str, Tensor]]:
        return self._whole_weights(self._stored)

    def named_weights(self) -> Iterator[tuple[str, Tensor]]:
        return self._whole_weights(self._dtype)

    def local_weights(self) -> Iterator[tuple[str, Tensor]]:
        for name, parameter in self._shard.held.items():
            yield name, parameter.detach()

    def weight_shapes(self) -> dict[str, tuple[int, ...]]:
        return {weight.name: weight.shape for weight in self._shard.weights}

    @property
    def _stored(self) -> torch.dtype:
        return next(iter(self._shard.held.values())).dtype

    def _on_two_stages(self) -> list[Weight]:
        """The weights of this stage that another stage holds too: a tied embedding."""
        weights, p = self._shard.weights, self._groups.layout.p
        return [w for w in weights.of_stage(self._groups.pipeline.rank, p) if len(weights.stages(w, p)) > 1]

    @torch.no_grad()
    def _global_norm(self, gradient: Callable[[nn.Parameter], Tensor]) -> Tensor:
        """The norm of the whole model's gradient; `gradient` gives this rank's part of it."""
        squares = torch.zeros((), dtype=torch.float64, device=self._device)
        elsewhere = {weight.name for weight in self._on_two_stages()} if not self._groups.first else set()
        for weight in self._shard.weights.of_stage(self._groups.pipeline.rank, self._groups.layout.p):
            mine = weight.axis is not None or self._groups.tensor.rank == 0
            if mine and weight.name not in elsewhere:
                squares += torch.linalg.vector_norm(gradient(self._shard.held[weight.name])).double().square()
        return self._groups.pipeline.all_reduce(self._groups.tensor.all_reduce(squares)).sqrt().float()

    def _whole_weights(self, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
        for weight in self._shard.weights:
            held = self._shard.held.get(weight.name)
            yield weight.name, self._whole(weight, None if held is None else held.detach().to(dtype), dtype)

    @torch.no_grad()
    def _whole(self, weight: Weight, held: Tensor | None, dtype: torch.dtype = torch.float32) -> Tensor:
        """The whole weight on all ranks, from each rank's part: gathered in the tensor group of the first stage that
        has it, then broadcast to the other stages."""
        groups, t = self._groups, self._groups.layout.t
        source = self._shard.weights.stages(weight, groups.layout.p)[0]
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
