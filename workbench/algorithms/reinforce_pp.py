"""REINFORCE++ (Hu et al. 2025, arXiv:2501.03262): advantages normalised over the global batch, no critic."""

from __future__ import annotations

from dataclasses import dataclass

from workbench.algorithms.lab import Lab
from workbench.algorithms.loop import RolloutAlgorithm
from workbench.support.validation import NonNegativeFloat, at_least


@dataclass
class ReinforcePP(RolloutAlgorithm):
    """`ReinforcePP(lab).run(n)`: n iterations of the lines in `define`.

    The reward to go of each token, including the KL penalty, is whitened over all tokens of the batch; the update is
    PPO's. With baseline=True (REINFORCE++-baseline) the mean reward of the prompt's samples is subtracted first, and
    the penalty moves from the reward to the loss, as k2, whose gradient is the reverse KL's.

    samples: at least 2 with the baseline. kl_coefficient: the penalty's weight; at 0 no reference is needed. Other
    fields: as in `PPO`.
    """

    baseline: bool = False
    gamma: float = 1.0
    kl_coefficient: NonNegativeFloat = 0.01
    clip: float = 0.2

    def __post_init__(self) -> None:
        if self.baseline:
            at_least("ReinforcePP(baseline=True).samples", self.samples, 2)  # the mean of one sample is the sample
        super().__post_init__()

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
