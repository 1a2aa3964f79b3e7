"""The fields of algorithms that train on scored responses of the actor."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any

from pydantic import Field

from workbench.algorithms.lab import Lab
from workbench.algorithms.loop import Algorithm
from workbench.data.reward_function import Weight
from workbench.objectives.correction import Correction
from workbench.settings.engines import Sampling
from workbench.support.validation import PositiveInt, Whole

GroupSize = Annotated[Whole, Field(ge=2)]  # samples of a prompt, where they are each other's baseline


@dataclass
class RolloutAlgorithm(Algorithm):
    """Base of PPO and its relatives. `PPO` says what the fields are."""

    lab: Lab
    prompts: PositiveInt = 16
    samples: PositiveInt = 1
    sampling: Sampling = field(default_factory=Sampling)
    reward: Callable[..., Any] | Mapping[str, Any] | None = None
    reward_weights: Mapping[str, Weight] | None = None
    epochs: PositiveInt = field(default=1, kw_only=True)
    correction: Correction | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        self.need("reward", *self._penalty_role)

    @property
    def _penalty_role(self) -> tuple[str, ...]:
        """The role that a KL penalty needs: none where its coefficient is 0."""
        return ("reference",) if getattr(self, "kl_coefficient", 0) else ()
