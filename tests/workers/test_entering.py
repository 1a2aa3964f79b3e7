"""What a stage would train on is checked before it begins: a refused batch changes nothing."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import workbench as wb
from tests.cases import stored, tiny_lab, update_on
from tests.expected import expect_error
from workbench.batches.columns import Ragged, Table
from workbench.errors import BadInput


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[wb.Workbench]:
    with tiny_lab("entering", tmp_path_factory.mktemp("runs"), backend="inline") as lab:
        yield lab


def with_value(name: str, value: float, row: int = 2) -> Table:
    table = stored()
    column = table[name]
    assert isinstance(column, Ragged)
    values = column.values.clone()
    values[int(column.lengths[:row].sum()) + 1] = value
    return {**table, name: column.like(values)}


@pytest.mark.parametrize("value", [float("nan"), pytest.param(float("inf"), marks=pytest.mark.thorough)])
@pytest.mark.parametrize(
    ("role", "name"), [("actor", "old_log_prob"), ("actor", "advantages"), ("critic", "values"), ("critic", "returns")]
)
def test_an_update_on_what_is_not_finite_takes_no_step(lab: wb.Workbench, role: str, name: str, value: float) -> None:
    batch = lab.put(with_value(name, value))  # to look at it is allowed
    worker, update = getattr(lab, role), f"update_{role}"
    digests, steps = worker.weight_digests(), len(lab.metrics())
    with pytest.raises(
        BadInput, match=rf"{role}.{update} failed.*'{name}' holds {value} in row 2, token 1.*leave"
    ) as e:
        getattr(worker, update)(batch)
    assert "column" in e.value.value and "finite" in e.value.rule and "batch.df" in e.value.remedy
    assert worker.weight_digests() == digests
    assert len(lab.metrics()) == steps
    spans = lab.spans()
    assert "forward" not in set(spans[spans["run"] == spans["run"].max()]["kind"])
    getattr(worker, update)(batch.take([0, 1]))  # without the row it is right


@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        ([[5], [-3], [5], [6]], "'prompt_ids' has token id -3 in row 1"),
        ([[5], [6], [5], [264]], "'prompt_ids' has token id 264 in row 3.*ids 0 to 263"),
        ([[9], [], [9], [9]], "'prompt_ids' has no token in row 1"),
        ([[9], [9] * 5000, [9], [9]], "row 1 has 5000 tokens in 'prompt_ids'.*reads at most 2048"),
        ([[9], [9], [9], [9] * 2044], "row 3 has 2049 tokens in 'prompt_ids' and 'response_ids'.*reads at most 2048"),
    ],
)
def test_ids_that_no_put_has_seen_are_checked_too(lab: wb.Workbench, prompts: list[list[int]], message: str) -> None:
    table = stored()
    del table["prompt_ids"]
    batch = lab.put({**table, "own": Ragged.of(prompts, torch.int64)}).rename(own="prompt_ids")
    for stage in (lab.actor.compute_log_prob, lab.critic.compute_values, lab.reference.compute_ref_log_prob):
        with pytest.raises(BadInput, match=message):
            stage(batch)


@pytest.mark.thorough
def test_a_row_on_one_rank_is_refused_by_all(tmp_path: Path) -> None:
    """A rank that began would wait in its first collective for the one that did not."""
    with tiny_lab("entering-two", tmp_path, backend="ray", devices=2, placement=wb.Placement.colocate(2)) as lab:
        digests = lab.actor.weight_digests()
        with expect_error(BadInput, value="update_actor failed on rank 1: .*'advantages' holds nan in row 3, token 1"):
            lab.actor.update_actor(lab.put(with_value("advantages", float("nan"), row=3)))
        assert lab.actor.weight_digests() == digests
        assert update_on(lab, stored())["actor/optimizer_steps"] == 2
