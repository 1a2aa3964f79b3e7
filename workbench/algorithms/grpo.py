"""GRPO (Shao et al. 2024, arXiv:2402.03300): the mean of a prompt's samples is the baseline; no critic."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from workbench.algorithms.lab import Lab
from workbench.algorithms.loop import RolloutAlgorithm
from workbench.errors import BadInput
from workbench.objectives.aggregation import Aggregation
from workbench.objectives.losses import CovarianceLoss
from workbench.support.validation import NonNegativeFloat, PositiveInt


@dataclass
class GRPO(RolloutAlgorithm):
    """`GRPO(lab).run(n)`: n iterations of the calls in `define`.

    samples: at least 2 unless `estimator` is a function.
    kl_coefficient, kl: weight and form (see `kl.kl_loss`) of the KL penalty in the loss; at 0 no reference is needed.
    aggregation: how token losses are combined; the paper's is "sequence-mean-token-mean". loss, estimator: names, or
    your own functions, see `update_actor` and `compute_advantages`. clip, clip_high, dual_clip, entropy_coefficient:
    as in `update_actor`; by default, a loss given by name uses the clips of its paper. Other fields: as in `PPO`.
    Variants:

        Dr. GRPO    estimator="dr_grpo", aggregation="fixed-length"              arXiv:2503.20783
        GSPO        loss="gspo"                                                  arXiv:2507.18071
        CISPO       loss="cispo", aggregation="token-mean"                       arXiv:2506.13585
        SAPO        loss="sapo"                                                  arXiv:2511.20347
        KL-Cov      loss=KLCov(), aggregation="token-mean", epochs=2             arXiv:2505.22617
        Clip-Cov    loss=ClipCov(), aggregation="token-mean"                     arXiv:2505.22617
        batch std   estimator="grpo_batch_std"                                   arXiv:2508.08221
        process     estimator="grpo_process", replace("compute_reward", steps=...)   arXiv:2402.03300, section 4.1.3
        VCPO        estimator="off_policy_baseline", clip=1.0, clip_high=1e9, correction=Correction(level="sequence",
                    high=8.0, reference_size=1.0)                                arXiv:2602.17616
        M2PO        correction=Correction(bound="second_moment"), clip=1.0, clip_high=1e9   arXiv:2510.01161
                    (as in AReaL, see `Correction`)

    VCPO's settings are from its authors' scripts: no clip, weights up to 8, a mean over the losses of a response's
    tokens. Its estimator divides by the standard deviation of the group, and uses the norm of each response's gradient,
    which costs one backward pass per response; `algo.remove("compute_gradient_norm")` saves these passes: then the
    number of tokens is used instead of the norm.
    """

    prompts: PositiveInt = 4
    samples: PositiveInt = 4
    estimator: str | Callable[..., Any] = "grpo"
    loss: str | CovarianceLoss | Callable[..., Any] = "ppo"
    kl_coefficient: NonNegativeFloat = 0.0
    kl: str = "k3"
    clip: float | None = None
    clip_high: float | None = None
    dual_clip: float | None = None
    entropy_coefficient: float = 0.0
    aggregation: Aggregation = "sequence-mean-token-mean"

    def __post_init__(self) -> None:
        if self.samples < 2 and not callable(self.estimator):
            why = f"must be at least 2: the baseline of estimator={self.estimator!r} is the other samples of a prompt"
            raise BadInput(f"GRPO.samples={self.samples}", why, "write samples=4, its default")
        super().__post_init__()

    def define(self, lab: Lab) -> None:
        batch, on_policy = self.rollouts(lab, reference=bool(self.kl_coefficient))
        if self.estimator == "off_policy_baseline":
            batch = lab.actor.compute_gradient_norm(batch)
        batch = lab.reward.compute_reward(batch, function=self.reward, weights=self.reward_weights)
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
