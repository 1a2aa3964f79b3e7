"""Rows that are handed out epoch after epoch, without an end, in an order that can be resumed."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from typing import Any, Generic, TypeVar

import numpy as np

from workbench.errors import BadInput
from workbench.support.validation import whole

R = TypeVar("R")


class EpochRows(Generic[R]):
    """Each epoch holds each row once: in an order drawn from (seed, epoch), or, without `shuffle`, as given.

    position: rows handed out since the beginning, over all epochs. called: what the rows are, for messages.
    """

    def __init__(self, rows: Sequence[R], *, seed: int, shuffle: bool, called: str) -> None:
        self.rows, self.seed, self.shuffle, self._called = rows, seed, shuffle, called
        self.position = 0
        self._permutation: tuple[int, Sequence[int]] = (-1, ())  # the epoch that was asked for last, and its order

    def next(self, n: int) -> list[R]:
        """The next `n` rows. Where an epoch ends, the next one begins."""
        whole("n", n, 1)
        rows = [self.at(self.position + i) for i in range(n)]
        self.position += n
        return rows

    def take(self, places: Sequence[int]) -> list[R]:
        """Hand out these rows, by their places in `rows`, in place of the next ones."""
        self.position += len(places)
        return [self.rows[place] for place in places]

    def at(self, position: int) -> R:
        """The row that is handed out after `position` others."""
        epoch, place = divmod(position, len(self.rows))
        if not self.shuffle:
            return self.rows[place]
        if self._permutation[0] != epoch:
            order = np.random.default_rng([self.seed, epoch]).permutation(len(self.rows)).tolist()
            self._permutation = (epoch, order)
        return self.rows[self._permutation[1][place]]

    @property
    def epoch(self) -> int:
        """The epoch of the next row, from 0."""
        return self.position // len(self.rows)

    def state_dict(self) -> dict[str, Any]:
        """Where the rows stand, as plain values (JSON will do)."""
        return {"position": self.position, **self._identity()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on exactly where `state` was taken. Raises `BadInput` if these rows are others, or in another order."""
        differ = [key for key, value in self._identity().items() if state.get(key) != value]
        if differ:
            raise BadInput(
                f"the saved {self._called} differ in {', '.join(differ)}",
                "rows are resumed with the same seed, shuffle and token ids",
                "build them with the source, tokenizer and settings of the saved ones, or start anew without loading",
            )
        whole("position", state.get("position"), 0)  # type: ignore[arg-type]
        self.position = state["position"]

    def _identity(self) -> dict[str, Any]:
        """What the order of the rows depends on."""
        digest = hashlib.sha256()
        for row in self.rows:
            for numbers in self.numbers_of(row):
                digest.update(np.asarray(numbers, dtype="<i8").tobytes())
        return {"seed": self.seed, "shuffle": self.shuffle, "token ids": digest.hexdigest()}

    def numbers_of(self, row: R) -> Iterable[Sequence[int]]:
        """What tells a row from others."""
        raise NotImplementedError
