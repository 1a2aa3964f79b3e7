"""Protocols over random layouts, rows and minibatches: what is dealt out comes back whole, each row once."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import workbench as wb
from tests.cases import generation_groups
from tests.expected import expect_error
from workbench.batches.location import minibatch_rows
from workbench.errors import BadInput
from workbench.messages.operation import operations
from workbench.messages.protocols import (
    ALL_TO_ALL,
    DP_PROTO,
    ONE_TO_ALL,
    PROTOCOLS,
    THREE_D_ALL_MICRO_DP,
    THREE_D_PP_ONLY,
    THREE_D_PROTO,
    TransferProtocol,
)
from workbench.placement import Layout
from workbench.workers.roles import ROLE_WORKERS

JOINING = [p for p in PROTOCOLS.values() if p.joins]


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    p, t, d = draw(st.integers(1, 4)), draw(st.integers(1, 4)), draw(st.integers(1, 4))
    divisors = [[m for m in range(1, n + 1) if n % m == 0] for n in (p, t)]
    return Layout(p, t, d, draw(st.sampled_from(divisors[0])), draw(st.sampled_from(divisors[1])))


@given(layouts(), st.sampled_from(JOINING), st.integers(1, 5), st.integers(1, 40))
def test_collect_after_distribute_is_the_identity(
    layout: Layout, protocol: TransferProtocol, minibatches: int, each: int
) -> None:
    rows = minibatches * each
    dealt = protocol.deal(layout, minibatch_rows(rows, minibatches), "test")
    ranks = protocol.gather(layout, dealt, rows, "test")
    collected = [row for rank in ranks for chunk in dealt[rank] for row in chunk]
    assert sorted(collected) == list(range(rows))


@given(layouts(), st.sampled_from(JOINING), st.integers(1, 5), st.integers(1, 40))
def test_a_minibatch_holds_the_same_rows_on_any_layout(
    layout: Layout, protocol: TransferProtocol, minibatches: int, each: int
) -> None:
    chunks = minibatch_rows(minibatches * each, minibatches)
    dealt = protocol.deal(layout, chunks, "test")
    ranks = protocol.gather(layout, dealt, minibatches * each, "test")
    for number, whole in enumerate(chunks):
        assert sorted(np.concatenate([dealt[rank][number] for rank in ranks]).tolist()) == whole.tolist()


@given(layouts(), st.integers(1, 5), st.integers(1, 12))
def test_ranks_that_compute_together_get_the_same_rows(layout: Layout, minibatches: int, each: int) -> None:
    chunks = minibatch_rows(minibatches * each, minibatches)
    trained = THREE_D_PROTO.deal(layout, chunks, "test")
    for replica in layout.mesh().reshape(layout.d, -1):
        assert len({str(trained[rank]) for rank in replica}) == 1
    generated = THREE_D_ALL_MICRO_DP.deal(layout, chunks, "test")
    for group in generation_groups(layout, "tensor"):
        assert len({str(generated[rank]) for rank in group}) == 1


@given(layouts(), st.integers(1, 40))
def test_a_micro_group_generates_what_its_replica_trains_on(layout: Layout, each: int) -> None:
    """So that gathering responses in a micro group gives each training replica its whole batch (section 5.2)."""
    chunks = minibatch_rows(each * layout.d * layout.d_g, 1)
    trained = THREE_D_PROTO.deal(layout, chunks, "test")
    generated = THREE_D_ALL_MICRO_DP.deal(layout, chunks, "test")
    for group in generation_groups(layout, "micro_data"):
        together = sorted({int(row) for rank in group for row in generated[rank][0]})
        assert together == trained[group[0]][0].tolist()


def test_operations_have_the_papers_protocols() -> None:
    """Table 3: what trains or infers is split over replicas, generation over its own; arithmetic over all ranks."""
    found = {
        name: operation.protocol.name
        for worker in ROLE_WORKERS.values()
        for name, operation in operations(worker).items()
    }
    assert found == {
        **dict.fromkeys(("compute_log_prob", "update_actor", "compute_ref_log_prob", "compute_precisions"), "3D_PROTO"),
        **dict.fromkeys(("compute_values", "update_critic", "compute_reward", "compute_cost"), "3D_PROTO"),
        **dict.fromkeys(("compute_cost_values", "update_cost_critic", "compute_loss"), "3D_PROTO"),
        "compute_gradient_norm": "3D_PROTO",
        **dict.fromkeys(
            (
                "update_sft",
                "update_dpo",
                "update_ipo",
                "update_orpo",
                "update_kto",
                "update_reward",
                "update_cost",
                "center",
                "reweigh",
            ),
            "3D_PROTO",
        ),
        **dict.fromkeys(
            ("compute_pair_log_prob", "compute_ref_pair_log_prob", "compute_feedback_log_prob"), "3D_PROTO"
        ),
        **dict.fromkeys(("compute_ref_feedback_log_prob", "compute_teacher_log_prob", "update_distill"), "3D_PROTO"),
        **dict.fromkeys(("compute_pair_rewards", "compute_pair_costs"), "3D_PROTO"),
        "generate_sequences": "3D_ALL_MICRO_DP",
        "compute_advantages": "DP_PROTO",
        **dict.fromkeys(("sync_weights", "check_sync", "weights_checksum", "save_model", "save_adapter"), "ONE_TO_ALL"),
        **dict.fromkeys(("publish_weights", "take_weights", "receive_weights", "compare_weights"), "ONE_TO_ALL"),
        **dict.fromkeys(("training_modules", "weight_digests", "watch_weights"), "ONE_TO_ALL"),
        "measure_gradient": "VALUES_OF_RANKS",  # dealt as 3D_PROTO deals, and every rank is heard
    }


def test_who_is_collected() -> None:
    layout = Layout(2, 2, 2, 1, 1)
    ranks = {name: protocol.collect(layout) for name, protocol in PROTOCOLS.items()}
    everyone = list(range(8))
    assert ranks == {
        "ONE_TO_ALL": everyone,
        "3D_PROTO": [2, 6],
        "3D_ALL_MICRO_DP": everyone,
        "3D_PP_ONLY": [0, 2],
        "DP_PROTO": everyone,
        "ALL_TO_ALL": everyone,
    }
    assert THREE_D_ALL_MICRO_DP.collect(Layout(1, 4, 2, 1, 2)) == [0, 1, 4, 5]
    for protocol in (ONE_TO_ALL, THREE_D_PP_ONLY, ALL_TO_ALL):
        dealt = protocol.deal(layout, minibatch_rows(5, 1), "test")
        assert [chunks[0].tolist() for chunks in dealt] == [list(range(5))] * 8
    assert ALL_TO_ALL.values_per_rank


def test_unequal_minibatches_are_refused() -> None:
    with expect_error(BadInput, value="10 rows in 4 minibatches", remedy=r"take\(range\(8\)\), which leaves 2 out"):
        minibatch_rows(10, 4)
    with expect_error(BadInput, remedy="^set training.minibatches to a divisor of 3"):
        minibatch_rows(3, 4)


@pytest.fixture
def own_protocols() -> Iterator[None]:
    before = dict(PROTOCOLS)
    yield
    PROTOCOLS.clear()
    PROTOCOLS.update(before)


@pytest.mark.usefixtures("own_protocols")
def test_a_protocol_of_ones_own() -> None:
    def zigzag(layout: Layout, minibatches: list[np.ndarray]) -> list[list[np.ndarray]]:
        return [[rows[rank :: layout.size] for rows in minibatches] for rank in range(layout.size)]

    protocol = wb.protocol("ZIGZAG", distribute=zigzag)
    dealt = protocol.deal(Layout(d=3), minibatch_rows(7, 1), "test")
    assert [chunks[0].tolist() for chunks in dealt] == [[0, 3, 6], [1, 4], [2, 5]]
    assert protocol.gather(Layout(d=3), dealt, 7, "test") == [0, 1, 2]
    assert PROTOCOLS["ZIGZAG"] is protocol
    with expect_error(BadInput, rule="the paper has these names"):
        wb.protocol("DP_PROTO")
    with expect_error(BadInput, rule="must be one of 'ONE_TO_ALL', '3D_PROTO'"):
        wb.register("3D_PROTOCOL")


WRONG_PROTOCOLS: list[tuple[dict[str, Any], str]] = [
    ({"distribute": lambda layout, minibatches: [minibatches]}, r"gave 1 parts.*has 2 ranks"),
    ({"distribute": lambda layout, minibatches: [[], []]}, r"rank 0 0 arrays of rows.*there are 2 minibatches"),
    ({"distribute": lambda layout, minibatches: [[rows + 1 for rows in minibatches]] * 2}, r"row 6.*rows 0 to 5"),
    ({"distribute": lambda layout, minibatches: [[rows - 1 for rows in minibatches]] * 2}, r"row -1.*rows 0 to 5"),
    ({"distribute": lambda layout, minibatches: None}, r"distribute \(TypeError: .*a list for each rank"),
    ({"collect": lambda layout: [2]}, r"collect gave ranks \[2\]"),
    ({"collect": lambda layout: []}, r"collect gave ranks \[\]"),
    ({"collect": lambda layout: None}, r"collect \(TypeError: .*a list of ranks"),
    ({"collect": lambda layout: [0.5]}, r"collect \(TypeError: .*a list of ranks"),
    ({"collect": lambda layout: [0], "distribute": DP_PROTO.distribute}, r"collects 4 rows of 6 from ranks"),
    ({}, r"collects 12 rows of 6 from ranks \[0, 1\].*exactly once"),
]


def test_a_protocol_that_is_wrong_is_named(subtests: pytest.Subtests) -> None:
    for broken, message in WRONG_PROTOCOLS:
        with subtests.test(broken=broken, message=message):
            parts: dict[str, Any] = {"distribute": ONE_TO_ALL.distribute, "collect": ONE_TO_ALL.collect, **broken}
            protocol = TransferProtocol(name="MINE", **parts)
            with pytest.raises(BadInput, match="actor.meet: MINE.*" + message):
                protocol.gather(
                    Layout(d=2), protocol.deal(Layout(d=2), minibatch_rows(6, 2), "actor.meet"), 6, "actor.meet"
                )


def test_dp_proto_deals_over_all_ranks() -> None:
    dealt = DP_PROTO.deal(Layout(1, 2, 2), minibatch_rows(8, 1), "test")
    assert [chunks[0].tolist() for chunks in dealt] == [[0, 1], [2, 3], [4, 5], [6, 7]]
