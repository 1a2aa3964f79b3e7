from __future__ import annotations

import pytest

from workbench.errors import BadInput
from workbench.placement import Placement

FOUR = ("actor", "critic", "reference", "reward")


def test_the_named_placements() -> None:
    assert str(Placement.colocate(2).restrict(FOUR)) == "shared[2]: actor, critic, reference, reward"
    split = Placement.split(4).restrict(FOUR)
    assert str(split) == "policy[2]: actor, reference | scorers[2]: critic, reward"
    alone = Placement.standalone(actor=2, critic=1, reference=1, reward=1)
    assert (alone.devices, alone.pool_of("actor").devices) == (5, 2)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Placement.of({"a": (1, ["actor"]), "b": (1, ["actor"])}), "role 'actor' twice"),
        (lambda: Placement.of({"a": (1, ["actr"])}), "unknown role 'actr'"),
        (lambda: Placement.of({"a": (0, ["actor"])}), "must be at least 1"),
        (lambda: Placement.of({"my pool": (1, ["actor"])}), "plain identifier"),
        (lambda: Placement.of({}), "needs at least one"),
        (lambda: Placement.split(3), "even number of devices"),
        (lambda: Placement.standalone(actor=1).restrict(["actor", "critic"]), "'critic' has no pool"),
        (lambda: Placement.standalone(actor=1, critic=1).restrict(["actor"]), "pool 'critic' has no role"),
    ],
)
def test_bad_placements_name_the_value_and_the_rule(make: object, message: str) -> None:
    with pytest.raises(BadInput, match=message):
        make()  # type: ignore[operator]
