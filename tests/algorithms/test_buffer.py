"""`lab.buffer` by hand: what waits, how old it is, what is drawn first, and what is refused."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import workbench as wb
from tests.cases import TINY, tiny_lab, vowels
from tests.expected import expect_error
from workbench.algorithms.waiting import WaitingRollouts
from workbench.errors import BadInput, UnknownColumn


@pytest.fixture(scope="module")
def opened(tmp_path_factory: pytest.TempPathFactory) -> Iterator[wb.Workbench]:
    models = {"actor": TINY, "reward": vowels}
    with tiny_lab("buffer", tmp_path_factory.mktemp("runs"), backend="inline", models=models) as lab:
        yield lab


@pytest.fixture
def lab(opened: wb.Workbench) -> wb.Workbench:
    opened.buffer.clear()
    opened.buffer.priority = None
    return opened


def generated(lab: wb.Workbench, prompts: int = 2, **settings: Any) -> wb.Batch:
    return lab.actor.generate_sequences(lab.prompts.next(prompts), samples=2, max_new_tokens=4, **settings)


def uids(batch: wb.Batch) -> list[int]:
    return list(batch.df(["prompt_uid"])["prompt_uid"])


def update(lab: wb.Workbench, batch: wb.Batch) -> None:
    batch = lab.reward.compute_reward(lab.actor.compute_log_prob(batch))
    lab.actor.update_actor(lab.compute_advantages(batch, estimator="grpo"))


def test_a_loop_by_hand(lab: wb.Workbench) -> None:
    """Its rows say which weights drew them and how long ago; the oldest are drawn first, as they were."""
    buffer, seen = lab.buffer, []
    assert repr(buffer) == "<Buffer: empty>" and "is empty" in buffer._repr_html_()
    start = lab.weights["actor"].steps
    for _ in range(3):
        while buffer.may_start(2, 1):
            buffer.add(generated(lab))
        batch = buffer.draw(2)
        seen.append(lab.weights["actor"].steps - batch.meta["weights_version"])
        update(lab, batch)
    assert seen == [0, 2, 2]  # two optimizer steps an iteration
    frame = buffer.df()
    assert len(frame) == 4 and len(buffer) == 2
    assert frame["weights_version"].tolist() == [start + 4] * 4 and frame["age_steps"].tolist() == [2] * 4
    assert (frame["response_tokens"] > 0).all() and frame["reward"].isna().all()
    assert repr(buffer) == "<Buffer: 2 groups of 1 iterations, 2 optimizer steps old>"
    assert f"iteration {lab.iteration}" in buffer._repr_html_() and "2 steps, 4 responses" in buffer._repr_html_()


def test_groups_come_whole_and_by_priority(lab: wb.Workbench) -> None:
    first, second = (lab.reward.compute_reward(generated(lab)) for _ in range(2))
    for batch in (first, second):
        lab.buffer.add(batch)
    groups = lab.buffer.groups()
    assert groups["rows"].tolist() == [2] * 4
    rewards = np.concatenate([batch.df(["rewards"])["rewards"] for batch in (first, second)])
    assert groups["reward"].tolist() == pytest.approx(rewards.reshape(4, 2).mean(1))
    best = groups.sort_values("reward", kind="stable", ascending=False)["prompt_uid"].tolist()[:3]
    lab.buffer.priority = lambda groups: groups["reward"]
    drawn = lab.buffer.draw(3, keep=True)
    assert sorted(uids(drawn)) == sorted(best * 2) and drawn.meta["iteration"] == lab.iteration
    assert sorted(lab.buffer.groups()["times_drawn"]) == [0, 1, 1, 1]
    lab.buffer.priority = None
    assert uids(lab.buffer.draw(1)) == uids(first)[:2]
    assert uids(lab.buffer.draw(3)) == [*uids(first)[2:], *uids(second)]
    assert len(lab.buffer) == 0


def test_nothing_goes_for_its_age_unless_it_is_thrown_away(lab: wb.Workbench) -> None:
    lab.buffer.add(generated(lab))
    update(lab, generated(lab))
    lab.buffer.add(generated(lab))
    assert lab.buffer.groups()["age_steps"].tolist() == [2, 2, 0, 0]
    assert not lab.buffer.may_start(2, 1) and lab.buffer.may_start(2, 2)
    assert len(lab.buffer) == 4
    assert lab.buffer.clear(older_than=2) == 0 and lab.buffer.clear(older_than=1) == 2
    assert lab.buffer.groups()["age_steps"].tolist() == [0, 0]
    assert lab.buffer.clear() == 2 and lab.buffer.df().empty


def test_bad_input(lab: wb.Workbench) -> None:
    buffer = lab.buffer
    with expect_error(UnknownColumn, value=r"lab\.buffer\.add reads column 'response_ids'"):
        buffer.add(lab.prompts.next(2))
    with expect_error(BadInput, value="batch=3"):
        buffer.add(3)  # type: ignore[arg-type]
    with expect_error(BadInput, value=r"lab\.buffer\.draw\(3\)", rule="0 groups wait", remedy="generate first"):
        buffer.draw(3)
    with expect_error(BadInput, value="priority = 'oldest'", rule="must be a function"):
        buffer.priority = "oldest"  # type: ignore[assignment]
    buffer.add(generated(lab))
    buffer.add(generated(lab, temperature=0.5))
    for wrong in (lambda groups: [1.0], lambda groups: "none", lambda groups: groups["reward"]):
        buffer.priority = wrong
        with expect_error(BadInput, rule="must return one number a group, 4 in all"):
            buffer.draw(1)
    buffer.priority = None
    with expect_error(BadInput, value="temperature"):
        buffer.draw(3)  # groups of two temperatures are no batch
    assert len(buffer) == 4
    with expect_error(BadInput, value="groups=0"):
        buffer.draw(0)
    buffer.clear()
    with expect_error(BadInput, value="2 groups have paused responses", remedy="resume=True"):
        buffer.add(generated(lab, pause_after=1))
    assert len(buffer.df()) == 0
    with expect_error(BadInput, value="max_staleness=-1"):
        buffer.may_start(1, -1)


def test_what_waits_in_an_older_checkpoint_is_read() -> None:
    state = WaitingRollouts(iteration=3).state({})
    del state["drawn_in"]
    assert WaitingRollouts.of_state(state, {}).iteration == 3
