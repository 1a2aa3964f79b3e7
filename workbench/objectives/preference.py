"""Losses on pairs of answers to one prompt, of which people prefer the chosen one. Suffix P: pairs of a micro-batch.

A pair's loss depends on both of its answers, so both go through the model in one micro-batch; the loss of a minibatch
is the mean over all of its pairs, on all ranks.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor
from torch.nn.functional import logsigmoid

from workbench.objectives.arguments import full, same_shape, within
from workbench.support.checked_calls import checked_call

CONFIDENCE_95 = 1.959964  # standard deviations on either side that hold 95 % of a normal distribution


@checked_call()
def pairwise_loss(chosen_P: Tensor, rejected_P: Tensor, margin_P: Tensor | None = None) -> Tensor:
    """The loss of a reward model on the scores of both answers, [P].

        loss = -log sigmoid(r_chosen - r_rejected - margin)

    Sources: the Bradley-Terry likelihood of Stiennon et al. 2020, https://arxiv.org/abs/2009.01325, section 3.4, and
    InstructGPT, https://arxiv.org/abs/2203.02155, equation 1; the margin, by how much more the chosen answer is
    preferred: Llama 2, https://arxiv.org/abs/2307.09288, equation 2.

    Equal scores without a margin cost log 2. Finite, with its right gradient, however far the scores lie apart.

    Raises `BadInput` on unequal shapes.
    """
    same_shape(chosen_P=chosen_P, rejected_P=rejected_P, **({} if margin_P is None else {"margin_P": margin_P}))
    gap_P = full(chosen_P) - full(rejected_P)
    return -logsigmoid(gap_P if margin_P is None else gap_P - full(margin_P).detach())


class DPOStats(NamedTuple):
    """Per pair and without gradient: beta times how much likelier each answer became than under the reference."""

    chosen_rewards_P: Tensor
    rejected_rewards_P: Tensor


@checked_call()
def dpo_loss(
    chosen_P: Tensor,
    rejected_P: Tensor,
    ref_chosen_P: Tensor,
    ref_rejected_P: Tensor,
    beta: float = 0.1,
    label_smoothing: float = 0.0,
) -> tuple[Tensor, DPOStats]:
    """Direct preference optimization, [P], from log-probabilities of whole answers: sums over response tokens, nats.

        h    = beta ((log pi - log ref)(chosen) - (log pi - log ref)(rejected))
        loss = -(1 - label_smoothing) log sigmoid(h) - label_smoothing log sigmoid(-h)

    Sources: Rafailov et al. 2023, https://arxiv.org/abs/2305.18290, equation 7; label smoothing, the share of pairs
    whose label is taken to be wrong: Mitchell 2023, https://ericmitchell.ai/cdpo.pdf, equation 3.

    While pi is the reference, the loss is log 2. Gradients flow into `chosen_P` and `rejected_P` only.

    Raises `BadInput` on unequal shapes, beta < 0, label_smoothing outside [0, 0.5].
    """
    same_shape(chosen_P=chosen_P, rejected_P=rejected_P, ref_chosen_P=ref_chosen_P, ref_rejected_P=ref_rejected_P)
    within("beta", beta, 0.0)
    within("label_smoothing", label_smoothing, 0.0, 0.5)
    chosen_rewards_P = beta * (full(chosen_P) - full(ref_chosen_P).detach())
    rejected_rewards_P = beta * (full(rejected_P) - full(ref_rejected_P).detach())
    h_P = chosen_rewards_P - rejected_rewards_P
    loss_P = -(1 - label_smoothing) * logsigmoid(h_P) - label_smoothing * logsigmoid(-h_P)
    return loss_P, DPOStats(chosen_rewards_P.detach(), rejected_rewards_P.detach())


@checked_call()
def binomial_interval(successes: float, trials: float, deviations: float = CONFIDENCE_95) -> tuple[float, float]:
    """Bounds of a success rate of which `successes` of `trials` were seen; by default they hold it with 95 %.

    Wilson's score interval (1927, https://doi.org/10.1080/01621459.1927.10502953): it stays within [0, 1] and is right
    for few trials and for rates near 0 and 1. Raises `BadInput` unless 0 <= successes <= trials and trials >= 1.
    """
    within("trials", trials, 1)
    within("successes", successes, 0, trials)
    rate, z2 = successes / trials, deviations**2
    middle = (rate + z2 / (2 * trials)) / (1 + z2 / trials)
    half = deviations / (1 + z2 / trials) * (rate * (1 - rate) / trials + z2 / (4 * trials**2)) ** 0.5
    return max(0.0, middle - half), min(1.0, middle + half)
