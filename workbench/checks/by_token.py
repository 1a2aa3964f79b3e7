"""A table a row and a token at a time, in plain floats, for formulas that stages are held to.

`advantage_formulas` and `loss_formulas` write the papers' formulas once more with it. They call none of the pure
functions of `workbench.algorithms`, which the stages are made of: a mistake in one of those is not to be made here as
well. Sources: the docstrings of those functions.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch import Tensor

from workbench.batches.columns import Ragged, Table
from workbench.objectives.correction import Correction, Level

Numbers = list[float]


class ByToken:
    """A table's columns; of token columns the tokens inside the mask alone, row by row."""

    def __init__(self, table: Table) -> None:
        self._table = table
        mask = table["response_mask"]
        assert isinstance(mask, Ragged)
        self.lengths: list[int] = mask.lengths.tolist()
        self.masks: list[list[bool]] = [row.bool().tolist() for row in mask.rows()]

    def __len__(self) -> int:
        return len(self.masks)

    def has(self, name: str) -> bool:
        """Whether the table has a column."""
        return name in self._table

    def tokens(self, name: str) -> list[Numbers]:
        """A token column."""
        rows = zip(self._whole(name), self.masks, strict=True)
        return [[x for x, inside in zip(row, mask, strict=True) if inside] for row, mask in rows]

    def turns(self) -> list[list[int]]:
        """The turn in which each token is: so many turns have ended before it."""
        column = self._table["turn_ends"]
        assert isinstance(column, Ragged)
        rows = zip(column.rows(), self.masks, strict=True)
        return [[sum(end <= t for end in ends.tolist()) for t, inside in enumerate(m) if inside] for ends, m in rows]

    def numbers(self, name: str) -> Numbers:
        """A column of one number a row."""
        column = self._table[name]
        assert isinstance(column, Tensor)
        numbers: Numbers = column.double().tolist()
        return numbers

    def is_one_a_row(self, name: str) -> bool:
        """Whether a column has one number a row."""
        return isinstance(self._table[name], Tensor)

    def scores(self, name: str) -> tuple[Numbers, list[Numbers]]:
        """Of each response, and of each of its tokens. The score of a whole response is on its last token; of one
        whose tokens are all masked out every token counts towards the response's score."""
        if isinstance(self._table[name], Tensor):
            whole = self.numbers(name)
            return whole, [on_last(score, sum(mask)) for score, mask in zip(whole, self.masks, strict=True)]
        each = self.tokens(name)
        return [sum(row) if row else sum(all_) for row, all_ in zip(each, self._whole(name), strict=True)], each

    def _whole(self, name: str) -> list[Numbers]:
        column = self._table[name]
        assert isinstance(column, Ragged)
        return [row.double().tolist() for row in column.rows()]


def on_last(score: float, tokens: int) -> Numbers:
    """A score on the last of so many tokens, 0 on the others."""
    return [0.0] * (tokens - 1) + [score] if tokens else []


def kl(log_prob: float, ref_log_prob: float, kind: str) -> float:
    """An estimate of KL(pi || ref) at one token."""
    d = log_prob - ref_log_prob
    return {"k1": d, "k2": d * d / 2, "k3": math.exp(-d) - 1 + d}[kind]


def most_kept(rows: Sequence[tuple[Numbers, Numbers]], correction: Correction) -> float:
    """The largest (log w)^2 that bound="second_moment" leaves in a minibatch; no limit for other bounds. rows: old and
    rollout log-probabilities of each."""
    if correction.bound != "second_moment":
        return math.inf
    squares = sorted((a - b) ** 2 for row in rows for a, b in zip(*row, strict=True))
    while squares and sum(squares) / len(squares) > correction.largest_second_moment:
        squares.pop()
    return squares[-1] if squares else -1.0


def importance_weights(old: Numbers, rollout: Numbers, correction: Correction, most: float = math.inf) -> Numbers:
    """What a correction multiplies the loss of each token of a response by. most: see `most_kept`."""
    if correction.bound == "second_moment":
        return [math.exp(a - b) if (a - b) ** 2 <= most else 0.0 for a, b in zip(old, rollout, strict=True)]
    weights = raw_importance_weights(old, rollout, correction.level)
    if correction.bound == "mask":
        low = 0.5 if correction.low is None else correction.low
        return [w if low <= w <= correction.high else 0.0 for w in weights]
    return [min(w, correction.high) for w in weights]


def raw_importance_weights(old: Numbers, rollout: Numbers, level: Level) -> Numbers:
    """The weights of a response's tokens before a correction bounds them."""
    logs = [a - b for a, b in zip(old, rollout, strict=True)]
    if level == "sequence":
        logs = [sum(logs)] * len(logs)
    elif level == "geometric":
        logs = [sum(logs) / len(logs)] * len(logs)
    return [math.exp(log) for log in logs]
