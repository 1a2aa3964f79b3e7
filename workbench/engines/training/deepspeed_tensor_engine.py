"""DeepSpeed's tensor parallelism (AutoTP) with its ZeRO over the replicas: layouts (1, t, d)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from workbench.engines.training.cut import BLOCKS, INTO_BLOCKS, Trial, cut_vocabulary
from workbench.engines.training.cut_engine import CutEngine
from workbench.engines.training.deepspeed_engine import DeepSpeedEngine, forget_ended_group
from workbench.engines.training.groups import ModelCollectives, ParallelGroups
from workbench.engines.training.passes import Pass
from workbench.errors import BadInput
from workbench.models.heads import PackedModule
from workbench.settings.engines import Training
from workbench.settings.layout import Layout


class DeepSpeedTensorEngine(CutEngine, DeepSpeedEngine):
    """Each replica's model is cut over t tensor ranks, all of which are given the same rows; what a rank holds is
    sharded over the replicas as `Training.zero_stage` says.

    AutoTP cuts the linear layers of attention and MLP blocks and computes with them. It would compute the loss too,
    where it cuts the vocabulary, but has no log-probabilities: embedding and output head are those of `cut_vocabulary`.
    The cut is that of the torch engine, so that weights go on to a generation engine in the same way.
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
        self._groups = groups
        trial = Trial(module)
        self._cut = cut_vocabulary(module, groups)
        for weight in self._cut.weights:  # Megatron's mark, by which DeepSpeed counts them on each rank in the norm
            self._cut.held[weight.name].tensor_model_parallel = weight.axis is not None  # type: ignore[attr-defined]
        for name in sorted(self._cut.partial):
            self._cut.held[name].register_hook(lambda gradient: groups.tensor.all_reduce(gradient.clone()))
        super().__init__(module, settings, groups.data, device=device, dtype=dtype)
        _count_bytes(module, groups.tensor)
        from deepspeed.module_inject.layers import TensorParallel_Layer

        for part in module.modules():  # AutoTP makes new layers, in training mode
            if isinstance(part, TensorParallel_Layer):
                part.eval()
        for weight in self._cut.weights:
            shape = tuple(self._cut.held[weight.name].shape)
            if shape != weight.local_shape(groups.tensor.rank, groups.layout.t):
                raise BadInput(
                    f"{weight.name} over t={groups.layout.t} tensor ranks",
                    f"DeepSpeed cut it to {shape} on rank {groups.tensor.rank}",
                    "use Training(engine='torch')",
                )
        with torch.no_grad():
            trial.require_same(module.hidden_states(**trial.inputs()), groups)

    def _prepare_groups(self) -> None:
        """DeepSpeed would make groups once a process, with the tensor ranks in the pool's order, which is not the
        layout's where an engine generates in smaller tensor groups: let it take the layout's."""
        from deepspeed.utils import groups

        self._require_tensor_ranks(self._groups.layout.t)
        forget_ended_group()
        groups._TENSOR_MODEL_PARALLEL_GROUP = groups._MODEL_PARALLEL_GROUP = self._groups.tensor.process_group
        groups._DATA_PARALLEL_GROUP = self._groups.data.process_group or dist.new_subgroups(1)[0]

    @property
    def _start_device(self) -> torch.device:
        return next(iter(self._cut.held.values())).device  # AutoTP moves slices to the device: it need not hold a whole

    def _config(self) -> dict[str, Any]:
        layers = [
            {"patterns": [rf".*\.{name}\.weight$" for name in INTO_BLOCKS], "partition_type": "column"},
            {"patterns": [rf".*\.{name}\.weight$" for name in BLOCKS.values()], "partition_type": "row"},
        ]
        partition = {"use_default_specs": False, "layer_specs": layers}
        return super()._config() | {
            "tensor_parallel": {"autotp_size": self._groups.layout.t, "partition_config": partition}
        }

    def _norm(self) -> Tensor:
        return self._global_norm(lambda parameter: cast(Tensor, parameter.grad))

    def gradients(self, passes: Sequence[Pass]) -> Iterator[tuple[str, Tensor]]:
        from deepspeed.utils import safe_get_full_grad

        try:
            self._backward(passes)
            for weight in self._cut.weights:
                yield weight.name, self._whole(weight, safe_get_full_grad(self._cut.held[weight.name]).float())
        finally:
            self._drop_gradients()


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


class _CountedGradient(torch.autograd.Function):
    """Counts the gradient that an AutoTP layer has summed over the tensor ranks."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ModelCollectives) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        ctx.group.moved_bytes += gradient.nbytes
        return gradient, None


def _count_bytes(module: nn.Module, group: ModelCollectives) -> None:
    """AutoTP's layers do not go through our collectives: count in `group` what they sum over the tensor ranks."""
    from deepspeed.module_inject.layers import LinearAllreduce, LinearLayer

    def into(_: nn.Module, args: tuple[Tensor]) -> tuple[Tensor]:
        return (cast(Tensor, _CountedGradient.apply(args[0], group)),)

    def out(_: nn.Module, args: tuple[Tensor], output: Tensor) -> None:
        group.moved_bytes += output.nbytes

    for layer in module.modules():
        if isinstance(layer, LinearLayer):
            layer.register_forward_pre_hook(into)
        elif isinstance(layer, LinearAllreduce):
            layer.register_forward_hook(out)
