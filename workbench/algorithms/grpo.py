"""GRPO (Shao et al. 2024, arXiv:2402.03300): the samples of a prompt are each other's baseline, no critic."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from workbench.algorithms.lab import Lab
from workbench.algorithms.loop import Algorithm, GroupSize
from workbench.objectives.aggregation import Aggregation
from workbench.objectives.correction import Correction
from workbench.settings.engines import Sampling


@dataclass
class GRPO(Algorithm):
    """`GRPO(lab).run(n)`: n iterations of the calls in `define`.

    prompts: prompts an iteration; samples: responses a prompt, at least 2. kl_coefficient, kl: penalty against the
    reference in the loss, and its form (see `kl.kl_loss`); at 0 no reference is needed. aggregation: how token losses
    become one; the paper's is "sequence-mean-token-mean". loss, estimator: by name, or functions of one's own, see
    `update_actor` and `compute_advantages`. clip, clip_high, dual_clip, entropy_coefficient: as in `update_actor`;
    without them a loss with a name has the clips of its paper. correction: for rollouts of another distribution than
    the trainer's, see `Correction`. Its variants:

        Dr. GRPO    estimator="dr_grpo", aggregation="fixed-length"              arXiv:2503.20783
        GSPO        loss="gspo"                                                  arXiv:2507.18071
        CISPO       loss="cispo", aggregation="token-mean"                       arXiv:2506.13585
        SAPO        loss="sapo"                                                  arXiv:2511.20347
        batch std   estimator="grpo_batch_std"                                   arXiv:2508.08221
        VCPO        estimator="off_policy_baseline", clip=1.0, clip_high=1e9, correction=Correction(level="sequence",
                    high=8.0, reference_size=1.0)                                arXiv:2602.17616

    VCPO's settings are those of its authors' scripts: no clip, weights up to 8, the losses of a response's tokens
    averaged. Its estimator divides by the standard deviation of the group.
    """

    lab: Lab
    prompts: int = 4
    samples: GroupSize = 4
    sampling: Sampling = field(default_factory=Sampling)
    reward: Callable[..., Any] | Mapping[str, Any] | None = None
    estimator: str | Callable[..., Any] = "grpo"
    loss: str | Callable[..., Any] = "ppo"
    kl_coefficient: float = 0.0
    kl: str = "k3"
    correction: Correction | None = None
    clip: float | None = None
    clip_high: float | None = None
    dual_clip: float | None = None
    entropy_coefficient: float = 0.0
    epochs: int = 1
    aggregation: Aggregation = "sequence-mean-token-mean"

    def __post_init__(self) -> None:
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
