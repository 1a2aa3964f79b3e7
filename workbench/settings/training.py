"""Settings of a trained role: engine, optimizer, learning rates and their schedule."""

from __future__ import annotations

import math
import numbers
import re
from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from typing import Annotated, Any, Literal, NoReturn

from pydantic import AfterValidator, Field

from workbench.errors import BadInput
from workbench.errors.containing import must_propagate
from workbench.errors.plain_text import said, shown
from workbench.settings.roles import CRITICS
from workbench.support.validation import (
    SEQUENCE,
    NonNegativeFloat,
    NonNegativeInt,
    Number,
    PositiveFloat,
    PositiveInt,
    Rule,
    Whole,
    settings,
)

TrainingEngine = Literal["torch", "deepspeed"]
Optimizer = Literal["adamw", "muon", "adamw_8bit"]
HeadDType = Literal["same", "float32"]

LEARNING_RATE, CRITIC_LEARNING_RATE = 1e-6, 1e-5  # a critic's head starts at zero and has more to learn
SMALLEST_8BIT = 4096  # bitsandbytes keeps 8-bit moments of tensors with at least this many elements
HIGH_RATE = 0.01  # above this rate, a step of AdamW is as large as the weights
Beta = Annotated[Number, Field(ge=0, lt=1)]


Schedule = Annotated[
    Literal["constant", "linear", "cosine"] | Callable[[int], Any],
    Rule("must be 'constant', 'linear', 'cosine', or a function of the number of steps", "write schedule='cosine'"),
]


RATES = (
    "learning_rate", "rates", "betas", "eps", "weight_decay", "schedule", "warmup_steps", "total_steps",
    "max_grad_norm",
)  # fmt: skip
LIVE = (*RATES, "minibatches")
"""Fields of `Training` that can be assigned while a workbench lives. `RATES`: fields that only the optimizer reads."""
WHOLE_TENSORS = {  # optimizer -> why it needs whole tensors on each rank
    "muon": "Muon orthogonalizes steps of whole matrices",
    "adamw_8bit": "8-bit moments belong to whole tensors",
}
CHECKED_STEPS = 100  # steps of a schedule that are checked if `total_steps` is None
MOST_CHECKED_STEPS = 10_000


class Factors(dict[str, float]):
    """`Training.rates`: refuses changes in place, because these would not be checked or recorded."""

    def _refuse(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise BadInput(
            f"a change inside rates={dict(self)}",
            "all factors must be assigned together, so that they are checked and recorded",
            f"write lab.actor.training.rates = {dict(self)}, with other factors",
        )

    __setitem__ = __delitem__ = __ior__ = _refuse
    update = setdefault = pop = popitem = clear = _refuse

    def __reduce__(self) -> tuple[Any, ...]:
        return Factors, (dict(self),)


def _are_patterns(rates: Mapping[str, float]) -> Mapping[str, float]:
    for pattern in rates:
        try:
            re.compile(pattern)
        except (re.error, RecursionError, OverflowError) as error:
            raise BadInput(
                f"Training.rates with the pattern {pattern[:60]!r}", f"is not a regular expression: {error}",
                f"write {re.escape(pattern[:60])!r} to match the text itself",
            ) from None  # fmt: skip
    return Factors(rates)


Rates = Annotated[
    Mapping[Annotated[str, Field(min_length=1)], NonNegativeFloat],
    AfterValidator(_are_patterns),
    Rule("must map patterns of weight names to factors of the rate, 0 or more", 'write rates={"embed": 0.1}'),
]


@settings()
class Training:
    """Settings of a trained role.

    engine: "deepspeed", for layouts (1, t, d), or "torch", for all (p, t, d), which needs no other package.
    zero_stage: DeepSpeed's ZeRO stage, 0 to 3, with t > 1 at most 2; ignored by the torch engine.
    optimizer: "adamw"; "muon" (https://kellerjordan.github.io/posts/muon/): matrices other than embeddings and heads
        take orthogonalised steps, scaled as in arXiv:2502.16982 so that AdamW's learning rate suits them too; all other
        weights use AdamW; or "adamw_8bit", by bitsandbytes (extra `adam8bit`): AdamW whose moments have 8 bits per
        element and a scale per block of 256 (https://arxiv.org/abs/2110.02861), 2 bytes per weight instead of 8;
        tensors of fewer than 4,096 elements keep fp32 moments. "muon" and "adamw_8bit" need engine="torch" and t=1, so
        that each tensor is whole on its rank.
    learning_rate, betas, eps, weight_decay: AdamW's. learning_rate None: 1e-6, for a critic 1e-5. Biases and norms are
        not decayed.
    rates: factors of the learning rate, by patterns: a factor applies to weights whose transformers name contains a
        match (`re.search`): `{"embed": 0.1, "lm_head|score": 10.0}`. The first matching pattern counts; 0 freezes its
        weights. While a workbench is open you can change the factors, but not the patterns.
    warmup_steps, total_steps, schedule: learning-rate schedule in optimizer steps; "linear" and "cosine" need
        total_steps. A function `schedule(step)` returns the factor of the rate after `step` steps: it is checked at
        once, for `total_steps` steps or 100, and is sent to the ranks like other functions of a cell.
    max_grad_norm: global norm to which gradients are clipped; 0 turns clipping off.
    minibatches: optimizer steps of one update on one batch (per epoch).
    micro_batch_tokens: the most tokens in one forward pass, prompts and responses together; a single longer row is a
        micro-batch of its own. None: 2048 on a CPU; on a GPU as many as fit with the rest of the placement, by a trial
        pass before the role's first pass (at most 32,768), and half as many after a step that still runs out of memory.
        Sequences are packed; for a model that does not support this, padding counts too. `lab.topology()` shows both.
        `compute_log_prob` and `update_actor` form the same micro-batches, so that the first ratio is exactly 1
        (within rounding if an update skips rows without advantage).
    head_dtype: "float32": compute the logits in fp32 for any dtype of the model, from fp32 hidden states and fp32
        weights of the output head (MiniMax-M1, https://arxiv.org/abs/2506.13585, section 3.2); "same": in its dtype.
        The transformers engine generates in the same way; for vLLM see `Generation`.
    activation_checkpointing: recompute layer activations in the backward pass.
    compile: run the layers through torch.compile, which needs a C++ compiler and, the first time on a machine, a minute
        or more. Results differ within rounding.
    """

    engine: TrainingEngine = "deepspeed"
    zero_stage: Annotated[Whole, Field(ge=0, le=3), Rule("must be one of 0, 1, 2, 3")] = 1
    optimizer: Optimizer = "adamw"
    learning_rate: NonNegativeFloat | None = None
    rates: Rates | None = None
    betas: Annotated[tuple[Beta, Beta], SEQUENCE, Rule("must be two numbers in [0, 1)", "write (0.9, 0.95)")] = (
        0.9,
        0.95,
    )
    eps: PositiveFloat = 1e-8
    weight_decay: NonNegativeFloat = 0.0
    schedule: Schedule = "constant"
    warmup_steps: NonNegativeInt = 0
    total_steps: PositiveInt | None = None
    max_grad_norm: Annotated[Number, Field(ge=0)] = 1.0
    minibatches: PositiveInt = 1
    micro_batch_tokens: PositiveInt | None = None
    head_dtype: HeadDType = "same"
    activation_checkpointing: bool = False
    compile: bool = False

    def __post_init__(self) -> None:
        if self.compile and self.cuts_weights:
            raise BadInput(
                "Training(compile=True, zero_stage=3)",
                "stage 3 gathers weights in hooks of the modules that are compiled",
                "use zero_stage=2, or compile=False",
            )
        if self.optimizer in WHOLE_TENSORS and self.engine != "torch":
            raise BadInput(
                f"Training(optimizer={self.optimizer!r}, engine={self.engine!r})",
                f"{WHOLE_TENSORS[self.optimizer]}, and ZeRO gives the optimizer pieces of many tensors",
                "use engine='torch', or optimizer='adamw'",
            )
        if callable(self.schedule):
            check_schedule(self.schedule, self.warmup_steps, self.total_steps)
        elif self.schedule != "constant" and self.total_steps is None:
            raise BadInput(
                f"Training.schedule={self.schedule!r} without total_steps",
                "a schedule that ends needs its length in optimizer steps",
                "give total_steps=iterations x minibatches x epochs",
            )
        if self.total_steps is not None and self.warmup_steps > self.total_steps:
            raise BadInput(
                f"Training.warmup_steps={self.warmup_steps} with total_steps={self.total_steps}",
                "the warm-up is a part of total_steps",
                f"use at most {self.total_steps}",
            )

    @property
    def peak_learning_rate(self) -> float:
        """The learning rate between warm-up and decay."""
        return LEARNING_RATE if self.learning_rate is None else self.learning_rate

    @property
    def cuts_weights(self) -> bool:
        """Whether each replica holds only a part of each weight: ZeRO-3."""
        return self.engine == "deepspeed" and self.zero_stage == 3

    def learning_rate_warning(self, role: str) -> str:
        """Return a warning if the learning rate is so high that training would destroy the role's model; else ""."""
        if self.peak_learning_rate <= HIGH_RATE:
            return ""
        usual = Training().of_role(role).learning_rate
        return (
            f"lab.{role}.training.learning_rate is {self.peak_learning_rate:g}: a step changes a weight by about this,"
            f" and weights of language models are near 0.02, so the model would forget what it knows. Write {usual:g}, "
            "the default, or for an adapter or a tiny model 1e-4 to 1e-3"
        )

    def pattern_of(self, name: str) -> str:
        """Return the first pattern of `rates` that matches a weight's name; "" if none does."""
        return next((pattern for pattern in self.rates or () if re.search(pattern, name)), "")

    def is_for_muon(self, name: str, axes: int) -> bool:
        """Whether Muon makes the steps of a weight. axes: the weight's number of dimensions."""
        return self.optimizer == "muon" and axes == 2 and not re.search(r"embed|lm_head|wte|wpe|score", name)

    def is_8bit(self, elements: int) -> bool:
        """Whether a weight with `elements` elements has 8-bit moments."""
        return self.optimizer == "adamw_8bit" and elements >= SMALLEST_8BIT

    def group_of(self, name: str, axes: int) -> tuple[int, bool]:
        """Return the key of a weight's parameter group; groups are sorted by it. Of one factor, matrices come first:
        they are decayed, biases and norms are not. axes: the weight's number of dimensions."""
        pattern = self.pattern_of(name)
        return [*(self.rates or ())].index(pattern) + 1 if pattern else 0, axes <= 1

    @property
    def without_rates(self) -> Training:
        """These settings with the defaults of `RATES`, which do not change the columns and micro-batches of a stage."""
        kept = {field.name: getattr(self, field.name) for field in fields(self) if field.name not in RATES}
        return Training(**kept)

    def of_role(self, role: str) -> Training:
        """Return these settings with the role's default learning rate if none was given."""
        if self.learning_rate is not None:
            return self
        return replace(self, learning_rate=CRITIC_LEARNING_RATE if role in CRITICS else LEARNING_RATE)


def factor_of(schedule: Callable[[int], Any], steps: int) -> float:
    """Return the factor of the rate that a function gives for the next optimizer step, after `steps` steps. `BadInput`
    if it raises, or returns anything but a finite number of 0 or more."""
    called = f"Training.schedule: {getattr(schedule, '__name__', 'the function')}({steps})"
    rule = "a schedule must return a factor of the learning rate for a number of optimizer steps: finite, 0 or more"
    try:
        factor = schedule(steps)
    except BaseException as error:
        if must_propagate(error):
            raise
        raise BadInput(
            f"{called} raised {type(error).__name__}: {said(error)}", rule, "def schedule(step): return 1.0"
        ) from error
    try:
        wrong = isinstance(factor, bool) or not isinstance(factor, numbers.Real) or not 0 <= float(factor) < math.inf
    except Exception:  # an integer too large for a float, or an object of any class
        wrong = True
    if wrong:
        raise BadInput(f"{called} = {shown(factor)}", rule, "return a number, such as max(0.1, 0.99**step)")
    return float(factor)


def check_schedule(schedule: Callable[[int], Any], warmup_steps: int, total_steps: int | None) -> None:
    """Raise `BadInput` if a function gives no valid factor for one of its first steps (`total_steps` or 100, at most
    10,000), gives another factor when it is called again, or is combined with warmup_steps."""
    name = getattr(schedule, "__name__", "the function")
    if warmup_steps:
        raise BadInput(
            f"Training.schedule={name} with warmup_steps={warmup_steps}", "a function gives the factors of all steps",
            f"leave warmup_steps out, and give min(1, (step + 1) / {warmup_steps}) in the function",
        )  # fmt: skip
    steps = range(min(total_steps or CHECKED_STEPS, MOST_CHECKED_STEPS))
    factors = [factor_of(schedule, step) for step in steps]
    for step, factor in zip(steps, factors, strict=True):
        if (again := factor_of(schedule, step)) != factor:
            raise BadInput(
                f"Training.schedule: {name}({step}) = {factor}, and {again} when it is called again",
                "every rank calls it, and so does a resumed run: it must return the same factor for the same step",
                "compute the factor only from the step",
            )
