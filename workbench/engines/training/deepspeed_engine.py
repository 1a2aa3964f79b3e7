"""Data-parallel training with DeepSpeed's ZeRO: optimizer state, gradients and weights sharded over the ranks.

Also ZeRO over the replicas of a model that is cut over tensor ranks: layouts (1, t, d).
"""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from itertools import chain
from types import SimpleNamespace
from typing import Any, ClassVar, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from workbench.engines.communicator import ParallelGroups
from workbench.engines.training.base import (
    TrainingEngine,
    place,
    recompute_activations,
    require_equal_parameters,
)
from workbench.engines.training.model_shard import ShardedEngine
from workbench.engines.training.steps import (
    ADAM,
    MOMENTS,
    LossScale,
    Pass,
    StateKind,
    finite_gradients,
    make_moments,
    make_optimizer,
    set_optimizer_steps,
    set_rates,
    with_moments,
)
from workbench.errors import BadInput
from workbench.models.heads import PackedModule
from workbench.placement.memory import BUCKET_ELEMENTS
from workbench.settings.layout import Layout
from workbench.settings.training import Training
from workbench.support.replaced import replaced
from workbench.telemetry import span


class DeepSpeedEngine(TrainingEngine):
    """`Training.zero_stage` says what is sharded: nothing (0), optimizer state (1), also gradients (2) and weights (3).

    With bfloat16, stages 1 to 3 hold bf16 weights, and fp32 masters (which start from the bf16 weights) in the sharded
    optimizer; stage 0 holds fp32 weights and computes under autocast, as the torch engine does. With float16 all stages
    compute like stage 0, on scaled losses, see `LossScale`: DeepSpeed's own fp16 needs a CPU that multiplies fp16.
    Gradients are accumulated and reduced in fp32.

    `offload` moves storages without DeepSpeed, whose own `offload_states` leaves out stage 0, stage 1 in bfloat16, and
    at stage 3 any Adam but DeepSpeed's. Stage 3's buffer of `BUCKET_ELEMENTS` stays on the device.

    torch.distributed's default process group must exist: DeepSpeed's collectives run on it.
    """

    settings: Training
    _model_parallel: Any = None  # the ranks with slices of one model, by the methods of Megatron's `mpu`
    _tensor_ranks: ClassVar[int] = 1  # of all engines in this process; never returns to 1

    def __init__(
        self,
        module: PackedModule,
        settings: Training,
        groups: ParallelGroups,
        *,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        self.settings, self.steps, self._groups = settings, 0, groups
        self._reduce(module)
        self._rank, self._world_size, self._device = groups.data.rank, groups.data.world_size, device
        self._dtype, self._stage = dtype, settings.zero_stage
        self._sharded_bf16 = dtype == torch.bfloat16 and self._stage > 0
        self.loss_scale = LossScale() if dtype == torch.float16 else None
        environment = {"RANK": self._rank, "WORLD_SIZE": self._world_size, "LOCAL_RANK": device.index or 0}
        for name, value in environment.items():
            os.environ.setdefault(name, str(value))
        os.environ["DS_ACCELERATOR"] = device.type
        deepspeed = _import_deepspeed()
        if deepspeed.accelerator.get_accelerator().device_name() != device.type:  # an earlier workbench's accelerator
            deepspeed.accelerator.real_accelerator.ds_accelerator = None  # DeepSpeed then looks for it again

        stored = torch.bfloat16 if self._sharded_bf16 else torch.float32
        loaded = torch.device("cpu") if settings.cuts_weights else device
        self.module = place(module, loaded, trained=stored, frozen=dtype)
        require_equal_parameters(module, groups.data)
        _forget_stale_groups()
        self._require_tensor_ranks(groups.tensor.world_size)
        if settings.activation_checkpointing:
            recompute_activations(module)
        self._use_own_groups()
        adam = make_optimizer(self._parameters(), settings)
        adam.register_step_pre_hook(self._begin_to_move)
        config = self._config()
        with replaced(nn.functional, "linear", nn.functional.linear):  # ZeRO-3 replaces it, in the whole process
            if settings.cuts_weights:  # one weight at a time: the device never holds the whole model
                deepspeed.zero.Init(module=module, config_dict_or_path=config, dtype=stored)
                module.to(device)  # its buffers
            self._engine, *_ = deepspeed.initialize(
                model=module, optimizer=adam, config=config, mpu=self._model_parallel, dist_init_required=False
            )
            self._linear = nn.functional.linear

    def _use_own_groups(self) -> None:
        """Set DeepSpeed's global groups to this engine's: DeepSpeed reads them at each reduction and knows one engine
        per process, but here several engines with other layouts take turns."""
        from deepspeed.utils import groups

        groups.mpu = self._model_parallel

    @staticmethod
    def _require_tensor_ranks(t: int) -> None:
        """Raise `BadInput` if engines of this process have another number of tensor ranks."""
        known = DeepSpeedEngine._tensor_ranks
        if known not in (1, t):
            raise BadInput(
                f"a DeepSpeed engine with t={t} in a process that has had one with t={known}",
                "DeepSpeed has one size of tensor groups per process, which cannot change",
                "use Training(engine='torch'), or give the pool another name: then it gets new processes",
            )
        DeepSpeedEngine._tensor_ranks = t

    def _config(self) -> dict[str, Any]:
        bucket = BUCKET_ELEMENTS["zero"]  # DeepSpeed's default reserves 2 GB
        trained = sum(parameter.numel() for parameter in self.module.parameters() if parameter.requires_grad)
        return {
            # The engine sets the boundaries of accumulation itself, so that their number may differ from step to step.
            "train_micro_batch_size_per_gpu": 1,
            "gradient_accumulation_steps": 1,
            # Without ZeRO DeepSpeed clips but does not report the norm: then `_step_without_zero` clips.
            "gradient_clipping": self.settings.max_grad_norm if self._stage > 0 else 0.0,
            "bf16": {"enabled": self._sharded_bf16},
            "data_types": {"grad_accum_dtype": "fp32"},
            "communication_data_type": "fp32",
            "zero_allow_untested_optimizer": True,
            "timers": {"throughput": {"enabled": False}},  # it waits for the device in each pass
            "zero_optimization": {
                "stage": self._stage,
                "reduce_bucket_size": max(1, min(bucket, trained)),
                "allgather_bucket_size": bucket,
            },
        }

    def forward(self, **inputs: Any) -> Any:
        self.load("parameters")
        enabled = self._dtype != torch.float32 and not self._sharded_bf16
        autocast = torch.autocast(self._device.type, self._dtype if enabled else None, enabled=enabled)
        with self._with_its_linear(), autocast:
            return self._engine(**inputs)

    def _with_its_linear(self) -> AbstractContextManager[None]:
        """Inside the block, all models use the `linear` function that ZeRO-3 gave this one; outside, other models
        compute as in a process of their own."""
        return replaced(nn.functional, "linear", self._linear)

    def _update(self, passes: Sequence[Pass], rate: float) -> tuple[float, str]:
        set_rates(self._engine.optimizer, self.settings, rate)
        try:
            self._backward(passes)
            with span("optimizer"):
                if self._stage == 0:
                    return self._step_without_zero(), ""
                self._step()  # changes nothing if the norm is not finite
                return float(self._engine.get_global_grad_norm()), ""
        except BaseException:
            self._drop_gradients()
            raise

    def close(self) -> None:
        self._engine.destroy()  # its hooks hold all of it in references that the garbage collector does not see

    def retrain(self, settings: Training) -> None:
        super().retrain(settings)
        if self._stage > 0:  # without ZeRO `_step_without_zero` clips
            self._engine.optimizer.clip_grad = settings.max_grad_norm

    def gradient_norms(self, passes: Sequence[Pass]) -> list[float]:
        norms: list[float] = []
        for micro in passes:
            for replica in range(self._world_size):  # DeepSpeed sums over replicas: only one has a loss
                mine = replica == self._rank
                alone = micro if mine else micro.times(0.0)
                squares = sum(float(gradient.double().square().sum()) for _, gradient in self.gradients([alone]))
                if mine:
                    norms.append(squares**0.5)
        return norms

    def whole_gradients(self, passes: Sequence[Pass]) -> AbstractContextManager[None]:
        def compute() -> bool:
            self.load()
            self._backward(passes)
            return self.loss_scale is None or self._all_finite()

        return finite_gradients(self.loss_scale, compute, self._drop_gradients)

    def _gradient(self, parameter: nn.Parameter) -> Tensor | None:
        from deepspeed.utils import safe_get_full_grad

        gradient: Tensor | None = safe_get_full_grad(parameter) if parameter.requires_grad else None
        return gradient if self.loss_scale is None or gradient is None else gradient.float() / self.loss_scale.scale

    def _all_finite(self) -> bool:
        """Return whether all gradients are finite, on all ranks."""
        gradients = [self._gradient(parameter) for parameter in self.module.parameters()]  # all: ranks gather them
        finite = all(bool(gradient.isfinite().all()) for gradient in gradients if gradient is not None)
        flag = torch.tensor(float(finite), device=self._device)
        torch.distributed.all_reduce(flag, op=torch.distributed.ReduceOp.MIN)
        return bool(flag)

    def _backward(self, passes: Sequence[Pass]) -> None:
        self._use_own_groups()
        scale = 1.0 if self.loss_scale is None else self.loss_scale.scale
        if self._stage > 0 and self.loss_scale is not None:
            # ZeRO's optimizers multiply losses by the scale, and divide gradients by it when they step
            self._engine.optimizer.loss_scaler.cur_scale, scale = scale, 1.0
        for i, micro in enumerate(passes):
            self._engine.set_gradient_accumulation_boundary(i == len(passes) - 1)
            # DeepSpeed averages gradients over the ranks; the product makes that a sum.
            with self._with_its_linear():
                value = self._loss_of(micro) * (self._world_size * scale)
                with span("backward"):  # reductions between ranks overlap with it
                    self._engine.backward(value)

    def _step_without_zero(self) -> float:
        self._unscale()
        norm = self._norm()
        if torch.isfinite(norm):
            self._clip(norm)
            self._step()
        self.module.zero_grad()
        return float(norm)

    def _step(self) -> None:
        adam = self._adam
        groups, held = adam.param_groups, [group["params"] for group in adam.param_groups]
        with with_moments(adam, self._adam_tensors, lambda: self.half_moved):
            try:
                self._engine.step()
            finally:  # ZeRO gives Adam one group at a time, and does not restore the others if Adam raises
                adam.param_groups = groups
                for group, parameters in zip(groups, held, strict=True):
                    group["params"] = parameters

    def _drop_gradients(self) -> None:
        """Drop what an unfinished step has accumulated, wherever the ZeRO stage keeps it."""
        optimizer = self._engine.optimizer
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)  # ZeRO reduces on a stream of its own
        self.module.zero_grad()
        optimizer.zero_grad(set_to_none=True)
        while getattr(optimizer, "_backward_active_depth", 0):
            optimizer.exit_backward()
        for bucket in getattr(optimizer, "ipg_buckets", {}).values():  # leftovers of a backward pass that broke off
            getattr(bucket, "clear_params", bucket.clear)()  # stage 3's buffer stays
        reduced = getattr(optimizer, "params_already_reduced", [])
        for parameter in reduced if isinstance(reduced, dict) else range(len(reduced)):
            reduced[parameter] = False
        if hasattr(optimizer, "extra_large_param_to_reduce"):  # stages 1 and 2
            optimizer.extra_large_param_to_reduce.clear()
            for parameter in chain(*optimizer.bit16_groups):
                parameter.grad_accum = None
            optimizer._release_ipg_buffers()
        for kept in ("averaged_gradients", "all_grad_tensors"):
            for group in getattr(optimizer, kept, {}):
                getattr(optimizer, kept)[group] = None
        if self._stage == 3 or hasattr(optimizer, "extra_large_param_to_reduce"):
            for stretch in self._adam_tensors:
                stretch.grad = None
        if self._stage == 2:
            optimizer._release_preflattened_grad_buffers()
        if self._stage == 3:
            self._engine.empty_partition_cache()  # gathered weights too

    def gathered(self, parameters: Sequence[nn.Parameter]) -> AbstractContextManager[Any]:
        import deepspeed

        return deepspeed.zero.GatheredParameters(list(parameters), enabled=self._stage == 3)

    def local_weights(self) -> Iterator[tuple[str, Tensor]]:
        if self._stage < 3:
            yield from super().local_weights()
            return
        parameter: Any  # with DeepSpeed's attributes for its shards
        for name, parameter in self._named_parameters():
            shard = parameter.ds_tensor.detach()
            # the last shards may be padded, or only padding
            start = min(self._rank * shard.numel(), parameter.ds_numel)
            yield name, shard[: parameter.ds_numel - start]

    @property
    def _adam(self) -> torch.optim.Optimizer:
        """The Adam optimizer inside the sharded optimizer, or the optimizer itself."""
        return cast(torch.optim.Optimizer, getattr(self._engine.optimizer, "optimizer", self._engine.optimizer))

    @property
    def _adam_tensors(self) -> list[Tensor]:
        """The tensors for which Adam keeps state: parameters, or this rank's parts of many of them end to end."""
        if self._stage == 3:  # stage 3 gives them to Adam one at a time
            return list(self._engine.optimizer.fp32_partitioned_groups_flat)
        return [parameter for group in self._adam.param_groups for parameter in group["params"]]

    @property
    def has_moments(self) -> bool:
        return bool(self._adam.state)

    def held_state(self, kind: StateKind) -> Iterator[tuple[str, Tensor]]:
        known = kind in ADAM or kind not in MOMENTS
        for name, parameter in self._parameters().items() if known else ():
            if parameter.requires_grad == (kind != "weights") and (kind not in MOMENTS or self.has_moments):
                part = self._part(kind, parameter)
                if part is not None:
                    yield name, part.detach()

    def _part(self, kind: StateKind, parameter: Any) -> Tensor | None:
        """Return this rank's part of a parameter's state, live; None: the rank has none."""
        if self._stage == 3:
            return self._part_of_stage_3(kind, parameter)
        if kind == "weights" or (kind == "parameters" and not self._sharded_bf16):
            return cast(Tensor, parameter)
        if self._stage == 0:
            return cast(Tensor, self._adam.state[parameter][kind])
        mapping = parameter._hp_mapping
        if mapping is None:
            return None
        stretch = self._adam_tensors[mapping.param_group_index]
        where = mapping.get_hp_fragment_address()
        return (stretch if kind == "parameters" else self._adam.state[stretch][kind]).narrow(
            0, where.start, where.numel
        )

    def _part_of_stage_3(self, kind: StateKind, parameter: Any) -> Tensor:
        from deepspeed.utils import safe_get_local_fp32_param, safe_get_local_optimizer_state

        if kind == "weights":
            part = parameter.ds_tensor
        elif kind == "parameters":
            part = safe_get_local_fp32_param(parameter)
        else:
            part = safe_get_local_optimizer_state(parameter, kind)
        chunk = part.numel()  # ends in padding on the last rank
        return part.narrow(0, 0, max(0, min(chunk, parameter.ds_numel - self._rank * chunk)))

    def begin_state(self, moments: bool) -> None:
        if not moments:
            self._adam.state.clear()
        elif not self.has_moments:
            make_moments(self._adam, self._adam_tensors)
        if self._stage == 3:
            self._engine.optimizer.checkpoint_event_prologue()

    @torch.no_grad()
    def end_state(self, steps: int, loss_scale: tuple[float, int] | None = None) -> None:
        super().end_state(steps, loss_scale)
        optimizer = self._engine.optimizer
        set_optimizer_steps(self._adam, steps)
        # only the weights or only their fp32 masters were written: copy them to the others
        if self._stage == 3:
            for weights, masters in zip(optimizer.fp16_partitioned_groups_flat, self._adam_tensors, strict=True):
                weights.data.copy_(masters.data)
            optimizer.checkpoint_event_epilogue()
        elif self._sharded_bf16:
            optimizer.update_lp_params()
        elif self._stage:
            optimizer.refresh_fp32_params()

    def tensors(self) -> dict[str, list[Tensor]]:
        parameters, optimizer = list(self.module.parameters()), self._engine.optimizer
        adam = self._adam
        # The names under which DeepSpeed's four optimizers keep masters and gradients.
        masters = _attributes(
            optimizer, "single_partition_of_fp32_groups", "fp32_groups_flat_partition", "fp32_partitioned_groups_flat"
        )
        accumulated = _attributes(optimizer, "averaged_gradients", "all_grad_tensors")
        buffers = _attributes(optimizer, "fp32_groups_gradients_flat", "grad_partitions_flat_buffer")
        moments = [t for entry in adam.state.values() for t in entry.values() if isinstance(t, Tensor)]
        return {
            "parameters": [*parameters, *(p.ds_tensor for p in parameters if hasattr(p, "ds_tensor"))],
            "gradients": [*self._held_gradients, *accumulated, *buffers],
            "optimizer": [*masters, *moments],  # in fp32 the masters may be the weights themselves
        }


def _attributes(owner: Any, *names: str) -> list[Tensor]:
    """Return all tensors in those of these attributes that `owner` has: tensors or nested lists and dicts of them."""
    waiting = [getattr(owner, name, None) for name in names]
    tensors = []
    while waiting:
        value = waiting.pop()
        if isinstance(value, Tensor):
            tensors.append(value)
        elif isinstance(value, dict):
            waiting.extend(value.values())
        elif isinstance(value, list | tuple):
            waiting.extend(value)
    return tensors


def _import_deepspeed() -> Any:
    """Import DeepSpeed with its messages switched off."""
    with span("import", note="importing DeepSpeed"):
        import deepspeed
    from deepspeed.runtime import bf16_optimizer

    deepspeed.utils.logger.setLevel(logging.ERROR)
    # DeepSpeed's collectives use names that torch has deprecated; its bf16 optimizer prints memory use unasked.
    warnings.filterwarnings("ignore", r"`torch\.distributed\.\w+` is deprecated", FutureWarning)
    bf16_optimizer.see_memory_usage = lambda message, force=False: None
    # DeepSpeed reads this table for one operator, of tensor-parallel inference on CPU, which nothing here calls;
    # building that needs a compiler and 10 s. To fill the table it tries to link libraries, and the linker complains.
    deepspeed.ops.__compatible_ops__ = {}
    return deepspeed


def _forget_stale_groups() -> None:
    """Drop DeepSpeed's clone of the default process group, made once per process, if that group has ended with an
    inline workbench that was closed."""
    from deepspeed.utils import groups

    if groups._WORLD_GROUP is not None:
        try:
            torch.distributed.get_global_rank(groups._WORLD_GROUP, 0)
        except ValueError:  # no longer registered
            groups._WORLD_GROUP = None


class DeepSpeedTensorEngine(ShardedEngine, DeepSpeedEngine):
    """Each replica's model is cut over t tensor ranks, see `shard_model`, which all get the same rows; each rank's
    slices are sharded over the replicas by `Training.zero_stage`.

    The tensor-parallel layers are those of the torch engine. DeepSpeed's own (AutoTP) cannot compute log-probabilities
    over a vocabulary that is cut.
    """

    def _reduce(self, module: PackedModule) -> None:
        super()._reduce(module)
        groups = self._groups
        for weight in self._shard.weights:  # Megatron's mark, by which DeepSpeed counts them on each rank in the norm
            self._shard.held[weight.name].tensor_model_parallel = weight.axis is not None  # type: ignore[attr-defined]
        for name in sorted(self._shard.partial):
            self._shard.held[name].register_hook(lambda gradient: groups.tensor.all_reduce(gradient.clone()))
        data = groups.data.process_group or dist.new_subgroups(1)[0]
        self._model_parallel = SimpleNamespace(  # with Megatron's names
            get_model_parallel_group=lambda: groups.tensor.process_group,
            get_model_parallel_world_size=lambda: groups.tensor.world_size,
            get_model_parallel_rank=lambda: groups.tensor.rank,
            get_data_parallel_group=lambda: data,
            get_data_parallel_world_size=lambda: groups.data.world_size,
            get_data_parallel_rank=lambda: groups.data.rank,
        )


def check_deepspeed_layout(layout: Layout, settings: Training) -> None:
    """Raise `BadInput` for a layout that DeepSpeed does not train in."""
    if layout.p > 1:
        raise BadInput(
            f"p={layout.p} with Training(engine='deepspeed')",
            "the DeepSpeed engine is tensor and data parallel, without pipeline stages",
            "use Training(engine='torch'), or p=1",
        )
    if layout.t > 1 and settings.zero_stage == 3:
        raise BadInput(
            f"t={layout.t} with Training(engine='deepspeed', zero_stage=3)",
            "with t > 1 each rank keeps its slices of the weights, so zero_stage must be 0, 1 or 2",
            "use zero_stage=2, or t=1",
        )
