"""The ledger of prompts, and orders that read it."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import numpy as np
import pandas as pd
import pytest

import workbench as wb
from tests.cases import TINY, tiny_lab
from tests.expected import expect_error
from workbench.batches.schema import ScoredRows
from workbench.data.ledger import OPEN_ITERATIONS, VERSIONS, Ledger
from workbench.errors import BadInput
from workbench.support.intervals import wilson_bounds

SHORT = wb.Sampling(max_new_tokens=4)
PROMPTS: Any = [{"prompt": f"Say {i}.", "level": i % 3} for i in range(12)]


def reward(prompt: str, response: str) -> float:
    """Right for even numbers; for others it depends on the response."""
    return float(int(prompt[4:-1]) % 2 == 0 or len(response) % 2)


def opened(name: str, runs: Path, **options: Any) -> wb.Workbench:
    return tiny_lab(
        name, runs, models={"actor": TINY, "reward": reward}, backend="inline", prompts=PROMPTS,
        training={"minibatches": 1}, **options,
    )  # fmt: skip


@pytest.fixture
def lab(tmp_path: Path) -> Iterator[wb.Workbench]:
    with opened("ledger", tmp_path) as lab:
        yield lab


def grpo(lab: wb.Workbench, **options: Any) -> wb.GRPO:
    return wb.GRPO(lab, prompts=4, samples=2, sampling=SHORT, **options)


def hardest(ledger: pd.DataFrame) -> pd.DataFrame:
    return ledger.sort_values("pass_rate", kind="stable", na_position="first")


def drawn(lab: wb.Workbench, n: int) -> list[str]:
    return cast("list[str]", lab.prompts.next(n).fetch(["prompt"])["prompt"])


def test_its_figures_are_those_of_the_batches(lab: wb.Workbench) -> None:
    seen: dict[str, list[tuple[float, int, int]]] = {}
    algorithm = grpo(lab)
    for _ in range(4):
        version = lab.weights["actor"].steps
        while algorithm.next_stage != "compute_advantages":
            algorithm.step()
        frame = algorithm.made["compute_reward"].df(["prompt", "rewards", "response_mask"])
        for _, row in frame.iterrows():
            seen.setdefault(row["prompt"], []).append((row["rewards"], int(sum(row["response_mask"])), version))
        algorithm.iterate()
    ledger = lab.prompts.ledger()
    assert len(ledger) == 12 and ledger["drawn"].sum() == 16
    for _, row in ledger.iterrows():
        rewards = [reward for reward, _, _ in seen[row["prompt"]]]
        last = seen[row["prompt"]][-2:]
        passed = sum(reward >= 1 for reward in rewards)
        assert row["drawn"] * 2 == row["responses"] == len(rewards)
        assert row["pass_rate"] == passed / len(rewards)
        assert (row["pass_low"], row["pass_high"]) == pytest.approx(wilson_bounds(passed, len(rewards)))
        assert row["reward_variance"] == pytest.approx(np.var(rewards, ddof=1))
        assert row["last_reward"] == pytest.approx(np.mean([reward for reward, _, _ in last]))
        assert row["last_variance"] == pytest.approx(np.var([reward for reward, _, _ in last], ddof=1))
        assert row["response_tokens_mean"] == pytest.approx(np.mean([n for _, n, _ in seen[row["prompt"]]]))
        assert row["last_version"] == last[-1][2]
    staleness = ledger.sort_values("drawn", kind="stable")["iterations_since"]
    assert set(staleness) == {0, 1, 2} or set(staleness) == {0, 1, 2, 3}
    versions = lab.prompts.ledger(by="version")
    assert versions["responses"].sum() == 32
    assert versions.index.get_level_values("version").nunique() == 4
    counted = {(row, version) for row, version in versions.index}
    assert counted == {(int(text[4:-1]), version) for text, found in seen.items() for _, _, version in found}


def test_what_is_no_sample_of_training_does_not_count(lab: wb.Workbench) -> None:
    batch = lab.actor.generate_sequences(lab.prompts.next(4), samples=2, max_new_tokens=4)
    assert lab.prompts.ledger()["responses"].sum() == 0
    lab.reward.compute_reward(batch)
    once = lab.prompts.ledger()
    lab.reward.compute_reward(batch)  # a cell that is run again
    lab.evaluate(PROMPTS, samples=1, sampling=SHORT)
    lab.check("ratio")
    greedy = lab.actor.generate_sequences(
        batch.select("prompt_ids", "prompt_uid", "prompt"), temperature=0, max_new_tokens=4
    )
    lab.reward.compute_reward(greedy)
    lab.reward.compute_reward(lab.put(batch.fetch()))
    pd.testing.assert_frame_equal(lab.prompts.ledger(), once)
    lab.reward.compute_reward(batch, function=lambda prompt, response: 0.25)  # the newest scores of a draw count
    again = lab.prompts.ledger()
    assert again["responses"].sum() == 8
    assert set(again[again["responses"] > 0]["reward_mean"]) == {0.25}
    lab.compare(batch, {"a": grpo(lab), "b": grpo(lab, reward=lambda prompt, response: 1.0)})
    pd.testing.assert_frame_equal(lab.prompts.ledger(), again)


def test_the_ledgers_own_order_is_the_order_without_a_function(tmp_path: Path) -> None:
    with opened("plain", tmp_path) as plain:
        expected = [drawn(plain, 4) for _ in range(9)]
    with opened("same", tmp_path) as lab:
        lab.prompts.order = lambda ledger: ledger
        assert [drawn(lab, 4) for _ in range(9)] == expected


def test_orders_filters_and_weights(lab: wb.Workbench) -> None:
    grpo(lab).run(3)  # each prompt once
    lab.prompts.order = hardest
    rates = lab.prompts.ledger().sort_values("pass_rate")["pass_rate"].tolist()
    chosen = drawn(lab, 4)
    assert lab.prompts.ledger().set_index("prompt").loc[chosen, "pass_rate"].tolist() == rates[:4]

    lab.prompts.order = lambda ledger: ledger["level"] == 2
    assert {int(text[4:-1]) % 3 for text in drawn(lab, 4)} == {2}
    nine = drawn(lab, 9)  # of four prompts: from the first on again
    assert len(set(nine[:4])) == 4 and nine == [nine[i % 4] for i in range(9)]

    lab.prompts.order = lambda ledger: pd.Series(ledger["level"].to_numpy(dtype=float), index=ledger.index)
    counts = pd.Series([int(text[4:-1]) % 3 for _ in range(60) for text in drawn(lab, 1)]).value_counts()
    assert 0 not in counts.index and 1.2 < counts[2] / counts[1] < 3.5  # twice as likely
    several = drawn(lab, 8)
    assert len(set(several)) == 8 and all(int(text[4:-1]) % 3 for text in several)  # without replacement


WRONG: list[tuple[Any, str]] = [
    (5, r"lab\.prompts\.order = 5.*a function of the ledger"),
    (lambda ledger: None, r"gave None.*rows to draw"),
    (lambda ledger: ledger[ledger.pass_rate > 0.5], r"chose none of 12 prompts.*isna\(\)"),
    (lambda ledger: ledger.nothing, r"raised AttributeError.*correct it"),
    (lambda ledger: [99], r"a row 99 that the ledger does not have"),
    (lambda ledger: pd.Series(1.0, index=[0, 0, 1]), "a Series that has a row twice"),
    (lambda ledger: ledger["level"] - 1.0, r"a weight of -1"),
    (lambda ledger: ledger["level"] + math.inf, r"a weight of inf"),
    (lambda ledger: ledger["prompt"], r"gave a Series of "),
    (lambda: None, r"raised TypeError"),
    (lambda ledger: "hardest", r"gave 'hardest'"),
    (lambda ledger: exit(), r"raised SystemExit"),
]


def test_a_wrong_function_is_refused_when_it_is_assigned(lab: wb.Workbench) -> None:
    lab.prompts.order = hardest
    for order, says in WRONG:
        with pytest.raises(BadInput, match=says):
            lab.prompts.order = order
        assert lab.prompts.order is hardest
    began = lab.iteration
    with expect_error(BadInput, value="n=0"):
        lab.prompts.next(0)
    assert lab.iteration == began
    with expect_error(BadInput, value=r"lab\.prompts\.threshold='high'", rule="number"):
        lab.prompts.threshold = "high"  # type: ignore[assignment]


def test_a_function_that_fails_later_draws_nothing(lab: wb.Workbench) -> None:
    lab.prompts.order = lambda ledger: ledger[ledger["drawn"] == 0]
    everything = [text for _ in range(3) for text in drawn(lab, 4)]
    assert len(set(everything)) == 12
    source = lab.prompts.source
    assert source is not None
    before = lab.iteration, lab.prompts.drawn, source.position
    with expect_error(BadInput, value="none of 12"):
        lab.prompts.next(4)
    assert before == (lab.iteration, lab.prompts.drawn, source.position)


def test_a_restored_run_draws_what_it_would_have_drawn(tmp_path: Path) -> None:
    with opened("whole", tmp_path) as lab:
        lab.prompts.order, lab.prompts.threshold = hardest, 0.5
        algorithm = grpo(lab)
        algorithm.run(4)
        saved = lab.save(tmp_path / "four")
        ledger = lab.prompts.ledger()
        metrics = algorithm.run(3)
        later, versions = lab.prompts.ledger(), lab.prompts.ledger(by="version")
    with wb.restore(saved.folder, runs=tmp_path) as lab:
        pd.testing.assert_frame_equal(lab.prompts.ledger(), ledger)
        assert lab.prompts.threshold == 0.5
        with expect_error(BadInput, rule=r"lab\.prompts\.order = hardest", remedy="run again the cell that assigns it"):
            lab.prompts.next(4)
        lab.prompts.order = hardest
        again = grpo(lab).run(3)
        pd.testing.assert_frame_equal(lab.prompts.ledger(), later)
        pd.testing.assert_frame_equal(lab.prompts.ledger(by="version"), versions)
    left = [name for name in metrics.columns if "second" not in name and "seconds" not in name]
    assert again["compute_reward/rewards/mean"].tolist() == metrics["compute_reward/rewards/mean"].tolist()
    assert set(left) <= set(again.columns)


def test_dynamic_sampling_draws_in_the_order_too(lab: wb.Workbench) -> None:
    dapo = wb.DAPO(lab, prompts=3, samples=2, sampling=SHORT, rounds=4, overlong_buffer=0, reward=odd_differ)
    for _ in range(2):
        dapo.iterate()
    without = lab.metrics("dynamic_sampling")["kept/fraction"].tolist()
    lab.prompts.order = lambda ledger: ledger.sort_values("last_variance", ascending=False, kind="stable")
    dapo.iterate()
    assert lab.last_metrics["dynamic_sampling"]["rounds"] == 0
    assert lab.last_metrics["dynamic_sampling"]["kept/fraction"] == 1 > max(without)


@wb.batched(over="group")
def odd_differ(prompt: list[str], response: list[str]) -> list[float]:
    """The responses to prompts of odd numbers differ in their rewards."""
    return [float(i == 0 or int(text[4:-1]) % 2 == 0) for i, text in enumerate(prompt)]


def test_streamed_prompts_have_none(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"prompt": "a"}\n{"prompt": "b"}\n')
    source = {"source": str(tmp_path / "rows.jsonl"), "stream": True, "max_prompt_tokens": 64}
    with tiny_lab("stream", tmp_path, models={"actor": TINY}, backend="inline", prompts=source) as lab:
        with expect_error(BadInput, value=r"lab\.prompts\.ledger\(\)", remedy="stream=True"):
            lab.prompts.ledger()
        with expect_error(BadInput, rule="streamed prompts"):
            lab.prompts.order = hardest
        lab.prompts.order = None
        lab.prompts.next(2)


def scored(uids: range, iteration: int, version: int, value: float) -> tuple[dict[str, Any], list[ScoredRows]]:
    each = np.repeat(np.array(uids), 4)
    rows = ScoredRows(prompt_uid=each, reward=np.full(len(each), value), tokens=np.full(len(each), 7))
    return {"iteration": iteration, "weights_version": version}, [rows]


def run_of(ledger: Ledger, iterations: range) -> None:
    for iteration in iterations:
        uids = range(16 * iteration, 16 * iteration + 16)
        ledger.note_drawn(np.random.default_rng(iteration).permutation(100)[:16], uids.start, iteration)
        ledger.note_scored(*scored(uids, iteration, iteration, float(iteration % 3 == 0)))


def test_it_grows_with_its_rows_and_not_with_what_is_drawn() -> None:
    ledger = Ledger(100)
    run_of(ledger, range(100))
    size = len(ledger.state())
    run_of(ledger, range(100, 2000))
    assert len(ledger.state()) == size
    totals = ledger.totals()
    assert totals.drawn.sum() == 2000 * 16 and totals.sums["responses"].sum() == 2000 * 64
    assert totals.sums["passed"].sum() == sum(64 for i in range(2000) if i % 3 == 0)
    assert (totals.versions >= 0).sum(1).tolist() == [VERSIONS] * 100
    assert all(sorted(set(row)) == sorted(row) for row in totals.versions.tolist())


def test_a_state_and_what_was_noted_since_are_the_ledger() -> None:
    ledger, other = Ledger(100), Ledger(100)
    run_of(ledger, range(20))
    state = ledger.state_and_changes()
    run_of(ledger, range(20, 50))
    other.load_state(state, ledger.take_changes())
    assert other.state() == ledger.state()
    assert ledger.take_changes() == []


def test_a_threshold_is_compared_in_float32_as_rewards_are() -> None:
    for threshold, reward in ((0.9, np.float32(0.9)), (0.3, np.float64(np.float32(0.1)) + np.float32(0.2))):
        ledger = Ledger(1)
        ledger.threshold = threshold
        ledger.note_drawn([0], 0, 1)
        ledger.note_scored(*scored(range(1), 1, 0, float(reward)))
        assert ledger.totals().sums["passed"].tolist() == [4]


def test_scores_of_a_draw_that_is_too_old_do_not_count() -> None:
    ledger = Ledger(10)
    for iteration in range(1, OPEN_ITERATIONS + 2):
        ledger.note_drawn([iteration], iteration, iteration)
    ledger.note_scored(*scored(range(1, 3), OPEN_ITERATIONS + 1, 0, 1.0))  # trained on later than it was drawn
    assert ledger.totals().sums["responses"].tolist()[1:3] == [0, 4]


def test_prompts_that_are_drawn_ahead_wait_for_their_scores() -> None:
    ledger = Ledger(10)
    for iteration in range(1, 10):
        ledger.note_drawn([iteration], iteration, iteration, now=1)
    ledger.note_scored(*scored(range(1, 2), 1, 0, 1.0))
    assert ledger.totals().sums["responses"].tolist()[1] == 4
