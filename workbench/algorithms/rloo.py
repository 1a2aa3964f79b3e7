"""RLOO (Ahmadian et al. 2024, arXiv:2402.14740): REINFORCE on whole responses, the other samples as the baseline."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from workbench.algorithms.lab import Lab
from workbench.algorithms.loop import Algorithm, GroupSize
from workbench.data.reward_function import Weight
from workbench.objectives.correction import Correction
from workbench.settings.engines import Sampling


@dataclass
class RLOO(Algorithm):
    """`RLOO(lab).run(n)`: n iterations of the lines in `define`.

    A response is one action: its reward, less the KL of the whole response, is held against the mean of the others to
    its prompt, and the log-probabilities of its tokens are summed.

    prompts: prompts an iteration; samples: responses a prompt, at least 2. kl_coefficient, kl: penalty against the
    reference in the reward; at 0 no reference is needed. clip: matters from the second optimizer step on, where it
    bounds the ratio of each token, not of the response. correction: as in `GRPO`.
    """

    lab: Lab
    prompts: int = 16
    samples: GroupSize = 4
    sampling: Sampling = field(default_factory=Sampling)
    reward: Callable[..., Any] | Mapping[str, Any] | None = None
    reward_weights: Mapping[str, Weight] | None = None
    kl_coefficient: float = 0.05
    kl: str = "k1"
    clip: float = 0.2
    epochs: int = 1
    correction: Correction | None = None

    def __post_init__(self) -> None:
        self.need("reward", *(["reference"] if self.kl_coefficient else []))

    def define(self, lab: Lab) -> None:
        batch, on_policy = self.rollouts(lab, penalised=bool(self.kl_coefficient))
        batch = lab.reward.compute_reward(batch, function=self.reward, weights=self.reward_weights)
        batch = lab.compute_advantages(batch, estimator="rloo", kl_coefficient=self.kl_coefficient, kl=self.kl)
        lab.actor.update_actor(
            batch,
            clip=self.clip,
            epochs=self.epochs,
            aggregation="sequence-mean-token-sum",
            correction=self.correction,
            on_policy=on_policy,
        )
