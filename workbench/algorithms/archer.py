"""ArCHer (Zhou et al. 2024, arXiv:2402.19446): a turn-level critic and a token-level policy gradient, on policy."""

from __future__ import annotations

from dataclasses import dataclass

from workbench.algorithms.lab import Lab
from workbench.algorithms.loop import RolloutAlgorithm
from workbench.errors import BadInput
from workbench.errors.plain_text import shown
from workbench.support.validation import NonNegativeFloat, PositiveFloat, PositiveInt


@dataclass
class ArCHer(RolloutAlgorithm):
    """`ArCHer(lab, sampling=wb.Sampling(environment=...)).run(n)`: n iterations of the lines in `define`.

    High level: an action is a turn. The critic learns by temporal differences from turn to turn: V(s_k) is trained
    towards r_k + gamma V(s_{k+1}), with V from before the update. Low level: all tokens of a turn have the advantage
    r_k + gamma V(s_{k+1}) - V(s_k), with V from after the update, and REINFORCE sums over the tokens.

    Parts of the paper that this class does not have: rollouts of earlier policies (the paper's critic learns from a
    replay buffer; here each iteration's rollouts are used once, so the values are those of the current policy); a
    second network Q(s, a) beside V(s) (here Q is its one-step backup on the sampled transition, which is the same if
    the environment is deterministic); the minimum of two critics; a slowly updated target critic (here the target is
    the critic at the beginning of the iteration); a token-level baseline. Values inside a turn are learned, not used.

    samples: conversations per prompt. sampling: needs an environment. reward: a function of the reward role that
    replaces the environment's rewards. lam: 0 is the paper's one-step difference; a larger lam relies less on the
    critic, as in GAE. kl_coefficient: weight of the penalty against the reference; at 0 no reference is needed.
    critic_epochs: the critic's passes over a batch, before the policy's. clip, epochs: for the policy's update; clip
    has an effect from its second optimizer step on. Other fields: as in `PPO`.
    """

    gamma: float = 0.95
    lam: float = 0.0
    kl_coefficient: NonNegativeFloat = 0.0
    critic_epochs: PositiveInt = 4
    value_clip: PositiveFloat | None = None
    clip: float = 0.2

    def __post_init__(self) -> None:
        if self.sampling.environment is None:
            raise BadInput(
                "ArCHer(sampling=...) without an environment",
                "an action of ArCHer is a turn of a conversation with an environment",
                "write sampling=wb.Sampling(environment=MyEnvironment, max_turns=4)",
            )
        if self.reward is None and self.reward_weights is not None:
            raise BadInput(
                f"ArCHer.reward_weights={shown(self.reward_weights)}",
                "the environment's rewards have no components",
                'give reward={"right": right, "format": tidy} too',
            )
        scored = ["reward"] if self.reward is not None else []
        self.need("critic", *self._penalty_role, *scored)

    def define(self, lab: Lab) -> None:
        batch, on_policy = self.rollouts(lab, penalised=bool(self.kl_coefficient))
        if self.reward is None:
            batch = batch.rename(environment_rewards="rewards")
        else:
            batch = lab.reward.compute_reward(batch, function=self.reward, weights=self.reward_weights)
        credit = {
            "estimator": "gae_turn", "gamma": self.gamma, "lam": self.lam, "bootstrap": True,
            "kl_coefficient": self.kl_coefficient, "whiten_advantages": False,
        }  # fmt: skip
        with lab.reported_as("compute_old_values"):
            batch = lab.critic.compute_values(batch, final=True)
        with lab.reported_as("compute_targets"):
            batch = lab.compute_advantages(batch, **credit)
        lab.critic.update_critic(batch, clip=self.value_clip, epochs=self.critic_epochs)
        batch = lab.critic.compute_values(batch, final=True)
        batch = lab.compute_advantages(batch, **credit)
        lab.actor.update_actor(
            batch,
            clip=self.clip,
            epochs=self.epochs,
            aggregation="sequence-mean-token-sum",
            correction=self.correction,
            on_policy=on_policy,
        )
