"""Tables as tensordicts, for users who want them: ragged columns are nested tensors of jagged layout, lists non-tensor
data. Only this file imports tensordict, which takes seconds."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import torch
from tensordict import NonTensorData, NonTensorStack, TensorDict
from torch import Tensor

from workbench.batches.columns import ColumnValues, Ragged, Table

# making a nested tensor makes torch log a notice to its own authors, once a process; it would be shown in the notebook
logging.getLogger("torch.fx._symbolic_trace").addFilter(lambda record: "is_fx_tracing" not in record.getMessage())


def to_tensordict(table: Mapping[str, ColumnValues], rows: int) -> TensorDict:
    """The columns of a table of that many rows, over the same memory."""
    return TensorDict({name: _entry_of(column) for name, column in table.items()}, batch_size=[rows])


def _entry_of(column: ColumnValues) -> Any:
    if isinstance(column, Ragged):
        offsets = torch.nn.functional.pad(torch.cumsum(column.lengths, 0), (1, 0))
        return torch.nested.nested_tensor_from_jagged(column.values, offsets)
    if isinstance(column, Tensor):
        return column
    return NonTensorStack(*map(NonTensorData, column))  # one by one: a list among the entries is an entry, and no axis


def from_tensordict(given: TensorDict) -> Table:
    """The inverse of `to_tensordict`."""
    return {str(name): _column_of(given.get(name)) for name in given.keys()}  # noqa: SIM118 (it iterates over rows)


def _column_of(entry: Any) -> ColumnValues:
    if isinstance(entry, NonTensorStack | NonTensorData):
        entries: list[Any] = entry.tolist()
        return entries
    return Ragged(entry.values(), entry.offsets().diff()) if entry.is_nested else entry
