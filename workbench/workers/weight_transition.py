"""From the slices that an actor is trained in to what its generation engine needs of them: the transition of a sync.

Trained in a layout (p, t, d) with p*t > 1, generated with on the same ranks in groups of t_g (HybridFlow's
3D-HybridEngine, arXiv:2409.19256, section 5).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from workbench.engines.generation import VOCABULARY_MULTIPLE, GenerationEngine
from workbench.engines.settings import Generation
from workbench.engines.training import TrainingEngine
from workbench.models.spec import Model
from workbench.placement import Layout
from workbench.resharding.distribution import Distribution, WeightShard
from workbench.resharding.engine import ReshardingEngine
from workbench.resharding.strategies import Transition, plan_sync
from workbench.resharding.views import fill
from workbench.resharding.weights import Weight, model_weights
from workbench.workers.calls import Mean, Metrics
from workbench.workers.communicator import Communicator
from workbench.workers.worker import Context

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


def plan_of(
    config: PreTrainedConfig, layout: Layout, generation: Generation, dtype: str, strategy: str | None = None
) -> Transition:
    """The plan of a sync of a model by a strategy (None: the settings' own), counted in `dtype`, the engine's."""
    return plan_sync(
        model_weights(config, dtype=dtype),
        layout.generating(generation.tensor_parallel_size),
        strategy or generation.strategy,
        vocabulary_multiple=VOCABULARY_MULTIPLE[generation.engine],
    )


class WeightTransitions:
    """The syncs of an actor whose layout has p*t > 1, each by the strategy that is asked for.

    There is no way back to go: slices are trained where they always were, and what was gathered of a layer is dropped
    once the engine has taken it. The engine's own copy and its key-value cache stay until the next sync, or until its
    `sleep`, where roles share memory; cached prefixes are dropped with the weights that they were computed with.
    """

    def __init__(self, trainer: TrainingEngine, generator: GenerationEngine, spec: Model, context: Context) -> None:
        self._trainer, self._generator, self._spec, self._context = trainer, generator, spec, context
        self._made: dict[str, WeightTransition] = {}

    def sync(self, strategy: str) -> tuple[int, Metrics]:
        """Give the engine the trainer's weights: bytes that it took on this rank, and what that moved on all ranks."""
        assert self._spec.generation is not None
        assert self._spec.dtype is not None
        communicator = self._context.communicator
        if strategy not in self._made:
            module: Any = self._trainer.module
            config = module.get_backbone().config
            plan = plan_of(config, self._context.layout, self._spec.generation, self._spec.dtype, strategy)
            self._made[strategy] = WeightTransition(plan, communicator)
        transition = self._made[strategy]
        received, handed = transition.received_bytes, transition.handed_bytes
        weights = transition.weights(dict(self._trainer.local_weights()), getattr(torch, self._spec.dtype))
        self._generator.update_weights(weights, self._trainer.steps)
        everywhere = communicator.all_reduce(torch.tensor([transition.received_bytes - received])).item()
        return transition.handed_bytes - handed, {
            "sync/received_bytes": Mean(total=everywhere, count=1),
            "sync/kept_twice_bytes": Mean(total=transition.kept_twice_bytes, count=1),
        }


class WeightTransition:
    """One rank's part of a transition, again and again. Weights go over as the engine's dtype: what is trained in fp32
    for an engine in bfloat16 is cast before, and half the bytes move.

    received_bytes: that this rank received so far. handed_bytes: of generation shards, handed on to the engine.
    kept_twice_bytes: that all ranks together keep beside their generation shards, by the plan.
    """

    def __init__(self, plan: Transition, communicator: Communicator) -> None:
        self.plan, self.handed_bytes = plan, 0
        self._rank, self._engine = communicator.rank, ReshardingEngine(plan, communicator)
        self._trained = Distribution(plan.weights, plan.layout, tuple(range(plan.layout.size)))
        self._by_name = {weight.name: weight for weight in plan.weights}
        self.kept_twice_bytes = int(plan.figures().kept_twice.sum())

    @property
    def received_bytes(self) -> int:
        return self._engine.received_bytes

    @torch.no_grad()
    def weights(self, trained: Mapping[str, Tensor], dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
        """What this rank generates with, for `GenerationEngine.update_weights`: each weight in its whole shape, with
        this rank's slices written. A layer moves when it is asked for; every rank iterates to the end.

        trained: this rank's slices in the training layout, by transformers' names; they stay as they are.
        """
        held = {name: self._source_shard(self._by_name[name], tensor).to(dtype) for name, tensor in trained.items()}
        for layer in self._engine.layers(held):
            for name, shard in layer.items():
                self.handed_bytes += shard.nbytes
                yield name, self._whole(self._by_name[name], shard)

    def _source_shard(self, weight: Weight, tensor: Tensor) -> Tensor:
        """What the plan starts from: the slice that is trained, or a flat part of it."""
        mine, source = self._trained.shard(weight, self._rank), self.plan.source.shard(weight, self._rank)
        assert mine is not None
        assert source is not None
        if mine == source:
            return tensor
        part = torch.empty(source.shape, dtype=tensor.dtype, device=tensor.device)
        fill(part, source, tensor, mine)
        return part

    def _whole(self, weight: Weight, shard: Tensor) -> Tensor:
        needed = self.plan.destination.shard(weight, self._rank)
        assert needed is not None
        rows, columns = weight.matrix
        whole = WeightShard(((0, rows, 0, columns),), weight.shape)
        if needed == whole:
            return shard
        tensor = torch.empty(weight.shape, dtype=shard.dtype, device=shard.device)
        fill(tensor, whole, shard, needed)
        return tensor
