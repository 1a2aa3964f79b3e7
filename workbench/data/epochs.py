"""The order in which rows are handed out, epoch after epoch, without an end."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


class EpochOrder:
    """Each epoch holds each of `rows` rows once: in an order drawn from (seed, epoch), or as given."""

    def __init__(self, rows: int, *, seed: int, shuffle: bool) -> None:
        self.rows, self.seed, self.shuffle = rows, seed, shuffle
        self._permutation: tuple[int, Sequence[int]] = (-1, ())  # the epoch asked for last, and its order

    def at(self, position: int) -> int:
        """The row that is handed out when `position` rows, over all epochs, have been before it."""
        epoch, place = divmod(position, self.rows)
        if not self.shuffle:
            return place
        if self._permutation[0] != epoch:
            self._permutation = (epoch, np.random.default_rng([self.seed, epoch]).permutation(self.rows).tolist())
        return self._permutation[1][place]
