"""A shard: a worker's part of a batch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from workbench.batches.columns import Ragged, Table, numbers_in, ragged_in
from workbench.batches.schema import COUNTING
from workbench.errors import BadInput


@dataclass(frozen=True, kw_only=True)
class Shard:
    """A worker's part of a batch. columns: its rows. rows: the rows' numbers in the whole batch [rows].

    minibatch_sizes: the number of rows of each minibatch, in order; they add up to len(rows).
    sample: for operations that draw samples, the number of equal rows before each row in the whole batch [rows].
    meta: the batch's meta, and this stage's `seed` (a tuple of integers).
    """

    columns: Table
    rows: np.ndarray
    minibatch_sizes: tuple[int, ...]
    meta: Mapping[str, Any]
    sample: np.ndarray | None = None

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def valid(self) -> Tensor:
        """Which rows count, bool [rows]: rows that failed or have no baseline do not, see `COUNTING` in
        `workbench.batches.schema`. In a shard without these columns all rows count."""
        found = torch.ones(len(self), dtype=torch.bool)
        for name in COUNTING:
            if name in self.columns:
                found &= self.numbers(name).bool()
        return found

    @property
    def valid_mask(self) -> Ragged:
        """The response mask without the tokens of rows that do not count: the tokens of advantages and losses."""
        mask = self.ragged("response_mask")
        if not set(COUNTING) & self.columns.keys():
            return mask
        return mask.like(mask.values.bool() & torch.repeat_interleave(self.valid, mask.lengths))

    @property
    def invalid_rows(self) -> frozenset[int]:
        """The rows that do not count, by their position in the shard."""
        return frozenset((~self.valid).nonzero()[:, 0].tolist())

    def ragged(self, name: str) -> Ragged:
        return ragged_in(self._with(name), name)

    def numbers(self, name: str) -> Tensor:
        return numbers_in(self._with(name), name)

    def _with(self, name: str) -> Table:
        if name not in self.columns:
            given = f"the operation was given {', '.join(self.columns) or 'no columns'}"
            raise BadInput(f"column {name!r}", given, f"register it with reads=({name!r}, ...)")
        return self.columns
