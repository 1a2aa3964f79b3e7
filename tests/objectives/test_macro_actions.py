"""Against GAE itself, numbers by hand, and GAE on rows whose macro actions were made by hand."""

from __future__ import annotations

import pytest
import torch

from tests.expected import expect_error
from tests.objectives.policies import normal, random_masks
from workbench.errors import BadInput
from workbench.objectives.estimators import gae
from workbench.objectives.turns import RANDOM_TOKENS, fixed_ends, macro_gae, perplexity_ends, random_ends


def test_one_token_is_gae() -> None:
    rewards, values, mask = normal(12, 9, seed=0), normal(12, 9, seed=1), random_masks(12, 9, seed=2)
    for found, expected in zip(
        macro_gae(rewards, values, mask, 0.9, 0.8, fixed_ends(mask, 1)),
        gae(rewards, values, mask, 0.9, 0.8),
        strict=True,
    ):
        # a scatter packs the tokens of the mask together, which GAE skips over: nothing is rounded otherwise
        assert torch.equal(found, expected)


def test_by_hand() -> None:
    rewards = torch.tensor([[1.0, 2.0, 9.0, 3.0, 4.0, 5.0]])
    values = torch.tensor([[2.0, 4.0, 9.0, 1.0, 3.0, 6.0]])
    mask = torch.tensor([[1, 1, 0, 1, 1, 1]])
    advantages, returns = macro_gae(rewards, values, mask, gamma=0.5, lam=0.5, ends_BT=fixed_ends(mask, 2))
    # macro actions {0, 1}, {3, 4}, {5}: rewards 3, 7, 5; values 3, 2, 6
    last, middle = 5 - 6, 7 + 0.5 * 6 - 2
    a = [3 + 0.5 * 2 - 3 + 0.25 * (middle + 0.25 * last), middle + 0.25 * last, last]
    assert advantages.tolist() == [pytest.approx([a[0], a[0], 0, a[1], a[1], a[2]])]
    assert returns.tolist() == [pytest.approx([a[0] + 3, a[0] + 3, 0, a[1] + 2, a[1] + 2, a[2] + 6])]


@pytest.mark.parametrize("tokens", [2, 3, 50])
def test_is_gae_on_the_macro_actions(tokens: int) -> None:
    rewards, values, mask = normal(12, 9, seed=0), normal(12, 9, seed=1), random_masks(12, 9, seed=2)
    advantages, returns = macro_gae(rewards, values, mask, 0.9, 0.8, fixed_ends(mask, tokens))
    for i in range(12):
        where = mask[i].nonzero().flatten().split(tokens)
        if mask[i].any():
            r = torch.stack([rewards[i, part].sum() for part in where])[None]
            v = torch.stack([values[i, part].mean() for part in where])[None]
            for found, expected in zip((advantages, returns), gae(r, v, torch.ones_like(r), 0.9, 0.8), strict=True):
                for m, part in enumerate(where):
                    torch.testing.assert_close(found[i, part], expected[0, m].expand(len(part)))
        assert (advantages[i, ~mask[i]] == 0).all()


def test_random_lengths_are_those_of_the_authors_and_of_the_seed() -> None:
    mask = random_masks(400, 60, seed=5)
    ends = random_ends(mask, range(400))
    assert torch.equal(ends, random_ends(mask, range(400)))
    assert not (ends & ~mask).any()
    counts = dict.fromkeys(RANDOM_TOKENS, 0)
    for i in range(400):
        last = ends[i, mask[i]].nonzero()[:, 0].tolist()
        for before, end in zip([-1, *last], last, strict=False):
            counts[end - before] += 1
    # a longer one reaches over the end of its response more often
    assert all(n > 0.6 * counts[1] for n in counts.values())
    shifted = random_ends(mask[1:], range(1, 400))
    assert torch.equal(shifted, ends[1:])


def test_perplexity_ends_by_hand() -> None:
    log_prob = torch.tensor([[-3.0, -2.0, 9.0, -1.0, -4.0, -4.0, -5.0, -1.0]])
    mask = torch.tensor([[1, 1, 0, 1, 1, 1, 1, 0]])
    # likelier, likelier, likelier | less, equal | less
    assert perplexity_ends(log_prob, mask).int().tolist() == [[0, 0, 0, 1, 0, 1, 0, 0]]


def test_any_endings() -> None:
    rewards, values = torch.tensor([[1.0, 2.0, 3.0, 4.0]]), torch.tensor([[1.0, 3.0, 5.0, 7.0]])
    ends = torch.tensor([[0, 0, 1, 0]])
    advantages, returns = macro_gae(rewards, values, torch.ones(1, 4), gamma=1.0, lam=0.0, ends_BT=ends)
    assert advantages.tolist() == [[6.0 + 7.0 - 3.0] * 3 + [4.0 - 7.0]]
    assert returns.tolist() == [[13.0] * 3 + [4.0]]


def test_bad_input() -> None:
    x = torch.zeros(2, 3)
    with expect_error(BadInput, value="seeds"):
        random_ends(x, [1])
    with expect_error(BadInput, value="values_BT has shape"):
        macro_gae(x, torch.zeros(2, 1), x, 1.0, 1.0, x)
