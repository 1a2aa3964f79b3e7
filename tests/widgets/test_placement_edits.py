"""Gestures of the placement editor, as functions of placements."""

from __future__ import annotations

import pytest

import workbench as wb
from tests.expected import expect_error
from workbench.errors import BadInput
from workbench_widgets import placement_edits as edits

SHARED = wb.Placement.of({"shared": (2, ["actor", "critic"])})
APART = wb.Placement.of({"policy": (2, ["actor"]), "scorers": (1, ["critic"])})


def test_a_role_steps_along_the_pools() -> None:
    made = edits.step(SHARED, "critic", 1)
    assert made == wb.Placement.of({"shared": (2, ["actor"]), "critic": (1, ["critic"])})
    assert edits.same(edits.step(made, "critic", -1), SHARED)
    assert edits.step(APART, "actor", 1) == wb.Placement.of({"scorers": (1, ["critic", "actor"])})


@pytest.mark.parametrize(("role", "by", "rule"), [("actor", -1, "the first one"), ("critic", 1, "for itself already")])
def test_a_step_to_nowhere_is_refused(role: str, by: int, rule: str) -> None:
    with pytest.raises(BadInput, match=rule):
        edits.step(APART, role, by)


def test_a_pool_of_ones_own_takes_a_free_name() -> None:
    taken = wb.Placement.of({"critic": (1, ["actor", "critic"])})
    assert edits.put(taken, "critic", edits.NEW_POOL).pool_of("critic").name == "critic_2"


def test_d_follows_from_the_devices() -> None:
    assert edits.lay_out(SHARED, "critic", "t", "2").layout_of("critic") == wb.Layout(1, 2, 1)
    with expect_error(BadInput, rule=r"p\*t\*d is 3"):
        edits.lay_out(SHARED, "critic", "t", 3)
    with expect_error(BadInput, rule="whole number"):
        edits.lay_out(SHARED, "critic", "p", "two")


def test_a_role_is_taken_back_with_its_layout() -> None:
    live = SHARED.with_layout("critic", (1, 2, 1))
    draft = edits.put(live, "critic", edits.NEW_POOL)
    assert not edits.same(draft, live)
    assert edits.same(edits.take_back(draft, "critic", live), live)
    assert edits.same(edits.take_back(edits.put(APART, "critic", "policy"), "critic", APART), APART)
    assert edits.take_back(edits.with_rollout(APART), "rollout", APART) == APART


def test_sizes() -> None:
    assert edits.resize(APART, "policy", "3").devices == 4
    with expect_error(BadInput, rule="whole number"):
        edits.resize(APART, "policy", 0)
