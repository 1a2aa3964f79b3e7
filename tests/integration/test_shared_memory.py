"""Roles that take turns in the memory of their device compute what they would compute side by side."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import workbench as wb
from tests.cases import TINY, rollouts, tiny_lab, train_on, vowels
from workbench.batches.columns import ColumnValues, Ragged
from workbench.workers.worker import ONE_MEMORY

ROLES = {"actor": TINY, "critic": TINY, "reference": TINY, "reward": vowels}
MOVES = [
    ("generate_sequences", "actor", "offload", "optimizer"),
    ("compute_ref_log_prob", "actor", "offload", "parameters"),
    ("compute_ref_log_prob", "reference", "load", "parameters"),
    ("compute_values", "reference", "offload", "parameters"),
    ("compute_values", "critic", "load", "parameters"),
    ("update_critic", "critic", "load", "optimizer"),
    ("update_actor", "critic", "offload", "parameters, optimizer"),
    ("update_actor", "actor", "load", "parameters"),
    ("update_actor", "actor", "load", "optimizer"),
    ("weight_digests", "actor", "offload", "parameters, optimizer"),
    ("weight_digests", "critic", "load", "parameters"),
]


def open_lab(name: str, runs: Path, share_memory: Any, **options: Any) -> wb.Workbench:
    return tiny_lab(name, runs, backend="inline", device="cpu", devices=1, share_memory=share_memory, **options)


def moves(lab: wb.Workbench) -> list[tuple[str, str, str, str]]:
    spans = lab.spans()
    spans = spans[spans["kind"].isin(["offload", "load"]) & (spans["stage"] != "open")]
    assert set(spans["parent"]) <= {"compute", "weight_sync"}
    return list(zip(spans["stage"], spans["role"], spans["kind"], spans["note"], strict=True))


def bytes_of(lab: wb.Workbench, role: str) -> dict[str, int]:
    row: Any = lab.topology().set_index("role").loc[role]
    uses = ("parameters", "gradients", "optimizer", "offloaded", "generation_weights")
    return {use: int(row[f"{use}_bytes"]) for use in uses if f"{use}_bytes" in row}


def plain(column: ColumnValues) -> Any:
    if isinstance(column, Ragged):
        return [row.tolist() for row in column.rows()]
    return column if isinstance(column, list) else column.tolist()


def iterations(lab: wb.Workbench) -> tuple[list[Any], list[Any]]:
    """Two of PPO: metrics of all stages and the weights after them; what moved in the second."""
    metrics, before = [], 0
    for _ in range(2):
        before = len(moves(lab))
        metrics.append(train_on(lab, *rollouts(lab, rows=2)))
    return [*metrics, *lab.actor.weight_digests(), *lab.critic.weight_digests()], moves(lab)[before:]


@pytest.mark.slow
def test_ppo_is_the_same_to_the_last_bit(tmp_path: Path) -> None:
    with open_lab("apart", tmp_path, False) as lab:
        expected, moved = iterations(lab)
        whole = bytes_of(lab, "actor")
        assert not moved
        assert "offloaded" not in whole
    with open_lab("turns", tmp_path, "always") as lab:
        found, moved = iterations(lab)
        assert found == expected
        assert moved == MOVES
        assert bytes_of(lab, "critic")["parameters"] > 0
        held = whole["parameters"] + whole["optimizer"]
        assert bytes_of(lab, "actor") == {**dict.fromkeys(whole, 0), "offloaded": held}
        spans = lab.spans()
        leaving = spans[(spans["stage"] == "weight_digests") & (spans["kind"] == "offload")]
        assert leaving["moved_bytes"].tolist() == [held]
        with lab.kept("actor", "critic"):  # reads and writes the state of roles that are away
            train_on(lab, *rollouts(lab, rows=2))
            assert lab.actor.weight_digests() + lab.critic.weight_digests() != expected[2:]
        assert lab.actor.weight_digests() + lab.critic.weight_digests() == expected[2:]


def test_a_cpu_moves_nothing_and_says_why(tmp_path: Path) -> None:
    with open_lab("cpu", tmp_path, True, models={"actor": TINY, "reference": TINY}) as lab:
        batch = lab.actor.generate_sequences(lab.prompts.next(2), max_new_tokens=4)
        lab.reference.compute_ref_log_prob(lab.actor.compute_log_prob(batch))
        why = f"actor stays: {ONE_MEMORY}"
        assert moves(lab) == [("compute_ref_log_prob", "reference", "offload", why)]
        assert lab.spans()["moved_bytes"].sum() == 0
        assert bytes_of(lab, "actor")["parameters"] > bytes_of(lab, "actor")["offloaded"] == 0


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated:DeprecationWarning")
def test_an_engine_with_weights_of_its_own_sleeps_while_the_trainer_works(tmp_path: Path) -> None:
    """With ZeRO-3 transformers samples from a copy of the weights."""

    def work(lab: wb.Workbench) -> list[Any]:
        prompts = lab.prompts.next(4)
        first = lab.actor.generate_sequences(prompts, max_new_tokens=6, seed=1)
        assert lab.actor.check_sync()[0] < 1e-3
        assert bytes_of(lab, "actor")["generation_weights"] > 0
        columns = [lab.actor.compute_log_prob(first).fetch()]
        asleep.append(bytes_of(lab, "actor")["generation_weights"] == 0)
        columns.append(lab.actor.generate_sequences(prompts, max_new_tokens=6, seed=1).fetch())
        lab.actor.generate_sequences(prompts, max_new_tokens=6, seed=1)
        return [{name: plain(column) for name, column in table.items()} for table in columns]

    asleep: list[bool] = []
    options: dict[str, Any] = {"models": {"actor": TINY}, "engine": "deepspeed", "training": {"zero_stage": 3}}
    with open_lab("apart", tmp_path, False, **options) as lab:
        expected = work(lab)
    with open_lab("turns", tmp_path, "always", **options) as lab:
        assert work(lab) == expected
        assert asleep == [False, True]
        syncs = lab.spans()
        given = (syncs["kind"] == "weight_sync") & (syncs["note"] == "")
        assert given.sum() == 2  # before the first, and after `compute_log_prob`
        assert set(lab.syncs()["verdict"]) == {"ok"}  # it slept: the same weights were due
        freed = [move for move in moves(lab) if "generation" in move[3]]
        assert [(stage, kind) for stage, _, kind, _ in freed] == [
            ("generate_sequences", "load"),
            ("compute_log_prob", "offload"),
            ("generate_sequences", "load"),
        ]
