"""ReMax (Li et al. 2023, arXiv:2310.10505): the reward of the greedy response is the baseline, no critic."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace

from workbench.algorithms.lab import Lab
from workbench.algorithms.loop import RolloutAlgorithm
from workbench.support.validation import NonNegativeFloat


@dataclass
class ReMax(RolloutAlgorithm):
    """`ReMax(lab).run(n)`: n iterations of the lines in `define`.

    Differences from PPO: an additional greedy generation with its rewards, and no critic (HybridFlow, figure 6).

    samples: responses per prompt; all have the reward of the one greedy response as their baseline, which comes from
    the stages `generate_greedy` and `compute_greedy_reward`. Other fields: as in `PPO`.
    """

    kl_coefficient: NonNegativeFloat = 0.05
    kl: str = "k1"
    clip: float = 0.2

    @property
    def _status(self) -> tuple[str, ...]:
        """The column "valid", which says which rows failed; () if no function or environment can fail."""
        by_function = self.reward is not None or self.lab.groups["reward"].spec.function is not None
        return ("valid",) if by_function or self.sampling.several_turns is not None else ()

    def define(self, lab: Lab) -> None:
        prompts = lab.prompts.next(self.prompts)
        with lab.reported_as("generate_greedy"):
            greedy = lab.actor.generate_sequences(prompts, **asdict(replace(self.sampling, temperature=0.0)))
        with lab.reported_as("compute_greedy_reward"):
            greedy = lab.reward.compute_reward(greedy, function=self.reward, weights=self.reward_weights)
        baseline = greedy.select("rewards", *self._status).rename(
            rewards="baseline_rewards", **dict.fromkeys(self._status, "baseline_valid")
        )
        baseline = baseline.repeat(self.samples)
        batch = lab.actor.generate_sequences(prompts, samples=self.samples, **asdict(self.sampling))
        on_policy = self.on_policy(penalised=bool(self.kl_coefficient))
        if not on_policy:
            batch = lab.actor.compute_log_prob(batch)
        if self.kl_coefficient:
            batch = lab.reference.compute_ref_log_prob(batch)
        batch = lab.reward.compute_reward(batch, function=self.reward, weights=self.reward_weights)
        batch = batch.join(baseline)
        batch = lab.compute_advantages(batch, estimator="remax", kl_coefficient=self.kl_coefficient, kl=self.kl)
        lab.actor.update_actor(
            batch, clip=self.clip, epochs=self.epochs, correction=self.correction, on_policy=on_policy
        )
