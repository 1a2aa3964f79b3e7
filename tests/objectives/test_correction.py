"""Weights by hand, and by exact enumeration what they correct."""

from __future__ import annotations

import itertools
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any, get_args

import pytest
import torch
from torch import Tensor

from tests.expected import expect_error
from tests.objectives.policies import log_probs_of, normal, sequences
from workbench.errors import BadInput
from workbench.objectives.correction import (
    Bound,
    Correction,
    Level,
    correct,
    effective_sample_size,
    second_moment_cut,
    step_scale,
)
from workbench.objectives.losses import ppo_loss

OLD = torch.tensor([[2.0, 0.25, 1.0], [4.0, 1.0, 7.0]]).log()
MASK = torch.tensor([[1, 1, 1], [1, 1, 0]])


def weights(**settings: Any) -> tuple[Tensor, Tensor]:
    return correct(OLD, torch.zeros(2, 3), MASK, Correction(**settings))


def test_tokens_by_hand() -> None:
    weight, bounded = weights(high=3.0)
    torch.testing.assert_close(weight, torch.tensor([[2.0, 0.25, 1.0], [3.0, 1.0, 0.0]]))
    assert bounded.tolist() == [[False] * 3, [True, False, False]]
    weight, bounded = weights(bound="mask", low=0.5, high=3.0)
    torch.testing.assert_close(weight, torch.tensor([[2.0, 0.0, 1.0], [0.0, 1.0, 0.0]]))
    assert bounded.tolist() == [[False, True, False], [True, False, False]]


def test_sequences_by_hand() -> None:
    weight, _ = weights(level="sequence", high=10.0)
    torch.testing.assert_close(weight, torch.tensor([[0.5] * 3, [4.0, 4.0, 0.0]]))
    weight, bounded = weights(level="geometric", bound="mask", low=0.9, high=1.5)
    torch.testing.assert_close(weight, torch.zeros(2, 3))  # the cube root of a half, and 2
    assert bounded.tolist() == MASK.bool().tolist()
    weight, _ = weights(level="geometric", high=1.5)
    torch.testing.assert_close(weight, torch.tensor([[0.5 ** (1 / 3)] * 3, [1.5, 1.5, 0.0]]))


@pytest.mark.parametrize("seed", range(5))
def test_the_second_moment_of_what_is_left_is_within_its_bound(seed: int) -> None:
    """The tokens with the largest squares go, one by one, until the mean of the others is small enough; the weights of
    these are whole. Any split over ranks leaves out the same."""
    old, rollout = 0.3 * normal(6, 7, seed=seed), 0.3 * normal(6, 7, seed=seed + 50)
    mask = normal(6, 7, seed=seed + 100) > -1
    log = (old - rollout).double()
    kept = sorted(log[mask].square().tolist())
    while sum(kept) / len(kept) > 0.04:
        kept.pop()
    weight, bounded = correct(old, rollout, mask, Correction(bound="second_moment"))
    assert 0 < int(bounded.sum()) == int(mask.sum()) - len(kept)
    left = mask & ~bounded
    assert sorted(log[left].square().tolist()) == pytest.approx(kept)
    torch.testing.assert_close(weight, torch.where(left, (old - rollout).exp(), 0.0))
    squares = log.square()
    parts = [squares[rows][mask[rows]] for rows in (slice(0, 2), slice(2, 6))]
    sums, barrier = dict[int, Tensor](), threading.Barrier(2)

    def cut_of(rank: int) -> Tensor:
        def summed(mine: Tensor) -> Tensor:
            sums[rank] = mine
            barrier.wait()
            total = sums[0] + sums[1]
            barrier.wait()
            return total

        return second_moment_cut(parts[rank], 0.04, summed)

    with ThreadPoolExecutor(2) as ranks:
        for cut in ranks.map(cut_of, (0, 1)):
            assert ((squares > cut) & mask).equal(bounded)
    assert not correct(old, rollout, mask, Correction(bound="second_moment", second_moment=9.0)).bounded_BT.any()


def test_decoupled_ppo_is_ppo_around_the_proximal_policy() -> None:
    """AReaL's equation 5, enumerated: under the behaviour policy the weighted loss has the gradient that PPO's has
    under the proximal policy, clips included. PPO that clips around the behaviour policy has another."""
    actions, logits = sequences()
    advantage = normal(9, seed=3)[:, None].expand(9, 2)
    proximal = log_probs_of(actions, logits.detach() + 0.3 * normal(4, 3, seed=4))
    behaviour = log_probs_of(actions, logits.detach() + 0.6 * normal(4, 3, seed=5))
    weight = correct(proximal, behaviour, torch.ones(9, 2), Correction(level="sequence", high=1e6)).weight_BT

    def gradient(drawn: Tensor, old: Tensor, weight: Tensor | float) -> Tensor:
        loss, stats = ppo_loss(log_probs_of(actions, logits), old, advantage)
        assert stats.clipped_BT.any()
        (found,) = torch.autograd.grad((drawn.sum(-1).exp()[:, None] * weight * loss).sum(), logits)
        return found

    wanted = gradient(proximal, proximal, 1.0)
    torch.testing.assert_close(gradient(behaviour, proximal, weight), wanted)
    coupled = gradient(behaviour, behaviour, 1.0)
    assert (coupled - wanted).norm() > 0.1 * wanted.norm()


def test_equal_policies_are_left_alone_to_the_bit() -> None:
    log_prob = normal(2, 3, seed=0)
    for level, bound in itertools.product(get_args(Level), get_args(Bound)):
        if bound == "second_moment" and level != "token":
            continue
        weight, bounded = correct(log_prob, log_prob, MASK, Correction(level=level, bound=bound))
        assert torch.equal(weight, MASK.to(weight.dtype))
        assert not bounded.any()


def test_no_gradient_and_no_leak() -> None:
    old = OLD.clone().requires_grad_()
    assert not correct(old, torch.zeros(2, 3), MASK, Correction()).weight_BT.requires_grad
    far = torch.where(MASK.bool(), OLD, float("nan"))
    assert torch.equal(correct(far, torch.zeros(2, 3), MASK, Correction()).weight_BT, weights()[0])
    assert correct(OLD + 1000, torch.zeros(2, 3), MASK, Correction(high=1e9)).weight_BT.isfinite().all()


def expected_gradient(level: Level | None) -> tuple[Tensor, Tensor]:
    """E over sequences of another policy than the trainer's of w A grad log pi, enumerated; and the trainer's truth."""
    actions, logits = sequences()
    scores, engine = normal(9, seed=8), log_probs_of(actions, logits.detach() + 0.4 * normal(4, 3, seed=9))
    log_probs = log_probs_of(actions, logits)
    drawn = engine.sum(-1).exp()
    weight = torch.ones(9, 2)
    if level is not None:
        weight = correct(log_probs.detach(), engine, torch.ones(9, 2), Correction(level=level, high=1e6)).weight_BT
    (found,) = torch.autograd.grad((drawn[:, None] * weight * scores[:, None] * log_probs).sum(), logits)
    (truth,) = torch.autograd.grad((log_probs_of(actions, logits).sum(-1).exp() * scores).sum(), logits)
    return found, truth


def test_the_sequence_weight_makes_the_gradient_unbiased() -> None:
    found, truth = expected_gradient("sequence")
    torch.testing.assert_close(found, truth)


@pytest.mark.parametrize(
    ("weight", "share"), [([3.0] * 8, 1.0), ([5.0, 0.0, 0.0, 0.0], 0.25), ([1.0, 3.0], 0.8), ([0.0, 0.0], 0.0)]
)
def test_effective_sample_size(weight: list[float], share: float) -> None:
    assert effective_sample_size(sum(weight), sum(w * w for w in weight), len(weight)) == pytest.approx(share)


def test_step_scale() -> None:
    assert step_scale(1.0, 1.0) == 1.0
    assert step_scale(0.25, 1.0) == 0.5
    assert step_scale(0.2, 0.8) == pytest.approx(0.5)
    assert step_scale(0.9, 0.8) == 1.0
    assert step_scale(0.0, 0.8) == 0.0
    for wrong in (0.0, 1.5):
        with pytest.raises(BadInput, match=f"reference_size={wrong}"):
            Correction(reference_size=wrong)


@pytest.mark.parametrize(
    ("settings", "message"),
    [({"level": "word"}, "level='word'"), ({"bound": "clip"}, "bound='clip'"), ({"low": 1.5}, r"low=1\.5"),
     ({"high": 0.5}, r"high=0\.5"), ({"second_moment": 0.1}, r"second_moment=0\.1 with bound='truncate'"),
     ({"bound": "second_moment", "level": "sequence"}, "leave level, low and high out"),
     ({"bound": "second_moment", "second_moment": 0.0}, r"second_moment=0\.0. must be a number above 0")],
)  # fmt: skip
def test_bad_settings(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(BadInput, match=message):
        Correction(**settings)


def test_bad_shapes() -> None:
    with expect_error(BadInput, value="rollout_log_prob_BT has shape"):
        correct(OLD, torch.zeros(2, 2), MASK, Correction())
