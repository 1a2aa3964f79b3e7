"""PPO with a critic (Schulman et al. 2017, arXiv:1707.06347), as an RLHF dataflow (HybridFlow, figure 6)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from workbench.algorithms.lab import Lab
from workbench.algorithms.loop import RolloutAlgorithm
from workbench.errors import BadInput
from workbench.objectives.kl import adaptive_kl_step
from workbench.objectives.losses import CovarianceLoss
from workbench.support.validation import NonNegativeFloat, PositiveFloat, PositiveInt


@dataclass
class PPO(RolloutAlgorithm):
    """`PPO(lab).run(n)`: n iterations of the calls in `define`, which a notebook can also make one by one.

    prompts: prompts per iteration; samples: responses per prompt. reward: a function that replaces the reward role's
    own, or components, as in `compute_reward`; reward_weights: weights of the components by name, instead of their own.
    kl_coefficient, kl: weight and form of the KL penalty in the reward; at 0 no reference is needed. kl_target: nats
    per response; `adaptive_kl_step` then moves kl_coefficient after each iteration (you can read and set it), over
    kl_horizon responses; None: the coefficient is fixed. macro_tokens: tokens that form one action for advantages
    (MA-PPO, arXiv:2410.02743), a number or a rule, see `compute_advantages`. bootstrap: in a truncated response, the
    critic's value replaces the rewards after the end.
    value_clip, epochs: for the updates, whose minibatches are set by `Training.minibatches`; loss, clip (None: the
    loss's own, 0.2), dual_clip, entropy_coefficient: as in `update_actor`. sampling: how responses are generated.
    correction: for rollouts from another distribution than the trainer's, see `Correction`.
    """

    gamma: float = 1.0
    lam: float = 0.95
    kl_coefficient: NonNegativeFloat = 0.05
    kl: str = "k1"
    kl_target: PositiveFloat | None = None
    kl_horizon: PositiveInt = 10_000
    macro_tokens: int | Literal["random", "perplexity", "steps"] = 1
    bootstrap: bool = False
    clip: float | None = None
    value_clip: PositiveFloat | None = 0.2
    dual_clip: float | None = None
    entropy_coefficient: float = 0.0
    loss: str | CovarianceLoss | Callable[..., Any] = "ppo"

    def __post_init__(self) -> None:
        self.need("critic", *(["reference"] if self._with_reference else []), "reward")
        if self.kl_target is None:
            return
        if not self.kl_coefficient > 0:
            raise BadInput(
                f"PPO(kl_target={self.kl_target}, kl_coefficient={self.kl_coefficient})",
                "kl_target multiplies the coefficient, and 0 would stay 0",
                "give a kl_coefficient above 0, or leave kl_target out",
            )
        if (responses := self.prompts * self.samples) >= 5 * self.kl_horizon:
            raise BadInput(
                f"PPO(kl_horizon={self.kl_horizon}) with {responses} responses an iteration",
                "an iteration of 5 horizons or more could make the coefficient 0 or negative",
                "give a larger kl_horizon",
            )

    def define(self, lab: Lab) -> None:
        penalised = bool(self.kl_coefficient or self.kl_target is not None)
        batch, on_policy = self.rollouts(lab, penalised=penalised, reference=self._with_reference)
        batch = lab.critic.compute_values(batch, final=self.bootstrap)
        batch = lab.reward.compute_reward(batch, function=self.reward, weights=self.reward_weights)
        batch = lab.compute_advantages(
            batch,
            gamma=self.gamma,
            lam=self.lam,
            macro_tokens=self.macro_tokens,
            bootstrap=self.bootstrap,
            kl_coefficient=self.kl_coefficient,
            kl=self.kl,
        )
        lab.critic.update_critic(batch, clip=self.value_clip, epochs=self.epochs)
        lab.actor.update_actor(
            batch,
            loss=self.loss,
            clip=self.clip,
            dual_clip=self.dual_clip,
            entropy_coefficient=self.entropy_coefficient,
            epochs=self.epochs,
            correction=self.correction,
            on_policy=on_policy,
        )

    def finish(self, metrics: Mapping[str, float]) -> None:
        """Move the KL coefficient for the next iteration, if there is a KL target."""
        if self.kl_target is not None:
            kl, responses = metrics["compute_advantages/reference_kl_per_response"], self.prompts * self.samples
            self.kl_coefficient = adaptive_kl_step(self.kl_coefficient, kl, self.kl_target, responses, self.kl_horizon)

    def state(self) -> dict[str, Any]:
        return {"kl_coefficient": self.kl_coefficient} if self.kl_target is not None else {}

    @property
    def _with_reference(self) -> bool:
        return bool(self.kl_coefficient or self.kl_target is not None or self.macro_tokens == "perplexity")
