"""GRPO (Shao et al. 2024, arXiv:2402.03300): the samples of a prompt are each other's baseline, no critic."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from workbench.algorithms.lab import Lab
from workbench.algorithms.loop import Algorithm, GroupSize
from workbench.errors import BadInput
from workbench.objectives.aggregation import Aggregation
from workbench.objectives.correction import Correction
from workbench.settings.engines import Sampling


@dataclass
class GRPO(Algorithm):
    """`GRPO(lab).run(n)`: n iterations of the calls in `define`.

    prompts: prompts an iteration; samples: responses a prompt, at least 2. kl_coefficient, kl: penalty against the
    reference in the loss, and its form (see `kl.kl_loss`); at 0 no reference is needed. aggregation: how token losses
    become one; the paper's is "sequence-mean-token-mean". dual_clip, entropy_coefficient: as in
    `update_actor`. correction: for rollouts of another distribution than the
    trainer's, see `Correction`. Its variants:

        Dr. GRPO    estimator="dr_grpo", aggregation="fixed-length"              arXiv:2503.20783
        GSPO        loss="gspo", clip=3e-4, clip_high=4e-4                       arXiv:2507.18071
        CISPO       loss="cispo", clip=1.0, clip_high=2.0, aggregation="token-mean"   arXiv:2506.13585
        VCPO        estimator="off_policy_baseline", correction=Correction(level="sequence",
                    reference_size=0.9), aggregation="sequence-mean-token-sum"   arXiv:2602.17616
    """

    lab: Lab
    prompts: int = 4
    samples: GroupSize = 4
    sampling: Sampling = field(default_factory=Sampling)
    reward: Callable[..., Any] | Mapping[str, Any] | None = None
    estimator: str = "grpo"
    loss: str = "ppo"
    kl_coefficient: float = 0.0
    kl: str = "k3"
    correction: Correction | None = None
    clip: float = 0.2
    clip_high: float | None = None
    dual_clip: float | None = None
    entropy_coefficient: float = 0.0
    epochs: int = 1
    aggregation: Aggregation = "sequence-mean-token-mean"

    def __post_init__(self) -> None:
        if self.estimator == "off_policy_baseline" and self.aggregation == "sequence-mean-token-mean":
            raise BadInput(
                f"GRPO(estimator='off_policy_baseline', aggregation={self.aggregation!r})",
                "its baseline weighs responses by their tokens, as where the losses of tokens are summed",
                "use aggregation='sequence-mean-token-sum'",
            )
        self.need("reward", *(["reference"] if self.kl_coefficient else []))

    def define(self, lab: Lab) -> None:
        batch = lab.prompts.next(self.prompts)
        batch = lab.actor.generate_sequences(batch, samples=self.samples, **asdict(self.sampling))
        on_policy = self.on_policy()
        if not on_policy:
            batch = lab.actor.compute_log_prob(batch)
        if self.kl_coefficient:
            batch = lab.reference.compute_ref_log_prob(batch)
        batch = lab.reward.compute_reward(batch, function=self.reward)
        batch = lab.compute_advantages(batch, estimator=self.estimator, correction=self.correction)
        lab.actor.update_actor(
            batch,
            loss=self.loss,
            clip=self.clip,
            clip_high=self.clip_high,
            dual_clip=self.dual_clip,
            entropy_coefficient=self.entropy_coefficient,
            epochs=self.epochs,
            kl_coefficient=self.kl_coefficient,
            kl=self.kl,
            correction=self.correction,
            on_policy=on_policy,
            aggregation=self.aggregation,
            max_response_tokens=self.sampling.max_new_tokens,
        )
