"""Tables of rows. Workers read and return columns in this form, hosts keep them in it, and `Batch.fetch` returns it.

A column is one of

    Tensor   [rows, ...]   numbers, rows of equal shape (a reward)
    Ragged   [rows, *]     numbers, rows of varying length (tokens, log-probabilities), packed: no padding is stored
    list     [rows]        anything else (text, answers)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import Tensor

from workbench.batches.location import packed
from workbench.errors import BadInput, WorkbenchError
from workbench.errors.plain_text import shown


@dataclass(frozen=True, eq=False)
class Ragged:
    """Rows of varying length, end to end: `values` [sum of lengths], `lengths` [rows] (int64)."""

    values: Tensor
    lengths: Tensor

    @classmethod
    def of(cls, rows: Sequence[Tensor | Sequence[Any]], dtype: torch.dtype) -> Ragged:
        """Pack a sequence of rows."""
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
        """Whether `lengths` are valid (1-D, int64, not negative) and add up to the number of `values`."""
        lengths = self.lengths
        right = lengths.ndim == 1 and lengths.dtype == torch.int64 and not bool((lengths < 0).any())
        return right and self.values.ndim >= 1 and int(lengths.sum()) == len(self.values)

    def rows(self) -> list[Tensor]:
        """Return the rows as views of `values`."""
        return list(torch.split(self.values, self.lengths.tolist()))

    def pad(self, fill: float = 0) -> Tensor:
        """Return the rows right-padded, [rows, longest]."""
        if not len(self):
            return self.values.new_zeros((0, 0))
        return torch.nn.utils.rnn.pad_sequence(self.rows(), batch_first=True, padding_value=fill)

    def like(self, values: Tensor) -> Ragged:
        """Return other values with the same row lengths."""
        return Ragged(values, self.lengths)

    def take(self, index: Sequence[int] | np.ndarray | Tensor) -> Ragged:
        """Return the rows with these numbers, in this order; the values of other rows are not touched."""
        index = torch.as_tensor(index, dtype=torch.int64)
        lengths = self.lengths[index]
        places = _places(torch.cumsum(self.lengths, 0)[index] - lengths, lengths)
        return Ragged(self.values[places.to(self.values.device)], lengths)


def _places(starts: Tensor, lengths: Tensor) -> Tensor:
    """Return the positions in `values` of rows that begin at `starts`, row after row."""
    places = torch.repeat_interleave(starts - torch.cumsum(lengths, 0) + lengths, lengths)
    return places + torch.arange(len(places))


ColumnValues = Tensor | Ragged | list[Any]
REPEAT_IT = (
    "to repeat a tensor x [rows] for each token: mask = batch.fetch(['response_mask'])['response_mask']; "
    "mask.like(torch.repeat_interleave(x, mask.lengths))"
)
Table = dict[str, ColumnValues]


def nbytes(column: ColumnValues) -> int:
    """Return the size of a column's numbers in bytes (of a list: of its entries as UTF-8 text)."""
    if isinstance(column, Ragged):
        return column.values.nbytes + column.lengths.nbytes
    if isinstance(column, Tensor):
        return column.nbytes
    return sum(len(str(row).encode()) for row in column)


def table_bytes(table: Mapping[str, ColumnValues]) -> int:
    return sum(map(nbytes, table.values()))


def describe(column: ColumnValues) -> tuple[str, tuple[int | str, ...]]:
    """Return (dtype, shape of one row); "*" stands for a varying length."""
    if isinstance(column, Ragged):
        return str(column.values.dtype).removeprefix("torch."), ("*",)
    if isinstance(column, Tensor):
        return str(column.dtype).removeprefix("torch."), tuple(column.shape[1:])
    return "object", ()


def kind_of(column: ColumnValues) -> str:
    """Return the kind of a column in words, for messages."""
    if isinstance(column, Ragged):
        return "a Ragged, with one number a token"
    if isinstance(column, Tensor):
        return f"a Tensor [{', '.join(('rows', *map(str, column.shape[1:])))}]"
    return f"a list of {', '.join(sorted({type(value).__name__ for value in column})) or 'Python objects'}"


def ragged_in(table: Mapping[str, ColumnValues], name: str) -> Ragged:
    """Return a table's column as a Ragged; raise `BadInput` if it is of another kind."""
    column = table[name]
    if not isinstance(column, Ragged):
        rule = "it must be a Ragged, with one number a token of each row"
        raise BadInput(f"column {name!r} is {kind_of(column)}", rule, REPEAT_IT)
    return column


def numbers_in(table: Mapping[str, ColumnValues], name: str) -> Tensor:
    """Return a table's column of one number per row; raise `BadInput` if it is of another kind."""
    column = table[name]
    if not isinstance(column, Tensor) or column.ndim != 1:
        raise BadInput(f"column {name!r} is {kind_of(column)}", "it must be a Tensor [rows], one number a row")
    return column


def check_form(name: str, column: object, error: type[WorkbenchError], where: str = "") -> None:
    """Raise `error` if `column` is not a valid column. name, where: for the message."""
    if isinstance(column, Ragged) and not column.is_whole:
        raise error(
            f"{where}column {name!r} has {len(column.values)} values for lengths {shown(column.lengths.tolist())}",
            "the lengths of a Ragged must be whole numbers, at least 0, and their sum the number of its values",
            "make it with Ragged.of(rows, dtype)",
        )
    if not isinstance(column, Tensor | Ragged | list) or (isinstance(column, Tensor) and column.ndim == 0):
        what = "a tensor without axes" if isinstance(column, Tensor) else f"a {type(column).__name__}"
        raise error(
            f"{where}column {name!r} is {what}",
            "a column is a Tensor [rows, ...], a Ragged, or a list of Python objects",
            "turn an array into a tensor with torch.from_numpy(array); give one value a row",
        )


# --- rows of tables ---------------------------------------------------------------------------------------------------


def rows_at(table: Mapping[str, ColumnValues], positions: np.ndarray) -> Table:
    """Return the rows at `positions`, in that order. Consecutive rows are returned as a view, without a copy."""
    if isinstance(run := packed(positions), range):
        return {name: _slice(column, slice(run.start, run.stop)) for name, column in table.items()}
    index = _index(positions)
    rows: Table = {}
    for name, column in table.items():
        if isinstance(column, Ragged):
            rows[name] = column.take(index)
        elif isinstance(column, Tensor):
            rows[name] = column[index.to(column.device)]
        else:
            rows[name] = [column[row] for row in index.tolist()]
    return rows


def _index(positions: np.ndarray) -> Tensor:
    return torch.from_numpy(np.array(positions, dtype=np.int64))  # a copy: torch warns about read-only memory


def _slice(column: ColumnValues, run: slice) -> ColumnValues:
    if not isinstance(column, Ragged):
        return column[run]
    start, lengths = int(column.lengths[: run.start].sum()), column.lengths[run]
    return Ragged(column.values[start : start + int(lengths.sum())], lengths)


def own_copy(table: Mapping[str, ColumnValues]) -> Table:
    """Return copies of the columns; the entries of lists are shared."""
    copies: Table = {}
    for name, column in table.items():
        if isinstance(column, Ragged):
            copies[name] = Ragged(column.values.clone(), column.lengths.clone())
        else:
            copies[name] = column.clone() if isinstance(column, Tensor) else list(column)
    return copies


def assembled(parts: Sequence[tuple[np.ndarray, Mapping[str, ColumnValues]]]) -> Table:
    """Return one new table of the rows of several tables with the same columns; every value is copied once. parts: for
    each table the row numbers of the result at which its rows go, and the table."""
    places, first = parts[0]
    if len(parts) == 1 and isinstance(packed(places), range):
        return own_copy(first)
    rows = [places for places, _ in parts]
    return {name: _assembled(rows, [table[name] for _, table in parts]) for name in first}


def _assembled(rows: Sequence[np.ndarray], parts: Sequence[Any]) -> ColumnValues:
    total, first = sum(map(len, rows)), parts[0]
    if isinstance(first, list):
        entries = dict(zip(np.concatenate(rows).tolist(), chain(*parts), strict=True))
        return [entries[place] for place in range(total)]
    index = [_index(places) for places in rows]
    if isinstance(first, Tensor):
        return _placed(index, parts, total)
    lengths = _placed(index, [part.lengths for part in parts], total)
    starts = torch.cumsum(lengths, 0) - lengths
    values = [part.values for part in parts]
    index = [_places(starts[places], part.lengths) for places, part in zip(index, parts, strict=True)]
    return Ragged(_placed(index, values, int(lengths.sum())), lengths)


def _placed(index: Sequence[Tensor], parts: Sequence[Tensor], total: int) -> Tensor:
    whole = parts[0].new_empty((total, *parts[0].shape[1:]))
    for places, part in zip(index, parts, strict=True):
        whole[places.to(whole.device)] = part.to(whole.device)
    return whole


def array_of(tensor: Tensor) -> tuple[str, np.ndarray]:
    """Return the name of a tensor's dtype, and the tensor as a NumPy array (bfloat16 as int16)."""
    tensor = tensor.detach().cpu().contiguous()
    name = str(tensor.dtype).removeprefix("torch.")
    return name, (tensor.view(torch.int16) if tensor.dtype == torch.bfloat16 else tensor).numpy()


def tensor_over(plain: tuple[str, np.ndarray]) -> Tensor:
    """Return the tensor of a result of `array_of`, over the same memory. Don't write to it if that memory is shared."""
    name, array = plain
    out = torch.from_numpy(np.asarray(_Lent(array)))
    return out.view(torch.bfloat16) if name == "bfloat16" else out


class _Lent:
    """Exposes an array's memory without its read-only flag, about which torch would warn."""

    def __init__(self, array: np.ndarray) -> None:
        interface = array.__array_interface__
        self._array, self.__array_interface__ = array, {**interface, "data": (interface["data"][0], False)}


def to_wire(table: Mapping[str, ColumnValues]) -> dict[str, Any]:
    """Return a table with NumPy arrays in place of tensors, over the same memory."""
    wire: dict[str, Any] = {}
    for name, column in table.items():
        if isinstance(column, Ragged):
            wire[name] = (array_of(column.values), array_of(column.lengths))
        else:
            wire[name] = array_of(column) if isinstance(column, Tensor) else column
    return wire


def from_wire(wire: Mapping[str, Any]) -> Table:
    """Return the table of a result of `to_wire`, over the same memory. Copy the table before you keep or change it."""
    table: Table = {}
    for name, column in wire.items():
        if isinstance(column, list):
            table[name] = column
        elif isinstance(column[0], str):
            table[name] = tensor_over(column)
        else:
            table[name] = Ragged(*map(tensor_over, column))
    return table
