from __future__ import annotations

import pickle

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from workbench.batches.columns import (
    ColumnValues,
    Ragged,
    assembled,
    describe,
    from_wire,
    rows_at,
    table_bytes,
    to_wire,
)

row_lists = st.lists(st.lists(st.integers(-9, 9), max_size=5), min_size=1, max_size=8)


def plain(column: ColumnValues) -> list[object]:
    if isinstance(column, Ragged):
        return [row.tolist() for row in column.rows()]
    return column if isinstance(column, list) else column.tolist()


def table_of(rows: list[list[int]]) -> dict[str, ColumnValues]:
    entries: list[object] = [str(row) if len(row) % 2 else row for row in rows]  # text, and lists that are entries
    return {"ids": Ragged.of(rows, torch.int64), "entry": entries, "length": torch.tensor([len(row) for row in rows])}


def plain_table(columns: dict[str, ColumnValues]) -> dict[str, object]:
    return {name: plain(column) for name, column in columns.items()}


@given(row_lists, st.data())
def test_taking_rows_is_indexing(rows: list[list[int]], data: st.DataObject) -> None:
    positions = np.array(data.draw(st.lists(st.integers(0, len(rows) - 1), min_size=1)))
    taken = rows_at(table_of(rows), positions)
    assert plain_table(taken) == plain_table(table_of([rows[i] for i in positions]))
    assert plain(Ragged.of(rows, torch.int64).take(positions.tolist())) == [rows[i] for i in positions]


@given(row_lists, st.data())
def test_rows_side_by_side_are_a_view(rows: list[list[int]], data: st.DataObject) -> None:
    first = data.draw(st.integers(0, len(rows) - 1))
    last = data.draw(st.integers(first + 1, len(rows)))
    columns = table_of(rows)
    part = rows_at(columns, np.arange(first, last))
    assert plain_table(part) == plain_table(table_of(rows[first:last]))
    whole, cut = columns["ids"], part["ids"]
    assert isinstance(whole, Ragged)
    assert isinstance(cut, Ragged)
    assert cut.values.untyped_storage().data_ptr() == whole.values.untyped_storage().data_ptr()


@given(row_lists, st.data())
def test_parts_are_put_together_in_any_order(rows: list[list[int]], data: st.DataObject) -> None:
    places = np.array(data.draw(st.permutations(range(len(rows)))))
    cut = data.draw(st.integers(0, len(rows) - 1))
    table = table_of(rows)
    parts = [(part, rows_at(table, part)) for part in (places[:cut], places[cut:]) if len(part)]
    whole = assembled(parts)
    assert plain_table(whole) == plain_table(table)
    one, two = whole["ids"], table["ids"]
    assert isinstance(one, Ragged) and isinstance(two, Ragged)
    assert one.values.untyped_storage().data_ptr() != two.values.untyped_storage().data_ptr() or not len(one.values)


@given(row_lists)
def test_padding_and_back(rows: list[list[int]]) -> None:
    column = Ragged.of(rows, torch.int64)
    padded = column.pad(fill=7)
    assert padded.shape == (len(rows), max(map(len, rows)))
    assert plain(Ragged.unpad(padded, column.lengths)) == rows


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.bool, torch.int64])
def test_the_wire_keeps_values_and_types(dtype: torch.dtype) -> None:
    table: dict[str, ColumnValues] = {
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
    table: dict[str, ColumnValues] = {
        "ids": Ragged.of([[1, 2, 3], []], torch.int64),
        "x": torch.zeros(3, 2),
        "text": ["ä", "b"],
    }
    assert table_bytes(table) == 3 * 8 + 2 * 8 + 24 + 3
