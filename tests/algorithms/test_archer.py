"""ArCHer on a two-turn environment: its targets by hand, the values that they lead to in closed form, its dataflow."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

import workbench as wb
from tests.calculator import SUMS, sums
from tests.cases import TINY, tiny_lab
from tests.expected import expect_error
from workbench.batches.columns import Ragged
from workbench.errors import BadInput

GAMMA = 0.8


class TwoTurns:
    """Rewards 0.25 and 1, whatever is said."""

    def reset(self, prompt: str) -> None:
        self.turns = 0

    def step(self, response: str) -> tuple[str, float, bool]:
        self.turns += 1
        return ("go on ", 0.25, False) if self.turns == 1 else ("", 1.0, True)


def sampling(**changes: Any) -> wb.Sampling:
    # an equals sign ends a turn: it is likely enough that none is cut
    bias = {**SUMS, 36: 17.0}
    return wb.Sampling(**{**sums(environment=TwoTurns, logit_bias=bias, max_new_tokens=64), **changes})


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[wb.Workbench]:
    with tiny_lab(
        "archer", tmp_path_factory.mktemp("runs"), backend="inline", models={"actor": TINY, "critic": TINY},
        training={"minibatches": 1, "learning_rate": 3e-3},
    ) as lab:  # fmt: skip
        yield lab


def rows(batch: wb.Batch, name: str) -> list[list[Any]]:
    column = batch.fetch([name])[name]
    assert isinstance(column, Ragged)
    return [row.tolist() for row in column.rows()]


def archer(lab: Any, **changes: Any) -> Any:
    return wb.ArCHer(lab, **{"prompts": 4, "samples": 2, "sampling": sampling(), "gamma": GAMMA, **changes})


def test_targets_and_advantages_are_one_step_differences_of_turns(lab: wb.Workbench) -> None:
    algo = archer(lab, critic_epochs=1)
    with lab.kept("actor", "critic"):
        algo.iterate()
    for stage, values_of in (("compute_targets", "compute_old_values"), ("compute_advantages", "compute_values")):
        batch = algo.made[stage]
        values, starts = rows(algo.made[values_of], "values"), rows(batch, "turn_starts")
        lines = zip(
            values, starts, rows(batch, "turn_ends"), rows(batch, "returns"), rows(batch, "advantages"), strict=True
        )
        for value, (first, second), ends, returns, advantages in lines:
            targets = [0.25 + GAMMA * value[second], 1.0]
            for start, end, target in zip((first, second), ends, targets, strict=True):
                assert returns[start:end] == pytest.approx([target] * (end - start), abs=1e-6)
                assert advantages[start:end] == pytest.approx([target - value[start]] * (end - start), abs=1e-6)
    # the policy is updated by the critic that has just been
    assert rows(algo.made["compute_values"], "values") != rows(algo.made["compute_old_values"], "values")


def test_the_critic_comes_to_the_values_of_the_two_turns(lab: wb.Workbench) -> None:
    """V(s_2) = 1 and V(s_1) = 0.25 + gamma: the fixed point of the targets."""
    algo = archer(lab)
    with lab.kept("actor", "critic"):
        for _ in range(12):
            algo.iterate()
        turns = algo.made["compute_values"].turns()
    for turn, value in ((0, 0.25 + GAMMA), (1, 1.0)):
        found = turns[turns.turn == turn].value
        assert float((found - value).abs().max()) < 0.1
    assert lab.last_metrics["compute_advantages"]["advantages/mean"] == pytest.approx(0, abs=0.1)


@pytest.mark.thorough
def test_it_learns_which_first_turn_makes_the_second_pay(lab: wb.Workbench) -> None:
    """The reward comes a turn later than the choice that earns it."""

    class Delayed:
        def reset(self, prompt: str) -> None:
            self.first: str | None = None

        def step(self, response: str) -> tuple[str, float, bool]:
            if self.first is None:
                self.first = response
                return " ", 0.0, False
            return "", float("7" in self.first), True

    one_digit = {24: 15.0, 30: 15.0}  # "1" and "7", each the end of a turn
    choice = sampling(environment=Delayed, logit_bias=one_digit, stop=("1", "7"))
    algo = archer(lab, prompts=8, samples=4, sampling=choice, critic_epochs=2, gamma=1.0)
    with lab.kept("actor", "critic"):
        history = algo.run(12)["generate_sequences/environment_rewards/mean"].tolist()
    assert history[0] < 0.8 < 0.95 < sum(history[-3:]) / 3  # half of the first turns are a 7 by chance


def test_it_needs_an_environment_and_a_critic(lab: wb.Workbench) -> None:
    with expect_error(BadInput, value=r"ArCHer\(sampling=\.\.\.\) without an environment"):
        wb.ArCHer(lab)
    with expect_error(BadInput, value="without reward"):
        archer(lab, reward=lambda environment_rewards: environment_rewards)
    with expect_error(BadInput, value="reward_weights=", rule="the environment's rewards have no components"):
        archer(lab, reward_weights={"right": 1.0})
    with expect_error(BadInput, value=r"ArCHer\.critic_epochs=0"):
        archer(lab, critic_epochs=0)
