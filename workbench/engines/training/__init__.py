"""Training engines behind one interface. To add one: a class of `TrainingEngine`, a line here, its name in settings."""

from __future__ import annotations

import torch
from torch import nn

from workbench.engines.settings import Training
from workbench.engines.training.base import Collectives, StepReport, TrainingEngine

__all__ = ["StepReport", "TrainingEngine", "make_training_engine"]


def make_training_engine(
    module: nn.Module, settings: Training, communicator: Collectives, *, device: torch.device, dtype: torch.dtype
) -> TrainingEngine:
    """The engine that `settings.engine` names, around `module`."""
    if settings.engine == "deepspeed":
        from workbench.engines.training.deepspeed_engine import DeepSpeedEngine

        return DeepSpeedEngine(module, settings, communicator, device=device, dtype=dtype)
    from workbench.engines.training.torch_engine import TorchEngine

    return TorchEngine(module, settings, communicator, device=device, dtype=dtype)
