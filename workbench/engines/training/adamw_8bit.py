"""AdamW whose moments are kept in 8 bits (Dettmers et al. 2021, https://arxiv.org/abs/2110.02861), by bitsandbytes."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from workbench.errors import MissingDependency

# Kind of state -> bitsandbytes' name for it. Small tensors have fp32 moments; of the others each moment is a code of 8
# bits an element, and the largest magnitude of each block of elements.
SMALL = {"exp_avg": "state1", "exp_avg_sq": "state2"}
LARGE = {
    "exp_avg_codes": "state1",
    "exp_avg_sq_codes": "state2",
    "exp_avg_scales": "absmax1",
    "exp_avg_sq_scales": "absmax2",
}


def make_adamw_8bit(groups: Sequence[dict[str, Any]]) -> torch.optim.Optimizer:
    """bitsandbytes' AdamW8bit of these parameter groups. Raises `MissingDependency` without bitsandbytes."""
    # at import it tells that it has no kernels of 4 bits for this CPU, of which nothing is used here
    quiet = logging.getLogger("bitsandbytes")
    level = quiet.level
    quiet.setLevel(logging.ERROR)
    try:
        import bitsandbytes
    except ImportError as error:
        rule = "Training(optimizer='adamw_8bit') steps with it"
        raise MissingDependency.of("bitsandbytes", rule, "adam8bit", "optimizer='adamw'") from error
    finally:
        quiet.setLevel(level)
    optimizer: torch.optim.Optimizer = bitsandbytes.optim.AdamW8bit(list(groups))
    return optimizer


def moment_8bit(entry: Mapping[str, Any], kind: str) -> Tensor | None:
    """A kind of state in bitsandbytes' state of a parameter; None where that has another kind."""
    names = LARGE if "absmax1" in entry else SMALL
    return entry[names[kind]] if kind in names else None


def make_moments_8bit(optimizer: Any) -> None:
    """Make the moments of all parameters before the first step, as zeros."""
    for g, group in enumerate(optimizer.param_groups):
        for p, parameter in enumerate(group["params"]):
            optimizer.init_state(group, parameter, g, p)
