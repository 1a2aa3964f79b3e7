"""Advantages for actions of several tokens. A turn is all that the policy says between two answers of its environment;
a macro action is any run of tokens, so that credit passes through fewer steps. Suffixes: see `arguments`.

K: the turns of the response with the most turns. ends_BT: true on the last token of each turn, inside or outside the
mask. A turn without a token inside the mask is no time step, and its reward does not count.

M: the macro actions of the response with the most. Source: MA-PPO, Chai et al. 2024, https://arxiv.org/abs/2410.02743.
The paper's termination by parsing needs a parser and is not here; but `macro_gae` takes any ends.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from workbench.errors import BadInput
from workbench.objectives.arguments import one_per_row, same_shape, upcast
from workbench.objectives.estimators import gae, less_baseline


@torch.no_grad()
def turn_gae(
    token_rewards_BT: Tensor,
    values_BT: Tensor,
    mask_BT: Tensor,
    ends_BT: Tensor,
    gamma: float,
    lam: float,
    bootstrap_B: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return advantages and returns of GAE over turns, both [B, T]; 0 outside the mask.

        r_k     = sum of r_t over the tokens of turn k inside the mask
        V_k     = V_t at the first of these tokens: the value of the conversation before the turn
        delta_k = r_k + gamma V_{k+1} - V_k
        A_k     = delta_k + gamma lambda A_{k+1},     G_k = A_k + V_k

    Source: Schulman et al. 2016, https://arxiv.org/abs/1506.02438, equation 16, with a turn as the action, as in the
    utterance-level critic of ArCHer, Zhou et al. 2024, https://arxiv.org/abs/2402.19446. Each token gets the advantage
    and the return of its turn. Values inside a turn do not count. bootstrap_B: as in `gae`. If each turn has one token,
    the result is bitwise that of `gae`.

    Raises `BadInput` as `gae` does, or if a token inside the mask comes after the last end.
    """
    same_shape(mask_BT=mask_BT, token_rewards_BT=token_rewards_BT, values_BT=values_BT, ends_BT=ends_BT)
    inside_BT, ends_BT = mask_BT.bool(), ends_BT.bool()
    turn_BT = ends_BT.cumsum(-1) - ends_BT.long()
    if bool((inside_BT & (turn_BT >= ends_BT.sum(-1, keepdim=True))).any()):
        raise BadInput(
            "mask_BT has tokens after the last end in ends_BT",
            "each token that the policy chose must be in a turn, and each turn must have an end",
        )
    rewards_BT = torch.where(inside_BT, upcast(token_rewards_BT), 0.0)
    sums_BK = torch.zeros_like(rewards_BT).scatter_add(1, turn_BT, rewards_BT)
    has_BK = torch.zeros_like(sums_BK).scatter_add(1, turn_BT, inside_BT.to(sums_BK)) > 0
    never = mask_BT.shape[1]
    places_T = torch.arange(never, device=mask_BT.device)
    first_BK = torch.full(sums_BK.shape, never, device=mask_BT.device)
    first_BK = first_BK.scatter_reduce(1, turn_BT, torch.where(inside_BT, places_T, never), "amin")
    value_BK = upcast(values_BT).gather(1, first_BK.clamp(max=max(never - 1, 0))) if never else upcast(values_BT)
    return _of_tokens(gae(sums_BK, value_BK, has_BK, gamma, lam, bootstrap_B), turn_BT, inside_BT)


@torch.no_grad()
def turn_reinforce(
    token_rewards_BT: Tensor, mask_BT: Tensor, ends_BT: Tensor, gamma: float, baseline_B: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return advantages (reward to go of turns minus a baseline) and returns, both [B, T]; 0 outside the mask.

        A_t = G_k - b,     G_k = r_k + gamma G_{k+1}

    k: the turn of token t; gamma is applied per turn. baseline_B: one number per row, as in `reinforce`.

    Raises `BadInput` as `turn_gae` does.
    """
    zeros_BT = torch.zeros_like(upcast(token_rewards_BT))
    returns_BT, _ = turn_gae(token_rewards_BT, zeros_BT, mask_BT, ends_BT, gamma, 1.0)
    return less_baseline(returns_BT, mask_BT, baseline_B)


RANDOM_TOKENS = (1, 2, 3, 5, 10)  # as in the authors' code


@torch.no_grad()
def macro_gae(
    token_rewards_BT: Tensor, values_BT: Tensor, mask_BT: Tensor, gamma: float, lam: float, ends_BT: Tensor
) -> tuple[Tensor, Tensor]:
    """Return advantages and returns of GAE over macro actions, both [B, T].

        r_m     = sum of r_t over the tokens of m
        V_m     = mean of V_t over the tokens of m
        delta_m = r_m + gamma V_{m+1} - V_m
        A_m     = delta_m + gamma lambda A_{m+1},     G_m = A_m + V_m

    V_m uses the paper's "equal" weights. gamma is applied per macro action; inside one, rewards are summed without
    discount, as in the paper. (The authors' code uses the mean of a macro action's token rewards, and makes the last
    token its own macro action, so that the score is not divided.) Each token gets the advantage and the return of its
    macro action, so PPO's losses can be used.

    ends_BT: true on the last token of each macro action; tokens after the last end form one more. Only tokens inside
    the mask are used. If every token is an end, the result is bitwise that of `gae`.

    Raises `BadInput` as `gae` does.
    """
    same_shape(mask_BT=mask_BT, token_rewards_BT=token_rewards_BT, values_BT=values_BT, ends_BT=ends_BT)
    mask_BT = mask_BT.bool()
    ends_BT = ends_BT.bool() & mask_BT
    which_BT = ends_BT.cumsum(-1) - ends_BT.long()
    macros = int(which_BT.max()) + 1 if which_BT.numel() else 0

    def sums(x_BT: Tensor) -> Tensor:
        x_BT = torch.where(mask_BT, upcast(x_BT), 0.0)
        return x_BT.new_zeros(len(x_BT), macros).scatter_add(1, which_BT, x_BT)

    count_BM = sums(mask_BT)
    value_BM = sums(values_BT) / count_BM.clamp(min=1)
    return _of_tokens(gae(sums(token_rewards_BT), value_BM, count_BM > 0, gamma, lam), which_BT, mask_BT)


def _of_tokens(of_actions: tuple[Tensor, Tensor], which_BT: Tensor, mask_BT: Tensor) -> tuple[Tensor, Tensor]:
    """Copy the advantages and returns of actions to all their tokens; 0 outside the mask."""
    advantages_BT, returns_BT = (torch.where(mask_BT, x_BK.gather(1, which_BT), 0.0) for x_BK in of_actions)
    return advantages_BT, returns_BT


def fixed_ends(mask_BT: Tensor, tokens: int) -> Tensor:
    """Return the ends of fixed n-grams of `tokens` tokens inside the mask, bool [B, T]."""
    mask_BT = mask_BT.bool()
    return mask_BT & (mask_BT.cumsum(-1) % tokens == 0)


def random_ends(mask_BT: Tensor, seeds: Sequence[int]) -> Tensor:
    """Return the ends of n-grams with random lengths, uniform over 1, 2, 3, 5 and 10, bool [B, T].

    seeds: one per row. (The authors shuffle a list with equally many of each length; tokens after its end are one macro
    action.) Raises `BadInput` unless there are as many seeds as rows.
    """
    one_per_row("seeds", torch.empty(len(seeds)), mask_BT)
    mask_BT = mask_BT.bool()
    ends_BT = torch.zeros_like(mask_BT)
    for i, seed in enumerate(seeds):
        places = mask_BT[i].nonzero()[:, 0]
        draws = torch.randint(len(RANDOM_TOKENS), (len(places),), generator=torch.Generator().manual_seed(seed))
        last = torch.tensor(RANDOM_TOKENS)[draws].cumsum(0) - 1
        ends_BT[i, places[last[last < len(places)].to(places.device)]] = True
    return ends_BT


@torch.no_grad()
def perplexity_ends(log_prob_BT: Tensor, mask_BT: Tensor) -> Tensor:
    """Return the ends of macro actions, bool [B, T]: a macro action lasts while perplexity falls, and ends if the next
    token inside the mask is less likely.

    log_prob_BT: the reference's, as in the authors' code (where a macro action ends one token earlier than in the
    paper). Raises `BadInput` on unequal shapes.
    """
    same_shape(mask_BT=mask_BT, log_prob_BT=log_prob_BT)
    mask_BT = mask_BT.bool()
    place_BT = (mask_BT.cumsum(-1) - 1).clamp(min=0)  # among the tokens of the mask
    inside_BT = torch.where(mask_BT, upcast(log_prob_BT), 0.0)
    packed_BT = torch.zeros_like(inside_BT).scatter_add(1, place_BT, inside_BT)
    rises_BT = torch.zeros_like(mask_BT)
    rises_BT[:, :-1] = packed_BT[:, 1:] < packed_BT[:, :-1]
    return rises_BT.gather(1, place_BT) & mask_BT
