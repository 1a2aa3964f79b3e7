"""Macro actions: several tokens as one action, so that credit has fewer steps to travel. Suffixes: see `arguments`.

Here M counts the macro actions of the longest response. Source: MA-PPO, Chai et al. 2024,
https://arxiv.org/abs/2410.02743. Its termination by parsing is left to who has a parser: `macro_gae` takes any endings.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from workbench.objectives.arguments import full, one_per_row, same_shape, tokenwise, within
from workbench.objectives.estimators import gae

RANDOM_TOKENS = (1, 2, 3, 5, 10)  # as the authors' code has them


@torch.no_grad()
def macro_gae(
    token_rewards_BT: Tensor, values_BT: Tensor, mask_BT: Tensor, gamma: float, lam: float, ends_BT: Tensor
) -> tuple[Tensor, Tensor]:
    """GAE over macro actions; advantages and returns, both [B, T].

        r_m     = sum of r_t over the tokens of m
        V_m     = mean of V_t over the tokens of m
        delta_m = r_m + gamma V_{m+1} - V_m
        A_m     = delta_m + gamma lambda A_{m+1},     G_m = A_m + V_m

    These are the "equal" weights of a macro action's values. Discounts count macro actions; inside one, rewards are
    summed as they are, as in the paper. (Its authors' code takes the mean of a macro action's token rewards, and makes
    the last token a macro action of its own, so that the score stays whole.) Each token gets the advantage and the
    return of its macro action, so the losses are those of PPO.

    ends_BT: true on the last token of each macro action; what is behind the last of them is one more. Only tokens of
    the mask are looked at. Where every token is an end it is `gae`, to the last bit.

    Raises `BadInput` as `gae` does.
    """
    tokenwise(mask_BT)
    same_shape(mask_BT=mask_BT, token_rewards_BT=token_rewards_BT, values_BT=values_BT, ends_BT=ends_BT)
    mask_BT = mask_BT.bool()
    ends_BT = ends_BT.bool() & mask_BT
    which_BT = ends_BT.cumsum(-1) - ends_BT.long()
    macros = int(which_BT.max()) + 1 if which_BT.numel() else 0

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


def fixed_ends(mask_BT: Tensor, tokens: int) -> Tensor:
    """The last of every `tokens` tokens of the mask, bool [B, T]: fixed n-grams. Raises `BadInput` on tokens < 1."""
    tokenwise(mask_BT)
    within("tokens", tokens, 1)
    mask_BT = mask_BT.bool()
    return mask_BT & (mask_BT.cumsum(-1) % tokens == 0)


def random_ends(mask_BT: Tensor, seeds: Sequence[int]) -> Tensor:
    """n-grams whose lengths are drawn, each of 1, 2, 3, 5 and 10 alike, bool [B, T].

    seeds: one a row, from 0 to 2^63 - 1. (The authors shuffle a list with equally many of each; what is behind its end
    is one macro action.) Raises `BadInput` unless there are as many seeds as rows.
    """
    tokenwise(mask_BT)
    one_per_row("seeds", torch.empty(len(seeds)), mask_BT)
    mask_BT = mask_BT.bool()
    ends_BT = torch.zeros_like(mask_BT)
    for i, seed in enumerate(seeds):
        within("seed", seed, 0, 2**63 - 1)
        places = mask_BT[i].nonzero()[:, 0]
        draws = torch.randint(len(RANDOM_TOKENS), (len(places),), generator=torch.Generator().manual_seed(seed))
        last = torch.tensor(RANDOM_TOKENS)[draws].cumsum(0) - 1
        ends_BT[i, places[last[last < len(places)].to(places.device)]] = True
    return ends_BT


@torch.no_grad()
def perplexity_ends(log_prob_BT: Tensor, mask_BT: Tensor) -> Tensor:
    """A macro action lasts while perplexity falls: it ends where the next token of the mask is less likely, bool
    [B, T].

    log_prob_BT: of the reference, as in the authors' code (which ends one token earlier than the paper says). Raises
    `BadInput` on unequal shapes.
    """
    tokenwise(mask_BT)
    same_shape(mask_BT=mask_BT, log_prob_BT=log_prob_BT)
    mask_BT = mask_BT.bool()
    place_BT = (mask_BT.cumsum(-1) - 1).clamp(min=0)  # among the tokens of the mask
    inside_BT = torch.where(mask_BT, full(log_prob_BT), 0.0)
    packed_BT = torch.zeros_like(inside_BT).scatter_add(1, place_BT, inside_BT)
    rises_BT = torch.zeros_like(mask_BT)
    rises_BT[:, :-1] = packed_BT[:, 1:] < packed_BT[:, :-1]
    return rises_BT.gather(1, place_BT) & mask_BT
