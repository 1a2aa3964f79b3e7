from __future__ import annotations

import pickle

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from workbench.batches.location import Location, ShardId
from workbench.batches.row_encoding import pack
from workbench.messages.calls import Call

runs = st.lists(st.tuples(st.integers(0, 2**40), st.integers(1, 20)), max_size=6)


@given(st.one_of(st.lists(st.integers(0, 2**40)), runs.map(lambda rs: [a + i for a, n in rs for i in range(n)])))
def test_packed_rows_come_back(numbers: list[int]) -> None:
    rows = np.array(numbers, dtype=np.int64)
    unpacked = pack(rows).unpack()
    assert unpacked.dtype == np.int64
    assert unpacked.tolist() == numbers


def test_a_call_for_consecutive_rows_is_small_and_arrives_whole() -> None:
    rows = np.arange(100_000, 200_000)
    shard = ShardId("a-0", "key")
    location = Location.of_parts([(shard, np.arange(200_000))])
    call = Call(
        run=1, key="k", stage="s", role="actor", method="m", rows=rows, sample=np.arange(100_000) % 7,
        pulls=((("uid",), tuple(location.pulls(rows))),),
    )  # fmt: skip
    sent = pickle.dumps(call)
    assert len(sent) < 100_000 * 1.1 / 3  # the copies of a prompt count from 0 to 6 again and again
