"""The columns of one shard, as they lie in a host's memory.

A column is one of
    Tensor   [rows, ...]   numbers of one shape a row (a reward)
    Ragged   [rows, *]     numbers of varying length a row (tokens, log-probabilities), packed: no padding is stored
    list     [rows]        anything else (text, answers)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Ragged:
    """Rows of varying length, end to end: `values` [sum of lengths], `lengths` [rows] (int64)."""

    values: Tensor
    lengths: Tensor

    @classmethod
    def of(cls, rows: Sequence[Tensor | Sequence[Any]], dtype: torch.dtype) -> Ragged:
        """Pack rows, given one by one."""
        parts = [torch.as_tensor(row, dtype=dtype) for row in rows]
        lengths = torch.tensor([len(part) for part in parts], dtype=torch.int64)
        return cls(torch.cat(parts) if parts else torch.empty(0, dtype=dtype), lengths)

    @classmethod
    def unpad(cls, padded_BT: Tensor, lengths: Tensor) -> Ragged:
        """Pack the first lengths[i] entries of each row of a right-padded tensor."""
        inside = torch.arange(padded_BT.shape[1], device=padded_BT.device)[None] < lengths.to(padded_BT.device)[:, None]
        return cls(padded_BT[inside].cpu(), lengths.cpu())

    def __len__(self) -> int:
        return len(self.lengths)

    def rows(self) -> list[Tensor]:
        """Views of the rows."""
        return list(torch.split(self.values, self.lengths.tolist()))

    def pad(self, fill: float = 0) -> Tensor:
        """Right-padded [rows, longest]."""
        if not len(self):
            return self.values.new_zeros((0, 0))
        return torch.nn.utils.rnn.pad_sequence(self.rows(), batch_first=True, padding_value=fill)

    def like(self, values: Tensor) -> Ragged:
        """Other values of the same row lengths."""
        return Ragged(values, self.lengths)


Column = Tensor | Ragged | list[Any]
Table = dict[str, Column]


def take(column: Column, positions: np.ndarray) -> Column:
    """The rows at `positions`, in that order. Rows that lie side by side come as a view, without a copy."""
    if len(positions) and np.array_equal(positions, np.arange(positions[0], positions[0] + len(positions))):
        first, last = int(positions[0]), int(positions[0]) + len(positions)
        if len(positions) == len(column):
            return column
        if not isinstance(column, Ragged):
            return column[first:last]
        begin, end = int(column.lengths[:first].sum()), int(column.lengths[:last].sum())
        return Ragged(column.values[begin:end], column.lengths[first:last])
    if isinstance(column, list):
        return [column[i] for i in positions]
    index = torch.from_numpy(np.ascontiguousarray(positions, dtype=np.int64))
    if isinstance(column, Tensor):
        return column[index]
    starts = torch.cumsum(column.lengths, 0) - column.lengths
    lengths = column.lengths[index]
    offsets = torch.arange(int(lengths.sum())) - torch.repeat_interleave(torch.cumsum(lengths, 0) - lengths, lengths)
    return Ragged(column.values[torch.repeat_interleave(starts[index], lengths) + offsets], lengths)


def concatenate(columns: Sequence[Column]) -> Column:
    """Rows of several columns of one kind, end to end."""
    if len(columns) == 1:
        return columns[0]
    if all(isinstance(column, list) for column in columns):
        return [row for column in columns for row in column]  # type: ignore[union-attr]
    if all(isinstance(column, Ragged) for column in columns):
        ragged: list[Ragged] = list(columns)  # type: ignore[arg-type]
        return Ragged(torch.cat([c.values for c in ragged]), torch.cat([c.lengths for c in ragged]))
    return torch.cat(list(columns))  # type: ignore[arg-type]


def nbytes(column: Column) -> int:
    """Bytes of the numbers of a column (text: of its UTF-8)."""
    if isinstance(column, Ragged):
        return column.values.nbytes + column.lengths.nbytes
    if isinstance(column, Tensor):
        return column.nbytes
    return sum(len(str(row).encode()) for row in column)


def describe(column: Column) -> tuple[str, tuple[int | str, ...]]:
    """(dtype, shape of one row); "*" stands for a length that varies."""
    if isinstance(column, Ragged):
        return str(column.values.dtype).removeprefix("torch."), ("*",)
    if isinstance(column, Tensor):
        return str(column.dtype).removeprefix("torch."), tuple(column.shape[1:])
    return "object", ()


def to_wire(table: Mapping[str, Column]) -> dict[str, Any]:
    """numpy arrays in place of tensors: pickle protocol 5 then moves the bytes without a copy."""

    def plain(tensor: Tensor) -> tuple[str, np.ndarray]:
        tensor = tensor.detach().cpu().contiguous()
        name = str(tensor.dtype).removeprefix("torch.")
        return name, (tensor.view(torch.int16) if tensor.dtype == torch.bfloat16 else tensor).numpy()

    wire: dict[str, Any] = {}
    for name, column in table.items():
        if isinstance(column, Ragged):
            wire[name] = ("ragged", plain(column.values), plain(column.lengths))
        elif isinstance(column, Tensor):
            wire[name] = ("tensor", plain(column))
        else:
            wire[name] = ("list", column)
    return wire


def from_wire(wire: Mapping[str, Any]) -> Table:
    """The inverse of `to_wire`. What came through shared memory is read-only, so tensors are copied out of it."""

    def tensor(plain: tuple[str, np.ndarray]) -> Tensor:
        name, array = plain
        out = torch.from_numpy(array.copy())
        return out.view(torch.bfloat16) if name == "bfloat16" else out

    table: Table = {}
    for name, (kind, *parts) in wire.items():
        if kind == "ragged":
            table[name] = Ragged(tensor(parts[0]), tensor(parts[1]))
        else:
            table[name] = tensor(parts[0]) if kind == "tensor" else parts[0]
    return table
