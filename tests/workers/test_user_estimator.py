"""Estimators that a user writes see the whole batch: the same numbers on one rank and on two, and those of the same
estimator by name."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import workbench as wb
from tests.cases import TINY, stored, tiny_lab
from tests.engines.training_ranks import run_ranks
from tests.expected import expect_error
from tests.workers.update_ranks import context_here
from workbench.batches.columns import Ragged, Table, rows_at
from workbench.errors import BadInput, StageError, UnknownColumn
from workbench.messages.shards import Shard
from workbench.models.spec import Model
from workbench.workers.roles.numeric import NumericWorker

ROWS = 8


def table() -> Table:
    found = stored(ROWS)
    mask = found["response_mask"]
    assert isinstance(mask, Ragged)
    rows = mask.rows()
    for row in rows[::3]:
        row[1] = False
    more: Table = {
        "response_mask": Ragged.of(rows, torch.bool), "rewards": torch.tensor([1.0, 0, 2, 0, 0, 3, 1, 1]),
        "prompt_uid": torch.arange(ROWS) % 3, "note": [f"row {row}" for row in range(ROWS)], "level": [*range(ROWS)],
        "ref_log_prob": found["old_log_prob"],
    }  # fmt: skip
    return {**found, **more}


def of_group(rewards: Tensor, group: Tensor) -> Tensor:
    """GRPO's, as a user writes it."""
    out = torch.zeros_like(rewards)
    for prompt in group.unique():
        its = rewards[group == prompt]
        out[group == prompt] = (its - its.mean()) / (its.std() + 1e-6)
    return out


def of_everything(
    token_rewards: Tensor,
    mask: Tensor,
    values: Tensor,
    note: list[str],
    level: Tensor,
    prompt_ids: Tensor,
    nothing: float = 2.0,
) -> tuple[Tensor, Tensor]:
    """One that mixes all rows: ranks that saw fewer of them, or in another order, would give other numbers."""
    assert [int(text.split()[1]) for text in note] == level.tolist() == [*range(ROWS)] and len(prompt_ids) == ROWS
    place = torch.arange(ROWS)[:, None] / ROWS
    whole = (token_rewards + values)[mask]
    return (values - whole.mean()) / whole.std() + place * nothing, token_rewards.flip(0).cumsum(-1)


def on_ranks() -> list[dict[str, Any]]:
    """Columns and metrics of this rank's rows for both estimators."""
    context = context_here()
    rank, size = context.communicator.rank, context.communicator.world_size
    mine = np.arange(ROWS)[::-1][rank::size].copy()  # in another order than that of the batch
    worker = NumericWorker(Model(TINY), context)
    shard = Shard(
        columns=rows_at(table(), mine), rows=mine, minibatch_sizes=(len(mine),), meta={}
    )  # fmt: skip
    found = []
    for function in (of_group, of_everything):
        output = worker.compute_advantages(replace(shard), estimator=function, kl_coefficient=0.1)
        of_row = {
            name: dict(zip(mine.tolist(), column.rows(), strict=True))
            for name, column in output.columns.items()
            if isinstance(column, Ragged)
        }
        found.append(of_row)
    return found


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[wb.Workbench]:
    with tiny_lab("estimators", tmp_path_factory.mktemp("runs"), backend="inline", models={"actor": TINY}) as lab:
        yield lab


def column(batch: wb.Batch, name: str) -> Tensor:
    found = batch.fetch([name])[name]
    assert isinstance(found, Ragged)
    return found.values


def test_grpo_written_in_a_cell_gives_grpos_numbers(lab: wb.Workbench) -> None:
    batch, mask = lab.put(table()), table()["response_mask"]
    assert isinstance(mask, Ragged)
    by_name, by_hand = (lab.compute_advantages(batch, estimator=estimator) for estimator in ("grpo", of_group))
    torch.testing.assert_close(column(by_hand, "advantages"), column(by_name, "advantages"))
    assert not column(by_hand, "advantages")[~mask.values].any()
    whitened = lab.compute_advantages(batch, estimator=of_group, whiten_advantages=True)
    inside = column(whitened, "advantages")[mask.values]
    assert float(inside.mean()) == pytest.approx(0, abs=1e-5) and float(inside.std()) == pytest.approx(1, abs=0.02)


def test_two_ranks_give_the_bits_of_one() -> None:
    one, two = on_ranks(), run_ranks(on_ranks, 2)
    for number, expected in enumerate(one):
        for name, rows in expected.items():
            both = {row: values for rank in two for row, values in rank[number][name].items()}
            assert both.keys() == rows.keys() == set(range(ROWS))
            assert all(torch.equal(both[row], rows[row]) for row in rows), name


@pytest.mark.parametrize(
    ("function", "said"),
    [
        (lambda rewards: rewards.mean(), r"shape \[\].*was it averaged over the batch"),
        (lambda rewards: rewards[:3], r"shape \[3\].*\[rows\] of shape \[8\]"),
        (lambda rewards: rewards.tolist(), r"returned list"),
        (lambda rewards: rewards / 0, r"not finite in row 0"),
        (lambda rewards: rewards > 0, r"torch.bool"),
        (
            lambda rewards: 1 / 0,
            r"estimator=<lambda> raised ZeroDivisionError: division by zero, in line \d+ of .*fetch",
        ),
    ],
)
def test_what_it_may_not_return(lab: wb.Workbench, function: Any, said: str) -> None:
    with pytest.raises((StageError, BadInput), match=said):
        lab.compute_advantages(lab.put(table()), estimator=function)


def test_what_it_may_not_ask_for(lab: wb.Workbench) -> None:
    with pytest.raises(BadInput, match=r"takes 'reward'\. .*rewards, token_rewards, mask, group.* write 'rewards'"):
        lab.compute_advantages(lab.put(table()), estimator=lambda reward: reward)
    remedy = "write def estimator.*; a decorator needs functools.wraps"
    with expect_error(BadInput, value=r"takes \*given", rule="its parameters' names select", remedy=remedy):
        lab.compute_advantages(lab.put(table()), estimator=lambda *given, **named: of_group(*given, **named))
    batch = lab.put({name: values for name, values in table().items() if name != "prompt_uid"})
    with expect_error(UnknownColumn, value="prompt_uid"):
        lab.compute_advantages(batch, estimator=of_group)
    with expect_error(BadInput, value="bootstrap"):
        lab.compute_advantages(lab.put(table()), estimator=of_group, bootstrap=True)


class Moving:
    """A moving average of the rewards as the baseline; as a loss it only counts its calls."""

    mean = calls = 0.0

    def __call__(self, rewards: Tensor) -> Tensor:
        self.mean += 0.1 * (float(rewards.mean()) - self.mean)
        return rewards - self.mean

    def loss(self, log_prob: Tensor) -> Tensor:
        self.calls += 1
        return -log_prob


def test_an_object_that_changes_itself_is_told_that_workers_have_copies(
    lab: wb.Workbench, capsys: pytest.CaptureFixture[str]
) -> None:
    batch, moving = lab.put(table()), Moving()
    lab.compute_advantages(batch, estimator=of_group)
    with lab.kept("actor"):
        lab.actor.update_actor(batch, loss=lambda log_prob: -log_prob)
        assert "changed its own fields" not in capsys.readouterr().err
        lab.compute_advantages(batch, estimator=moving)
        assert "estimator=Moving changed its own fields. With Ray" in capsys.readouterr().err
        lab.actor.update_actor(batch, loss=moving.loss)
        assert "loss=loss changed its own fields. With Ray" in capsys.readouterr().err


def test_it_needs_no_rewards_if_it_takes_none(lab: wb.Workbench) -> None:
    def towards_reference(old_log_prob: Tensor, ref_log_prob: Tensor) -> Tensor:
        return ref_log_prob - old_log_prob

    scored = lab.put(table())
    batch = scored.drop("rewards", "ref_log_prob").join(scored.select("values").rename(values="ref_log_prob"))
    found = lab.compute_advantages(batch, estimator=towards_reference)
    mask = column(found, "response_mask").bool()
    expected = torch.where(mask, column(found, "ref_log_prob") - column(found, "old_log_prob"), 0.0)
    torch.testing.assert_close(column(found, "advantages"), expected)
    assert "rewards/mean" not in lab.last_metrics["compute_advantages"] and not column(found, "token_rewards").any()
    rewarded = lab.compute_advantages(batch.join(scored.select("rewards")), estimator=towards_reference)
    assert torch.equal(column(rewarded, "advantages"), expected) and column(rewarded, "returns").any()
    for function in (of_group, lambda group, token_rewards=None: token_rewards):
        with expect_error(UnknownColumn, value="rewards"):
            lab.compute_advantages(batch, estimator=function)


def test_for_costs_it_gets_the_columns_of_costs(lab: wb.Workbench) -> None:
    def own_gae(token_rewards: Tensor, values: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        assert mask.all()
        out, advantage = torch.zeros_like(values), torch.zeros(len(values))
        for t in reversed(range(values.shape[1])):
            after = values[:, t + 1] if t + 1 < values.shape[1] else torch.zeros(len(values))
            advantage = token_rewards[:, t] + 0.9 * after - values[:, t] + 0.9 * 0.8 * advantage
            out[:, t] = advantage
        return out, out + values

    def own_remax(token_rewards: Tensor, mask: Tensor, baseline_rewards: Tensor | None = None) -> Tensor:
        assert baseline_rewards is not None
        return (token_rewards.sum(-1) - baseline_rewards)[:, None] * mask

    flat = Ragged.of([torch.linspace(row, 1, 4) for row in range(ROWS)], torch.float32)
    more: Table = {
        "prompt_ids": flat.like(torch.ones(4 * ROWS).long()), "response_ids": flat.like(torch.ones(4 * ROWS).long()),
        "response_mask": flat.like(torch.ones(4 * ROWS).bool()), "rewards": table()["rewards"],
        "values": flat, "cost_values": flat.like(5 - flat.values), "costs": torch.arange(ROWS).float(),
        "baseline_rewards": torch.linspace(0, 1, ROWS), "baseline_costs": torch.linspace(3, 0, ROWS),
        "prompt_uid": torch.arange(ROWS),
    }  # fmt: skip
    batch = lab.put(more)
    for function, name in ((own_gae, "gae"), (own_remax, "remax")):
        options = {"gamma": 0.9 if name == "gae" else 1.0, "lam": 0.8, "multiplier": 0.7, "whiten_advantages": False}
        mine, named = (lab.compute_advantages(batch, estimator=e, **options) for e in (function, name))
        for found in ("advantages", "returns", "cost_returns"):
            torch.testing.assert_close(column(mine, found), column(named, found), msg=f"{name} {found}")
    of_tokens = lab.put({**more, "baseline_rewards": flat, "baseline_costs": flat.like(flat.values + 1)})
    mine, named = (
        lab.compute_advantages(of_tokens, estimator=e, multiplier=0.7, whiten_advantages=False)
        for e in (own_remax, "remax")
    )
    torch.testing.assert_close(column(mine, "advantages"), column(named, "advantages"))
    with expect_error(UnknownColumn, value="cost_values"):
        lab.compute_advantages(batch.drop("cost_values"), estimator=own_gae, multiplier=0.7)


def test_it_is_told_of_rows_that_count(lab: wb.Workbench) -> None:
    seen = table() | {"baseline_rewards": torch.linspace(0, 1, ROWS), "valid": torch.tensor([1, 0, 1, 1, 1, 1, 1, 1])}
    batch = lab.put({**seen, "baseline_valid": torch.tensor([1, 1, 0, 1, 1, 1, 1, 1])})

    def own_remax(token_rewards: Tensor, mask: Tensor, baseline_rewards: Tensor) -> Tensor:
        assert len(mask) == ROWS - 2
        return (token_rewards.flip(-1).cumsum(-1).flip(-1) - baseline_rewards[:, None]) * mask

    mine, named = (lab.compute_advantages(batch, estimator=e) for e in (own_remax, "remax"))
    torch.testing.assert_close(column(mine, "advantages"), column(named, "advantages"))
    assert mine.fetch(["counted"])["counted"].tolist() == [True, False, False] + [True] * 5

    def every(rewards: Tensor, valid: Tensor, baseline_rewards: Tensor) -> Tensor:
        assert valid.tolist() == [1, 0, 1, 1, 1, 1, 1, 1]
        return rewards + 1

    lab.compute_advantages(batch, estimator=every, count_invalid=True)
    with expect_error((StageError, BadInput), value="not finite in row 4"):
        lab.compute_advantages(
            batch, estimator=lambda rewards, prompt_uid: rewards / (rewards[:1] * 0 + (torch.arange(len(rewards)) != 3))
        )
