"""Tables on their way between processes: arrays in place of tensors, which pickle protocol 5 moves without a copy."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from workbench.batches.columns import ColumnValues, Ragged, Table


def array_of(tensor: Tensor) -> tuple[str, np.ndarray]:
    """A tensor as the name of its dtype and a numpy array."""
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


def to_wire(table: Mapping[str, ColumnValues]) -> dict[str, Any]:
    """A table with arrays in place of tensors, over the same memory."""
    wire: dict[str, Any] = {}
    for name, column in table.items():
        if isinstance(column, Ragged):
            wire[name] = (array_of(column.values), array_of(column.lengths))
        else:
            wire[name] = array_of(column) if isinstance(column, Tensor) else column
    return wire


def from_wire(wire: Mapping[str, Any]) -> Table:
    """The inverse of `to_wire`, over the same memory: only to be read, so that who keeps or changes it takes a copy."""
    table: Table = {}
    for name, column in wire.items():
        if isinstance(column, list):
            table[name] = column
        elif isinstance(column[0], str):
            table[name] = tensor_over(column)
        else:
            table[name] = Ragged(*map(tensor_over, column))
    return table
