"""Turns of a conversation as actions: what a policy says between two answers of its environment. Suffixes: see
`arguments`.

Here K counts the turns of the longest response. ends_BT: true on the last token of each turn, whatever the mask is
there. A turn of which no token is inside the mask takes no time, and its reward does not count.
"""

from __future__ import annotations

import torch
from torch import Tensor

from workbench.errors import BadInput
from workbench.objectives.arguments import full, one_per_row, same_shape, tokenwise
from workbench.objectives.estimators import gae


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
    """GAE over turns; advantages and returns, both [B, T]; 0 outside the mask.

        r_k     = sum of r_t over the tokens of turn k inside the mask
        V_k     = V_t at the first of them: the value of the conversation before the turn
        delta_k = r_k + gamma V_{k+1} - V_k
        A_k     = delta_k + gamma lambda A_{k+1},     G_k = A_k + V_k

    Source: Schulman et al. 2016, https://arxiv.org/abs/1506.02438, equation 16, with a turn as the action, as in the
    utterance-level critic of ArCHer, Zhou et al. 2024, https://arxiv.org/abs/2402.19446. Each token gets the advantage
    and the return of its turn. Values inside a turn do not count. bootstrap_B: as in `gae`. Where each turn has one
    token it is `gae`, to the last bit.

    Raises `BadInput` as `gae` does, or where a token inside the mask stands behind the last end.
    """
    turn_BT, sums_BK, has_BK = _turns(token_rewards_BT, mask_BT, ends_BT)
    same_shape(mask_BT=mask_BT, values_BT=values_BT)
    inside_BT, places_T = mask_BT.bool(), torch.arange(mask_BT.shape[1], device=mask_BT.device)
    never = mask_BT.shape[1]
    first_BK = torch.full(sums_BK.shape, never, device=mask_BT.device)
    first_BK = first_BK.scatter_reduce(1, turn_BT, torch.where(inside_BT, places_T, never), "amin")
    value_BK = full(values_BT).gather(1, first_BK.clamp(max=max(never - 1, 0))) if never else full(values_BT)
    advantages_BK, returns_BK = gae(sums_BK, value_BK, has_BK, gamma, lam, bootstrap_B)
    return (
        torch.where(inside_BT, advantages_BK.gather(1, turn_BT), 0.0),
        torch.where(inside_BT, returns_BK.gather(1, turn_BT), 0.0),
    )


@torch.no_grad()
def turn_reinforce(
    token_rewards_BT: Tensor, mask_BT: Tensor, ends_BT: Tensor, gamma: float, baseline_B: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """REINFORCE over turns: reward to go from a turn on, less a baseline, and returns, both [B, T]; 0 outside the mask.

        A_t = G_k - b,     G_k = r_k + gamma G_{k+1}

    k: the turn of token t; discounts count turns. baseline_B: one number a row, as in `reinforce`.

    Raises `BadInput` as `turn_gae` does.
    """
    zeros_BT = torch.zeros_like(full(token_rewards_BT))
    returns_BT, _ = turn_gae(token_rewards_BT, zeros_BT, mask_BT, ends_BT, gamma, 1.0)
    if baseline_B is None:
        return returns_BT, returns_BT
    one_per_row("baseline_B", baseline_B, mask_BT)
    return torch.where(mask_BT.bool(), returns_BT - full(baseline_B)[:, None], 0.0), returns_BT


def _turns(token_rewards_BT: Tensor, mask_BT: Tensor, ends_BT: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The turn of each token [B, T], the reward of each turn [B, K], and whether it has a token inside the mask."""
    tokenwise(mask_BT)
    same_shape(mask_BT=mask_BT, token_rewards_BT=token_rewards_BT, ends_BT=ends_BT)
    inside_BT, ends_BT = mask_BT.bool(), ends_BT.bool()
    turn_BT = ends_BT.cumsum(-1) - ends_BT.long()
    if bool((inside_BT & (turn_BT >= ends_BT.sum(-1, keepdim=True))).any()):
        raise BadInput(
            "mask_BT has tokens behind the last end of ends_BT",
            "each token that the policy chose is in a turn, which has an end",
        )
    rewards_BT = torch.where(inside_BT, full(token_rewards_BT), 0.0)
    sums_BK = torch.zeros_like(rewards_BT).scatter_add(1, turn_BT, rewards_BT)
    return turn_BT, sums_BK, torch.zeros_like(sums_BK).scatter_add(1, turn_BT, inside_BT.to(sums_BK)) > 0
