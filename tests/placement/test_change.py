"""What a change of placement moves, against counts by hand and by brute force."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

from tests.expected import expect_error
from tests.placement.memory_ranks import CONFIG, config_of
from workbench.errors import BadInput
from workbench.placement import Layout, Placement
from workbench.placement.change import PlacementChange
from workbench.placement.role_model import RoleModel
from workbench.placement.state import state_of
from workbench.settings.engines import Generation
from workbench.settings.training import Training

FOUR = ("actor", "critic", "reference", "reward")
# of the model with one table of embeddings: elements that tensor ranks share out, and those that each has whole
H, F, V, LAYERS = CONFIG["hidden_size"], CONFIG["intermediate_size"], CONFIG["vocab_size"], CONFIG["num_hidden_layers"]
KV = H // 2  # half as many key-value heads
CUT = LAYERS * (2 * H * H + 2 * KV * H + 3 * H * F + H + 2 * KV) + V * H
WHOLE = LAYERS * (3 * H) + H  # norms, and the bias of what leads out of attention
P = CUT + WHOLE


def role_of(engine: str = "torch", *, head: Any = "lm", dtype: str = "float32", generates: bool = False) -> RoleModel:
    zero: dict[str, Any] = {"engine": "torch"} if engine in ("torch", "frozen") else {"zero_stage": int(engine[-1])}
    return RoleModel(
        config=config_of(), head=head, dtype=dtype, training=Training(**zero), trained=engine != "frozen",
        generation=Generation(engine="transformers", max_model_tokens=64) if generates else None,
    )  # fmt: skip


def ppo(engine: str = "torch") -> dict[str, RoleModel | None]:
    return {
        "actor": role_of(engine, generates=True),
        "critic": role_of(engine, head="scalar"),
        "reference": role_of("frozen", dtype="bfloat16"),
        "reward": None,  # a function
    }


VALUES = P + H + 1  # the critic's elements: a scalar head, and embeddings that are no output head


def change(old: Placement, new: Placement, models: Mapping[str, RoleModel | None] | None = None, **more: Any) -> Any:
    models = ppo() if models is None else models
    return PlacementChange(old=old.restrict(models), new=new.restrict(models), models=models, **more)


def test_the_counts_by_hand_are_of_this_model() -> None:
    assert role_of().weights.nbytes == 4 * P
    assert role_of(head="scalar").weights.nbytes == 4 * VALUES


@pytest.mark.parametrize(
    "placement", [Placement.colocate(2), Placement.split(4), Placement.colocate(2, {"actor": (1, 2, 1)})]
)
def test_no_change_moves_nothing(placement: Placement) -> None:
    same = change(placement, placement, batch_bytes={"shared-0": 10, "policy-0": 10}, has_bytes=10**9)
    assert not same.matrix.any()
    assert (same.total_bytes, same.seconds, same.problem) == (0, 0.0, "")
    assert {role.action for role in same.roles} == {"stays"}
    for n in same.devices:
        held = same.before.lasting(n)
        batches = sum(same.batch_bytes.get(same.names[i], 0) for i, p in enumerate(same.places) if p.device == n)
        assert same.during(n) == held + batches
        assert same.after.lasting(n) == held
    assert repr(same) == "<PlacementChange of nothing: 0 B>"


def test_from_one_pool_to_two_to_one_for_each_role() -> None:
    colocated, split = Placement.colocate(2), Placement.split(4)
    apart = Placement.standalone(actor=2, critic=1, reference=1, reward=1)

    first = change(colocated, split)
    assert first.kept == ()
    moved = {role.role: role.moved_bytes for role in first.roles}
    # two replicas of fp32 weights and both moments; of weights that are only run; of nothing
    assert moved == {"actor": 2 * 12 * P, "critic": 2 * 12 * VALUES, "reference": 2 * 2 * P, "reward": 0}
    # each replica from one of its own
    assert first.traffic().frame().to_dict("records") == [
        {"source": "shared-0", "destination": "policy-0", "moved_bytes": 14 * P},
        {"source": "shared-1", "destination": "policy-1", "moved_bytes": 14 * P},
        {"source": "shared-0", "destination": "scorers-0", "moved_bytes": 12 * VALUES},
        {"source": "shared-1", "destination": "scorers-1", "moved_bytes": 12 * VALUES},
    ]
    assert first.new_numbers == {"policy": (0, 1), "scorers": (2, 3)}
    # a GPU is given to one process: new ones get others than those that are about to end
    assert change(colocated, split, device="cuda").new_numbers == {"policy": (2, 3), "scorers": (4, 5)}

    second = change(split, apart)
    moved = {role.role: role.moved_bytes for role in second.roles}
    assert moved == {"actor": 2 * 12 * P, "critic": 12 * VALUES, "reference": 2 * P, "reward": 0}
    assert second.total_bytes == sum(moved.values()) == second.matrix.sum()

    back = change(apart, colocated)
    # the second replica of what was on one device comes from there too
    assert {role.role: role.moved_bytes for role in back.roles}["critic"] == 2 * 12 * VALUES


def test_a_pool_is_kept_by_name_and_size() -> None:
    old = Placement.of({"a": (2, FOUR[:3]), "b": (1, FOUR[3:])})
    moved = change(old, old.with_role("critic", "b"))
    assert moved.kept == ("a", "b")
    assert {r.role: r.action for r in moved.roles} == {
        "actor": "stays", "critic": "moves", "reference": "stays", "reward": "stays",
    }  # fmt: skip
    assert moved.total_bytes == 12 * VALUES
    assert moved.matrix[0, 2] == 12 * VALUES
    # "a" is another pool when it has another size, and its processes are new
    grown = change(old, Placement.of({"b": (1, FOUR[3:]), "a": (3, FOUR[:3])}))
    assert grown.kept == ("b",)
    assert grown.names == ("a-0", "a-1", "b-0", "a-0.1", "a-1.1", "a-2.1")
    assert grown.new_numbers == {"b": (2,), "a": (0, 1, 3)}, "the lowest that no kept pool uses"


def test_another_layout_in_a_kept_pool() -> None:
    models = {"critic": role_of()}
    whole, cut, staged = (
        Placement.of({"a": (2, ["critic"])}, {"critic": l}) for l in ((1, 1, 2), (1, 2, 1), (2, 1, 1))
    )
    # a rank that holds everything lacks no slice
    narrower = change(whole, cut, models)
    assert (narrower.roles[0].action, narrower.total_bytes) == ("rebuilt", 0)
    # and one that holds a slice lacks the other's. Of 1601 rows the first has 801.
    wider = change(cut, whole, models)
    half = [(CUT - V * H) // 2 + rows * H for rows in (801, 800)]
    assert wider.matrix.tolist() == [[0, 12 * half[0]], [12 * half[1], 0]]
    # from tensor ranks to stages: the other half of one layer each, and the tables that the first and last stage have
    layer = (CUT - V * H) // LAYERS // 2
    across = change(cut, staged, models)
    assert across.matrix.tolist() == [[0, 12 * (layer + 801 * H)], [12 * (layer + 800 * H), 0]]


def test_zero_shards_move_as_they_lie() -> None:
    """ZeRO-1 to 3, from two ranks to three of which two are the same, element by element."""
    for engine, dtype in itertools.product(("zero1", "zero2", "zero3"), ("float32", "bfloat16")):
        role = role_of(engine, dtype=dtype)
        for part in state_of(role):
            found = part.reshard((Layout(d=2), (0, 1)), (Layout(d=3), (1, 0, 2))).figures().matrix
            assert found.sum(axis=0).tolist() == _lacking(role, part.sharding), (engine, dtype, part.what)


def _lacking(role: RoleModel, sharding: str) -> list[int]:
    """Bytes of fp32 that ranks 0, 1, 2 lack, from the owner of each element before and after."""
    weights = list(role.weights)
    if sharding == "replicas":
        return [0, 0, 4 * P]
    runs = (
        [[w] for w in weights]
        if sharding == "zero"
        else [[w for w in weights if (len(w.shape) > 1) is big] for big in (True, False)]
    )
    lacking = np.zeros(3, dtype=np.int64)
    for run in runs:
        total = sum(w.numel for w in run)
        owners = []
        for ranks in ((0, 1), (1, 0, 2)):
            d = len(ranks)
            each = -(-total // d) if sharding == "zero" else -(-total // (2 * d)) * 2
            owners.append(np.array(ranks)[np.arange(total) // each])
        for rank in range(3):
            lacking[rank] += 4 * int(((owners[1] == rank) & (owners[0] != rank)).sum())
    return lacking.tolist()


def test_zero_moves_one_copy_of_the_moments() -> None:
    models = ppo("zero1")
    found = change(Placement.colocate(2), Placement.split(4), models)
    moved = {role.role: role.moved_bytes for role in found.roles}
    assert moved["actor"] == 2 * 4 * P + 8 * P  # a whole replica for each rank, the moments once
    old, new = (Placement.of({pool: (2, ["critic"])}) for pool in "ab")
    low = change(old, new, {"critic": role_of("zero3", dtype="bfloat16")})
    assert low.total_bytes == 12 * P


def test_batches_go_to_new_processes() -> None:
    held = {"shared-0": 100, "shared-1": 30}
    found = change(
        Placement.colocate(2), Placement.standalone(actor=1, critic=1, reference=1, reward=1), batch_bytes=held
    )
    assert found.batch_matrix.sum() == 130
    names = found.names
    assert found.batch_matrix[0, names.index("actor-0")] == 100
    assert found.batch_matrix[1, names.index("critic-0")] == 30
    # a pool that goes, and no new one
    old = Placement.of({"a": (1, FOUR[:2]), "b": (2, FOUR[2:])})
    gone = change(old, Placement.of({"a": (1, FOUR)}), batch_bytes={"b-0": 7, "b-1": 8, "a-0": 5})
    assert gone.batch_matrix[:, 0].tolist() == [0, 7, 8]


def test_memory_while_things_move() -> None:
    old, new = Placement.colocate(1), Placement.split(2)
    found = change(old, new, batch_bytes={"shared-0": 1000}, has_bytes=10**9)
    source = 4 * P + 8 * P + 28 * 4 + 4 * VALUES + 8 * VALUES + 30 * 4 + 2 * P
    actor, critic = 12 * P + 28 * 4 + 2 * P, 12 * VALUES + 30 * 4
    moved = [min(2**26, n) for n in (14 * P + 12 * VALUES + 1000, 14 * P + 1000, 12 * VALUES)]
    # the old pool and the actor's new one share device 0
    assert found.during(0) == source + actor + 1000 + 1000 + moved[0] + moved[1]
    assert found.during(1) == critic + moved[2]
    assert found.fits
    tight = change(old, new, has_bytes=source, device="cuda")
    assert not tight.fits
    with expect_error(BadInput, rule="needs .* on cuda:0 during the move .* too little"):
        tight.require_fit()
    assert change(old, new).fits is None, "unknown"


def test_how_long_it_takes_and_how_it_shows() -> None:
    found = change(
        Placement.colocate(2),
        Placement.split(4),
        bandwidth_bytes_s=1e9,
        measured="assumed",
        has_bytes=10**9,
        start_s=8.0,
    )
    assert found.seconds == pytest.approx(found.total_bytes / 1e9)
    assert found.expected_s == pytest.approx(found.total_bytes / 1e9 + 8.0)
    assert "at least" in found.expected_text, "nothing is known beyond that"
    assert found.expected_text in str(found) and "new processes and models 8.0 s" in found.expected_parts
    later = dataclasses.replace(found, rest_s=2.0)
    assert later.expected_s == pytest.approx(found.expected_s + 2.0)
    assert "about" in later.expected_text and "the rest 2.0 s" in later.expected_parts
    assert dataclasses.replace(found, bandwidth_bytes_s=None).expected_s is None
    assert found.frame().set_index("role").loc["critic", ["action", "pool", "new_pool"]].tolist() == [
        "moves", "shared", "scorers",
    ]  # fmt: skip
    assert found.memory()["device"].tolist() == ["cpu:0", "cpu:1", "cpu:2", "cpu:3"]
    shown = found._repr_html_()
    assert f"shared-0 to policy-0: {14 * P:,} bytes" in shown
    assert change(Placement.colocate(2), Placement.split(4)).seconds is None


def test_bytes_between_machines_go_over_their_links() -> None:
    found = change(
        Placement.of({"a": (1, FOUR)}), Placement.of({"a": (1, ["actor"]), "b": (1, ["critic"]), "c": (1, FOUR[2:])}),
        bandwidth_bytes_s=1e9, machines=("m1", "m1", "m2"), link_bytes_s=1e8, link_measured="assumed",
    )  # fmt: skip
    inside, between = found.matrix[0, 1], found.matrix[0, 2]
    assert inside and between and found.between.sum() == found.link_bytes == between
    assert found.seconds == pytest.approx(inside / 1e9 + between / 1e8)
    assert "over a network link at 100 MB/s (assumed)" in str(found)
    assert dataclasses.replace(found, link_bytes_s=None).seconds is None
    # where it is not known on which machine a process will be, it counts as on the same
    assert not dataclasses.replace(found, machines=("m1", "m1", "")).between.any()
    two = dataclasses.replace(found, machines=("m1", "m2", "m3"))
    assert two.link_bytes == inside + between, "what one machine sends to two goes over its own link"
