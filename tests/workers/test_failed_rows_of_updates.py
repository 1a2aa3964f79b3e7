"""Every registered operation that takes steps: what a row that is not valid holds changes nothing, or it is refused."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import workbench as wb
from tests.cases import TINY, stored, tiny_lab
from tests.expected import expect_error
from workbench.batches.columns import Ragged, Table
from workbench.errors import BadInput
from workbench.messages.calls import Output
from workbench.messages.operation import Operation, operations, register
from workbench.messages.shards import Shard
from workbench.workers import roles
from workbench.workers.roles.actor import ActorWorker
from workbench.workers.worker import Worker

FAILED = 1


def updates() -> dict[str, Operation]:
    """By name, of all worker classes of the package."""
    modules = [
        importlib.import_module(f"{roles.__name__}.{found.name}") for found in pkgutil.iter_modules(roles.__path__)
    ]
    classes = {value for module in modules for value in vars(module).values() if inspect.isclass(value)}
    workers = [value for value in classes if issubclass(value, Worker) and value.__module__.startswith("workbench.")]
    return {name: op for one in workers for name, op in operations(one).items() if op.updates}


UPDATES = sorted(updates())
ARGUMENTS: dict[str, list[dict[str, Any]]] = {
    "update_actor": [{}, {"entropy_coefficient": 0.1}, {"sft_coefficient": 1.0}, {"loss": "gspo"}]
}


COMPUTED = (
    "actor.compute_log_prob", "actor.compute_pair_log_prob", "actor.compute_feedback_log_prob",
    "reference.compute_ref_log_prob", "reference.compute_precisions", "critic.compute_values",
    "cost_critic.compute_cost_values", "reward.compute_pair_rewards", "cost.compute_pair_costs",
)  # fmt: skip


class Forgetful(ActorWorker):
    """An update of a user's that does not know of rows that are not valid."""

    @register("DP_PROTO", reads=("prompt_ids", "response_ids"), updates=True)
    def update_mine(self, batch: Shard) -> Output:
        raise AssertionError("refused before")


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[wb.Workbench]:
    trained = wb.Model(TINY, training=wb.Training(engine="torch", learning_rate=0.0, minibatches=1))
    models = {"actor": wb.Model(TINY, worker=Forgetful), "critic": TINY, "cost_critic": TINY, "reference": TINY,
              "teacher": TINY, "reward": trained, "cost": trained}  # fmt: skip
    with tiny_lab("every-update", tmp_path_factory.mktemp("runs"), backend="inline", models=models,
                  training={"minibatches": 1, "learning_rate": 0.0}) as lab:  # fmt: skip
        yield lab


def other(ids: Ragged) -> Ragged:
    """The same but in the failed row."""
    rows = [row.clone() for row in ids.rows()]
    rows[FAILED] = rows[FAILED].flip(0) + 1 if not ids.values.is_floating_point() else 5 - rows[FAILED]
    return Ragged.of(rows, ids.values.dtype)


def tables(lab: wb.Workbench) -> tuple[Table, Table]:
    """All that updates read, with one row that is not valid; and the same with other contents of that row."""
    one = dict(stored(4))
    lengths = one["response_mask"].lengths  # type: ignore[union-attr]
    draws = torch.Generator().manual_seed(3)
    for name in ("chosen_ids", "rejected_ids", "mismatched_ids"):
        one[name] = Ragged(torch.randint(8, 200, (int(lengths.sum()),), generator=draws), lengths)
    one |= {"cost_values": one["values"], "cost_returns": one["returns"], "rollout_log_prob": one["old_log_prob"],
            "ref_log_prob": one["old_log_prob"]}  # fmt: skip
    for name in ("ref_chosen_log_prob", "ref_rejected_log_prob", "ref_response_log_prob", "ref_mismatched_log_prob"):
        one[name] = -torch.arange(4.0)
    one |= {"desirable": torch.tensor([1, 0, 1, 0]), "demonstrated": torch.tensor([1, 1, 0, 0])}
    one["prompt_uid"] = torch.tensor([0, 0, 1, 1])
    two = {
        name: other(column) if isinstance(column, Ragged) and name != "response_mask" else column
        for name, column in one.items()
    }
    two["desirable"], two["demonstrated"] = torch.tensor([1, 1, 1, 0]), torch.tensor([1, 0, 0, 0])
    found = []
    for made in (one, two):
        taught = lab.teacher.compute_teacher_log_prob(lab.put(made), top_k=4).fetch()
        found.append({**taught, "valid": torch.tensor([1, 0, 1, 1])})
    return found[0], found[1]


def test_roles_have_them_all(lab: wb.Workbench) -> None:
    found = {name for group in lab.groups.values() for name, op in group.operations.items() if op.operation.updates}
    assert found == {*UPDATES, "update_mine"}, "open a role for the new update in this file's workbench"


@pytest.mark.parametrize("name", UPDATES)
def test_what_is_in_a_failed_row_changes_nothing_or_is_refused(lab: wb.Workbench, name: str) -> None:
    group = next(group for group in lab.groups.values() if name in group.operations)
    one, two = tables(lab)
    for arguments in ARGUMENTS.get(name, [{}]):
        if group.operations[name].operation.resolved({**arguments_of(group, name), **arguments}).counts_all_rows:
            with expect_error(BadInput, value="row 1 is not valid", remedy="take the others"):
                getattr(group, name)(lab.put(one))
            assert getattr(group, name)(lab.put({n: c for n, c in one.items() if n != "valid"}))
            continue
        first, second = (dict(getattr(group, name)(lab.put(made), **arguments)) for made in (one, two))
        whole = dict(getattr(group, name)(lab.put({n: c for n, c in two.items() if n != "valid"}), **arguments))
        for metrics in (first, second, whole):
            metrics.pop("optimizer_steps")
        if name == "center":  # the second one finds what the first one has centred
            assert abs(second["before/mean"]) < 1e-5 < abs(whole["before/mean"])
            continue
        assert first["grad_norm"] > 0 and first == second
        assert whole != first, "the failed row would have made a difference"


def arguments_of(group: Any, name: str) -> dict[str, Any]:
    return dict(group.operations[name].arguments((), {})[0])


def test_an_update_of_ones_own_that_does_not_say_so_refuses_them(lab: wb.Workbench) -> None:
    one, _ = tables(lab)
    with expect_error(BadInput, value="row 1 is not valid"):
        lab.actor.update_mine(lab.put(one))


@pytest.mark.parametrize("stage", COMPUTED)
def test_metrics_of_a_forward_pass_are_of_valid_rows(lab: wb.Workbench, stage: str) -> None:
    one, _ = tables(lab)
    keep = torch.tensor([0, 2, 3])
    alone: Table = {name: one_of(column, keep) for name, column in one.items() if name != "valid"}
    role, _, name = stage.partition(".")
    found = []
    for given in (one, alone):
        getattr(lab.groups[role], name)(lab.put(given))
        found.append(dict(lab.last_metrics[name]))
    assert found[0] and found[0] == pytest.approx(found[1], rel=1e-5)


def one_of(column: Any, keep: torch.Tensor) -> Any:
    return column.take(keep.tolist()) if isinstance(column, Ragged) else column[keep]


def test_the_mean_score_of_a_model_is_of_valid_rows(lab: wb.Workbench) -> None:
    one, _ = tables(lab)
    batch = lab.reward.compute_reward(lab.put(one))
    scores = batch.fetch(["rewards"])["rewards"]
    assert isinstance(scores, torch.Tensor)
    assert lab.last_metrics["compute_reward"]["rewards/mean"] == pytest.approx(
        float(scores[[0, 2, 3]].mean()), rel=1e-5
    )
