"""Tables in tensordict's form: how hosts keep the columns of a shard, cut rows out of them and join what they pulled.

    Tensor   [rows, ...]   as it is
    Ragged   [rows, *]     a nested tensor of jagged layout over the same memory
    list     [rows]        a stack of non-tensor entries

Workers read and return plain tables (`columns.Table`); `carry` and `columns_of` go from one form to the other without
a copy.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any, cast

import numpy as np
import torch
from tensordict import NonTensorData, NonTensorStack, TensorDict
from torch import Tensor

from workbench.batches.columns import ColumnValues, Ragged, Table, nbytes
from workbench.batches.location import Pull

# making a nested tensor makes torch log a notice to its own authors, once a process; it would be shown in the notebook
logging.getLogger("torch.fx._symbolic_trace").addFilter(lambda record: "is_fx_tracing" not in record.getMessage())


def carry(table: Mapping[str, ColumnValues], rows: int | None = None) -> TensorDict:
    """The columns of a table, which all have equally many rows, as one tensordict of that batch size."""
    rows = len(next(iter(table.values()))) if rows is None else rows
    return TensorDict({name: _carried(column) for name, column in table.items()}, batch_size=[rows])


def _carried(column: ColumnValues) -> Any:
    if isinstance(column, Ragged):
        offsets = torch.nn.functional.pad(torch.cumsum(column.lengths, 0), (1, 0))
        return torch.nested.nested_tensor_from_jagged(column.values, offsets)
    if isinstance(column, Tensor):
        return column
    # one by one: a list among the entries is an entry, and no axis. Rows that share an entry share what holds it
    held = {key: NonTensorData(entry) for key, entry in {id(entry): entry for entry in column}.items()}
    return NonTensorStack(*[held[id(entry)] for entry in column])


def columns_of(carried: TensorDict) -> Table:
    """The columns as workers see them."""
    return {str(name): _column(carried.get(name)) for name in carried.keys()}  # noqa: SIM118 (it iterates over rows)


def _column(value: Any) -> ColumnValues:
    if isinstance(value, NonTensorStack | NonTensorData):
        entries: list[Any] = value.tolist()
        return entries
    return Ragged(value.values(), value.offsets().diff()) if value.is_nested else value


def side_by_side(positions: np.ndarray) -> bool:
    """Whether rows follow each other in a shard, so that `rows_at` gives a view of them."""
    return bool(len(positions)) and np.array_equal(positions, np.arange(positions[0], positions[0] + len(positions)))


def own_copy(table: Mapping[str, ColumnValues]) -> Table:
    """The columns in memory of their own; the entries of lists are shared."""
    copied: Table = {}
    for name, column in table.items():
        if isinstance(column, Ragged):
            copied[name] = Ragged(column.values.clone(), column.lengths.clone())
        else:
            copied[name] = column.clone() if isinstance(column, Tensor) else list(column)
    return copied


def rows_at(carried: TensorDict, positions: np.ndarray) -> TensorDict:
    """The rows at `positions`, in that order. Rows that lie side by side come as a view, without a copy."""
    if side_by_side(positions):
        first, last = int(positions[0]), int(positions[0]) + len(positions)
        return carried if last - first == len(carried) else carried[first:last]
    # copied: those that came through shared memory are read-only, of which torch warns
    return carried[torch.from_numpy(np.array(positions, dtype=np.int64))]


def end_to_end(parts: Sequence[TensorDict]) -> TensorDict:
    """The rows of several tables of the same columns, end to end."""
    return parts[0] if len(parts) == 1 else cast(TensorDict, torch.cat(list(parts)))


def under_names(pull: Pull, kept: TensorDict, names: Sequence[str]) -> TensorDict:
    """What a shard gave for `pull.kept(names)`, under the names of today."""
    if not pull.name:
        return kept
    return TensorDict({name: kept.get(pull.name) for name in names}, batch_size=kept.batch_size)


def carried_bytes(carried: TensorDict) -> int:
    """Bytes of all columns, see `nbytes`."""
    return sum(map(nbytes, columns_of(carried).values()))


def array_of(tensor: Tensor) -> tuple[str, np.ndarray]:
    """A tensor as the name of its dtype and a numpy array, which pickle protocol 5 moves without a copy."""
    tensor = tensor.detach().cpu().contiguous()
    name = str(tensor.dtype).removeprefix("torch.")
    return name, (tensor.view(torch.int16) if tensor.dtype == torch.bfloat16 else tensor).numpy()


def tensor_over(plain: tuple[str, np.ndarray]) -> Tensor:
    """The inverse of `array_of`, over the same memory. What came through shared memory is only to be read."""
    name, array = plain
    out = torch.from_numpy(np.asarray(_Lent(array)))
    return out.view(torch.bfloat16) if name == "bfloat16" else out


class _Lent:
    """An array's memory without its mark that it is read-only, of which torch would warn."""

    def __init__(self, array: np.ndarray) -> None:
        interface = array.__array_interface__
        self._array, self.__array_interface__ = array, {**interface, "data": (interface["data"][0], False)}


def to_wire(carried: TensorDict) -> dict[str, Any]:
    """numpy arrays in place of tensors, see `array_of`."""
    wire: dict[str, Any] = {}
    for name, column in columns_of(carried).items():
        if isinstance(column, Ragged):
            wire[name] = ("ragged", array_of(column.values), array_of(column.lengths))
        elif isinstance(column, Tensor):
            wire[name] = ("tensor", array_of(column))
        else:
            wire[name] = ("list", column)
    return wire


def from_wire(wire: Mapping[str, Any]) -> TensorDict:
    """The inverse of `to_wire`. What came through shared memory is read-only, so tensors are copied out of it."""
    columns: Table = {}
    for name, (kind, *parts) in wire.items():
        if kind == "ragged":
            columns[name] = Ragged(tensor_over(parts[0]).clone(), tensor_over(parts[1]).clone())
        else:
            columns[name] = tensor_over(parts[0]).clone() if kind == "tensor" else parts[0]
    return carry(columns)
