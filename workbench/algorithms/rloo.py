"""RLOO (Ahmadian et al. 2024, arXiv:2402.14740): REINFORCE on whole responses, the other samples as the baseline."""

from __future__ import annotations

from dataclasses import dataclass

from workbench.algorithms.lab import Lab
from workbench.algorithms.loop import GroupSize, RolloutAlgorithm
from workbench.support.validation import NonNegativeFloat


@dataclass
class RLOO(RolloutAlgorithm):
    """`RLOO(lab).run(n)`: n iterations of the lines in `define`.

    A response is one action: its advantage is its reward, minus the KL of the whole response, minus the mean of the
    prompt's other responses; the log-probabilities of its tokens are summed.

    samples: at least 2. clip: has an effect from the second optimizer step on, where it bounds the ratio of each token,
    not of the response. Other fields: as in `PPO`.
    """

    samples: GroupSize = 4
    kl_coefficient: NonNegativeFloat = 0.05
    kl: str = "k1"
    clip: float = 0.2

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
