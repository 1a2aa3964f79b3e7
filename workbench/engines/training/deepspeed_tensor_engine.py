"""DeepSpeed's ZeRO over the replicas of a model that is cut over tensor ranks: layouts (1, t, d)."""

from __future__ import annotations

from types import SimpleNamespace

import torch
import torch.distributed as dist

from workbench.engines.training.deepspeed_engine import DeepSpeedEngine
from workbench.engines.training.groups import ParallelGroups
from workbench.engines.training.model_shard import ShardedEngine, shard_model
from workbench.errors import BadInput
from workbench.models.heads import PackedModule
from workbench.settings.layout import Layout
from workbench.settings.training import Training


class DeepSpeedTensorEngine(ShardedEngine, DeepSpeedEngine):
    """Each replica's model is cut over t tensor ranks, see `shard_model`, which all get the same rows; what a rank
    holds is sharded over the replicas as `Training.zero_stage` says.

    The tensor-parallel layers are those of the torch engine. DeepSpeed's own (AutoTP) have no log-probabilities of a
    vocabulary that is cut.
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
        if settings is not None:
            check_deepspeed_layout(groups.layout, settings)
        self._groups, self._shard = groups, shard_model(module, groups)
        for weight in self._shard.weights:  # Megatron's mark, by which DeepSpeed counts them on each rank in the norm
            self._shard.held[weight.name].tensor_model_parallel = weight.axis is not None  # type: ignore[attr-defined]
        for name in sorted(self._shard.partial):
            self._shard.held[name].register_hook(lambda gradient: groups.tensor.all_reduce(gradient.clone()))
        data = groups.data.process_group or dist.new_subgroups(1)[0]
        ranks = SimpleNamespace(  # as Megatron names them
            get_model_parallel_group=lambda: groups.tensor.process_group,
            get_model_parallel_world_size=lambda: groups.tensor.world_size,
            get_model_parallel_rank=lambda: groups.tensor.rank,
            get_data_parallel_group=lambda: data,
            get_data_parallel_world_size=lambda: groups.data.world_size,
            get_data_parallel_rank=lambda: groups.data.rank,
        )
        super().__init__(module, settings, groups.data, device=device, dtype=dtype, model_parallel=ranks)


def check_deepspeed_layout(layout: Layout, settings: Training) -> None:
    """Raise `BadInput` for a layout that DeepSpeed does not train in."""
    if layout.p > 1:
        raise BadInput(
            f"p={layout.p} with Training(engine='deepspeed')",
            "DeepSpeed's engine here is tensor and data parallel, without pipeline stages",
            "use Training(engine='torch'), or p=1",
        )
    if layout.t > 1 and settings.zero_stage == 3:
        raise BadInput(
            f"t={layout.t} with Training(engine='deepspeed', zero_stage=3)",
            "with t > 1 each rank keeps its slices of the weights: zero_stage is 0, 1 or 2",
            "use zero_stage=2, or t=1",
        )
