"""PPO with a critic (Schulman et al. 2017, arXiv:1707.06347), as an RLHF dataflow (HybridFlow, figure 6)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from workbench.algorithms.loop import Algorithm
from workbench.engines.settings import Sampling

if TYPE_CHECKING:
    from workbench.controller import Workbench


@dataclass
class PPO(Algorithm):
    """`PPO(lab).run(n)`: n iterations of the calls in `define`, which a notebook can also make one by one.

    prompts: prompts an iteration; samples: responses a prompt. reward: a function in place of the reward role's own.
    kl_coefficient, kl: penalty against the reference in the reward. clip, value_clip, epochs: of the updates, whose
    minibatches are set by `Training.minibatches`. sampling: how responses are drawn.
    """

    lab: Workbench
    prompts: int = 16
    samples: int = 1
    sampling: Sampling = field(default_factory=Sampling)
    reward: Callable[..., Any] | None = None
    gamma: float = 1.0
    lam: float = 0.95
    kl_coefficient: float = 0.05
    kl: str = "k1"
    clip: float = 0.2
    value_clip: float | None = 0.2
    epochs: int = 1

    def __post_init__(self) -> None:
        self.need("critic", "reference", "reward")

    def define(self, lab: Workbench) -> None:
        batch = lab.prompts.next(self.prompts)
        batch = lab.actor.generate_sequences(batch, samples=self.samples, **asdict(self.sampling))
        batch = lab.actor.compute_log_prob(batch)
        batch = lab.reference.compute_ref_log_prob(batch)
        batch = lab.critic.compute_values(batch)
        batch = lab.reward.compute_reward(batch, function=self.reward)
        batch = lab.compute_advantages(
            batch, gamma=self.gamma, lam=self.lam, kl_coefficient=self.kl_coefficient, kl=self.kl
        )
        lab.critic.update_critic(batch, clip=self.value_clip, epochs=self.epochs)
        lab.actor.update_actor(batch, clip=self.clip, epochs=self.epochs)
