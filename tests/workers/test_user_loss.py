"""Losses that a user writes: they give the bits of the same loss by name, ask for columns by name, and are refused with
shapes where they return another thing."""

from __future__ import annotations

import functools
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import Tensor

import workbench as wb
from tests.cases import TINY, hosts_of, stored, tiny_lab
from tests.engines.training_ranks import run_ranks
from tests.expected import expect_error
from tests.workers.update_ranks import Case, ppo_by_hand, run_cases, squared_by_hand
from workbench.batches.columns import Ragged, Table
from workbench.engines.communicator import Communicator
from workbench.errors import BadInput, StageError, UnknownColumn
from workbench.messages.metrics import Mean
from workbench.messages.shards import Shard
from workbench.telemetry import Recorder
from workbench.workers.micro_batches import each_minibatch, on_host
from workbench.workers.user_loss import reported

ENGINES = ("torch", "zero1", "zero2")


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[wb.Workbench]:
    models = {"actor": TINY, "critic": TINY}
    training = {"micro_batch_tokens": 32}  # several micro-batches a minibatch
    with tiny_lab("losses", tmp_path_factory.mktemp("runs"), backend="inline", models=models, training=training) as lab:
        yield lab


def table() -> Table:
    found = stored(8)
    mask = found["response_mask"]
    assert isinstance(mask, Ragged)
    rows = mask.rows()
    for row in rows[::3]:
        row[1] = False
    columns: dict[str, Any] = {"rewards": torch.arange(8.0), "answer": [str(row) for row in range(8)]}
    columns |= {"weight": [row / 8 for row in range(8)], "level": [*range(7), None]}
    for name in ("ref_log_prob", "rollout_log_prob"):
        old = found["old_log_prob"]
        assert isinstance(old, Ragged)
        columns[name] = old.like(old.values + 0.1)
    return {**found, **columns}


def updated(lab: wb.Workbench, role: str = "actor", **arguments: Any) -> tuple[dict[str, float], list[dict[str, str]]]:
    """Metrics of an update and the digests of all weights after it, which is then undone."""
    with lab.kept(role):
        group = getattr(lab, role)
        metrics = dict(getattr(group, f"update_{role}")(lab.put(table(), meta={"temperature": 1.0}), **arguments))
        return metrics, group.weight_digests()


def returning(value: Any) -> Any:
    def loss(log_prob: Tensor, mask: Tensor) -> Any:
        return value(log_prob) if callable(value) else value

    return loss


@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"epochs": 2, "aggregation": "sequence-mean-token-sum"},
        {"kl_coefficient": 0.1, "entropy_coefficient": 0.01, "correction": wb.Correction()},
    ],
)
def test_ppo_written_in_a_cell_gives_the_bits_of_ppo(lab: wb.Workbench, arguments: dict[str, Any]) -> None:
    by_name, weights = updated(lab, loss="ppo", **arguments)
    by_hand, same = updated(lab, loss=ppo_by_hand, **arguments)
    assert by_hand == by_name
    assert same == weights
    assert 0 < by_hand["clip_fraction"] < 1


def test_on_policy_the_old_log_probabilities_are_the_present_ones(tmp_path: Path) -> None:
    with tiny_lab("one-step", tmp_path, backend="inline", models={"actor": TINY}, training={"minibatches": 1}) as lab:
        by_name = updated(lab, on_policy=True)
        assert updated(lab, loss=ppo_by_hand, on_policy=True) == by_name
        assert by_name[0]["ratio/max_deviation"] == 0


def test_a_critics_loss_written_in_a_cell(lab: wb.Workbench) -> None:
    assert updated(lab, "critic", loss=squared_by_hand) == updated(lab, "critic")
    with expect_error(BadInput, value="clip=0.3 with loss=squared_by_hand.*", remedy="functools.partial"):
        updated(lab, "critic", loss=squared_by_hand, clip=0.3)
    with expect_error(BadInput, value="takes log_prob", rule="its gradient comes through 'values'"):
        updated(lab, "critic", loss=lambda log_prob: log_prob)


@pytest.mark.slow
@pytest.mark.parametrize("world", [2, pytest.param(1, marks=pytest.mark.thorough)])
def test_the_bits_are_those_of_the_named_loss_on_each_engine(world: int) -> None:
    cases = [
        Case(role=role, engine=engine, rows=2, written=written)
        for role in ("actor", "critic")
        for engine in (ENGINES if role == "actor" else ENGINES[:1])
        for written in (False, True)
    ]
    for of_rank in run_ranks(run_cases, world, cases):
        for by_name, by_hand in zip(of_rank[::2], of_rank[1::2], strict=True):
            assert by_name[0]["metrics"] == by_hand[0]["metrics"]
            assert by_name[0]["moved"].keys() == by_hand[0]["moved"].keys()
            assert all(torch.equal(by_hand[0]["moved"][name], moved) for name, moved in by_name[0]["moved"].items())


def test_what_it_is_given(lab: wb.Workbench) -> None:
    seen: list[dict[str, Any]] = []

    def loss(
        log_prob: Tensor, entropy: Tensor, mask: Tensor, prompt_ids: Tensor, rewards: Tensor, answer: list[str],
        weight: Tensor, level: list[int | None], rollout_log_prob: Tensor | None = None, nothing: float = 3.0,
        scale: float = 1.0,
    ) -> Any:  # fmt: skip
        seen.append(dict(locals()))
        return scale * -log_prob * rewards[:, None], {"double": 2 * log_prob, "single": log_prob, "reward": rewards}

    metrics, _ = updated(lab, loss=functools.partial(loss, scale=0.5))
    given, whole = seen[-1], table()
    rows = [int(text) for text in given["answer"]]
    assert given["rewards"].tolist() == rows and given["nothing"] == 3.0 and given["scale"] == 0.5
    assert given["weight"].tolist() == [row / 8 for row in rows]
    assert given["level"] == [row if row < 7 else None for row in rows]  # not all are numbers
    for name, inside in (("response_mask", given["mask"]), ("rollout_log_prob", given["rollout_log_prob"])):
        column = whole[name]
        assert isinstance(column, Ragged)
        padded = column.take(rows).pad()
        assert torch.equal(torch.where(given["mask"], padded, 0), inside)
    prompts = whole["prompt_ids"]
    assert isinstance(prompts, Ragged) and torch.equal(given["prompt_ids"], prompts.take(rows).pad())
    assert given["mask"].dtype == torch.bool and given["entropy"].requires_grad and given["log_prob"].requires_grad
    assert not given["log_prob"][~given["mask"]].any()
    assert metrics["reward"] == pytest.approx(3.5)  # the mean over the rows
    assert metrics["double"] == pytest.approx(2 * metrics["single"]) and metrics["single"] < 0


def test_a_parameter_that_nothing_has(lab: wb.Workbench) -> None:
    with pytest.raises(
        BadInput,
        match=r"takes 'logprob'. .*log_prob, entropy, logits, hidden_states, mask, .* write 'log_prob' \(the nearest\)",
    ):
        updated(lab, loss=lambda log_prob, logprob: log_prob)
    with expect_error(BadInput, value="takes 'adv'", remedy=r"write 'advantages' \(the nearest\)"):
        updated(lab, loss=lambda log_prob, adv: log_prob)
    with expect_error(UnknownColumn, value="reads column 'token_rewards'"):
        updated(lab, loss=lambda log_prob, token_rewards: log_prob)
    with expect_error(
        BadInput, value="takes old_log_prob", rule="its gradient comes through 'log_prob' or 'entropy' or 'logits'"
    ):
        updated(lab, loss=lambda old_log_prob: old_log_prob)
    with expect_error(BadInput, value="by position"):
        updated(lab, loss=lambda log_prob, /: log_prob)
    with expect_error(
        BadInput, value="clip=0.1 with loss=ppo_by_hand", remedy=r"functools.partial\(ppo_by_hand, clip=0.1\)"
    ):
        updated(lab, loss=ppo_by_hand, clip=0.1)
    lock = threading.Lock()
    with expect_error(BadInput, value="cannot be sent to workers"):
        updated(lab, loss=lambda log_prob: log_prob * bool(lock))


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (lambda x: x.mean(), r"shape \[\].*was it summed or averaged"),
        (lambda x: x.sum(-1), r"shape \[2\].*was it summed or averaged"),
        (0.5, r"float 0.5.*was it summed"),
        (lambda x: x.T, r"a tensor of shape \[6, 2\]"),
        (lambda x: x.long(), r"int64"),
        (lambda x: x.detach(), r"a loss without a gradient.*detach"),
        (lambda x: (x, 3), r"int 3 as its metrics"),
        (lambda x: (x, {"far": x.mean()}), r"shape \[\] as metric 'far'"),
        (lambda x: (x, {"loss": x}), r"a metric 'loss'"),
        (lambda x: (x, {"entropy": x}), r"a metric 'entropy'\. .*one of the update's own metrics: .*approximate_kl"),
        (lambda x: (x, {"rollout_gap/mean": x}), r"a metric 'rollout_gap/mean'"),
        (lambda x: 1 / 0, r"loss=loss raised ZeroDivisionError: division by zero, in line \d+ of <lambda>.*lab.check"),
    ],
)
def test_what_it_may_not_return(lab: wb.Workbench, value: Any, said: str) -> None:
    weights = lab.actor.weight_digests()
    with pytest.raises((StageError, BadInput), match=said):
        lab.actor.update_actor(lab.put(table(), meta={"temperature": 1.0}), loss=returning(value))
    assert lab.actor.weight_digests() == weights


def test_the_rehearsal_takes_rows_with_a_token(lab: wb.Workbench) -> None:
    found, lengths = table(), [len(row) for row in cast(Ragged, table()["response_mask"]).rows()]
    valid = torch.tensor([False, True, False, True, True, True, False, True])
    mask = Ragged.of([torch.full((n,), row != 1) for row, n in enumerate(lengths)], torch.bool)
    seen: list[Tensor] = []

    def loss(log_prob: Tensor, mask: Tensor, rewards: Tensor) -> Tensor:
        seen.append(rewards)
        return -log_prob / mask.sum(-1, keepdim=True).clamp(min=1)

    batch = lab.put({**found, "response_mask": mask, "valid": valid}, meta={"temperature": 1.0})
    with lab.kept("actor"):
        lab.actor.update_actor(batch, loss=loss)
        assert seen[0].tolist() == [3, 4]
        seen.clear()
        lab.actor.update_actor(lab.put({**batch.fetch(), "valid": valid & ~valid}, meta=batch.meta), loss=loss)
    assert all(len(rewards) == 1 for rewards in seen)  # the passes of empty minibatches, and no rehearsal


def test_a_metric_of_rows_in_a_pass_that_only_keeps_in_step() -> None:
    values = torch.tensor([float("nan")])
    shard = Shard(columns=table(), rows=np.arange(8), minibatch_sizes=(2, 6), meta={})
    (micro,), _ = each_minibatch(shard, 100, Communicator(0, 1, Recorder()), torch.device("cpu"), skip={0, 1})
    read = on_host([{"length": reported(micro, values, micro.mask_BR(shard.valid_mask))}])
    assert read[0]["length"] == Mean(total=0.0, count=0.0)


def with_a_nan(log_prob: Tensor) -> Tensor:
    """Whose gradient is finite: that of the entry that was overwritten is 0."""
    loss = -log_prob
    loss[loss.isfinite()] = torch.where(torch.arange(loss.numel()) == 0, torch.nan, loss.flatten())
    return loss


@pytest.mark.parametrize(
    "loss",
    [
        lambda log_prob: (log_prob - log_prob.detach()).log(),
        lambda log_prob: -log_prob + torch.inf,
        with_a_nan,
    ],
)
def test_a_loss_that_is_not_finite_takes_no_step(lab: wb.Workbench, loss: Any) -> None:
    weights = lab.actor.weight_digests()
    metrics, _ = updated(lab, loss=loss)
    assert metrics["skipped/fraction"] == 1.0
    assert lab.actor.weight_digests() == weights


def test_nobody_looks_at_tensors_while_a_stage_computes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A view asks what hosts hold when it likes; a gradient that is read while it is dropped crashes the process."""
    with tiny_lab("looked", tmp_path, backend="inline") as lab:
        host, threads, described = hosts_of(lab)["shared-0"], list[str](), list[Any]()
        worker = host.workers["actor"]
        looked, stepped = worker.memory_bytes, worker.engine.step

        def noted() -> Any:
            threads.append(threading.current_thread().name)
            return looked()

        def step(*given: Any, **more: Any) -> Any:
            view = threading.Thread(target=lambda: described.append(host.describe()), name="view")
            view.start()
            view.join()
            return stepped(*given, **more)

        monkeypatch.setattr(worker, "memory_bytes", noted)
        monkeypatch.setattr(worker.engine, "step", step)
        before = host.describe()
        lab.actor.update_actor(lab.put(stored()))
        assert described and all(one["roles"] == before["roles"] for one in described)
        assert "view" not in threads
        assert host.describe()["moments"] == ["actor"] != before["moments"]
