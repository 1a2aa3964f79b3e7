"""DeepSpeed as a module: imported without its noise, and without groups of an earlier workbench."""

from __future__ import annotations

import logging
import warnings
from typing import Any

import torch.distributed as dist

from workbench.errors import MissingDependency
from workbench.support.descriptors import quiet_stderr
from workbench.telemetry import span


def import_deepspeed() -> Any:
    """DeepSpeed, which says nothing unasked. Raises `MissingDependency` where it is not installed."""
    try:
        with span("import", note="importing DeepSpeed"):
            import deepspeed
    except ImportError as error:
        raise MissingDependency(
            "deepspeed is not installed", "Training.engine='deepspeed' needs it", "install it or take engine='torch'"
        ) from error
    from deepspeed.runtime import bf16_optimizer

    deepspeed.utils.logger.setLevel(logging.ERROR)
    # DeepSpeed's collectives have not followed torch's renaming; its bf16 optimizer prints memory use unasked.
    warnings.filterwarnings("ignore", r"`torch\.distributed\.\w+` is deprecated", FutureWarning)
    bf16_optimizer.see_memory_usage = lambda message, force=False: None
    # An operator for tensor-parallel inference on CPU, which nothing here calls; building it needs a compiler and 10 s.
    # Asked for the first time, the table tries to link libraries of other operators, and the linker complains.
    with quiet_stderr():
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    return deepspeed


def forget_stale_groups() -> None:
    """Drop DeepSpeed's clone of the default process group, made once a process, where that group has ended with an
    inline workbench that was closed."""
    from deepspeed.utils import groups

    if groups._WORLD_GROUP is not None:
        try:
            dist.get_global_rank(groups._WORLD_GROUP, 0)
        except ValueError:  # not registered any more
            groups._WORLD_GROUP = None
