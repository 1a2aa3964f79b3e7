"""Rank arithmetic, by enumeration of every layout up to 4 x 4 x 3 and every generation layout that divides it."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest

from tests.cases import generation_groups
from tests.expected import expect_error
from workbench.errors import BadInput
from workbench.placement import Layout


def divisors(n: int) -> list[int]:
    return [m for m in range(1, n + 1) if n % m == 0]


ALL = [
    Layout(p, t, d, p_g, t_g)
    for p, t, d in itertools.product(range(1, 5), range(1, 5), range(1, 4))
    for p_g, t_g in itertools.product(divisors(p), divisors(t))
]


ALL += [replace(layout, numbering="generation") for layout in ALL]


def test_coordinates_and_rank_are_inverse_and_agree_with_the_mesh() -> None:
    for layout in ALL:
        mesh = layout.mesh()
        assert mesh.shape == (layout.d, layout.p, layout.t)
        for rank in range(layout.size):
            place = layout.coordinates(rank)
            assert layout.rank(*place) == rank == mesh[place]


def test_groups_partition_the_ranks_and_differ_along_their_axis() -> None:
    for layout in ALL:
        for axis, which, size in (("data", 0, layout.d), ("pipeline", 1, layout.p), ("tensor", 2, layout.t)):
            groups = layout.groups(axis)  # type: ignore[arg-type]
            assert sorted(itertools.chain(*groups)) == list(range(layout.size))
            for group in groups:
                places = [list(layout.coordinates(rank)) for rank in group]
                assert [place.pop(which) for place in places] == list(range(size))
                assert all(place == places[0] for place in places)


def test_generation_groups_partition_the_ranks() -> None:
    for layout in ALL:
        for axis, size in (("tensor", layout.t_g), ("micro_data", layout.d_g)):
            groups = generation_groups(layout, axis)
            assert sorted(itertools.chain(*groups)) == list(range(layout.size))
            assert {len(group) for group in groups} == {size}
        assert layout.p_g * layout.t_g * layout.d_g * layout.d == layout.size  # type: ignore[operator]


def test_an_engine_generates_on_consecutive_ranks() -> None:
    assert Layout(1, 4, 1).generating(2).groups("tensor") == [[0, 2, 1, 3]]
    for layout in ALL:
        assert layout.t_g is not None
        engines = layout.generating(layout.t_g)
        ranks = np.arange(layout.size).reshape(-1, layout.t_g).tolist()
        assert generation_groups(engines, "tensor") == ranks
        tensors = [engines.generation_place(rank).tensor for rank in range(layout.size)]
        assert tensors == list(range(layout.t_g)) * (layout.size // layout.t_g)


def test_a_training_shard_lies_inside_its_generation_shard() -> None:
    """The point of HybridFlow's grouping: shards as intervals of layers and of columns, in exact fractions."""
    for layout in ALL:
        assert layout.p_g is not None
        assert layout.t_g is not None
        for rank in range(layout.size):
            _, i, j = layout.coordinates(rank)
            place = layout.generation_place(rank)
            for mine, size, whole, parts in (
                (i, layout.p, place.stage, layout.p_g),
                (j, layout.t, place.tensor, layout.t_g),
            ):
                assert whole * size <= mine * parts
                assert (mine + 1) * parts <= (whole + 1) * size


def test_a_micro_group_holds_its_generation_shard_exactly_once() -> None:
    for layout in ALL:
        for group in generation_groups(layout, "micro_data"):
            assert len({layout.coordinates(rank) for rank in group}) == len(group)
            held = {layout.coordinates(rank)[1:] for rank in group}
            first = layout.generation_place(group[0])
            wanted = {
                (i, j)
                for i in range(layout.p)
                for j in range(layout.t)
                if (i // (layout.p // (layout.p_g or 1)), j // (layout.t // (layout.t_g or 1)))
                == (first.stage, first.tensor)
            }
            assert held == wanted


def test_the_papers_example() -> None:
    """Figure 8: training 1-4-2, generation 1-2-2-2, devices counted from 1."""
    layout = Layout(1, 4, 2, 1, 2)
    count = lambda groups: [[rank + 1 for rank in group] for group in groups]  # noqa: E731
    assert count(generation_groups(layout, "tensor")) == [[1, 3], [2, 4], [5, 7], [6, 8]]
    assert count(generation_groups(layout, "micro_data")) == [[1, 2], [3, 4], [5, 6], [7, 8]]
    assert str(layout) == "(p=1, t=4, d=2, generating (p_g=1, t_g=2, d_g=2))"


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ((0, 1, 1), r"Layout.p=0.*at least 1"),
        ((1, 4, 1, 1, 3), r"Layout.t_g=3.*must divide t=4.*use one of 1, 2, 4"),
        ((4, 1, 1, 8, 1), r"Layout.p_g=8.*must divide p=4"),
    ],
)
def test_wrong_sizes_name_the_rule(sizes: tuple[int, ...], message: str) -> None:
    with pytest.raises(BadInput, match=message):
        Layout(*sizes)


def test_a_rank_that_is_not_there() -> None:
    with expect_error(BadInput, value="rank 6 of ", rule="0 to 5"):
        Layout(1, 2, 3).coordinates(6)
    with expect_error(BadInput, value="j=2 in ", rule="between 0 and 1"):
        Layout(1, 2, 3).rank(0, 0, 2)
