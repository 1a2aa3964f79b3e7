"""Estimates values and advantages of a conversation's turns from continuations that were sampled there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from statistics import fmean

import pandas as pd

from workbench.conversations.tree import Turn
from workbench.display.html import table
from workbench.support.intervals import clustered_half_width


@dataclass(frozen=True, kw_only=True)
class Value:
    """The mean of n returns, and the ends of its 95 % interval, by Student's t, because n is small. The ends are NaN
    for one return. If all returns are equal, the interval is a point, although later returns may differ."""

    mean: float
    low: float
    high: float
    n: int

    @classmethod
    def of(cls, returns: Sequence[float]) -> Value:
        mean, half = fmean(returns), clustered_half_width(returns, [1] * len(returns))
        return cls(mean=mean, low=mean - half, high=mean + half, n=len(returns))

    def __str__(self) -> str:
        if self.n < 2:
            return f"{self.mean:.3g} (of 1)"
        return f"{self.mean:.3g} [{self.low:.3g}, {self.high:.3g}] (of {self.n})"


class Credit:
    """Returns of continuations, by the turn after which they begin. gamma: the discount per turn."""

    def __init__(self, gamma: float) -> None:
        self.gamma = gamma
        self._returns: dict[int | None, tuple[int, list[float]]] = {}

    def add(self, behind: int | None, version: int, returns: Sequence[float]) -> None:
        """Add returns of continuations after turn `behind`; forget returns of other weights versions."""
        known = self._returns.get(behind)
        self._returns[behind] = version, [*(known[1] if known and known[0] == version else []), *returns]

    def value_behind(self, number: int | None) -> Value | None:
        """Return the value after the turn of that number (None: at the beginning); None without continuations."""
        return Value.of(self._returns[number][1]) if number in self._returns else None

    def advantage(self, turn: Turn) -> float | None:
        before, behind = self.value_behind(turn.parent), self.value_behind(turn.number)
        after = 0.0 if turn.done else None if behind is None else behind.mean
        return None if before is None or after is None else turn.reward + self.gamma * after - before.mean


@dataclass(frozen=True, kw_only=True)
class Fork:
    """Continuations from before turn `at`. Made by `chat.fork`.

    leaves: the last turn of each continuation, for `chat.go` or `chat.batch`. returns: for each continuation, the sum
    of gamma^k times the reward of its k-th turn. value: their mean and its interval, a Monte Carlo estimate of the
    value before that turn. critic: the critic's value there; None without a critic. df: one row per continuation.
    failed: the number of continuations left out because their environment or reward function failed.
    """

    at: int
    leaves: Sequence[Turn]
    returns: Sequence[float]
    endings: Sequence[str]
    texts: Sequence[str]
    turns: Sequence[int]
    critic: float | None = None
    failed: int = 0

    @property
    def value(self) -> Value:
        return Value.of(self.returns)

    @property
    def df(self) -> pd.DataFrame:
        columns = {
            "leaf": [turn.number for turn in self.leaves], "turns": self.turns, "return": self.returns,
            "ending": self.endings, "text": self.texts,
        }  # fmt: skip
        return pd.DataFrame(columns)

    def __repr__(self) -> str:
        critic = "" if self.critic is None else f", critic {self.critic:.3g}"
        return f"<Fork before turn {self.at}: value {self.value}{critic}>"[:79]

    def _repr_html_(self) -> str:
        critic = "" if self.critic is None else f"; the critic says {self.critic:.3g}"
        failed = f"; {self.failed} failed" if self.failed else ""
        said = f"Before turn {self.at}: value {self.value}{critic}{failed}"
        return table(
            [{str(name): x for name, x in line.items()} for line in self.df.to_dict("records")], caption=escape(said)
        )
