"""Calls of reward functions and environments that fail: their rows are data, and what was finished is kept."""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

import workbench as wb
from tests.calculator import Calculator, sums
from tests.cases import TINY, tiny_lab, vowels
from tests.expected import expect_error
from workbench.batches.columns import Ragged
from workbench.errors import BadInput, RewardError, RolloutError, UnknownColumn, UpstreamError


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[wb.Workbench]:
    models = {"actor": TINY, "reward": vowels}
    with tiny_lab("failures", tmp_path_factory.mktemp("runs"), backend="inline", models=models) as lab:
        yield lab


@pytest.fixture(scope="module")
def rollouts(lab: wb.Workbench) -> wb.Batch:
    batch = lab.actor.generate_sequences(lab.prompts.next(8), samples=4, max_new_tokens=6, seed=3)
    return lab.put({**batch.fetch(), "number": [str(row) for row in range(32)]}, meta=dict(batch.meta))


def column(batch: wb.Batch, name: str) -> Any:
    return batch.fetch([name])[name]


def counting(folder: Path, bad: Callable[[str], object] = lambda number: None) -> Callable[..., float]:
    """A reward that notes each call in a folder, and does something else for some rows."""

    def service(prompt: str, response: str, number: str) -> float:
        (folder / f"{number} {time.monotonic_ns()}").touch()
        bad(number)
        return float(number)

    return service


def calls_in(folder: Path) -> list[int]:
    return sorted(int(path.name.split()[0]) for path in folder.iterdir())


def unavailable(number: str) -> None:
    time.sleep(0.02)
    if number == "13":
        raise ConnectionError("HTTP 503")


def test_one_failure_among_32_costs_one_row_and_the_second_call_asks_that_one(
    lab: wb.Workbench, rollouts: wb.Batch, tmp_path: Path
) -> None:
    scored = lab.reward.compute_reward(rollouts, function=counting(tmp_path, unavailable))
    assert calls_in(tmp_path) == list(range(32))
    rewards = column(scored, "rewards").tolist()
    assert rewards == [0.0 if row == 13 else float(row) for row in range(32)]
    assert column(scored, "valid").tolist() == [row != 13 for row in range(32)]
    metrics = lab.last_metrics["compute_reward"]
    assert metrics["failed/fraction"] == 1 / 32 and metrics["rewards/mean"] == pytest.approx((496 - 13) / 31)
    failed = scored.failed()
    assert failed[["row", "stage", "function", "error"]].values.tolist() == [
        [13, "compute_reward", "service", "raised ConnectionError: HTTP 503"]
    ]
    assert failed.prompt[0] == column(rollouts, "prompt")[13]
    for only in (failed, [13], np.array([13]), failed.row):
        mended = lab.reward.compute_reward(scored, function=counting(tmp_path), only=only)
        assert column(mended, "rewards").tolist() == list(map(float, range(32)))
        assert column(mended, "valid").all() and mended.failed().empty
    assert calls_in(tmp_path) == sorted([*range(32), *[13] * 4])
    assert mended.version > scored.version and column(scored, "rewards")[13] == 0
    # what a file holds
    again = lab.load(scored.save(tmp_path / "rows.safetensors"))
    pd.testing.assert_frame_equal(again.failed(), failed)
    assert rollouts.failed().empty


def test_too_many_failures_fail_the_stage_and_lose_nothing(
    lab: wb.Workbench, rollouts: wb.Batch, tmp_path: Path
) -> None:
    with expect_error(RewardError, value="service raised ConnectionError: HTTP 503 for row 13 on rank 0") as caught:
        lab.reward.compute_reward(rollouts, function=counting(tmp_path, unavailable), concurrency=1, most_failed=0)
    asked = calls_in(tmp_path)
    assert 14 <= len(asked) < 32  # no more calls are paid for in vain
    rest = [13, *(row for row in range(32) if row not in asked)]
    said = f"1 of 32 rows failed, more than most_failed=0 allows; {len(rest) - 1} more rows were not tried"
    assert said in str(caught.value)
    kept = caught.value.batch
    assert kept.failed().row.tolist() == rest
    assert column(kept, "rewards").tolist() == [0.0 if row in rest else float(row) for row in range(32)]
    assert lab.batch(kept.id).failed().equals(kept.failed())
    assert lab.last_error().batch is not None
    mended = lab.reward.compute_reward(kept, function=counting(tmp_path), only=kept.failed())
    assert calls_in(tmp_path) == sorted([*asked, *rest])
    assert column(mended, "rewards").tolist() == list(map(float, range(32)))
    # the store does not take what was kept for the stage's result
    with lab.reuse(), pytest.raises(RewardError):
        lab.reward.compute_reward(rollouts, function=counting(tmp_path, unavailable), concurrency=1, most_failed=0)


def crashes(number: str) -> None:
    if number == "5":
        os._exit(3)


def hangs(number: str) -> None:
    if number in ("5", "6"):
        time.sleep(60)


def eats(number: str) -> None:
    if number == "5":
        len(bytearray(2**30))


def exits(number: str) -> None:
    if number == "5":
        raise SystemExit("bye")


@pytest.mark.parametrize(
    ("bad", "rows", "error"),
    [
        (crashes, [5], "ended its process with exit code 3"),
        (hangs, [5, 6], "took more than 5 s; write compute_reward(..., call_timeout_s=60)"),
        (eats, [5], "raised MemoryError"),
        (exits, [5], "raised SystemExit: bye"),
    ],
)
def test_a_crash_a_limit_and_an_exit_each_cost_their_row_alone(
    lab: wb.Workbench, rollouts: wb.Batch, tmp_path: Path, bad: Callable[[str], object], rows: list[int], error: str
) -> None:
    function = wb.limits(memory_bytes=2**29)(counting(tmp_path, bad))
    scored = lab.reward.compute_reward(rollouts.take(range(16)), function=function, call_timeout_s=5)
    failed = scored.failed()
    assert failed.row.tolist() == rows and failed.error.str.startswith(error).all()
    assert column(scored, "rewards").tolist() == [0.0 if row in rows else float(row) for row in range(16)]


def test_failed_calls_are_made_again_after_the_others(lab: wb.Workbench, rollouts: wb.Batch, tmp_path: Path) -> None:
    def twice(number: str) -> None:
        if number == "2" and len([path for path in tmp_path.iterdir() if path.name.startswith("2 ")]) < 3:
            os._exit(1)

    few = rollouts.take(range(4))
    scored = lab.reward.compute_reward(few, function=counting(tmp_path, twice), retries=2, concurrency=1)
    assert column(scored, "rewards").tolist() == [0.0, 1.0, 2.0, 3.0] and scored.failed().empty
    assert calls_in(tmp_path) == [0, 1, 2, 2, 2, 3]


def test_a_wrong_value_costs_its_row_and_so_does_another_kind(lab: wb.Workbench, rollouts: wb.Batch) -> None:
    wrong = {"1": float("nan"), "2": "1.0", "3": [0.5]}
    scored = lab.reward.compute_reward(rollouts, function=lambda prompt, response, number: wrong.get(number, 1.0))
    assert scored.failed().row.tolist() == [1, 2, 3]
    assert scored.failed().error.tolist()[:2] == ["returned nan", "returned '1.0'"]

    def tokens(prompt: str, response: str, number: str, environment_rewards: list[float]) -> list[float]:
        if number == "1":
            raise ValueError("no")
        return [1.0] * len(environment_rewards)

    lengths = column(rollouts, "response_ids").lengths
    given = {**rollouts.fetch(), "environment_rewards": Ragged(torch.zeros(int(lengths.sum())), lengths)}
    scored = lab.reward.compute_reward(lab.put(given), function=tokens)
    assert [float(row.sum()) for row in column(scored, "rewards").rows()[:3]] == [lengths[0], 0.0, lengths[2]]
    mended = lab.reward.compute_reward(
        scored, only=[1], function=lambda prompt, response, environment_rewards: [2.0] * len(environment_rewards)
    )
    assert [float(row.sum()) for row in column(mended, "rewards").rows()[:3]] == [
        lengths[0], 2 * lengths[1], lengths[2],
    ]  # fmt: skip


def test_functions_in_their_host_fail_alone_too(lab: wb.Workbench, rollouts: wb.Batch, tmp_path: Path) -> None:
    def bad(number: str) -> None:
        unavailable(number)
        if number == "3":
            time.sleep(60)

    function = wb.limits(own_process=False)(counting(tmp_path, bad))
    scored = lab.reward.compute_reward(rollouts, function=function, call_timeout_s=3)
    assert scored.failed().row.tolist() == [3, 13]


def test_overlap_reaches_the_consumer_and_keeps_the_rows(lab: wb.Workbench, rollouts: wb.Batch, tmp_path: Path) -> None:
    run = lab.reward.compute_reward.submit(rollouts, function=counting(tmp_path, unavailable), most_failed=0)
    with expect_error(UpstreamError, rule="HTTP 503"):
        lab.compute_advantages(run, estimator="grpo")
    with pytest.raises(RewardError) as caught:
        run.result()
    assert 13 in caught.value.batch.failed().row.tolist()


def test_wrong_arguments_are_refused_before_any_call(lab: wb.Workbench, rollouts: wb.Batch) -> None:
    wrong: tuple[dict[str, Any], ...] = (
        {"only": []}, {"only": "all"}, {"only": [-1]}, {"most_failed": 2}, {"retries": -1},
        {"only": [99], "function": vowels}, {"function": {}}, {"function": {"a b": vowels}},
        {"function": {"a": (vowels, float("nan"))}},
    )  # fmt: skip
    for arguments in wrong:
        with pytest.raises((BadInput, UnknownColumn)):
            lab.reward.compute_reward(rollouts, **arguments)


def test_where_no_row_failed_none_is_asked(lab: wb.Workbench, rollouts: wb.Batch, tmp_path: Path) -> None:
    """A cell that asks the failed rows again may be run again, also in a script in which none fails."""
    scored = lab.reward.compute_reward(rollouts, function=vowels)
    again = lab.reward.compute_reward(scored, function=counting(tmp_path), only=scored.failed())
    assert list(tmp_path.iterdir()) == [] and again.failed().empty
    assert column(again, "rewards").equal(column(scored, "rewards"))


# --- components -------------------------------------------------------------------------------------------------------


def right(prompt: str, response: str, number: str) -> float:
    return float(int(number) % 2)


def tidy(prompt: str, response: str, number: str) -> float:
    if number == "4":
        raise LookupError("no format")
    return float(number)


def number_of(prompt: str, response: str, number: str) -> float:
    return float(number)


def test_components_are_columns_with_weights(lab: wb.Workbench, rollouts: wb.Batch) -> None:
    both = {"right": right, "format": (tidy, 0.25)}
    scored = lab.reward.compute_reward(rollouts, function=both)
    ones, numbers = column(scored, "rewards/right"), column(scored, "rewards/format")
    assert ones.tolist() == [float(row % 2) for row in range(32)] and float(numbers[5]) == 5
    expected = [0.0 if row == 4 else row % 2 + 0.25 * row for row in range(32)]
    assert column(scored, "rewards").tolist() == expected
    assert scored.failed()[["row", "function"]].values.tolist() == [[4, "format"]]
    metrics = lab.last_metrics["compute_reward"]
    assert metrics["rewards/right/mean"] == pytest.approx(16 / 31)
    again = lab.reward.reweigh(scored, {"right": 2.0, "format": 0.0})
    assert column(again, "rewards").tolist() == [2.0 * (row % 2) for row in range(32)]
    assert not column(again, "valid")[4] and lab.last_metrics["reweigh"]["rewards/mean"] == pytest.approx(32 / 31)
    mended = lab.reward.compute_reward(scored, function={**both, "format": (number_of, 0.25)}, only=scored.failed())
    assert column(mended, "rewards").tolist() == [row % 2 + 0.25 * row for row in range(32)]
    assert mended.failed().empty
    frame = scored.df(["rewards/right", "rewards/format"])  # where two verifiers disagree
    assert len(frame[(frame["rewards/right"] > 0) != (frame["rewards/format"] > 0)]) == 14
    with pytest.raises(UnknownColumn):
        lab.reward.reweigh(rollouts, {"right": 1.0})


def test_rows_that_are_asked_again_have_the_components_of_the_others(
    lab: wb.Workbench, rollouts: wb.Batch, tmp_path: Path
) -> None:
    scored = lab.reward.compute_reward(rollouts, function={"right": right, "format": (tidy, 0.2)})
    noted = counting(tmp_path)
    for function, said in (
        ({"format": (noted, 0.2)}, "components format"), (noted, "no components"),
        ({"right": noted, "format": noted, "style": noted}, "components format, right, style"),
    ):  # fmt: skip
        with pytest.raises(BadInput, match=f"only= with {said}, in a batch with components format, right"):
            lab.reward.compute_reward(scored, function=function, only=scored.failed())
    with expect_error(BadInput, value="only= with components right, in a batch with no components"):
        lab.reward.compute_reward(lab.reward.compute_reward(rollouts), function={"right": noted}, only=[4])
    costs = lab.reward.compute_reward(rollouts, function={"right": right})
    again = lab.reward.compute_reward(costs, function=number_of)
    with expect_error(BadInput, remedy=r'batch\.drop\("rewards/right"\)'):
        lab.reward.compute_reward(again, function=noted, only=[4])
    assert not calls_in(tmp_path)
    mended = lab.reward.compute_reward(again.drop("rewards/right"), function=lambda prompt, response: 7.0, only=[4])
    assert column(mended, "rewards").tolist() == [7.0 if row == 4 else float(row) for row in range(32)]


def test_all_rows_have_the_weights_of_the_last_call(lab: wb.Workbench, rollouts: wb.Batch) -> None:
    def worse(prompt: str, response: str, number: str) -> float:
        if number == "6":
            raise LookupError("no format")
        return tidy(prompt, response, number)

    scored = lab.reward.compute_reward(rollouts, function={"right": right, "format": (worse, 0.5)})
    other = lab.reward.reweigh(scored, {"right": 3.0, "format": 0.125})
    mended = lab.reward.compute_reward(other, function={"right": right, "format": (number_of, 0.25)}, only=[4])
    # row 6 failed and was not asked: its reward is 0, though a component of it has a number
    expected = [0.0 if row == 6 else row % 2 + 0.25 * row for row in range(32)]
    assert column(mended, "rewards").tolist() == expected and mended.failed().row.tolist() == [6]


def test_a_row_is_mended_after_advantages(lab: wb.Workbench, rollouts: wb.Batch) -> None:
    scored = lab.reward.compute_reward(rollouts, function={"right": right, "format": (tidy, 0.25)})
    late = lab.compute_advantages(scored, estimator="grpo")
    mended = lab.reward.compute_reward(late, function={"right": right, "format": (number_of, 0.25)}, only=late.failed())
    assert column(mended, "rewards").tolist() == [row % 2 + 0.25 * row for row in range(32)]
    assert column(mended, "valid").all()


# --- components of one number a row, and of one a token ---------------------------------------------------------------


def process(prompt: str, response: str, response_ids: list[int], number: str) -> list[float]:
    if number == "4":
        raise LookupError("no steps")
    return [0.5] * len(response_ids)


def test_an_outcome_and_a_process_reward_are_added_at_the_last_token_of_the_policy(
    lab: wb.Workbench, rollouts: wb.Batch
) -> None:
    lengths = column(rollouts, "response_ids").lengths.tolist()
    # the policy chose not the last token of row 1, and none of row 2
    masks = [torch.ones(n) for n in lengths]
    masks[1][-1], masks[2][:] = 0, 0
    batch = lab.put({**rollouts.fetch(), "response_mask": Ragged.of(masks, torch.int64)}, meta=dict(rollouts.meta))
    scored = lab.reward.compute_reward(batch, function={"outcome": (number_of, 2.0), "process": process})

    def expected(weight: float, failed: int | None) -> list[list[float]]:
        rows = []
        for row, mask in enumerate(masks):
            rewards = (0.5 * mask).tolist() if row != failed else [0.0] * len(mask)
            if row != failed and mask.any():
                rewards[int(mask.nonzero()[-1])] += weight * row
            rows.append(rewards)
        return rows

    def found(batch: wb.Batch) -> list[list[float]]:
        return [row.tolist() for row in column(batch, "rewards").rows()]

    assert found(scored) == expected(2.0, 4)
    assert column(scored, "rewards/outcome").tolist() == list(map(float, range(32)))  # each keeps its form
    assert [len(row) for row in column(scored, "rewards/process").rows()] == lengths
    assert found(lab.reward.reweigh(scored, {"outcome": 4.0, "process": 1.0})) == expected(4.0, 4)
    assert column(lab.reward.reweigh(scored, {"outcome": 4.0}), "rewards").tolist() == [
        0.0 if row == 4 else 4.0 * row for row in range(32)
    ]

    def steps(prompt: str, response: str, response_ids: list[int]) -> list[float]:
        return [0.5] * len(response_ids)

    mended = lab.reward.compute_reward(scored, function={"outcome": number_of, "process": steps}, only=scored.failed())
    assert found(mended) == expected(1.0, None) and mended.failed().empty
    advantages = lab.compute_advantages(mended, estimator="reinforce_pp", gamma=1.0)
    sums = [float(row.sum()) for row in column(advantages, "token_rewards").rows()]
    assert sums == pytest.approx([sum(row) for row in expected(1.0, None)])
    # a row that is asked again gives what the rows that stay have
    with expect_error(RewardError, value="number_of: column 'rewards/process' .*; it gave 4.0 for row 4"):
        lab.reward.compute_reward(scored, function={"outcome": number_of, "process": number_of}, only=[4])


def test_the_form_of_rows_that_all_failed_is_that_of_the_function_that_scores_them(
    lab: wb.Workbench, rollouts: wb.Batch
) -> None:
    few = rollouts.take([4, 4])
    failed = lab.reward.compute_reward(few, function={"process": process, "outcome": right}, most_failed=1.0)
    assert column(failed, "rewards").tolist() == [0.0, 0.0]
    both = {"process": lambda prompt, response, response_ids: [1.0] * len(response_ids), "outcome": right}
    mended = lab.reward.compute_reward(failed, function=both, only=failed.failed())
    lengths = column(few, "response_ids").lengths.tolist()
    assert [row.tolist() for row in column(mended, "rewards").rows()] == [[1.0] * n for n in lengths]


def test_arms_are_compared_on_stored_components_without_a_call(
    lab: wb.Workbench, rollouts: wb.Batch, tmp_path: Path
) -> None:
    function = {"number": counting(tmp_path), "right": right}
    scored = lab.reward.compute_reward(lab.actor.compute_log_prob(rollouts), function=function)
    calls = len(calls_in(tmp_path))
    losses = []
    for weight in (0.0, 5.0):
        arm = wb.GRPO(lab, prompts=8, samples=4, reward=function)
        batch = lab.reward.reweigh(scored, {"number": 1.0, "right": weight})
        (found,) = lab.compare(batch, {"grpo": arm}).arms
        assert "compute_reward" in found.taken
        losses.append(found.metrics["compute_advantages/rewards/mean"])
    assert losses[1] == pytest.approx(losses[0] + 5 * 0.5)
    assert len(calls_in(tmp_path)) == calls


# --- functions of many rows -------------------------------------------------------------------------------------------


@wb.batched(over="group")
def spread(response: list[str], number: list[str], prompt: list[str]) -> list[float]:
    assert len({*prompt}) == 1
    if "8" in number:
        raise ValueError("of the group")
    return [len(number) + float(one) / 100 for one in number]


@wb.batched(over="batch")
def place(response: list[str], number: list[str], **row: Any) -> list[float]:
    return [sorted(map(int, number)).index(int(one)) / len(number) for one in number]


def test_functions_of_a_group_and_of_the_batch(lab: wb.Workbench, rollouts: wb.Batch) -> None:
    scored = lab.reward.compute_reward(rollouts, function={"spread": spread, "place": place})
    failed = scored.failed()
    assert failed.row.tolist() == [8, 9, 10, 11] and set(failed.function) == {"spread"}
    assert column(scored, "rewards/spread")[12:14].tolist() == pytest.approx([4.12, 4.13])
    assert column(scored, "rewards/place").tolist() == [row / 32 for row in range(32)]
    one = lab.reward.compute_reward(scored, function={"spread": place, "place": place}, only=[9])
    assert column(one, "rewards/spread")[9] == 9 / 32 and one.failed().row.tolist() == [8, 10, 11]
    with expect_error(BadInput, value="prompt_uid"):
        lab.reward.compute_reward(rollouts.drop("prompt_uid"), function=spread)
    with expect_error(RewardError, value="returned 1.0 instead of 32 scores for row 0"):
        lab.reward.compute_reward(rollouts, function=wb.batched(over="batch")(lambda prompt, response: 1.0))


def test_algorithms_take_components_and_go_on_over_failed_rows(lab: wb.Workbench) -> None:
    def unlucky(prompt: str, response: str, **row: Any) -> float:
        if len(response) % 5 == 1:
            raise ConnectionError("HTTP 503")
        return vowels(prompt, response)

    lengths = wb.batched(over="group")(lambda prompt, response: [len(one) for one in response])
    reward = {"right": unlucky, "length": (lengths, 0.1)}
    options: dict[str, Any] = {"prompts": 8, "samples": 4, "reward": reward, "sampling": wb.Sampling(max_new_tokens=6)}
    for algorithm in (wb.GRPO, wb.DAPO, functools.partial(wb.ReMax, kl_coefficient=0.0)):
        made = algorithm(lab, **options)
        for stage in [name for name in made.graph().names if name.endswith("_reward")]:
            made.replace(stage, most_failed=1.0)
        frame = made.run(1)
        assert 0 < frame["compute_reward/failed/fraction"].iloc[0] < 1
    assert lab.evaluate("arithmetic/test", n=8, samples=2, reward=lengths)["failed_fraction"].iloc[0] == 0


# --- environments -----------------------------------------------------------------------------------------------------


class Unlucky(Calculator):
    """A calculator whose service is away in a turn of one row, the first `times` times."""

    how = "raise"
    row, turn = "", 0
    times = 99
    folder = Path()

    def reset(self, prompt: str, sample_seed: int, **row: Any) -> str:
        self.bad, self.asked = row["number"] == self.row, 0
        return super().reset(prompt, sample_seed=sample_seed, **row)

    def step(self, response: str) -> tuple[str, float, bool]:
        self.asked += 1
        seen = len(list(self.folder.iterdir()))
        if self.bad and self.asked == self.turn and seen < self.times:
            (self.folder / str(seen)).touch()
            if self.how == "exit":
                os._exit(4)
            raise ConnectionError("HTTP 503")
        return super().step(response)


@pytest.fixture
def conversations(lab: wb.Workbench) -> tuple[wb.Batch, wb.Batch]:
    prompts = lab.prompts.next(12)
    prompts = lab.put({**prompts.fetch(), "number": [str(row) for row in range(12)]}, meta=dict(prompts.meta))
    return prompts, lab.actor.generate_sequences(prompts, seed=5, **sums())


@pytest.mark.parametrize("how", ["raise", "exit"])
def test_an_environment_that_fails_ends_its_row_alone(
    lab: wb.Workbench, conversations: tuple[wb.Batch, wb.Batch], tmp_path: Path, how: str
) -> None:
    prompts, expected = conversations

    class Away(Unlucky):
        pass

    turns = column(expected, "turns")
    bad = int(turns.argmax())
    assert turns[bad] >= 2  # the environment answers all turns but perhaps the last one
    Away.how, Away.folder, Away.row, Away.turn = how, tmp_path, str(bad), int(turns[bad]) - 1
    found = lab.actor.generate_sequences(prompts, seed=5, **sums(environment=Away))
    failed = found.failed()
    assert failed[["row", "stage", "function"]].values.tolist() == [[bad, "generate_sequences", "Away"]]
    assert failed.error[0].startswith(
        "step raised Conn" if how == "raise" else "step ended its process with exit code 4"
    )
    rows = [row for row in range(12) if row != bad]
    assert column(found.take(rows), "response_ids").values.equal(column(expected.take(rows), "response_ids").values)
    assert column(found, "ending")[bad] == "failed" and not column(found, "finished")[bad]
    # the response is no whole one: it is not scored, and stays so
    scored = lab.reward.compute_reward(found)
    assert scored.failed().row.tolist() == [bad] and column(scored, "rewards")[bad] == 0
    assert lab.reward.compute_reward(scored, only=scored.failed()).failed().equals(scored.failed())
    # again, with a new environment: as if nothing had happened
    Away.times = len(list(tmp_path.iterdir())) + 2
    healed = lab.actor.generate_sequences(prompts, seed=5, retries=2, **sums(environment=Away))
    assert healed.failed().empty
    assert column(healed, "response_ids").values.equal(column(expected, "response_ids").values)
    Away.times = 999
    with pytest.raises(RolloutError, match=rf"step of environment Away .* for row {bad} ") as caught:
        lab.actor.generate_sequences(prompts, seed=5, most_failed=0, **sums(environment=Away))
    assert caught.value.batch.failed().row.tolist() == [bad]
