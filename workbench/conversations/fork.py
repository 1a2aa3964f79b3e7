"""What came of continuing a conversation several times from one place."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING

from workbench.conversations.tree import Turn
from workbench.conversations.value import Value
from workbench.display.html import table

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True, kw_only=True)
class Fork:
    """Continuations from before turn `at`. Made by `chat.fork`.

    leaves: the last turn of each, to go to or to put into a batch. returns: of each, the sum of gamma^k times the
    reward of its k-th turn. value: their mean and its interval: the value of the conversation before that turn, by
    Monte Carlo. critic: what the critic says of it; None without one. df: a frame with one row a continuation.
    failed: continuations whose environment failed, which are not among them.
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
        import pandas as pd

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
