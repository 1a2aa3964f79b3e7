"""The columns of one shard, as workers read and return them (`carrier` has the form in which hosts keep them).

A column is one of

    Tensor   [rows, ...]   numbers of one shape a row (a reward)
    Ragged   [rows, *]     numbers of varying length a row (tokens, log-probabilities), packed: no padding is stored
    list     [rows]        anything else (text, answers)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

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

    @property
    def is_whole(self) -> bool:
        """Whether the lengths are those of rows which lie in `values` end to end."""
        lengths = self.lengths
        right = lengths.ndim == 1 and lengths.dtype == torch.int64 and not bool((lengths < 0).any())
        return right and self.values.ndim >= 1 and int(lengths.sum()) == len(self.values)

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

    def take(self, index: Sequence[int]) -> Ragged:
        """Rows by number, in that order; its work is that of the rows taken, not of the whole column."""
        picked = torch.as_tensor(index, dtype=torch.int64)
        lengths, ends = self.lengths[picked], torch.cumsum(self.lengths, 0)[picked]
        # what to add to a value's place among those taken for its place here
        shifts = torch.repeat_interleave(ends - torch.cumsum(lengths, 0), lengths)
        return Ragged(self.values[(shifts + torch.arange(len(shifts))).to(self.values.device)], lengths)


ColumnValues = Tensor | Ragged | list[Any]
Table = dict[str, ColumnValues]


def nbytes(column: ColumnValues) -> int:
    """Bytes of the numbers of a column (text: of its UTF-8)."""
    if isinstance(column, Ragged):
        return column.values.nbytes + column.lengths.nbytes
    if isinstance(column, Tensor):
        return column.nbytes
    return sum(len(str(row).encode()) for row in column)


def describe(column: ColumnValues) -> tuple[str, tuple[int | str, ...]]:
    """(dtype, shape of one row); "*" stands for a length that varies."""
    if isinstance(column, Ragged):
        return str(column.values.dtype).removeprefix("torch."), ("*",)
    if isinstance(column, Tensor):
        return str(column.dtype).removeprefix("torch."), tuple(column.shape[1:])
    return "object", ()


def kind_of(column: ColumnValues) -> str:
    """What a column is, for messages."""
    if isinstance(column, Ragged):
        return "a Ragged, with one number a token"
    if isinstance(column, Tensor):
        return f"a Tensor [{', '.join(('rows', *map(str, column.shape[1:])))}]"
    return f"a list of {', '.join(sorted({type(value).__name__ for value in column})) or 'Python objects'}"
