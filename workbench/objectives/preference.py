"""Losses on pairs of answers to one prompt (a chosen and a rejected one), and on single rated answers.

A pair's loss depends on both answers, so both go through the model in one micro-batch. The loss of a minibatch is the
mean over all its pairs (or answers) on all ranks. Suffixes: P pairs of a micro-batch, B answers.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from workbench.objectives.arguments import same_shape, upcast

# ORPO clamps mean token probabilities to this, because the odds of 1 are infinite.
MOST_PROBABLE = 1 - 1e-6


def pairwise_loss(chosen_P: Tensor, rejected_P: Tensor, margin_P: Tensor | None = None) -> Tensor:
    """Compute a reward model's loss from the scores of both answers, [P].

        loss = -log sigmoid(r_chosen - r_rejected - margin)

    Sources: the Bradley-Terry likelihood of Stiennon et al. 2020, https://arxiv.org/abs/2009.01325, section 3.4, and
    InstructGPT, https://arxiv.org/abs/2203.02155, equation 1; the margin, the degree of preference for the chosen
    answer: Llama 2, https://arxiv.org/abs/2307.09288, equation 2.

    Equal scores without a margin give log 2. The loss is finite and its gradient correct for any distance of scores.

    Raises `BadInput` on unequal shapes.
    """
    same_shape(chosen_P=chosen_P, rejected_P=rejected_P, **({} if margin_P is None else {"margin_P": margin_P}))
    gap_P = upcast(chosen_P) - upcast(rejected_P)
    return -logsigmoid(gap_P if margin_P is None else gap_P - upcast(margin_P).detach())


class DPOStats(NamedTuple):
    """Implicit rewards per pair, without gradient: beta times each answer's log-ratio to the reference."""

    chosen_rewards_P: Tensor
    rejected_rewards_P: Tensor


def dpo_loss(
    chosen_P: Tensor,
    rejected_P: Tensor,
    ref_chosen_P: Tensor,
    ref_rejected_P: Tensor,
    beta: float = 0.1,
    label_smoothing: float = 0.0,
) -> tuple[Tensor, DPOStats]:
    """Compute DPO's loss, [P], from log-probabilities of whole answers: sums over response tokens, in nats.

        h    = beta ((log pi - log ref)(chosen) - (log pi - log ref)(rejected))
        loss = -(1 - label_smoothing) log sigmoid(h) - label_smoothing log sigmoid(-h)

    Sources: Rafailov et al. 2023, https://arxiv.org/abs/2305.18290, equation 7; label smoothing, the assumed share of
    pairs with a wrong label: Mitchell 2023, https://ericmitchell.ai/cdpo.pdf, equation 3.

    If pi is the reference, the loss is log 2. Gradients flow into `chosen_P` and `rejected_P` only.

    Raises `BadInput` on unequal shapes.
    """
    same_shape(chosen_P=chosen_P, rejected_P=rejected_P, ref_chosen_P=ref_chosen_P, ref_rejected_P=ref_rejected_P)
    chosen_rewards_P = beta * (upcast(chosen_P) - upcast(ref_chosen_P).detach())
    rejected_rewards_P = beta * (upcast(rejected_P) - upcast(ref_rejected_P).detach())
    h_P = chosen_rewards_P - rejected_rewards_P
    loss_P = -(1 - label_smoothing) * logsigmoid(h_P) - label_smoothing * logsigmoid(-h_P)
    return loss_P, DPOStats(chosen_rewards_P.detach(), rejected_rewards_P.detach())


def ipo_loss(
    chosen_P: Tensor,
    rejected_P: Tensor,
    ref_chosen_P: Tensor,
    ref_rejected_P: Tensor,
    chosen_tokens_P: Tensor,
    rejected_tokens_P: Tensor,
    beta: float = 0.1,
) -> tuple[Tensor, DPOStats]:
    """Compute IPO's loss, [P], from log-probabilities of whole answers and their numbers of tokens.

        h    = (log pi - log ref)(chosen) / chosen_tokens - (log pi - log ref)(rejected) / rejected_tokens
        loss = (h - 1 / (2 beta))^2

    Source: Azar et al. 2023, https://arxiv.org/abs/2310.12036, equation 17, where beta is tau and h has sums over
    tokens. The authors' results use means over tokens, as TRL's `loss_type="ipo"` says and does: with sums, the
    distance to the same 1 / (2 beta) would depend on the length of the answers. With all numbers of tokens set to 1,
    this is the paper's equation.

    DPO raises h without limit for a pair that is always preferred; this loss is 0 at h = 1 / (2 beta). Gradients flow
    into `chosen_P` and `rejected_P` only. The stats are beta times the two terms of h.

    Raises `BadInput` on unequal shapes.
    """
    same_shape(
        chosen_P=chosen_P, rejected_P=rejected_P, ref_chosen_P=ref_chosen_P, ref_rejected_P=ref_rejected_P,
        chosen_tokens_P=chosen_tokens_P, rejected_tokens_P=rejected_tokens_P,
    )  # fmt: skip
    chosen_P = (upcast(chosen_P) - upcast(ref_chosen_P).detach()) / chosen_tokens_P
    rejected_P = (upcast(rejected_P) - upcast(ref_rejected_P).detach()) / rejected_tokens_P
    loss_P = (chosen_P - rejected_P - 1 / (2 * beta)) ** 2
    return loss_P, DPOStats(beta * chosen_P.detach(), beta * rejected_P.detach())


class ORPOStats(NamedTuple):
    """Statistics per pair, without gradient: the log-odds of both answers, and the fine-tuning part of the loss."""

    chosen_log_odds_P: Tensor
    rejected_log_odds_P: Tensor
    sft_loss_P: Tensor


def orpo_loss(
    chosen_P: Tensor, rejected_P: Tensor, chosen_tokens_P: Tensor, rejected_tokens_P: Tensor, beta: float = 0.1
) -> tuple[Tensor, ORPOStats]:
    """Compute ORPO's loss, [P], from log-probabilities of whole answers and their numbers of tokens.

        log P(y) = log pi(y) / tokens(y)
        odds(y)  = P(y) / (1 - P(y))
        loss     = -log P(chosen) - beta log sigmoid(log odds(chosen) - log odds(rejected))

    Source: Hong et al. 2024, https://arxiv.org/abs/2403.07691, equations 1, 4, 6 and 7; beta is the paper's lambda.
    There is no reference: the first term, fine-tuning on the chosen answer, keeps the policy near the data. This term
    is a mean over each answer's tokens, then over pairs, as in equation 6; TRL uses one mean over the tokens of all
    prompts and chosen answers. P(y) is clamped to 1 - 1e-6 in the odds.

    Raises `BadInput` on unequal shapes.
    """
    same_shape(
        chosen_P=chosen_P, rejected_P=rejected_P, chosen_tokens_P=chosen_tokens_P, rejected_tokens_P=rejected_tokens_P
    )
    chosen_P, rejected_P = upcast(chosen_P) / chosen_tokens_P, upcast(rejected_P) / rejected_tokens_P
    odds_P, against_P = _log_odds(chosen_P), _log_odds(rejected_P)
    loss_P = -chosen_P - beta * logsigmoid(odds_P - against_P)
    return loss_P, ORPOStats(odds_P.detach(), against_P.detach(), -chosen_P.detach())


def _log_odds(log_p: Tensor) -> Tensor:
    log_p = log_p.clamp(max=math.log(MOST_PROBABLE))
    return log_p - torch.log(-torch.expm1(log_p))


def kto_loss(
    log_prob_B: Tensor,
    ref_log_prob_B: Tensor,
    desirable_B: Tensor,
    kl: float,
    beta: float = 0.1,
    desirable_weight: float = 1.0,
    undesirable_weight: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """Compute KTO's loss, [B], from log-probabilities of whole answers: sums over response tokens, in nats. Also return
    the implicit rewards beta r, [B], without gradient.

        r    = log pi(y | x) - log ref(y | x)
        loss = desirable_weight   (1 - sigmoid(beta (r - kl)))    of a desirable answer
               undesirable_weight (1 - sigmoid(beta (kl - r)))    of an undesirable one

    desirable_B: 1 (or True) for desirable answers. kl: the reference point, an estimate of KL(pi || ref), without
    gradient, the same for all answers of a minibatch. The authors and TRL use the mean of log pi - log ref over answers
    to other prompts (each prompt with the answer of the row before it), clamped to at least 0.

    Source: Ethayarajh et al. 2024, https://arxiv.org/abs/2402.01306, section 4 (the loss of KTO, where the weights are
    lambda_D and lambda_U), and the authors' `KTOTrainer.loss` in ContextualAI/HALOs.

    Raises `BadInput` on unequal shapes.
    """
    same_shape(log_prob_B=log_prob_B, ref_log_prob_B=ref_log_prob_B, desirable_B=desirable_B)
    ratio_B = upcast(log_prob_B) - upcast(ref_log_prob_B).detach()
    good_B = desirable_B.bool()
    # 1 - sigmoid(z) is sigmoid(-z), without cancellation
    loss_B = torch.where(
        good_B,
        desirable_weight * torch.sigmoid(-beta * (ratio_B - kl)),
        undesirable_weight * torch.sigmoid(-beta * (kl - ratio_B)),
    )
    return loss_B, beta * ratio_B.detach()
