"""Against GAE itself, numbers by hand, and GAE on rows whose macro actions were made by hand."""

from __future__ import annotations

import pytest
import torch

from tests.objectives.policies import normal, random_masks
from workbench.errors import BadInput
from workbench.objectives.estimators import gae
from workbench.objectives.macro_actions import macro_gae


def test_one_token_is_gae() -> None:
    rewards, values, mask = normal(12, 9, seed=0), normal(12, 9, seed=1), random_masks(12, 9, seed=2)
    for found, expected in zip(
        macro_gae(rewards, values, mask, 0.9, 0.8, 1), gae(rewards, values, mask, 0.9, 0.8), strict=True
    ):
        # a scatter packs the tokens of the mask together, which GAE skips over: nothing is rounded otherwise
        assert torch.equal(found, expected)


def test_by_hand() -> None:
    rewards = torch.tensor([[1.0, 2.0, 9.0, 3.0, 4.0, 5.0]])
    values = torch.tensor([[2.0, 4.0, 9.0, 1.0, 3.0, 6.0]])
    mask = torch.tensor([[1, 1, 0, 1, 1, 1]])
    advantages, returns = macro_gae(rewards, values, mask, gamma=0.5, lam=0.5, tokens=2)
    # macro actions {0, 1}, {3, 4}, {5}: rewards 3, 7, 5; values 3, 2, 6
    last, middle = 5 - 6, 7 + 0.5 * 6 - 2
    a = [3 + 0.5 * 2 - 3 + 0.25 * (middle + 0.25 * last), middle + 0.25 * last, last]
    assert advantages.tolist() == [pytest.approx([a[0], a[0], 0, a[1], a[1], a[2]])]
    assert returns.tolist() == [pytest.approx([a[0] + 3, a[0] + 3, 0, a[1] + 2, a[1] + 2, a[2] + 6])]


@pytest.mark.parametrize("tokens", [2, 3, 50])
def test_is_gae_on_the_macro_actions(tokens: int) -> None:
    rewards, values, mask = normal(12, 9, seed=0), normal(12, 9, seed=1), random_masks(12, 9, seed=2)
    advantages, returns = macro_gae(rewards, values, mask, 0.9, 0.8, tokens)
    for i in range(12):
        where = mask[i].nonzero().flatten().split(tokens)
        if mask[i].any():
            r = torch.stack([rewards[i, part].sum() for part in where])[None]
            v = torch.stack([values[i, part].mean() for part in where])[None]
            for found, expected in zip((advantages, returns), gae(r, v, torch.ones_like(r), 0.9, 0.8), strict=True):
                for m, part in enumerate(where):
                    torch.testing.assert_close(found[i, part], expected[0, m].expand(len(part)))
        assert (advantages[i, ~mask[i]] == 0).all()


def test_bad_input() -> None:
    x = torch.zeros(2, 3)
    with pytest.raises(BadInput, match="tokens=0"):
        macro_gae(x, x, x, 1.0, 1.0, 0)
    with pytest.raises(BadInput, match="values_BT has shape"):
        macro_gae(x, torch.zeros(2, 1), x, 1.0, 1.0, 2)
