from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from workbench.errors import BadInput
from workbench.placement import Layout
from workbench.workers.protocols import ALL_TO_ALL, DP_PROTO, ONE_TO_ALL, minibatch_rows

layouts = st.builds(Layout, st.integers(1, 3), st.integers(1, 3), st.integers(1, 4))


@given(layouts, st.integers(1, 5), st.integers(1, 12))
def test_data_parallel_deals_every_row_once_and_collects_them_all(layout: Layout, minibatches: int, each: int) -> None:
    rows = minibatches * each
    dealt = DP_PROTO.distribute(layout, minibatch_rows(rows, minibatches))
    ranks = DP_PROTO.collect(layout)
    assert ranks is not None
    collected = np.concatenate([np.concatenate(dealt[rank]) for rank in ranks])
    assert sorted(collected.tolist()) == list(range(rows))


@given(layouts, st.integers(1, 5), st.integers(1, 12))
def test_ranks_of_a_replica_get_the_same_rows(layout: Layout, minibatches: int, each: int) -> None:
    dealt = DP_PROTO.distribute(layout, minibatch_rows(minibatches * each, minibatches))
    for rank in range(layout.size):
        k, _, _ = layout.coordinates(rank)
        for mine, first in zip(dealt[rank], dealt[layout.rank(k, 0, 0)], strict=True):
            np.testing.assert_array_equal(mine, first)


@given(st.integers(1, 4), st.integers(1, 4), st.integers(1, 8))
def test_a_minibatch_holds_the_same_rows_on_any_number_of_ranks(ranks: int, minibatches: int, each: int) -> None:
    chunks = minibatch_rows(minibatches * each * ranks, minibatches)
    dealt = DP_PROTO.distribute(Layout(d=ranks), chunks)
    for number, whole in enumerate(chunks):
        assert sorted(np.concatenate([rank[number] for rank in dealt]).tolist()) == whole.tolist()


def test_collecting_takes_the_last_stage_and_the_first_tensor_rank() -> None:
    layout = Layout(p=2, t=2, d=2)
    assert DP_PROTO.collect(layout) == [2, 6]


def test_one_to_all_gives_everything_to_everyone() -> None:
    dealt = ONE_TO_ALL.distribute(Layout(d=3), minibatch_rows(5, 1))
    assert [chunk[0].tolist() for chunk in dealt] == [[0, 1, 2, 3, 4]] * 3
    assert ONE_TO_ALL.collect(Layout(d=3)) is None
    assert ALL_TO_ALL.values_per_rank


def test_unequal_minibatches_are_refused() -> None:
    with pytest.raises(BadInput, match="10 rows in 4 minibatches"):
        minibatch_rows(10, 4)


@given(layouts)
def test_coordinates_and_rank_are_inverse(layout: Layout) -> None:
    assert [layout.rank(*layout.coordinates(rank)) for rank in range(layout.size)] == list(range(layout.size))
