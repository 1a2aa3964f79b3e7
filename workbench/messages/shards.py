"""What a worker sees of a batch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from workbench.batches.columns import Ragged, Table, numbers_in, ragged_in
from workbench.batches.schema import COUNTING


@dataclass(frozen=True, kw_only=True)
class Shard:
    """What a worker gets of a batch: its columns' rows, and their numbers in the whole batch.

    minibatch_sizes: rows of each minibatch, in order; they add up to len(rows).
    sample: for operations that draw samples, how many equal rows come before each in the whole batch [rows].
    meta: what the batch carries along, and this stage's `seed` (a tuple of integers).
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
        """Which rows count, [rows]: not those that failed or have no baseline, see `COUNTING` in
        `workbench.batches.schema`. A shard without these columns has no such row."""
        found = torch.ones(len(self), dtype=torch.bool)
        for name in COUNTING:
            if name in self.columns:
                found &= self.numbers(name).bool()
        return found

    @property
    def valid_mask(self) -> Ragged:
        """The response mask without the tokens of rows that do not count: what advantages and losses are over."""
        mask = self.ragged("response_mask")
        if not set(COUNTING) & self.columns.keys():
            return mask
        return mask.like(mask.values.bool() & torch.repeat_interleave(self.valid, mask.lengths))

    @property
    def invalid_rows(self) -> frozenset[int]:
        """Those that do not count, by their place in the shard."""
        return frozenset((~self.valid).nonzero()[:, 0].tolist())

    def ragged(self, name: str) -> Ragged:
        return ragged_in(self.columns, name)

    def numbers(self, name: str) -> Tensor:
        return numbers_in(self.columns, name)
