"""Safe-RLHF (Dai et al. 2023, arXiv:2310.12773): the most reward at a bounded mean cost, by PPO with a multiplier."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any

from workbench.algorithms.lab import Lab
from workbench.algorithms.loop import RolloutAlgorithm
from workbench.errors import BadInput
from workbench.objectives.lagrangian import dual_step
from workbench.support.validation import FINITE, SEQUENCE, NonNegativeFloat, Number, PositiveFloat, Rule

TWO_BOUNDS = Rule(
    "must be two numbers, 0 < low <= high < infinity: each step changes the logarithm of the multiplier",
    "write multiplier_bounds=(0.01, 10.0)",
)
Bounds = Annotated[tuple[PositiveFloat, PositiveFloat], SEQUENCE, TWO_BOUNDS]


@dataclass
class SafeRLHF(RolloutAlgorithm):
    """`SafeRLHF(lab, limit=...).run(n)`: n iterations of the lines in `define`.

    Differences from PPO: costs and their values, a multiplier that weighs cost against reward, and a pretraining loss
    (HybridFlow, figure 6; its listing leaves out Safe-RLHF's cost critic, which is two lines here).

    kl_coefficient: weight of the KL penalty, which is subtracted from the rewards and added to the costs; the authors'
    code gives each of them one half of it. Other fields: as in `PPO`.
    cost: a function that replaces the cost role's own. limit: the allowed mean cost of a response.
    multiplier: the current value; `dual_step` moves it after each iteration, up while the mean cost is above the limit.
    It is the algorithm's only state: you can read, keep and set it. multiplier_rate, multiplier_bounds: for this step.
    pretrain: a text column of the prompts' data set, for a language-model loss in the actor's update, with weight
    pretrain_coefficient (each iteration uses the texts of its own rows); None: no such loss.
    """

    cost: Callable[..., Any] | Mapping[str, Any] | None = None
    limit: Annotated[Number, FINITE] = 0.0
    multiplier: float = 1.0
    multiplier_rate: NonNegativeFloat = 0.1
    multiplier_bounds: Bounds = (0.01, 10.0)
    gamma: float = 1.0
    lam: float = 0.95
    kl_coefficient: NonNegativeFloat = 0.05
    kl: str = "k1"
    clip: float = 0.2
    value_clip: PositiveFloat | None = 0.2
    pretrain: str | None = None
    pretrain_coefficient: float = 1.0

    def __post_init__(self) -> None:
        self.need("critic", *self._penalty_role, "reward", "cost", "cost_critic")
        bounds = self.multiplier_bounds
        if not bounds[0] <= self.multiplier <= bounds[1]:
            raise BadInput(
                f"SafeRLHF.multiplier={self.multiplier!r}", f"must lie within multiplier_bounds={tuple(bounds)}"
            )

    def define(self, lab: Lab) -> None:
        batch, on_policy = self.rollouts(lab, penalised=bool(self.kl_coefficient))
        batch = lab.critic.compute_values(batch)
        batch = lab.cost_critic.compute_cost_values(batch)
        batch = lab.reward.compute_reward(batch, function=self.reward, weights=self.reward_weights)
        batch = lab.cost.compute_cost(batch, function=self.cost)
        batch = lab.compute_advantages(
            batch,
            gamma=self.gamma,
            lam=self.lam,
            kl_coefficient=self.kl_coefficient,
            kl=self.kl,
            multiplier=self.multiplier,
        )
        lab.critic.update_critic(batch, clip=self.value_clip, epochs=self.epochs)
        lab.cost_critic.update_cost_critic(batch, clip=self.value_clip, epochs=self.epochs)
        if self.pretrain is not None:
            batch = lab.actor.compute_loss(batch, text=self.pretrain)
        lab.actor.update_actor(
            batch,
            clip=self.clip,
            epochs=self.epochs,
            pretrain_coefficient=0.0 if self.pretrain is None else self.pretrain_coefficient,
            correction=self.correction,
            on_policy=on_policy,
        )

    def finish(self, metrics: Mapping[str, float]) -> None:
        """Move the multiplier for the next iteration."""
        mean_cost = metrics["compute_advantages/costs/mean"]
        self.multiplier = dual_step(
            self.multiplier, mean_cost, self.limit, self.multiplier_rate, self.multiplier_bounds
        )

    def state(self) -> dict[str, Any]:
        return {"multiplier": self.multiplier}
