"""GAE and REINFORCE over turns: against those of tokens, numbers by hand, and an enumeration of a toy environment."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from torch import Tensor

from tests.expected import expect_error
from tests.objectives.policies import normal, random_masks
from workbench.errors import BadInput
from workbench.objectives.estimators import gae, reinforce
from workbench.objectives.turns import turn_gae, turn_reinforce

ENDS = torch.tensor([[0, 0, 1, 0, 1, 0, 1]])
MASK = torch.tensor([[0, 1, 1, 0, 1, 0, 1]])  # turns {1, 2}, {4}, {6}; the environment wrote 0, 3 and 5


def test_turns_of_one_token_are_gae() -> None:
    rewards, values, mask = normal(12, 9, seed=0), normal(12, 9, seed=1), random_masks(12, 9, seed=2)
    after = normal(12, 1, seed=3)[:, 0]
    for bootstrap in (None, after):
        found = turn_gae(rewards, values, mask, mask, 0.9, 0.8, bootstrap)
        assert all(map(torch.equal, found, gae(rewards, values, mask, 0.9, 0.8, bootstrap)))
    found = turn_reinforce(rewards, mask, mask, 0.9, after)
    assert all(map(torch.equal, found, reinforce(rewards, mask, 0.9, after)))


def test_by_hand() -> None:
    rewards = torch.tensor([[9.0, 1.0, 2.0, 9.0, 4.0, 9.0, 5.0]])
    values = torch.tensor([[9.0, 3.0, 9.0, 9.0, 1.0, 9.0, 6.0]])
    advantages, returns = turn_gae(rewards, values, MASK, ENDS, 0.5, 0.5, torch.tensor([8.0]))
    last = 5 + 0.5 * 8 - 6
    middle = 4 + 0.5 * 6 - 1 + 0.25 * last
    first = 3 + 0.5 * 1 - 3 + 0.25 * middle
    assert advantages.tolist() == [pytest.approx([0, first, first, 0, middle, 0, last])]
    assert returns.tolist() == [pytest.approx([0, first + 3, first + 3, 0, middle + 1, 0, last + 6])]
    to_go = [3 + 0.5 * (4 + 0.5 * 5), 4 + 0.5 * 5, 5]
    advantages, returns = turn_reinforce(rewards, MASK, ENDS, 0.5, torch.tensor([2.0]))
    assert returns.tolist() == [pytest.approx([0, to_go[0], to_go[0], 0, to_go[1], 0, to_go[2]])]
    assert advantages.tolist() == [pytest.approx([0, *[to_go[0] - 2] * 2, 0, to_go[1] - 2, 0, to_go[2] - 2])]


def test_what_the_environment_wrote_changes_nothing_and_gets_nothing() -> None:
    rewards, values = normal(1, 7, seed=0), normal(1, 7, seed=1)
    noise = torch.where(MASK.bool(), 0.0, 1e6)
    clean, spoilt = (turn_gae(rewards + x, values + x, MASK, ENDS, 0.9, 0.8) for x in (torch.zeros(1, 7), noise))
    assert all(map(torch.equal, clean, spoilt))
    assert (clean[0][~MASK.bool()] == 0).all()


def test_a_turn_that_is_masked_out_takes_no_time() -> None:
    rewards, values = normal(1, 7, seed=0), normal(1, 7, seed=1)
    without = MASK.clone()
    without[0, 4] = 0
    found = turn_gae(rewards, values, without, ENDS, 0.9, 0.8)[0]
    keep = [1, 2, 6]
    shorter = turn_gae(rewards[:, keep], values[:, keep], torch.ones(1, 3), torch.tensor([[0, 1, 1]]), 0.9, 0.8)[0]
    torch.testing.assert_close(found[:, keep], shorter)
    assert found[0, 4] == 0


def enumerated(chances: Tensor, scores: list[Tensor], gamma: float) -> Tensor:
    """The gradient of the expected discounted score by the logits of two turns of two tokens each, over all courses."""
    logits = chances.clone().requires_grad_()
    total = torch.zeros((), dtype=torch.float64)
    for course in product(range(2), repeat=4):
        chance = torch.stack([torch.log_softmax(logits[t], -1)[token] for t, token in enumerate(course)]).sum().exp()
        total = total + chance * (scores[0][course[:2]] + gamma * scores[1][course])
    (gradient,) = torch.autograd.grad(total, logits)
    return gradient


@pytest.mark.parametrize("estimator", ["gae", "reinforce"])
def test_the_expected_update_is_the_gradient_of_the_score(estimator: str) -> None:
    """Two turns of two tokens, rewards at the end of each; values are the true ones, any baseline stays unbiased."""
    generator = torch.Generator().manual_seed(0)
    chances = torch.randn(4, 2, generator=generator, dtype=torch.float64)
    scores = [torch.randn([2] * n, generator=generator, dtype=torch.float64) for n in (2, 4)]
    gamma, mask, ends = 0.7, torch.ones(1, 4), torch.tensor([[0, 1, 0, 1]])
    logits = chances.clone().requires_grad_()
    p = torch.softmax(chances, -1)
    second_AB = torch.einsum("abcd,c,d->ab", scores[1], p[2], p[3])
    start = torch.einsum("ab,a,b->", scores[0] + gamma * second_AB, p[0], p[1])
    total = torch.zeros((), dtype=torch.float64)
    for course in product(range(2), repeat=4):
        chosen = torch.stack([torch.log_softmax(logits[t], -1)[token] for t, token in enumerate(course)])
        rewards = torch.tensor([[0.0, scores[0][course[:2]], 0.0, scores[1][course]]], dtype=torch.float64)
        values = torch.tensor([[start, 1e3, second_AB[course[:2]], -1e3]], dtype=torch.float64)
        if estimator == "gae":
            advantages, _ = turn_gae(rewards, values, mask, ends, gamma, 0.6)
        else:
            advantages, _ = turn_reinforce(rewards, mask, ends, gamma, torch.tensor([5.0]))
        # the discounted objective weighs the second turn by gamma
        weights = torch.tensor([1.0, 1.0, gamma, gamma], dtype=torch.float64)
        total = total + chosen.sum().exp().detach() * (weights * advantages[0] * chosen).sum()
    (found,) = torch.autograd.grad(total, logits)
    torch.testing.assert_close(found, enumerated(chances, scores, gamma), atol=1e-9, rtol=1e-9)


def test_bad_input() -> None:
    x = torch.zeros(1, 7)
    with expect_error(BadInput, value="after the last end"):
        turn_gae(x, x, torch.ones(1, 7), torch.tensor([[0, 0, 1, 0, 0, 0, 0]]), 1.0, 1.0)
    with expect_error(BadInput, value="ends_BT has shape"):
        turn_gae(x, x, MASK, ENDS[:, :3], 1.0, 1.0)
    with expect_error(BadInput, value="values_BT has shape"):
        turn_gae(x, x[:, :3], MASK, ENDS, 1.0, 1.0)
    with expect_error(BadInput, value="baseline_B has shape"):
        turn_reinforce(x, MASK, ENDS, 1.0, torch.zeros(3))
