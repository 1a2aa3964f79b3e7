"""Parts of an optimizer step: its micro-batches, its learning rate, the scale of its losses in fp16, and its report.

Optimizers by `Training`: AdamW (Loshchilov and Hutter 2019, arXiv:1711.05101), with Muon, or with moments of 8 bits
(Dettmers et al. 2021, arXiv:2110.02861; by bitsandbytes); and access to their state.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn

from workbench.settings.training import Training, factor_of

FIRST, LEAST, MOST = 2.0**16, 1.0, 2.0**24  # loss scales
GROWTH_STEPS = 2000  # as in torch.amp.GradScaler


@dataclass(frozen=True, kw_only=True)
class Pass:
    """A micro-batch of an optimizer step.

    inputs: keyword arguments of the module's `forward`. loss: maps its output to a scalar already divided by the
    minibatch's denominator; called on the ranks that have the output, on a pipeline the last stage. tokens: for the
    record. begin: called on every rank before its forward pass.
    """

    inputs: Mapping[str, Any]
    loss: Callable[[Any], Tensor]
    tokens: int = 0
    begin: Callable[[], None] = lambda: None

    def times(self, factor: float) -> Pass:
        return replace(self, loss=lambda output: self.loss(output) * factor)


@dataclass(frozen=True, kw_only=True)
class StepReport:
    """The report of one optimizer step: global gradient norm before clipping, learning rate used, steps taken so far.

    skipped: the norm was not finite; weights, optimizer and step count did not change. culprit: the first weight whose
    gradient is then not finite, by transformers' names; "" if the engine does not know it. loss_scale: the loss scale
    of this step, for an engine in fp16.
    """

    grad_norm: float
    learning_rate: float
    steps: int
    skipped: bool = False
    culprit: str = ""
    loss_scale: float | None = None


def learning_rate(settings: Training, steps: int) -> float:
    """Return the learning rate of the next optimizer step, after `steps` steps.

    It rises linearly over `warmup_steps` steps (the first step already moves), then stays, or falls to 0 at
    `total_steps` along a line or half a cosine; it is 0 from there on. A function gives each step's factor.
    """
    if callable(settings.schedule):
        return settings.peak_learning_rate * factor_of(settings.schedule, steps)
    if steps < settings.warmup_steps:
        return settings.peak_learning_rate * (steps + 1) / settings.warmup_steps
    if settings.schedule == "constant" or settings.total_steps is None:
        return settings.peak_learning_rate
    falling_steps = max(1, settings.total_steps - settings.warmup_steps)
    progress = min(1.0, (steps - settings.warmup_steps) / falling_steps)
    factor = 1 - progress if settings.schedule == "linear" else 0.5 * (1 + math.cos(math.pi * progress))
    return settings.peak_learning_rate * factor


def schedule_ended_note(settings: Training, steps: int) -> str:
    """Return a note if the last of `steps` came after the end of the schedule, and moved no weight; else ""."""
    end = settings.total_steps
    if settings.schedule not in ("linear", "cosine") or end is None or steps <= end:
        return ""
    return (
        f"the rate is 0 after total_steps={end}, and this was optimizer step {steps}: it changed no weight. Assign "
        "a larger training.total_steps (iterations x minibatches x epochs), or the schedule 'constant'"
    )


@dataclass(kw_only=True)
class LossScale:
    """The factor by which losses are multiplied before the backward pass, and gradients divided after it, so that small
    gradients do not vanish in fp16 (Micikevicius et al. 2018, arXiv:1710.03740).

    It is a power of two, so that neither operation rounds; it is halved if a gradient is not finite, and doubled after
    `growth_steps` steps in a row with finite gradients.

    good_steps: such steps in a row so far.
    """

    scale: float = FIRST
    good_steps: int = 0
    growth_steps: int = GROWTH_STEPS

    def after_step(self, *, finite: bool) -> None:
        if not finite:
            self.scale, self.good_steps = max(LEAST, self.scale / 2), 0
            return
        self.good_steps += 1
        if self.good_steps == self.growth_steps:
            self.scale, self.good_steps = min(MOST, self.scale * 2), 0

    @property
    def state(self) -> tuple[float, int]:
        """The values that a checkpoint keeps."""
        return self.scale, self.good_steps


@contextmanager
def finite_gradients(scale: LossScale | None, compute: Callable[[], bool], drop: Callable[[], None]) -> Iterator[None]:
    """Provide gradients inside the block: `compute` computes them, and `drop` drops them at its end. In fp16 they are
    computed again with half the loss scale while `compute` reports an overflow; afterwards the scale is as before."""
    kept = 0.0 if scale is None else scale.scale
    try:
        while not compute() and scale is not None and scale.scale > LEAST:
            drop()
            scale.scale /= 2
        yield
    finally:
        drop()
        if scale is not None:
            scale.scale = kept


StateKind = Literal[
    "weights", "parameters", "exp_avg", "exp_avg_sq", "momentum_buffer", "exp_avg_codes", "exp_avg_sq_codes",
    "exp_avg_scales", "exp_avg_sq_scales",
]  # fmt: skip
"""Kinds of state: untrained weights, trained weights (parameters), both moments of Adam, Muon's momentum, and both
moments of 8-bit Adam: a code per element, and a scale per block of elements."""
ADAM: tuple[StateKind, ...] = ("exp_avg", "exp_avg_sq")
MUON: tuple[StateKind, ...] = ("momentum_buffer",)
CODES: tuple[StateKind, ...] = ("exp_avg_codes", "exp_avg_sq_codes")
SCALES: tuple[StateKind, ...] = ("exp_avg_scales", "exp_avg_sq_scales")
MOMENTS: tuple[StateKind, ...] = (*ADAM, *MUON, *CODES, *SCALES)
# Kind of state -> bitsandbytes' name for it. Small tensors have fp32 moments; large ones have, for each moment, a code
# of 8 bits per element, and the largest magnitude of each block of elements.
SMALL = {"exp_avg": "state1", "exp_avg_sq": "state2"}
LARGE = {
    "exp_avg_codes": "state1",
    "exp_avg_sq_codes": "state2",
    "exp_avg_scales": "absmax1",
    "exp_avg_sq_scales": "absmax2",
}


def make_optimizer(parameters: Mapping[str, nn.Parameter], settings: Training) -> torch.optim.Optimizer:
    """Make an optimizer with the groups of `Training.group_of`. parameters: by transformers' names, trained or not."""
    found: dict[tuple[bool, int, bool], dict[str, Any]] = {}
    for name, parameter in parameters.items():
        if parameter.requires_grad:
            of_muon = settings.is_for_muon(name, parameter.dim())
            number, flat = settings.group_of(name, parameter.dim())
            new = {"params": [], "decays": not flat, "pattern": settings.pattern_of(name), "muon": of_muon}
            found.setdefault((of_muon, number, flat), new)["params"].append(parameter)
    groups = [found[key] for key in sorted(found)]
    adamw, muon = ([group for group in groups if group["muon"] is which] for which in (False, True))
    made: list[torch.optim.Optimizer] = []
    if adamw:
        made.append(_adamw_8bit(adamw) if settings.optimizer == "adamw_8bit" else torch.optim.AdamW(adamw, fused=True))
    if muon:
        made.append(torch.optim.Muon(muon, adjust_lr_fn="match_rms_adamw"))
    optimizer = made[0] if len(made) == 1 else CombinedOptimizer(made)
    set_rates(optimizer, settings, settings.peak_learning_rate)
    return optimizer


class CombinedOptimizer(torch.optim.Optimizer):
    """Several optimizers, each for its own parameters, as one."""

    def __init__(self, parts: Sequence[torch.optim.Optimizer]) -> None:
        super().__init__([group for part in parts for group in part.param_groups], {})
        self._parts = parts
        for part in parts:  # the parts share groups and state
            part.state = self.state

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for part in self._parts:
            part.step()


def set_rates(optimizer: torch.optim.Optimizer, settings: Training, rate: float) -> None:
    """Make the optimizer's next step use these settings. rate: the schedule's."""
    for group in optimizer.param_groups:
        decay = settings.weight_decay if group["decays"] else 0.0
        factor = settings.rates[group["pattern"]] if settings.rates and group["pattern"] else 1.0
        group.update(lr=rate * factor, weight_decay=decay)
        if not group["muon"]:
            group.update(betas=settings.betas, eps=settings.eps)


def make_moments(
    optimizer: torch.optim.Optimizer, parameters: Iterable[Tensor], make: Callable[..., Tensor] = torch.zeros_like
) -> None:
    """Create an optimizer's moments before its first step, as zeros. make: `torch.empty_like` if all of them are about
    to be written, so that their memory is touched once."""
    if hasattr(optimizer, "init_state"):  # bitsandbytes' optimizer
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


@contextmanager
def with_moments(
    optimizer: torch.optim.Optimizer, parameters: Iterable[Tensor], moved: Callable[[], bool]
) -> Iterator[None]:
    """Inside the block, an optimizer without moments has all of them, which it would otherwise create between the
    updates of its groups. If no weight has moved at the end, the moments are removed again."""
    first = not optimizer.state
    try:
        if first:
            make_moments(optimizer, parameters)
        yield
    finally:
        if first and not moved():
            optimizer.state.clear()


def set_optimizer_steps(optimizer: torch.optim.Optimizer, steps: int) -> None:
    """Set the step count of AdamW, if it has moments."""
    for entry in optimizer.state.values():
        if isinstance(entry.get("step"), Tensor):
            entry["step"].fill_(steps)
        elif "step" in entry:  # Muon has none
            entry["step"] = steps


def moment_of(entry: Mapping[str, Any], kind: StateKind) -> Tensor | None:
    """Return a moment in an optimizer's state of a parameter; None if the state has other kinds."""
    names = {kind: kind} if "state1" not in entry else LARGE if "absmax1" in entry else SMALL
    return entry.get(names[kind]) if kind in names else None


def _adamw_8bit(groups: Sequence[dict[str, Any]]) -> torch.optim.Optimizer:
    """Make bitsandbytes' AdamW8bit for these parameter groups."""
    # at import it warns that it has no 4-bit kernels for this CPU, which are not used here
    quiet = logging.getLogger("bitsandbytes")
    level = quiet.level
    quiet.setLevel(logging.ERROR)
    try:
        import bitsandbytes
    finally:
        quiet.setLevel(level)
    return bitsandbytes.optim.AdamW8bit(list(groups))
