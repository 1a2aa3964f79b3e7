"""GRPO (Shao et al. 2024, arXiv:2402.03300): the samples of a prompt are each other's baseline, no critic."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from workbench.algorithms.aggregation import Aggregation
from workbench.algorithms.loop import Algorithm
from workbench.engines.settings import Sampling, at_least

if TYPE_CHECKING:
    from workbench.controller import Workbench


@dataclass
class GRPO(Algorithm):
    """`GRPO(lab).run(n)`: n iterations of the calls in `define`.

    prompts: prompts an iteration; samples: responses a prompt, at least 2. kl_coefficient: k3 penalty against the
    reference in the loss; at 0 no reference is needed. aggregation: "sequence-mean-token-mean" is the paper's.
    estimator: "grpo", or "dr_grpo" without the standard deviation (arXiv:2503.20783), or "rloo" (arXiv:2402.14740).
    """

    lab: Workbench
    prompts: int = 4
    samples: int = 4
    sampling: Sampling = field(default_factory=Sampling)
    reward: Callable[..., Any] | None = None
    estimator: str = "grpo"
    kl_coefficient: float = 0.0
    clip: float = 0.2
    clip_high: float | None = None
    epochs: int = 1
    aggregation: Aggregation = "sequence-mean-token-mean"

    def __post_init__(self) -> None:
        at_least("GRPO.samples", self.samples, 2)  # one sample is its own mean: nothing to learn from
        self.need("reward", *(["reference"] if self.kl_coefficient else []))

    def define(self, lab: Workbench) -> None:
        batch = lab.prompts.next(self.prompts)
        batch = lab.actor.generate_sequences(batch, samples=self.samples, **asdict(self.sampling))
        batch = lab.actor.compute_log_prob(batch)
        if self.kl_coefficient:
            batch = lab.reference.compute_ref_log_prob(batch)
        batch = lab.reward.compute_reward(batch, function=self.reward)
        batch = lab.compute_advantages(batch, estimator=self.estimator)
        lab.actor.update_actor(
            batch,
            clip=self.clip,
            clip_high=self.clip_high,
            epochs=self.epochs,
            kl_coefficient=self.kl_coefficient,
            aggregation=self.aggregation,
        )
