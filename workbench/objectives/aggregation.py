"""From a loss (or a statistic) per token to one number for the minibatch. Suffixes: see `arguments`.

A minibatch is cut into micro-batches and spread over ranks. The mean of their means is not its mean: it weighs the
tokens of short micro-batches more. So each micro-batch gives its *share*: a local sum over the denominator of the whole
minibatch.

    whole = sum over ranks of sum over micro-batches of denominator(mask_BT, how, ...)
    loss  = aggregate(x_BT, mask_BT, how, whole)        # a share: values and gradients are summed, never averaged
"""

from __future__ import annotations

from typing import Literal, get_args

import torch
from torch import Tensor

from workbench.errors import BadInput
from workbench.objectives.arguments import full, same_shape, tokenwise, within
from workbench.support.validation import one_of

Aggregation = Literal["token-mean", "sequence-mean-token-mean", "sequence-mean-token-sum", "fixed-length"]
AGGREGATIONS: tuple[Aggregation, ...] = get_args(Aggregation)


def denominator(mask_BT: Tensor, how: Aggregation, max_response_tokens: int | None = None) -> Tensor:
    """This micro-batch's part of the denominator, a float64 scalar: add the parts up over micro-batches and ranks.

        token-mean                  valid tokens
        sequence-mean-token-mean    sequences
        sequence-mean-token-sum     sequences
        fixed-length                sequences x max_response_tokens

    A sequence counts when it has a valid token, so rows that only fill up a micro-batch change nothing.

    Raises `BadInput` on an unknown mode, or when "fixed-length" lacks `max_response_tokens`.
    """
    one_of("how", how, AGGREGATIONS)
    tokenwise(mask_BT)
    mask_BT = mask_BT.bool()
    if how == "token-mean":
        return mask_BT.sum().double()
    sequences = mask_BT.any(-1).sum().double()
    if how != "fixed-length":
        return sequences
    if max_response_tokens is None:
        raise BadInput("max_response_tokens=None", "fixed-length divides by the longest response that was allowed")
    within("max_response_tokens", max_response_tokens, 1)
    return sequences * max_response_tokens


def aggregate(x_BT: Tensor, mask_BT: Tensor, how: Aggregation, denominator: Tensor | float) -> Tensor:
    """This micro-batch's share of the minibatch's aggregate, a scalar of at least fp32.

        token-mean                  sum_i sum_t x / tokens                        DAPO, https://arxiv.org/abs/2503.14476
        sequence-mean-token-mean    sum_i (sum_t x / tokens of i) / sequences     GRPO, https://arxiv.org/abs/2402.03300
        sequence-mean-token-sum     sum_i sum_t x / sequences                     the response as one action
        fixed-length                sum_i sum_t x / (sequences x longest)         Dr. GRPO, https://arxiv.org/abs/2503.20783

    denominator: the sum of `denominator()` over all micro-batches and ranks of the minibatch. Where that is 0, for want
    of a valid token anywhere, the share is 0 and its gradients are 0.

    Raises `BadInput` on unequal shapes or an unknown mode.
    """
    one_of("how", how, AGGREGATIONS)
    tokenwise(mask_BT)
    same_shape(mask_BT=mask_BT, x_BT=x_BT)
    mask_BT = mask_BT.bool()
    # A selection, not a product: what stands outside the mask must not leak in, were it infinite.
    sum_B = torch.where(mask_BT, full(x_BT), 0.0).sum(-1)
    if how == "sequence-mean-token-mean":
        sum_B = sum_B / mask_BT.sum(-1).clamp(min=1)
    # Every denominator is 0 or at least 1.
    return sum_B.sum() / torch.as_tensor(denominator, dtype=sum_B.dtype, device=sum_B.device).clamp(min=1)
