"""What the turns of a conversation are worth, by continuations that were sampled from them."""

from __future__ import annotations

from collections.abc import Sequence

from workbench.conversations.tree import Turn
from workbench.conversations.value import Value


class Credit:
    """Returns of continuations, by the turn behind which they begin. gamma: of values, for each turn."""

    def __init__(self, gamma: float) -> None:
        self.gamma = gamma
        self._returns: dict[int | None, tuple[int, list[float]]] = {}

    def add(self, behind: int | None, version: int, returns: Sequence[float]) -> None:
        """Add to the value behind a turn. Returns of earlier weights are forgotten. version: of the weights."""
        known = self._returns.get(behind)
        self._returns[behind] = version, [*(known[1] if known and known[0] == version else []), *returns]

    def value_behind(self, number: int | None) -> Value | None:
        """The value behind the turn of that number, None: of the beginning; None where there are no continuations."""
        return Value.of(self._returns[number][1]) if number in self._returns else None

    def advantage(self, turn: Turn) -> float | None:
        """The reward of a turn, and gamma times the value behind it, less the value before it. Behind the end the value
        is 0. None where there are no continuations from both places."""
        before, behind = self.value_behind(turn.parent), self.value_behind(turn.number)
        after = 0.0 if turn.done else None if behind is None else behind.mean
        return None if before is None or after is None else turn.reward + self.gamma * after - before.mean
