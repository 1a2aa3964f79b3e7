"""Which machine each rank goes to."""

from __future__ import annotations

import pytest

from workbench.backends.nodes import nodes_of_pools


@pytest.mark.parametrize(
    ("pools", "found"),
    [
        ([3, 3], ["aaa", "bbb"]),  # each whole, where filling machine after machine would cut the second
        ([2, 4], ["bb", "aaaa"]),
        ([2, 2, 4], ["bb", "bb", "aaaa"]),
        ([6], ["aaaabb"]),  # larger than a machine: neighbours together
        ([6, 2], ["aaaabb", "bb"]),
        ([1, 1], ["a", "a"]),
        ([5, 4], None),
    ],
)
def test_pools_on_two_machines_of_four(pools: list[int], found: list[str] | None) -> None:
    placed = nodes_of_pools(pools, {"a": 4, "b": 4})
    assert (None if placed is None else ["".join(nodes) for nodes in placed]) == found


def test_a_pool_goes_where_it_just_fits() -> None:
    assert nodes_of_pools([2], {"a": 4, "b": 2}) == [["b", "b"]]
    assert nodes_of_pools([3], {"a": 0, "b": 1, "c": 2}) == [["c", "c", "b"]]


def test_a_tensor_group_stays_on_one_machine() -> None:
    free = {"a": 3, "b": 3, "c": 1}
    assert nodes_of_pools([4], free, [2]) == [["a", "a", "b", "b"]]
    assert nodes_of_pools([6], free) == [["a", "a", "a", "b", "b", "b"]]
    assert nodes_of_pools([6], free, [2]) is None  # devices enough, but none for the third group


def test_a_pool_goes_into_one_rack_where_one_has_room() -> None:
    free, racks = {"a": 2, "b": 3, "c": 2, "d": 2}, {"a": "1", "b": "2", "c": "1", "d": "2"}
    assert nodes_of_pools([4], free, racks=racks) == [["a", "a", "c", "c"]]
    assert nodes_of_pools([5], free, racks=racks) == [["b", "b", "b", "d", "d"]]
    assert nodes_of_pools([6], free, racks=racks) == [["b", "b", "b", "a", "a", "c"]]
