"""Rows that failed count nowhere from advantages on: the numbers are those of a batch without them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

import workbench as wb
from tests.cases import TINY, stored, tiny_lab
from tests.engines.training_ranks import run_ranks
from tests.expected import expect_error
from tests.workers.update_ranks import context_here
from workbench.algorithms.dapo import _varied
from workbench.batches.columns import Ragged, Table
from workbench.errors import BadInput
from workbench.messages.metrics import Metrics, as_metrics, merge_metrics, reported
from workbench.messages.shards import Shard
from workbench.models.spec import Model
from workbench.settings.engines import Generation
from workbench.settings.training import Training
from workbench.support.intervals import clustered_half_width
from workbench.workers.advantages import GROUPED
from workbench.workers.roles.numeric import NumericWorker
from workbench.workers.roles.reward import RewardWorker

REWARDS = [1.0, 1.0, 0.0, 0.0]


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[wb.Workbench]:
    runs = tmp_path_factory.mktemp("runs")
    with tiny_lab("failed-rows", runs, backend="inline", training={"minibatches": 1}) as lab:
        yield lab


def table(valid: list[int] | None = None, rewards: list[float] = REWARDS, groups: list[int] | None = None) -> Table:
    found = dict(stored(len(rewards)))
    found |= {"rewards": torch.tensor(rewards), "rollout_log_prob": found["old_log_prob"]}
    found |= {"baseline_rewards": torch.linspace(0, 1, len(rewards)), "ref_log_prob": found["values"]}
    lengths = found["response_mask"].lengths  # type: ignore[union-attr]
    found["turn_ends"] = Ragged.of([[1, n] for n in lengths.tolist()], torch.int64)
    found["prompt_uid"] = torch.tensor(groups or [0] * len(rewards))
    return found if valid is None else {**found, "valid": torch.tensor(valid)}


def without(whole: Table, rows: list[int]) -> Table:
    keep = [row for row in range(len(whole["prompt_uid"])) if row not in rows]
    kept: Table = {}
    for name, column in whole.items():
        if name != "valid":
            kept[name] = column.take(keep) if isinstance(column, Ragged) else column[torch.tensor(keep)]
    return kept


def advantages(lab: wb.Workbench, given: Table, **arguments: Any) -> list[torch.Tensor]:
    column = lab.compute_advantages(lab.put(given), **arguments).fetch(["advantages"])["advantages"]
    assert isinstance(column, Ragged)
    return column.rows()


@pytest.mark.parametrize(
    ("estimator", "right"),
    [("dr_grpo", [2 / 3, 0.0, -1 / 3, -1 / 3]), ("grpo", [2 / 3**0.5, 0.0, -(3**-0.5), -(3**-0.5)])],
)
def test_a_failed_row_is_no_baseline_of_the_others(lab: wb.Workbench, estimator: str, right: list[float]) -> None:
    found = advantages(lab, table([1, 0, 1, 1]), estimator=estimator)
    for row, value in zip(found, right, strict=True):
        assert row.tolist() == pytest.approx([value] * len(row), rel=1e-5, abs=1e-6)
    metrics = lab.last_metrics["compute_advantages"]
    assert metrics["rewards/mean"] == pytest.approx(1 / 3) and metrics["valid/fraction"] == 0.75
    assert metrics["dropped_groups"] == 0


ESTIMATORS: list[dict[str, Any]] = [
    *({"estimator": name} for name in GROUPED if name != "off_policy_baseline"),
    {"estimator": "off_policy_baseline", "correction": wb.Correction(level="sequence")},
    {"estimator": "gae"},
    {"estimator": "gae", "kl_coefficient": 0.1},
    {"estimator": "remax"},
    {"estimator": "reinforce_pp", "gamma": 0.9},
    {"estimator": "grpo", "overlong_buffer": 2, "max_response_tokens": 8, "whiten_advantages": True},
]


@pytest.mark.parametrize("arguments", ESTIMATORS, ids=lambda a: "-".join(map(str, a)) + a["estimator"])
def test_every_estimator_gives_what_it_gives_without_the_failed_rows(
    lab: wb.Workbench, arguments: dict[str, Any]
) -> None:
    rewards, groups = [1.0, 1.0, 0.0, 0.0, 0.5, 0.25, 0.0], [0, 0, 0, 0, 1, 1, 1]
    whole = table([1, 0, 1, 1, 0, 1, 1], rewards, groups)
    found = advantages(lab, whole, **arguments)
    metrics = dict(lab.last_metrics["compute_advantages"])
    right = advantages(lab, without(whole, [1, 4]), **arguments)
    expected = lab.last_metrics["compute_advantages"]
    assert all((found[row] == 0).all() for row in (1, 4))
    for row, one in zip((0, 2, 3, 5, 6), right, strict=True):
        torch.testing.assert_close(found[row], one, rtol=1e-5, atol=1e-6)
    assert {name: metrics[name] for name in expected} == pytest.approx(dict(expected), rel=1e-5, abs=1e-6)
    # with all rows valid, the last bit is as without the column
    plain = {name: column for name, column in whole.items() if name != "valid"}
    ones = {**plain, "valid": torch.ones(len(rewards))}
    for mine, other in zip(advantages(lab, ones, **arguments), advantages(lab, plain, **arguments), strict=True):
        assert torch.equal(mine, other)


def test_a_prompt_with_fewer_than_two_valid_rows_is_dropped_with_a_count(lab: wb.Workbench) -> None:
    whole = table([1, 0, 1, 1], REWARDS, [0, 0, 1, 1])
    for estimator in ("grpo", "rloo", "reinforce_pp_baseline"):
        batch = lab.compute_advantages(lab.put(whole), estimator=estimator)
        assert batch.fetch(["counted"])["counted"].tolist() == [False, False, True, True]
        assert lab.last_metrics["compute_advantages"]["dropped_groups"] == 1
    none = lab.compute_advantages(lab.put(table([0, 0, 1, 0], REWARDS, [0, 0, 1, 1])), estimator="rloo")
    assert not none.fetch(["counted"])["counted"].any()
    assert lab.last_metrics["compute_advantages"]["dropped_groups"] == 2
    assert lab.actor.update_actor(none)["loss"] == 0


def test_equal_scores_of_all_prompts_are_warned_of(lab: wb.Workbench, capsys: pytest.CaptureFixture[str]) -> None:
    equal, said = table(None, [1.0] * 4), "all advantages are 0, and an update learns nothing from them"
    advantages(lab, equal, estimator="grpo")
    assert f"{said}: the samples of each prompt have equal scores. Draw more" in capsys.readouterr().err
    lab.compute_advantages(lab.put(equal, meta={"temperature": 0}), estimator="rloo")
    assert "At temperature 0 they are the same text: set wb.Sampling(temperature=1.0)" in capsys.readouterr().err
    advantages(lab, table(), estimator="grpo")
    assert said not in capsys.readouterr().err


def test_they_can_be_told_to_count(lab: wb.Workbench) -> None:
    counted = advantages(lab, table([1, 0, 1, 1]), estimator="dr_grpo", count_invalid=True)
    assert [float(row[0]) for row in counted] == pytest.approx([0.5, 0.5, -0.5, -0.5])
    batch = lab.compute_advantages(lab.put(table([1, 0, 1, 1])).drop("valid"), estimator="dr_grpo")
    assert [float(row[0]) for row in batch.fetch()["advantages"].rows()] == pytest.approx([0.5, 0.5, -0.5, -0.5])


def gradient(lab: wb.Workbench, role: str, given: Table, update: str, **arguments: Any) -> tuple[np.ndarray, Any]:
    """The sum of absolute changes that one update makes to the weights, from the same state, and its metrics."""
    with lab.kept(role):
        group = getattr(lab, role)
        before = group.weights_checksum()[0]
        metrics = getattr(group, update)(lab.put(given), **arguments)
        return np.array([group.weights_checksum()[0] - before, metrics["grad_norm"], metrics["loss"]]), metrics


@pytest.mark.parametrize("aggregation", ["token-mean", "sequence-mean-token-mean", "fixed-length"])
@pytest.mark.parametrize("extra", [{}, {"entropy_coefficient": 0.1}, {"correction": wb.Correction()}])
def test_a_failed_row_has_no_gradient_and_no_place_in_a_denominator(
    lab: wb.Workbench, aggregation: str, extra: dict[str, Any]
) -> None:
    whole = table([1, 0, 1, 1])
    whole["advantages"] = lab.compute_advantages(lab.put(whole), estimator="dr_grpo").fetch()["advantages"]
    arguments = {"aggregation": aggregation, "max_response_tokens": 8, **extra}
    found, metrics = gradient(lab, "actor", whole, "update_actor", **arguments)
    right, expected = gradient(lab, "actor", without(whole, [1]), "update_actor", **arguments)
    np.testing.assert_allclose(found, right, rtol=1e-4, atol=1e-7)
    names = ("ratio/mean", "approximate_kl", "skipped_rows/fraction")
    assert {n: metrics[n] for n in names} == pytest.approx({n: expected[n] for n in names}, rel=1e-5, abs=1e-7)
    found, _ = gradient(lab, "critic", whole, "update_critic", aggregation=aggregation, max_response_tokens=8)
    right, _ = gradient(
        lab, "critic", without(whole, [1]), "update_critic", aggregation=aggregation, max_response_tokens=8
    )
    np.testing.assert_allclose(found, right, rtol=1e-4, atol=1e-7)


def test_dynamic_sampling_looks_at_valid_rows_alone(lab: wb.Workbench) -> None:
    # prompt 0 differs in a failed row only, prompt 1 in valid ones, prompt 2 has one valid row
    rewards, groups = [0.0, 1.0, 1.0, 1.0, 0.0, 0.5, 0.0, 1.0, 0.0], [0, 0, 0, 1, 1, 1, 2, 2, 2]
    batch = lab.put(table([0, 1, 1, 1, 1, 0, 0, 1, 0], rewards, groups))
    scores, varied, prompts = _varied(batch)
    assert scores.tolist() == [1.0, 1.0, 1.0, 0.0, 1.0] and prompts.tolist() == [0, 0, 1, 1, 2]
    assert varied.tolist() == [False] * 3 + [True] * 3 + [False] * 3


def test_two_ranks_score_and_estimate_as_one_does() -> None:
    """The rows of a prompt lie on both ranks, functions of a prompt or of the batch among them."""
    alone, ranks = outcomes(), run_ranks(outcomes, 2)
    for call, columns in alone["columns"].items():
        for name, rows in columns.items():
            found = {row: value for rank in ranks for row, value in rank["columns"][call][name].items()}
            if name == "failure":
                found, rows = ({n: text.split(" on rank")[0] for n, text in each.items()} for each in (found, rows))
            assert sorted(found) == sorted(rows)
            for row, value in rows.items():
                assert found[row] == (value if isinstance(value, str | bool) else pytest.approx(value, abs=1e-5)), name
        merged: Metrics = {}
        for rank in ranks:
            merge_metrics(merged, rank["metrics"][call])
        assert reported(merged) == pytest.approx(reported(alone["metrics"][call]), abs=1e-5)
    assert alone["columns"]["one"]["failure"][6] == "compute_reward picky: raised ConnectionError: HTTP 503"
    assert not any(alone["columns"]["all failed"]["valid"].values())
    assert alone["columns"]["again"]["valid"][6] and not alone["columns"]["again"]["valid"][1]
    assert alone["columns"]["mixed"]["rewards"][3] == [0.0] * 3 and alone["columns"]["mixed"]["rewards"][1] == [0.0] * 4
    # its place is 6 of 8, the mean of its prompt is that of 2, 3, 6 and 7, its steps are 6 a token: 6/8 + 6 - 4.5 + 6
    assert alone["columns"]["mixed again"]["rewards"][6] == pytest.approx([6.0, 6.0, 8.25])
    assert alone["metrics"]["grpo"]["dropped_groups"].value == 1


def test_a_row_that_lost_its_baseline_is_back_when_it_is_asked_again(lab: wb.Workbench) -> None:
    def half(prompt: str, response: str, number: str) -> float:
        if number == "1":
            raise ValueError("no number")
        return float(number)

    def mended(prompt: str, response: str, number: str) -> float:
        return float(number)

    given = {**table(None, REWARDS, [0, 0, 1, 1]), "number": list("0123"), "prompt": ["a"] * 4}
    batch = lab.put({name: column for name, column in given.items() if name != "rewards"})
    scored = lab.reward.compute_reward(batch, function={"half": half}, most_failed=0.5)
    dropped = lab.compute_advantages(scored, estimator="grpo")
    assert dropped.fetch(["valid"])["valid"].tolist() == [True, False, True, True]
    assert dropped.fetch(["counted"])["counted"].tolist() == [False, False, True, True]
    assert dropped.failed()["row"].tolist() == [1]
    # the reward of a row without a baseline stays what it is
    assert lab.reward.reweigh(dropped, {"half": 2.0}).fetch(["rewards"])["rewards"].tolist() == [0, 0, 4, 6]
    with expect_error(BadInput, value=r"=1e\+39", rule=r"must be at most 3\.4e\+38"):
        lab.reward.reweigh(dropped, {"half": 1e39})
    with expect_error(BadInput, rule="finite weight"):
        lab.reward.compute_reward(batch, function={"half": (half, 1e39)})
    # another estimator, which needs no such baseline, counts it
    other = lab.compute_advantages(dropped, estimator="reinforce_pp")
    assert other.fetch(["counted"])["counted"].tolist() == [True, False, True, True]
    again = lab.reward.compute_reward(dropped, function={"half": mended}, only=dropped.failed())
    again = lab.compute_advantages(again, estimator="grpo")
    assert again.fetch(["counted"])["counted"].all() and lab.last_metrics["compute_advantages"]["dropped_groups"] == 0
    assert all(row.any() for row in again.fetch(["advantages"])["advantages"].rows())
    every = lab.compute_advantages(dropped.drop("valid"), estimator="grpo")
    assert every.fetch(["counted"])["counted"].all()


def test_updates_leave_out_rows_without_a_baseline(lab: wb.Workbench) -> None:
    whole = table([1, 0, 1, 1], REWARDS, [0, 0, 1, 1]) | {"rewards": torch.tensor([1.0, 0.5, 1.0, 0.0])}
    made = lab.compute_advantages(lab.put(whole), estimator="rloo").fetch()
    for role, update in (("actor", "update_actor"), ("critic", "update_critic")):
        found, _ = gradient(lab, role, dict(made), update, clip=0.2)
        right, _ = gradient(lab, role, without(dict(made), [0, 1]), update, clip=0.2)
        np.testing.assert_allclose(found, right, rtol=1e-4, atol=1e-7)


def test_remax_leaves_out_rows_whose_greedy_response_failed(lab: wb.Workbench) -> None:
    whole = {**table(), "baseline_valid": torch.tensor([1, 0, 1, 1])}
    batch = lab.compute_advantages(lab.put(whole), estimator="remax")
    assert "valid" not in batch.names and batch.fetch(["counted"])["counted"].tolist() == [True, False, True, True]
    other = lab.compute_advantages(batch, estimator="reinforce_pp")
    assert other.fetch(["counted"])["counted"].all()


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_new_responses_have_not_failed(lab: wb.Workbench, temperature: float) -> None:
    status: Table = {
        "valid": torch.tensor([0, 1]),
        "counted": torch.tensor([1, 0]),
        "failure": ["compute_reward f: raised X", ""],
    }
    prompts = lab.put({**lab.prompts.next(2).fetch(), **status})
    drawn = lab.actor.generate_sequences(prompts, max_new_tokens=2, temperature=temperature)
    found = drawn.fetch(["valid", "counted"])
    assert found["valid"].all() and found["counted"].all() and drawn.failed().empty


def test_the_interval_of_rewards_has_prompts_as_clusters_and_valid_rows_alone(lab: wb.Workbench) -> None:
    given = table([1, 1, 1, 1, 0, 1], [0.0] * 6, [0, 0, 1, 1, 2, 2])

    def score(response: str, response_ids: list[int], **row: Any) -> float:
        return float(len(response_ids))

    scored = lab.reward.compute_reward(lab.put(given), function=score)
    scores = torch.as_tensor(scored.fetch(["rewards"])["rewards"]).double()
    totals = [float(scores[:2].sum()), float(scores[2:4].sum()), float(scores[5])]
    metrics = lab.last_metrics["compute_reward"]
    assert metrics["rewards/interval95"] == pytest.approx(clustered_half_width(totals, [2, 2, 1]))
    assert metrics["rewards/mean"] == pytest.approx(sum(totals) / 5)


ROWS = 8
VALID = [1, 0, 1, 1, 0, 0, 1, 0]  # of two prompts, whose rows lie on both ranks; the second has one valid row


def picky(prompt: str, response: str, number: str) -> float:
    if number in "16":
        raise ConnectionError("HTTP 503")
    return float(number)


def steps(prompt: str, response: str, response_ids: list[int], number: str) -> list[float]:
    if number == "3":
        raise ConnectionError("HTTP 503")
    return [float(number)] * len(response_ids)


@wb.batched(over="group")
def against_group(prompt: list[str], response: list[str], number: list[str]) -> list[float]:
    return [float(one) - sum(map(float, number)) / len(number) for one in number]


@wb.batched(over="batch")
def place(prompt: list[str], response: list[str], number: list[str]) -> list[float]:
    if "x" in number:
        raise ValueError("no number")
    return [number.index(one) / len(number) for one in number]


def shard(rank: int, size: int, **columns: Any) -> Shard:
    """This rank's rows of eight: every second of two ranks."""
    rows = torch.arange(rank, ROWS, size)
    draws = torch.Generator().manual_seed(1)
    every = Ragged.of([torch.randn(3 + row % 3, generator=draws) for row in range(ROWS)], torch.float32)
    ids = every.like(torch.randint(8, 200, (len(every.values),), generator=draws))
    table = {
        "prompt_ids": ids, "response_ids": ids, "response_mask": every.like(torch.ones(len(ids.values)).bool()),
        "old_log_prob": every.like(-every.values.abs()), "rollout_log_prob": every.like(-every.values.abs() - 0.1),
        "turn_ends": Ragged.of([[1, n] for n in every.lengths.tolist()], torch.int64),
        "values": every, "prompt_uid": torch.arange(ROWS) % 4 // 2, "rewards": torch.randn(ROWS, generator=draws),
        **columns,
    }  # fmt: skip
    mine = {
        name: column.take(rows.tolist()) if isinstance(column, Ragged) else column[rows]
        if isinstance(column, torch.Tensor) else [column[row] for row in rows.tolist()]
        for name, column in table.items()
    }  # fmt: skip
    return Shard(columns=mine, rows=rows.numpy(), minibatch_sizes=(len(rows),), meta={})


def outcomes() -> dict[str, Any]:
    """Columns of this rank's rows, by row number, and metrics with their counts, of each call."""
    context = context_here()
    rank, size = context.communicator.rank, context.communicator.world_size
    settings = {"dtype": "float32", "training": Training(engine="torch"), "generation": Generation()}
    model = Model(function=picky).filled("reward", **settings)  # type: ignore[arg-type]
    reward, numeric = RewardWorker(model, context), NumericWorker(Model(TINY), context)
    texts = {name: [str(row) for row in range(ROWS)] for name in ("prompt", "number")}
    given = shard(rank, size, **texts)
    given.columns.pop("rewards")
    done = {
        "one": reward.compute_reward(given, most_failed=1.0),
        "many": reward.compute_reward(
            given, most_failed=1.0, function={"a": picky, "b": (against_group, 0.5), "c": place}
        ),
        "mixed": reward.compute_reward(
            given, most_failed=1.0, function={"a": picky, "b": (against_group, 0.5), "steps": steps}
        ),
        "all failed": reward.compute_reward(
            shard(rank, size, **{**texts, "number": ["x"] * ROWS}), function=place, most_failed=1.0
        ),
    }
    again = replace(given, columns={**given.columns, **done["one"].columns})
    done["again"] = reward.compute_reward(again, function=place, only=[6])
    again = replace(given, columns={**given.columns, **done["mixed"].columns})
    functions: dict[str, Any] = {"a": place, "b": against_group, "steps": steps}
    done["mixed again"] = reward.compute_reward(again, function=functions, only=[6], most_failed=1.0)
    valid = shard(rank, size, valid=torch.tensor(VALID))
    for estimator in (*GROUPED, "gae"):
        correction = wb.Correction() if estimator == "off_policy_baseline" else None
        done[estimator] = numeric.compute_advantages(valid, estimator=estimator, correction=correction)  # type: ignore[arg-type]
    ends = valid.ragged("response_mask")
    flags = torch.tensor([t % 2 == 0 for n in ends.lengths.tolist() for t in range(n)])
    columns = {**valid.columns, "rewards": valid.columns["values"], "step_ends": ends.like(flags)}
    done["steps"] = numeric.compute_advantages(replace(valid, columns=columns), estimator="grpo_process")
    context.calls.close()
    return {
        "columns": {
            call: {
                name: dict(zip(given.rows.tolist(), map(_plain, _rows(column)), strict=True))
                for name, column in output.columns.items()
            }
            for call, output in done.items()
        },
        "metrics": {call: as_metrics(output.metrics) for call, output in done.items()},
    }


def _rows(column: Any) -> list[Any]:
    return column.rows() if isinstance(column, Ragged) else list(column)


def _plain(value: Any) -> Any:
    return value.tolist() if isinstance(value, torch.Tensor) else value
