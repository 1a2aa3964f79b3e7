"""Macro actions: several tokens as one action, so that credit has fewer steps to travel. Suffixes: see `arguments`.

Here M counts the macro actions of the longest response.
"""

from __future__ import annotations

import torch
from torch import Tensor

from workbench.objectives.arguments import full, same_shape, tokenwise, within
from workbench.objectives.estimators import gae
from workbench.support.checked_calls import checked_call


@checked_call()
@torch.no_grad()
def macro_gae(
    token_rewards_BT: Tensor, values_BT: Tensor, mask_BT: Tensor, gamma: float, lam: float, tokens: int
) -> tuple[Tensor, Tensor]:
    """GAE over macro actions of `tokens` tokens (the last may be shorter); advantages and returns, both [B, T].

        r_m     = sum of r_t over the tokens of m
        V_m     = mean of V_t over the tokens of m
        delta_m = r_m + gamma V_{m+1} - V_m
        A_m     = delta_m + gamma lambda A_{m+1},     G_m = A_m + V_m

    Source: MA-PPO, Chai et al. 2024, https://arxiv.org/abs/2410.02743, with its termination by fixed n-grams and its
    "equal" weights of a macro action's values. Discounts count macro actions; inside one, rewards are summed as they
    are. Each token gets the advantage and the return of its macro action, so the losses are those of PPO. Only tokens
    of the mask are counted off. With tokens=1 it is `gae`, to the last bit.

    Raises `BadInput` as `gae` does, or on tokens < 1.
    """
    tokenwise(mask_BT)
    same_shape(mask_BT=mask_BT, token_rewards_BT=token_rewards_BT, values_BT=values_BT)
    within("tokens", tokens, 1)
    mask_BT = mask_BT.bool()
    which_BT = ((mask_BT.cumsum(-1) - 1) // tokens).clamp(min=0)
    macros = -(-mask_BT.shape[1] // tokens)

    def sums(x_BT: Tensor) -> Tensor:
        x_BT = torch.where(mask_BT, full(x_BT), 0.0)
        return x_BT.new_zeros(len(x_BT), macros).scatter_add(1, which_BT, x_BT)

    count_BM = sums(mask_BT)
    value_BM = sums(values_BT) / count_BM.clamp(min=1)
    advantages_BM, returns_BM = gae(sums(token_rewards_BT), value_BM, count_BM > 0, gamma, lam)
    return (
        torch.where(mask_BT, advantages_BM.gather(1, which_BT), 0.0),
        torch.where(mask_BT, returns_BM.gather(1, which_BT), 0.0),
    )
