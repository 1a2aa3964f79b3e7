"""Credit by turns: from rollouts of several turns to advantages, a frame of turns, and an update."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

import workbench as wb
from tests.calculator import answer, segments, sums
from tests.cases import TINY, tiny_lab
from tests.expected import expect_error
from workbench.batches.columns import Ragged, Table
from workbench.errors import BadInput, UnknownColumn

BY_TURN = ("gae_turn", "reinforce_turn", "reinforce_turn_baseline")


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[wb.Workbench]:
    models = {"actor": TINY, "critic": TINY}
    runs = tmp_path_factory.mktemp("runs")
    with tiny_lab("credit", runs, backend="inline", models=models, training={"minibatches": 1}) as lab:
        yield lab


@pytest.fixture(scope="module")
def talk(lab: wb.Workbench) -> wb.Batch:
    """Conversations whose rewards are those of the environment, by turn."""
    batch = lab.actor.generate_sequences(lab.prompts.next(3), samples=2, seed=3, **sums(max_new_tokens=32))
    batch = lab.critic.compute_values(batch.rename(environment_rewards="rewards"), final=True)
    return lab.actor.compute_log_prob(batch)


def rows(batch: wb.Batch, name: str) -> list[list[Any]]:
    column = batch.fetch([name])[name]
    assert isinstance(column, Ragged)
    return [row.tolist() for row in column.rows()]


def spoilt(table: Table, names: tuple[str, ...]) -> Table:
    """With nonsense in these columns wherever the environment wrote."""
    mask, found = table["response_mask"], dict(table)
    assert isinstance(mask, Ragged) and not mask.values.all()
    for name in names:
        column = table[name]
        assert isinstance(column, Ragged)
        found[name] = column.like(torch.where(mask.values, column.values, 1e4))
    return found


def test_turns_lie_where_the_policy_wrote_them(lab: wb.Workbench, talk: wb.Batch) -> None:
    columns = zip(*(rows(talk, name) for name in ("turn_starts", "turn_ends", "turn_rewards", "rewards")), strict=True)
    turns: Any = talk.fetch(["turns"])["turns"]
    assert turns.tolist() == list(map(len, rows(talk, "turn_ends")))
    for parts, (starts, ends, given, rewards) in zip(segments(talk), columns, strict=True):
        edges = np.cumsum([len(part) for _, part in parts]).tolist()
        assert ends == [edge for edge, (mine, _) in zip(edges, parts, strict=True) if mine]
        assert starts == [edge - len(part) for edge, (mine, part) in zip(edges, parts, strict=True) if mine]
        assert given == [rewards[end - 1] for end in ends]


def test_two_turns_without_a_word_between_them_are_two(lab: wb.Workbench) -> None:
    class Silent:
        def step(self, response: str) -> tuple[None, float, bool]:
            return None, 1.0, False

    batch = lab.actor.generate_sequences(lab.prompts.next(2), **sums(environment=Silent, max_turns=3))
    assert all(all(row) for row in rows(batch, "response_mask"))
    assert rows(batch, "turn_rewards") == [[1.0] * 3] * 2
    assert [starts[1:] for starts in rows(batch, "turn_starts")] == [ends[:-1] for ends in rows(batch, "turn_ends")]
    frame = batch.turns()
    assert frame.turn.tolist() == [0, 1, 2] * 2 and set(frame.observation) == {""}


def test_a_frame_of_turns(lab: wb.Workbench, talk: wb.Batch) -> None:
    frame = talk.turns()
    assert list(frame) == ["conversation", "turn", "tokens", "text", "observation", "trained", "reward", "value"]
    values, starts = rows(talk, "values"), rows(talk, "turn_starts")
    for conversation in range(6):
        parts, of_one = segments(talk)[conversation], frame[frame.conversation == conversation]
        assert [*zip(of_one.observation, of_one.text, strict=True)] == [
            tuple(lab.decode(ids) for _, ids in parts[i : i + 2]) for i in range(0, len(parts), 2)
        ]
        assert of_one.value.tolist() == [values[conversation][start] for start in starts[conversation]]
        complete = [text for text in of_one.text if text.endswith("=")]
        assert of_one.reward.tolist()[: len(complete)] == pytest.approx([answer(text)[1] for text in complete])
    scored = lab.compute_advantages(talk, estimator="gae_turn", whiten_advantages=False).turns(rows=[4])
    assert set(scored.conversation) == {4}
    assert scored["return"].tolist() == pytest.approx((scored.advantage + scored.value).tolist(), abs=1e-5)
    once = lab.put({**talk.drop("rewards").fetch(), "rewards": torch.arange(6.0)}).turns()
    assert once.groupby("conversation").reward.apply(list).map(lambda x: x[-1] == sum(x)).all()
    assert talk.drop("rewards").turns().reward.tolist() == frame.reward.tolist()


def test_gae_over_turns_by_hand(lab: wb.Workbench, talk: wb.Batch) -> None:
    gamma, lam = 0.9, 0.8
    after: Any = talk.fetch(["final_values", "finished"])
    frame = talk.turns()
    made = lab.compute_advantages(
        talk, estimator="gae_turn", gamma=gamma, lam=lam, bootstrap=True, whiten_advantages=False
    )
    for row, (found, starts, mask) in enumerate(
        zip(*(rows(made, name) for name in ("advantages", "turn_starts", "response_mask")), strict=True)
    ):
        of_one = frame[frame.conversation == row]
        following = 0.0 if after["finished"][row] else float(after["final_values"][row])
        advantage = 0.0
        expected: list[float] = []
        for reward, value in [*zip(of_one.reward, of_one.value, strict=True)][::-1]:
            advantage = reward + gamma * following - value + gamma * lam * advantage
            expected.insert(0, advantage)
            following = value
        assert [found[start] for start in starts] == pytest.approx(expected, abs=1e-5)
        assert not any(number for number, mine in zip(found, mask, strict=True) if not mine)


@pytest.mark.parametrize("estimator", BY_TURN)
def test_no_token_of_the_environment_has_an_advantage_that_matters(
    lab: wb.Workbench, talk: wb.Batch, estimator: str
) -> None:
    table, meta = talk.fetch(), dict(talk.meta)
    garbage = spoilt(table, ("rewards", "values", "old_log_prob", "rollout_log_prob"))
    grads = []
    for columns in (table, garbage):
        scored = lab.compute_advantages(lab.put(columns, meta=meta), estimator=estimator)
        for found, mask in zip(rows(scored, "advantages"), rows(scored, "response_mask"), strict=True):
            assert not any(number for number, mine in zip(found, mask, strict=True) if not mine)
        if columns is garbage:  # nor does the update look at one
            scored = lab.put(spoilt(scored.fetch(), ("advantages",)), meta=meta)
        with lab.kept("actor"):
            grads.append(lab.actor.update_actor(scored)["grad_norm"])
    assert grads[0] == grads[1] > 0


def test_the_baseline_is_the_mean_of_whole_conversations(lab: wb.Workbench, talk: wb.Batch) -> None:
    made = lab.compute_advantages(talk, estimator="reinforce_turn_baseline", gamma=0.9, whiten_advantages=False)
    frame = made.turns()
    totals = frame.groupby("conversation").reward.sum()
    for (conversation, turn), line in frame.set_index(["conversation", "turn"]).iterrows():
        of_one = frame[frame.conversation == conversation].set_index("turn").reward
        group = totals[[conversation - conversation % 2, conversation - conversation % 2 + 1]]
        to_go = sum(0.9 ** (later - turn) * reward for later, reward in of_one.items() if later >= turn)
        assert line.advantage == pytest.approx(to_go - group.mean(), abs=1e-5)


def test_bad_input(lab: wb.Workbench, talk: wb.Batch) -> None:
    with expect_error(UnknownColumn, remedy=r"generate_sequences\(environment"):
        lab.compute_advantages(talk.drop("turn_ends"), estimator="gae_turn")
    with expect_error(UnknownColumn, value="turn_starts"):
        talk.drop("turn_starts").turns()
    with expect_error(BadInput, value="macro_tokens=2 with estimator='gae_turn'"):
        lab.compute_advantages(talk, estimator="gae_turn", macro_tokens=2)
    ends = talk.fetch()["turn_ends"]
    assert isinstance(ends, Ragged)
    wrong = lab.put({**talk.fetch(), "turn_ends": ends.like(ends.values + 1)}, meta=dict(talk.meta))
    with expect_error(BadInput, rule="they must rise from turn to turn"):
        lab.compute_advantages(wrong, estimator="gae_turn")
    shorter = Ragged.of([row[:-1] for row in ends.rows()], torch.int64)
    wrong = lab.put({**talk.fetch(), "turn_ends": shorter}, meta=dict(talk.meta))
    with expect_error(BadInput, value="after the last end"):
        lab.compute_advantages(wrong, estimator="gae_turn")
