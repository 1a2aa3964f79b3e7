"""Optimizers by `Training`: AdamW (Loshchilov and Hutter 2019, arXiv:1711.05101), with Muon, or with moments of 8 bits
(Dettmers et al. 2021, arXiv:2110.02861; by bitsandbytes); and where their state lies."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn

from workbench.errors import MissingDependency
from workbench.settings.training import Training

StateKind = Literal[
    "weights", "parameters", "exp_avg", "exp_avg_sq", "momentum_buffer", "exp_avg_codes", "exp_avg_sq_codes",
    "exp_avg_scales", "exp_avg_sq_scales",
]  # fmt: skip
"""Kinds of state: weights that are not trained, those that are (parameters), both moments of Adam, that of Muon, both
moments of 8-bit Adam: a code an element, and a scale a block of elements."""
ADAM: tuple[StateKind, ...] = ("exp_avg", "exp_avg_sq")
MUON: tuple[StateKind, ...] = ("momentum_buffer",)
CODES: tuple[StateKind, ...] = ("exp_avg_codes", "exp_avg_sq_codes")
SCALES: tuple[StateKind, ...] = ("exp_avg_scales", "exp_avg_sq_scales")
MOMENTS: tuple[StateKind, ...] = (*ADAM, *MUON, *CODES, *SCALES)
# Kind of state -> bitsandbytes' name for it. Small tensors have fp32 moments; of the others each moment is a code of 8
# bits an element, and the largest magnitude of each block of elements.
SMALL = {"exp_avg": "state1", "exp_avg_sq": "state2"}
LARGE = {
    "exp_avg_codes": "state1",
    "exp_avg_sq_codes": "state2",
    "exp_avg_scales": "absmax1",
    "exp_avg_sq_scales": "absmax2",
}


def make_optimizer(parameters: Mapping[str, nn.Parameter], settings: Training) -> torch.optim.Optimizer:
    """With the groups of `Training.group_of`. parameters: by transformers' names; those that are trained count."""
    found: dict[tuple[bool, int, bool], dict[str, Any]] = {}
    for name, parameter in parameters.items():
        if parameter.requires_grad:
            of_muon, (number, flat) = (
                settings.is_for_muon(name, parameter.dim()),
                settings.group_of(name, parameter.dim()),
            )
            new = {"params": [], "decays": not flat, "pattern": settings.pattern_of(name), "muon": of_muon}
            found.setdefault((of_muon, number, flat), new)["params"].append(parameter)
    groups = [found[key] for key in sorted(found)]
    adamw, muon = ([group for group in groups if group["muon"] is which] for which in (False, True))
    made: list[torch.optim.Optimizer] = []
    if adamw:
        made.append(_adamw_8bit(adamw) if settings.optimizer == "adamw_8bit" else torch.optim.AdamW(adamw, fused=True))
    if muon:
        made.append(torch.optim.Muon(muon, adjust_lr_fn="match_rms_adamw"))
    optimizer = made[0] if len(made) == 1 else Together(made)
    set_rates(optimizer, settings, settings.peak_learning_rate)
    return optimizer


class Together(torch.optim.Optimizer):
    """Several optimizers, each of its own parameters, as one."""

    def __init__(self, parts: Sequence[torch.optim.Optimizer]) -> None:
        super().__init__([group for part in parts for group in part.param_groups], {})
        self._parts = parts
        for part in parts:  # the groups and the state are those of all
            part.state = self.state

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """A step of each."""
        for part in self._parts:
            part.step()


def set_rates(optimizer: torch.optim.Optimizer, settings: Training, rate: float) -> None:
    """Have the optimizer's next step use these settings. rate: of the schedule."""
    for group in optimizer.param_groups:
        decay = settings.weight_decay if group["decays"] else 0.0
        factor = settings.rates[group["pattern"]] if settings.rates and group["pattern"] else 1.0
        group.update(lr=rate * factor, weight_decay=decay)
        if not group["muon"]:
            group.update(betas=settings.betas, eps=settings.eps)


def make_moments(
    optimizer: torch.optim.Optimizer, parameters: Iterable[Tensor], make: Callable[..., Tensor] = torch.zeros_like
) -> None:
    """Make an optimizer's moments before its first step, as zeros. make: `torch.empty_like` where all of them are about
    to be written, so that their memory is touched once."""
    if hasattr(optimizer, "init_state"):  # of bitsandbytes
        for g, group in enumerate(optimizer.param_groups):
            for p, parameter in enumerate(group["params"]):
                optimizer.init_state(group, parameter, g, p)
        return
    of_muon = {p for group in optimizer.param_groups if group["muon"] for p in group["params"]}
    for parameter in parameters:
        kinds = MUON if parameter in of_muon else ADAM
        state = {name: make(parameter, memory_format=torch.preserve_format) for name in kinds}
        steps = {} if parameter in of_muon else {"step": torch.zeros((), device=parameter.device)}
        optimizer.state[parameter] = {**steps, **state}


def set_optimizer_steps(optimizer: torch.optim.Optimizer, steps: int) -> None:
    """Set the step count of AdamW, where it has moments."""
    for entry in optimizer.state.values():
        if isinstance(entry.get("step"), Tensor):
            entry["step"].fill_(steps)
        elif "step" in entry:  # Muon has none
            entry["step"] = steps


def moment_of(entry: Mapping[str, Any], kind: StateKind) -> Tensor | None:
    """A moment in an optimizer's state of a parameter; None where that has others."""
    names = {kind: kind} if "state1" not in entry else LARGE if "absmax1" in entry else SMALL
    return entry.get(names[kind]) if kind in names else None


def _adamw_8bit(groups: Sequence[dict[str, Any]]) -> torch.optim.Optimizer:
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
