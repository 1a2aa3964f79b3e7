"""A conversation as a tree of turns, which were sampled or written by hand, with a branch for each continuation."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from workbench.errors import BadInput
from workbench.errors.plain_text import shown

Author = Literal["policy", "hand"]


@dataclass(frozen=True, kw_only=True)
class Turn:
    """A turn of the policy, and the answer to it.

    number: in the tree, from 0. parent: the number of the turn before it; None for a first turn. token_ids: with the
    end token. log_probs: their log-probabilities when sampled; zeros for a turn written by hand. ending: "eos", "stop"
    or "length" (cut). answer_ids: the tokens that the policy reads next. own_ids: the environment's own answer, which
    an answer by hand may replace. reward, done: from the environment. answered: False if the conversation ended before
    an answer came. limit: "max_calls" if this limit ended it. weights_version: of the policy that sampled the turn.
    text, answer: token_ids and answer_ids as text, with special tokens; the tree sets them.
    """

    number: int
    parent: int | None
    token_ids: Sequence[int]
    log_probs: Sequence[float]
    ending: str
    written_by: Author = "policy"
    answer_ids: Sequence[int] = ()
    own_ids: Sequence[int] = ()
    answered_by: Literal["environment", "hand"] = "environment"
    answered: bool = True
    reward: float = 0.0
    done: bool = False
    limit: str = ""
    weights_version: int = 0
    text: str = ""
    answer: str = ""

    def __repr__(self) -> str:
        answered = f" -> {shown(self.answer, 30)}" if self.answer_ids else ""
        hand = " (by hand)" if self.edited else ""
        over = ", done" if self.done else f", {self.limit}" if self.limit else ""
        return f"<Turn {self.number}{hand}: {shown(self.text, 40)}{answered}, reward {self.reward:g}{over}>"

    @property
    def edited(self) -> bool:
        """Whether the user wrote the turn or its answer, so that later turns also depend on the user."""
        return self.written_by == "hand" or self.answered_by == "hand"


@dataclass(kw_only=True)
class Tree:
    """The turns of a conversation, and its beginning. prompt_ids: the prompt. first_ids: the environment's tokens
    before the first turn, with which the response begins. decode: turns tokens into text."""

    decode: Callable[[Sequence[int]], str]
    prompt_ids: Sequence[int] = ()
    first_ids: Sequence[int] = ()
    turns: list[Turn] = field(default_factory=list)

    def add(self, turn: Turn) -> Turn:
        """Append a turn; return it with `text` and `answer` filled in."""
        assert turn.number == len(self.turns)
        self.turns.append(replace(turn, text=self.decode(turn.token_ids), answer=self.decode(turn.answer_ids)))
        return self.turns[-1]

    def path(self, number: int | None) -> list[Turn]:
        """Return the turns from the first turn to this one; [] for None."""
        found: list[Turn] = []
        while number is not None:
            found.append(self.turns[number])
            number = found[-1].parent
        return found[::-1]

    def children(self, number: int | None) -> list[Turn]:
        return [turn for turn in self.turns if turn.parent == number]

    def walk(self) -> Iterator[Turn]:
        """Yield all turns, each before the turns that continue it."""
        waiting = self.children(None)[::-1]
        while waiting:
            yield (turn := waiting.pop())
            waiting += self.children(turn.number)[::-1]

    def number(self, turn: object) -> int:
        """Return the number of a turn, given as a `Turn` or by number; raise `BadInput` if it is not in the tree."""
        number = turn.number if isinstance(turn, Turn) else turn
        if isinstance(number, bool) or not isinstance(number, int) or not 0 <= number < len(self.turns):
            here = f"0 to {len(self.turns) - 1}" if self.turns else "none yet"
            raise BadInput(f"turn {shown(turn)}", f"the tree has turns {here}", "the chat shows their numbers")
        return number

    def tokens(self, path: Sequence[Turn]) -> list[int]:
        """Return the tokens of the response that these turns form, with the answer to the last turn."""
        return [*self.first_ids, *(one for turn in path for one in (*turn.token_ids, *turn.answer_ids))]
