"""Aggregate a loss (or a statistic) per token into one number for the minibatch. Suffixes: see `arguments`.

A minibatch is split into micro-batches and over ranks. The mean of the micro-batches' means is not the minibatch's
mean: tokens of short micro-batches would count more. So each micro-batch computes its *share*: its local sum, divided
by the denominator of the whole minibatch.

    whole = sum over ranks of sum over micro-batches of denominator(mask_BT, how, ...)
    loss  = aggregate(x_BT, mask_BT, how, whole)        # a share: values and gradients are summed, never averaged
"""

from __future__ import annotations

from typing import Literal, get_args

import torch
from torch import Tensor

from workbench.errors import BadInput
from workbench.objectives.arguments import same_shape, upcast
from workbench.support.validation import one_of

Aggregation = Literal["token-mean", "sequence-mean-token-mean", "sequence-mean-token-sum", "fixed-length"]


def denominator(mask_BT: Tensor, how: Aggregation, max_response_tokens: int | None = None) -> Tensor:
    """Return this micro-batch's part of the denominator, a float64 scalar; sum the parts over micro-batches and ranks.

        token-mean                  valid tokens
        sequence-mean-token-mean    sequences
        sequence-mean-token-sum     sequences
        fixed-length                sequences x max_response_tokens

    A sequence counts if it has a valid token, so rows that only pad a micro-batch change nothing.

    Raises `BadInput` on an unknown mode, or without a limit for fixed-length.
    """
    one_of("how", how, get_args(Aggregation))
    mask_BT = mask_BT.bool()
    if how == "token-mean":
        return mask_BT.sum().double()
    sequences = mask_BT.any(-1).sum().double()
    if how != "fixed-length":
        return sequences
    if max_response_tokens is None:
        raise BadInput("max_response_tokens=None", "fixed-length divides by it", "pass the limit of the rollouts")
    return sequences * max_response_tokens


def aggregate(x_BT: Tensor, mask_BT: Tensor, how: Aggregation, denominator: Tensor | float) -> Tensor:
    """Return this micro-batch's share of the minibatch's aggregate, a scalar in at least fp32.

        token-mean                  sum_i sum_t x / tokens                        DAPO, https://arxiv.org/abs/2503.14476
        sequence-mean-token-mean    sum_i (sum_t x / tokens of i) / sequences     GRPO, https://arxiv.org/abs/2402.03300
        sequence-mean-token-sum     sum_i sum_t x / sequences                     the response as one action
        fixed-length                sum_i sum_t x / (sequences x longest)         Dr. GRPO, https://arxiv.org/abs/2503.20783

    denominator: the sum of `denominator()` over all micro-batches and ranks of the minibatch. If it is 0, because the
    minibatch has no valid token, the share and its gradients are 0.

    Raises `BadInput` on unequal shapes or an unknown mode.
    """
    one_of("how", how, get_args(Aggregation))
    same_shape(mask_BT=mask_BT, x_BT=x_BT)
    mask_BT = mask_BT.bool()
    # A selection, not a product: infinite entries outside the mask must not leak in.
    sum_B = torch.where(mask_BT, upcast(x_BT), 0.0).sum(-1)
    if how == "sequence-mean-token-mean":
        sum_B = sum_B / mask_BT.sum(-1).clamp(min=1)
    # Every denominator is 0 or at least 1.
    return sum_B.sum() / torch.as_tensor(denominator, dtype=sum_B.dtype, device=sum_B.device).clamp(min=1)
