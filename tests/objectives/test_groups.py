"""Against numbers by hand, and by exact enumeration of a bandit."""

from __future__ import annotations

import pytest
import torch

from tests.expected import expect_error
from tests.objectives.policies import normal
from workbench.errors import BadInput
from workbench.objectives.groups import (
    group_mean,
    grpo,
    grpo_batch_std,
    off_policy_baseline,
    process_advantages,
    rloo,
    step_scores,
    with_variance,
)


class TestGroups:
    scores = torch.tensor([1.0, 5.0, 3.0, 7.0, 0.1, 0.1, 0.1, 2.0])
    group = torch.tensor([900, -4, 900, -4, 7, 7, 7, 900])

    def test_grpo_by_hand(self) -> None:
        # group 900: 1, 3, 2 with mean 2 and deviation 1; group -4: 5, 7 with mean 6 and deviation sqrt(2)
        expected = torch.tensor([-1.0, -(0.5**0.5), 1.0, 0.5**0.5, 0.0, 0.0, 0.0, 0.0])
        torch.testing.assert_close(grpo(self.scores, self.group, eps=0.0)[[0, 1, 2, 3, 7]], expected[[0, 1, 2, 3, 7]])
        torch.testing.assert_close(grpo(self.scores, self.group), expected, rtol=1e-5, atol=0)
        assert grpo(self.scores, self.group, scale_by_std=False)[:4].tolist() == [-1.0, -1.0, 1.0, 1.0]

    def test_the_batch_std_by_hand(self) -> None:
        scores, groups = torch.tensor([1.0, 0.0, 3.0, 3.0, 5.0]), torch.tensor([4, 4, 7, 7, 9])
        centred = torch.tensor([0.5, -0.5, 0.0, 0.0, 0.0])
        torch.testing.assert_close(grpo_batch_std(scores, groups), centred / (scores.std() + 1e-6))
        assert grpo_batch_std(torch.tensor([2.0]), torch.tensor([1])).tolist() == [0.0]

    def test_rloo_by_hand(self) -> None:
        assert rloo(self.scores, self.group).tolist() == [-1.5, -2.0, 1.5, 2.0, 0.0, 0.0, 0.0, 0.0]

    def test_order_and_ids_do_not_matter(self) -> None:
        scores, group = normal(24, seed=0), torch.arange(24) % 5
        order = torch.randperm(24, generator=torch.Generator().manual_seed(1))
        for advantage in (grpo, rloo):
            torch.testing.assert_close(
                advantage(scores[order], 10**9 - 3 * group[order]), advantage(scores, group)[order]
            )

    def test_equal_scores_give_exactly_nothing(self) -> None:
        for score in [0.1, -1e6 / 3, 1e-30]:
            for dtype in [torch.float32, torch.float64]:
                scores = torch.tensor([-1e7 / 7, score] * 7, dtype=dtype)
                group = torch.tensor([1, 0] * 7, dtype=torch.int32)
                for advantages in (grpo(scores, group), grpo(scores, group, scale_by_std=False), rloo(scores, group)):
                    assert torch.equal(advantages, torch.zeros(14, dtype=dtype))

    def test_group_of_one(self) -> None:
        scores, group = torch.tensor([5.0, 1.0, 2.0]), torch.tensor([3, 8, 8])
        assert grpo(scores, group)[0] == 0
        assert grpo(scores, group, scale_by_std=False)[0] == 0
        with expect_error(BadInput, value="group 3"):
            rloo(scores, group)

    def test_bad_input(self) -> None:
        for advantage in (grpo, rloo):
            with expect_error(BadInput, value=r"scores_N has shape \[3\], group_N has shape \[2\]"):
                advantage(torch.zeros(3), torch.zeros(2, dtype=torch.long))

    def test_group_mean_and_variance_by_hand(self) -> None:
        assert group_mean(self.scores, self.group).tolist() == pytest.approx([2, 6, 2, 6, 0.1, 0.1, 0.1, 2])
        assert with_variance(self.scores, self.group).tolist() == [True] * 4 + [False] * 3 + [True]


class TestOffPolicyBaseline:
    def test_by_hand(self) -> None:
        scores, group = torch.tensor([1.0, 4.0, 7.0]), torch.tensor([0, 0, 5])
        weights, norms = torch.tensor([2.0, 1.0, 3.0]), torch.tensor([3.0, 6.0, 1.0])
        # (4 * 3 * 1 + 1 * 6 * 4) / (4 * 3 + 1 * 6) = 2
        assert off_policy_baseline(scores, group, weights, norms).tolist() == pytest.approx([2.0, 2.0, 7.0])
        assert off_policy_baseline(scores, group, 0 * weights, norms).tolist() == pytest.approx([2.5, 2.5, 7.0])
        equal = off_policy_baseline(scores, group, torch.ones(3), torch.ones(3))
        torch.testing.assert_close(equal, group_mean(scores, group))

    def test_least_variance_of_all_baselines(self) -> None:
        """Enumerated: the variance of w g (R - b) over a bandit's arms drawn from an older policy, for every b tried.

        The older policy's probabilities are multiples of 1/20, so 20 samples hold each arm as often as expected, and
        the samples' baseline is the expectation's.
        """
        reward = torch.tensor([1.0, 0.0, 4.0, -2.0], dtype=torch.float64)
        drawn = torch.tensor([1, 4, 5, 10])
        logits = torch.tensor([0.3, -0.2, 0.9, 0.1], dtype=torch.float64, requires_grad=True)
        policy, old = logits.softmax(0).detach(), drawn / 20
        slopes = torch.eye(4, dtype=torch.float64) - policy  # d log pi(a) / d logits
        weights, norms = policy / old, slopes.square().sum(-1)
        arms = torch.repeat_interleave(torch.arange(4), drawn)
        best = off_policy_baseline(reward[arms], torch.zeros(20, dtype=torch.int64), weights[arms], norms[arms])[0]

        def moments_at(baseline: float) -> tuple[torch.Tensor, float]:
            estimate = weights[:, None] * slopes * (reward - baseline)[:, None]
            mean = (old[:, None] * estimate).sum(0)
            return mean, float((old * (estimate - mean).square().sum(-1)).sum())

        (truth,) = torch.autograd.grad((logits.softmax(0) * reward).sum(), logits)
        least = moments_at(float(best))
        torch.testing.assert_close(least[0], truth)  # any constant leaves it unbiased
        for other in (-2.0, 0.0, float((policy * reward).sum()), float(best) - 1e-3, float(best) + 1e-3, 4.0):
            mean, variance = moments_at(other)
            torch.testing.assert_close(mean, truth)
            assert variance > least[1]

    def test_bad_input(self) -> None:
        ones, group = torch.ones(3), torch.zeros(3, dtype=torch.int64)
        with expect_error(BadInput, value="norm2_N has shape"):
            off_policy_baseline(ones, group, ones, torch.ones(2))


class TestSteps:
    """Two responses to a prompt with steps of rewards 1, 0 and 2: mean 1, unbiased deviation 1."""

    ends_BT = torch.tensor([[0, 1, 0, 0, 1, 0], [0, 0, 1, 0, 0, 0], [0, 0, 0, 0, 0, 0]]).bool()
    rewards_BT = torch.tensor([[0.0, 1.0, 0.0, 0.25, -0.5, 0.25], [0.5, 0.5, 1.0, 0.0, 0.0, 0.0], [9.0] * 6])

    def test_the_reward_of_a_step_is_the_sum_over_its_tokens(self) -> None:
        assert step_scores(self.rewards_BT, self.ends_BT).tolist() == [1.0, 0.0, 2.0]

    def test_a_token_gets_the_normalised_rewards_of_the_steps_that_end_there_or_later(self) -> None:
        scores_S = step_scores(self.rewards_BT, self.ends_BT)
        normal_S = grpo(scores_S, torch.zeros(3).long(), eps=0.0)
        assert normal_S.tolist() == [0.0, -1.0, 1.0]
        expected = [[-1.0, -1.0, -1.0, -1.0, -1.0, 0.0], [1.0, 1.0, 1.0, 0.0, 0.0, 0.0], [0.0] * 6]
        assert process_advantages(normal_S, self.ends_BT).tolist() == expected

    def test_wrong_shapes(self) -> None:
        with expect_error(BadInput, rule="must be of 3 steps"):
            process_advantages(torch.zeros(2), self.ends_BT)
        with expect_error(BadInput, value="shape"):
            step_scores(self.rewards_BT[:2], self.ends_BT)
