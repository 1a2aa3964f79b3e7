"""Named placements: all devices are used, and what cannot be says why."""

from __future__ import annotations

import pytest

import workbench as wb
from workbench.errors import BadInput
from workbench.placement.named import named_placements

ROLES = ("actor", "critic", "reference", "reward")


def test_each_uses_all_devices() -> None:
    found = named_placements(ROLES, 6)
    assert found == {
        "colocate": wb.Placement.of({"shared": (6, ROLES)}),
        "split": wb.Placement.of({"policy": (3, ["actor", "reference"]), "scorers": (3, ["critic", "reward"])}),
        "standalone": wb.Placement.standalone(actor=2, critic=2, reference=1, reward=1),
    }
    assert {placement.devices for placement in found.values() if isinstance(placement, wb.Placement)} == {6}


@pytest.mark.parametrize(
    ("roles", "devices", "refused"), [(ROLES, 1, {"split", "standalone"}), (("actor",), 2, {"split"})]
)
def test_what_cannot_be_says_why(roles: tuple[str, ...], devices: int, refused: set[str]) -> None:
    found = named_placements(roles, devices)
    assert {name for name, value in found.items() if isinstance(value, BadInput)} == refused


def test_rollout_workers_have_no_place_in_them() -> None:
    assert named_placements((*ROLES, "rollout"), 4) == named_placements(ROLES, 4)
