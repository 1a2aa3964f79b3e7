from __future__ import annotations

import pickle

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from workbench.batches.location import Location, ShardId, packed, unpacked
from workbench.messages.calls import Call


@given(st.lists(st.integers(0, 5), min_size=1, max_size=5).filter(any), st.data())
def test_pulls_bring_exactly_the_rows_asked_for(sizes: list[int], data: st.DataObject) -> None:
    total = sum(sizes)
    order = np.array(data.draw(st.permutations(range(total))))
    parts = [
        (ShardId(f"host{i}", "k"), rows) for i, rows in enumerate(np.split(order, np.cumsum(sizes)[:-1])) if len(rows)
    ]
    content = dict(parts)  # a shard's row holds its own row number
    location = Location.of_parts(parts)
    wanted = np.array(data.draw(st.lists(st.integers(0, total - 1), min_size=1, max_size=12)))
    got = np.full(len(wanted), -1)
    for pull in location.pulls(wanted):
        assert (got[pull.destinations] == -1).all()
        got[pull.destinations] = content[pull.shard][pull.positions]
    np.testing.assert_array_equal(got, wanted)


def test_a_choice_of_rows_moves_nothing_but_indices() -> None:
    location = Location.of_parts([(ShardId("a", "k"), np.array([0, 2])), (ShardId("b", "k"), np.array([1]))])
    chosen = location.take(np.array([2, 2, 1]))
    pulls = chosen.pulls(np.arange(3))
    assert [(p.shard.host, p.positions.tolist(), p.destinations.tolist()) for p in pulls] == [
        ("a", [1, 1], [0, 1]),
        ("b", [0], [2]),
    ]


def test_only_shards_that_are_needed_are_asked() -> None:
    location = Location.of_parts([(ShardId(str(i), "k"), np.arange(4) + 4 * i) for i in range(3)])
    assert [pull.shard.host for pull in location.pulls(np.arange(4, 8))] == ["1"]


def test_a_row_without_a_place_is_refused() -> None:
    with pytest.raises(ValueError, match="exactly one part"):
        Location.of_parts([(ShardId("a", "k"), np.array([0, 0]))])


@given(st.lists(st.integers(0, 5), min_size=1, max_size=30))
def test_occurrences_count_earlier_copies(rows: list[int]) -> None:
    parts = [(ShardId("a", "1"), np.array([0, 2, 4])), (ShardId("b", "1"), np.array([5, 3, 1]))]
    taken = Location.of_parts(parts).take(np.array(rows))
    assert taken.occurrences().tolist() == [rows[:i].count(row) for i, row in enumerate(rows)]


parts_of_location = st.lists(
    st.tuples(
        st.sampled_from("abc"), st.lists(st.integers(0, 4), min_size=1, max_size=6), st.sampled_from(["", "x", "y"])
    ),
    min_size=1,
    max_size=5,
)


@given(parts_of_location, st.data())
def test_concatenation_keeps_every_place_and_name(parts: list[tuple[str, list[int], str]], data: st.DataObject) -> None:
    """Against plain lists of (host, name in the shard, row), also after a choice of rows."""
    locations = []
    for host, rows, name in parts:
        location = Location.of_parts([(ShardId(host, "1"), np.arange(5))]).take(np.array(rows))
        locations.append(location.stored_as(name) if name else location)
    whole = Location.concat(locations)
    places = [(host, name, row) for host, rows, name in parts for row in rows]
    wanted = data.draw(st.lists(st.integers(0, len(places) - 1), min_size=1))
    pulled: dict[int, tuple[str, str, int]] = {}
    for pull in whole.pulls(np.array(wanted)):
        for position, destination in zip(pull.positions, pull.destinations, strict=True):
            assert destination not in pulled
            pulled[destination] = (pull.shard.host, pull.name, position)
    assert [pulled[i] for i in range(len(wanted))] == [places[i] for i in wanted]
    assert whole.occurrences().tolist() == [places[:i].count(place) for i, place in enumerate(places)]


def test_a_column_renamed_twice_is_kept_under_its_first_name() -> None:
    location = Location.of_parts([(ShardId("a", "1"), np.arange(2))]).stored_as("first").stored_as("second")
    (pull,) = location.pulls(np.arange(2))
    assert pull.stored_names(("third", "fourth")) == ("first",)
    assert pull.renamed({"first": [1, 2]}, ("third", "fourth")) == {"third": [1, 2], "fourth": [1, 2]}


runs = st.lists(st.tuples(st.integers(0, 2**40), st.integers(1, 20)), max_size=6)


@given(st.one_of(st.lists(st.integers(0, 2**40)), runs.map(lambda rs: [a + i for a, n in rs for i in range(n)])))
def test_packed_rows_come_back(numbers: list[int]) -> None:
    rows = np.array(numbers, dtype=np.int64)
    found = unpacked(packed(rows))
    assert found.dtype == np.int64
    assert found.tolist() == numbers


def test_a_call_for_consecutive_rows_is_small_and_arrives_whole() -> None:
    rows = np.arange(100_000, 200_000)
    shard = ShardId("a-0", "key")
    location = Location.of_parts([(shard, np.arange(200_000))])
    call = Call(
        run=1, stage="s", role="actor", method="m", rows=rows, sample=np.arange(100_000) % 7,
        pulls=((("uid",), tuple(location.pulls(rows))),),
    )  # fmt: skip
    sent = pickle.dumps(call)
    assert len(sent) < 100_000 * 1.1  # a byte a row: copies of a prompt count from 0 to 6 again and again
