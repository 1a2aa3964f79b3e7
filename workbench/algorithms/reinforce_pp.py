"""REINFORCE++ (Hu et al. 2025, arXiv:2501.03262): advantages normalised over the global batch, no critic."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from workbench.algorithms.lab import Lab
from workbench.algorithms.loop import Algorithm
from workbench.data.reward_function import Weight
from workbench.objectives.correction import Correction
from workbench.settings.engines import Sampling
from workbench.support.validation import at_least


@dataclass
class ReinforcePP(Algorithm):
    """`ReinforcePP(lab).run(n)`: n iterations of the lines in `define`.

    The reward to go of each token, with its KL penalty in it, is whitened over all tokens of the batch; the update is
    PPO's. With baseline=True (REINFORCE++-baseline) the mean reward of the prompt's samples is taken off first, and
    the penalty moves from the reward to the loss, as k2, whose gradient is that of the reverse KL.

    prompts: prompts an iteration; samples: responses a prompt, at least 2 with the baseline. kl_coefficient: of the
    penalty against the reference; at 0 no reference is needed. clip, epochs: of the updates.
    correction: as in `GRPO`.
    """

    lab: Lab
    prompts: int = 16
    samples: int = 1
    baseline: bool = False
    sampling: Sampling = field(default_factory=Sampling)
    reward: Callable[..., Any] | Mapping[str, Any] | None = None
    reward_weights: Mapping[str, Weight] | None = None
    gamma: float = 1.0
    kl_coefficient: float = 0.01
    clip: float = 0.2
    epochs: int = 1
    correction: Correction | None = None

    def __post_init__(self) -> None:
        if self.baseline:
            at_least("ReinforcePP(baseline=True).samples", self.samples, 2)  # one sample is its own mean
        self.need("reward", *(["reference"] if self.kl_coefficient else []))

    def define(self, lab: Lab) -> None:
        in_reward, in_loss = (0.0, self.kl_coefficient) if self.baseline else (self.kl_coefficient, 0.0)
        estimator = "reinforce_pp_baseline" if self.baseline else "reinforce_pp"
        batch, on_policy = self.rollouts(lab, penalised=bool(in_reward), reference=bool(self.kl_coefficient))
        batch = lab.reward.compute_reward(batch, function=self.reward, weights=self.reward_weights)
        batch = lab.compute_advantages(batch, estimator=estimator, gamma=self.gamma, kl_coefficient=in_reward, kl="k1")
        lab.actor.update_actor(
            batch,
            clip=self.clip,
            epochs=self.epochs,
            kl_coefficient=in_loss,
            kl="k2",
            correction=self.correction,
            on_policy=on_policy,
        )
