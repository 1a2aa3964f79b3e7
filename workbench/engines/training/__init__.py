"""Training engines behind one interface. To add one: a class of `TrainingEngine`, a line here, its name in settings."""

from __future__ import annotations

import torch

from workbench.engines.communicator import ParallelGroups
from workbench.engines.training.base import TrainingEngine
from workbench.engines.training.steps import Pass, StepReport
from workbench.models.heads import PackedModule
from workbench.settings.training import Training

__all__ = ["ParallelGroups", "Pass", "StepReport", "TrainingEngine", "make_training_engine"]


def make_training_engine(
    module: PackedModule, settings: Training | None, groups: ParallelGroups, *, device: torch.device, dtype: torch.dtype
) -> TrainingEngine:
    """Make the engine that `settings.engine` names around `module`; without settings torch's, which only runs it."""
    if settings is not None and settings.engine == "deepspeed":
        from workbench.engines.training.deepspeed_engine import DeepSpeedEngine, DeepSpeedTensorEngine

        zero = DeepSpeedTensorEngine if groups.model_parallel else DeepSpeedEngine
        return zero(module, settings, groups, device=device, dtype=dtype)
    from workbench.engines.training.torch_engine import Torch3DEngine, TorchEngine

    plain = Torch3DEngine if groups.model_parallel else TorchEngine
    return plain(module, settings, groups, device=device, dtype=dtype)
