from __future__ import annotations

import pickle

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from workbench.dataflow.columns import Column, Ragged, concatenate, describe, from_wire, nbytes, take, to_wire

row_lists = st.lists(st.lists(st.integers(-9, 9), max_size=5), min_size=1, max_size=8)


def plain(column: Column) -> list[object]:
    if isinstance(column, Ragged):
        return [row.tolist() for row in column.rows()]
    return column if isinstance(column, list) else column.tolist()


@given(row_lists, st.data())
def test_taking_rows_is_indexing(rows: list[list[int]], data: st.DataObject) -> None:
    positions = np.array(data.draw(st.lists(st.integers(0, len(rows) - 1), min_size=1)))
    expected = [rows[i] for i in positions]
    firsts = torch.tensor([len(row) for row in rows])
    assert plain(take(Ragged.of(rows, torch.int64), positions)) == expected
    assert plain(take([str(row) for row in rows], positions)) == [str(row) for row in expected]
    assert plain(take(firsts, positions)) == [len(row) for row in expected]


@given(row_lists, st.data())
def test_rows_side_by_side_are_a_view(rows: list[list[int]], data: st.DataObject) -> None:
    first = data.draw(st.integers(0, len(rows) - 1))
    last = data.draw(st.integers(first + 1, len(rows)))
    ragged, positions = Ragged.of(rows, torch.int64), np.arange(first, last)
    part = take(ragged, positions)
    assert isinstance(part, Ragged)
    assert plain(part) == rows[first:last]
    assert part.values.untyped_storage().data_ptr() == ragged.values.untyped_storage().data_ptr()
    assert plain(take([str(row) for row in rows], positions)) == [str(row) for row in rows[first:last]]
    assert plain(take(ragged.lengths, positions)) == [len(row) for row in rows[first:last]]


@given(row_lists, row_lists)
def test_concatenation_joins_rows(one: list[list[int]], two: list[list[int]]) -> None:
    joined = concatenate([Ragged.of(one, torch.int64), Ragged.of(two, torch.int64)])
    assert plain(joined) == one + two


@given(row_lists)
def test_padding_and_back(rows: list[list[int]]) -> None:
    column = Ragged.of(rows, torch.int64)
    padded = column.pad(fill=7)
    assert padded.shape == (len(rows), max(map(len, rows)))
    assert plain(Ragged.unpad(padded, column.lengths)) == rows


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.bool, torch.int64])
def test_the_wire_keeps_values_and_types(dtype: torch.dtype) -> None:
    table: dict[str, Column] = {
        "dense": torch.tensor([[1, 0], [0, 1]]).to(dtype),
        "ragged": Ragged.of([[1], [0, 1]], dtype),
        "text": ["a", "ä"],
    }
    back = from_wire(pickle.loads(pickle.dumps(to_wire(table), protocol=5)))
    assert list(back) == list(table)
    for name, column in table.items():
        assert plain(back[name]) == plain(column)
        assert describe(back[name]) == describe(column)


def test_bytes_count_values_and_lengths() -> None:
    assert nbytes(Ragged.of([[1, 2, 3], []], torch.int64)) == 3 * 8 + 2 * 8
    assert nbytes(torch.zeros(3, 2)) == 24
    assert nbytes(["ä", "b"]) == 3
