from __future__ import annotations

import pytest

from tests.expected import expect_error
from tests.light import describe
from workbench.errors import BadInput
from workbench.placement import Layout, Placement
from workbench.placement.placement import named_placements
from workbench.workers.worker import Worker

FOUR = ("actor", "critic", "reference", "reward")


def test_the_named_placements() -> None:
    assert str(Placement.colocate(2).restrict(FOUR)) == "shared[2]: actor, critic, reference, reward"
    split = Placement.split(4).restrict(FOUR)
    assert str(split) == "policy[2]: actor, reference | scorers[2]: critic, reward"
    alone = Placement.standalone(actor=2, critic=1, reference=1, reward=1)
    assert (alone.devices, alone.pool_of("actor").devices) == (5, 2)


def test_a_role_has_the_layout_that_it_was_given_and_else_is_data_parallel() -> None:
    pools = {"a": (6, ["actor"]), "b": (4, ["critic", "reward"])}
    placement = Placement.of(pools, layouts={"actor": (1, 2, 3), "critic": Layout(2, 1, 2)})
    assert placement.layout_of("actor") == Layout(1, 2, 3)
    assert placement.layout_of("critic") == Layout(2, 1, 2)
    assert placement.layout_of("reward") == Layout(1, 1, 4)
    assert str(placement) == "a[6]: actor (p=1, t=2, d=3) | b[4]: critic (p=2, t=1, d=2), reward"
    assert "actor" not in placement.restrict(["critic", "reward", "actor"]).restrict(["actor", "critic"]).pools[1].roles
    assert placement.restrict(["actor", "critic"]).layouts == placement.layouts
    # a default that is spelled out makes no other placement
    assert Placement.of(pools, layouts={"actor": (1, 1, 6)}) == Placement.of(pools)
    assert hash(placement) == hash(Placement.of(pools))


def test_layouts_in_the_named_placements() -> None:
    assert Placement.colocate(4, layouts={"critic": (2, 2, 1)}).layout_of("critic") == Layout(2, 2, 1)
    assert Placement.split(4, layouts={"reward": (1, 2, 1)}).layout_of("reward") == Layout(1, 2, 1)
    assert Placement.standalone(actor=2, layouts={"actor": Layout(1, 2, 1, 1, 1)}).layout_of("actor").d_g == 2


def test_a_layout_needs_an_engine_that_computes_in_it() -> None:
    cut = Placement.colocate(4, layouts={"actor": (1, 2, 2)})
    assert describe({"actor": Worker}, cut).placement.layout_of("actor") == Layout(1, 2, 2)
    assert describe({"actor": None}, cut).layout_of("actor") == Layout(1, 2, 2).generating(1)
    with expect_error(BadInput, value=r"layouts\['actor'\]=\(p=2, t=1, d=2\).*deepspeed", remedy="engine='torch'"):
        describe({"actor": None}, Placement.colocate(4, layouts={"actor": (2, 1, 2)}))
    assert describe({"actor": None}, Placement.colocate(4)).placement.layout_of("actor") == Layout(d=4)


def test_roles_that_deepspeed_trains_on_the_same_devices_share_t() -> None:
    both: dict[str, None] = {"actor": None, "critic": None}
    of_actor = {"actor": (1, 2, 1)}
    with expect_error(BadInput, value="t=2 for 'actor' and t=1 for 'critic'", rule="same t", remedy="engine='torch'"):
        describe(both, Placement.colocate(2, layouts=of_actor))
    with expect_error(BadInput, value="t=2 for 'critic' and t=1 for 'cost_critic'"):
        describe({"critic": None, "cost_critic": None}, Placement.colocate(2, layouts={"critic": (1, 2, 1)}))
    for fine in (
        Placement.colocate(2, layouts=dict.fromkeys(both, (1, 2, 1))),
        Placement.of({"a": (2, ["actor"]), "b": (1, ["critic"])}, layouts=of_actor),
    ):
        describe(both, fine)
    describe({"actor": None, "reference": None}, Placement.colocate(2, layouts=of_actor))  # only run, not by DeepSpeed
    describe({"actor": None, "critic": Worker}, Placement.colocate(2, layouts=of_actor))


FOUR_DEVICES = {"a": (4, ["actor"])}


BAD: list[tuple[object, str]] = [
    (lambda: Placement.of({"a": (1, ["actor"]), "b": (1, ["actor"])}), "role 'actor' twice"),
    (lambda: Placement.of({"a": (1, ["actr"])}), "unknown role 'actr'"),
    (lambda: Placement.of({"a": (0, ["actor"])}), "must be at least 1"),
    (lambda: Placement.of({"my pool": (1, ["actor"])}), "plain identifier"),
    (lambda: Placement.of({}), "needs at least one"),
    (lambda: Placement.of(FOUR_DEVICES, layouts={"actor": (1, 2, 3)}), r"p\*t\*d is 6.*use d=2"),
    (lambda: Placement.of(FOUR_DEVICES, layouts={"actor": (1, 3, 1)}), r"p\*t\*d is 3.*give the pool 3 devices"),
    (lambda: Placement.of(FOUR_DEVICES, layouts={"actor": (1, 4)}), r"the three numbers \(p, t, d\)"),
    (lambda: Placement.of(FOUR_DEVICES, layouts={"critic": (1, 1, 4)}), "'critic' has no pool"),
    (lambda: Placement.of(FOUR_DEVICES, layouts={"actr": (1, 1, 4)}), "unknown role 'actr'"),
    (lambda: Placement.split(3), "even number of devices"),
    (lambda: Placement.standalone(actor=1).restrict(["actor", "critic"]), "'critic' has no pool"),
    (lambda: Placement.standalone(actor=1, critic=1).restrict(["actor"]), "pool 'critic' has no role"),
]


def test_bad_placements_name_the_value_and_the_rule(subtests: pytest.Subtests) -> None:
    for make, message in BAD:
        with subtests.test(make=make, message=message), pytest.raises(BadInput, match=message):
            make()  # type: ignore[operator]


def test_a_placement_is_a_value() -> None:
    placement = Placement.split(4, layouts={"critic": (1, 2, 1)}).restrict(FOUR)
    assert eval(repr(placement)) == placement
    assert placement.frame().to_dict("records")[2] == {
        "role": "critic", "pool": "scorers", "devices": 2, "p": 1, "t": 2, "d": 1,
    }  # fmt: skip
    assert "scorers" in placement._repr_html_()
    assert "Placement on 4 devices" in placement._repr_html_()


def test_one_thing_changed() -> None:
    split = Placement.split(4, layouts={"critic": (1, 2, 1)}).restrict(FOUR)
    assert str(split.with_role("reference", "scorers")) == (
        "policy[2]: actor | scorers[2]: critic (p=1, t=2, d=1), reward, reference"
    )
    assert split.with_role("actor", "policy") == split
    # a role keeps a layout that fits, and an empty pool goes
    assert split.with_role("critic", "policy").layout_of("critic") == Layout(1, 2, 1)
    alone = split.with_role("critic", "values", devices=1)
    assert alone.layout_of("critic") == Layout(1, 1, 1)
    assert [pool.name for pool in alone.with_role("reward", "values").pools] == ["policy", "values"]
    assert split.with_layout("actor", (2, 1, 1)).layout_of("actor") == Layout(2, 1, 1)
    assert split.with_layout("critic", (1, 1, 2)) == Placement.split(4).restrict(FOUR)
    assert split.without("critic").layouts == {}
    assert [pool.name for pool in split.without("critic").without("reward").pools] == ["policy"]
    for wrong, message in (
        (lambda: split.with_role("critic", "values"), r"the pools are policy, scorers.*devices=1"),
        (lambda: split.with_role("critic", "policy", devices=3), r"the pool of that name has 2 devices"),
        (lambda: split.with_layout("actor", (1, 2, 2)), r"p\*t\*d is 4"),
        (lambda: split.without("cost"), r"role 'cost' has no pool"),
    ):
        with pytest.raises(BadInput, match=message):
            wrong()


def test_placements_by_name_use_all_devices_or_say_why_they_cannot() -> None:
    found = named_placements(FOUR, 6)
    assert found == {
        "colocate": Placement.of({"shared": (6, FOUR)}),
        "split": Placement.of({"policy": (3, ["actor", "reference"]), "scorers": (3, ["critic", "reward"])}),
        "standalone": Placement.standalone(actor=2, critic=2, reference=1, reward=1),
    }
    assert named_placements((*FOUR, "rollout"), 6) == found  # the actor generates
    for roles, devices, refused in ((FOUR, 1, {"split", "standalone"}), (("actor",), 2, {"split"})):
        some = named_placements(roles, devices)
        assert {name for name, value in some.items() if isinstance(value, BadInput)} == refused
