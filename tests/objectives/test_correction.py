"""Weights by hand, and by exact enumeration what they correct."""

from __future__ import annotations

import itertools
from typing import Any, get_args

import pytest
import torch
from torch import Tensor

from tests.objectives.policies import log_probs_of, normal, sequences
from workbench.errors import BadInput
from workbench.objectives.correction import Bound, Correction, Level, correct, effective_sample_size, step_scale

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


def test_equal_policies_are_left_alone_to_the_bit() -> None:
    log_prob = normal(2, 3, seed=0)
    for level, bound in itertools.product(get_args(Level), get_args(Bound)):
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


def test_the_token_weight_is_biased_yet_nearer_than_none() -> None:
    errors = []
    for level in ("token", None):
        found, truth = expected_gradient(level)
        errors.append(float((found - truth).norm() / truth.norm()))
    assert 0.01 < errors[0] < errors[1]


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
     ({"high": 0.5}, r"high=0\.5")],
)  # fmt: skip
def test_bad_settings(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(BadInput, match=message):
        Correction(**settings)


def test_bad_shapes() -> None:
    with pytest.raises(BadInput, match="rollout_log_prob_BT has shape"):
        correct(OLD, torch.zeros(2, 2), MASK, Correction())
