"""A conversation as a tree of turns: what was sampled, what was written by hand, and where it was continued anew."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from workbench.errors import BadInput
from workbench.errors.plain_text import shown

Author = Literal["policy", "hand"]


@dataclass(frozen=True, kw_only=True)
class Turn:
    """A turn of the policy, and what it was answered.

    number: in the tree, from 0. parent: the turn before it; None: it is the first. token_ids: with the ending.
    log_probs: those it was sampled with; zeros where it was written by hand. ending: of the turn, "eos", "stop" or
    "length" (cut). answer_ids: what the policy reads next. own_ids: what the environment answered itself, which another
    answer may stand in for. reward, done: the environment's. answered: False where the conversation ended before an
    answer came. limit: "max_calls" where that ended it. weights_version: of the policy that sampled it. text, answer:
    of token_ids and answer_ids, with special tokens; the tree writes them.
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
        """Whether the user edited it. Later turns then do not follow from policy and environment alone."""
        return self.written_by == "hand" or self.answered_by == "hand"


@dataclass(kw_only=True)
class Tree:
    """The turns of a conversation, and how it begins. prompt_ids: its prompt. first_ids: what the environment said
    before the first turn, which the response begins with. decode: tokens as text."""

    decode: Callable[[Sequence[int]], str]
    prompt_ids: Sequence[int] = ()
    first_ids: Sequence[int] = ()
    turns: list[Turn] = field(default_factory=list)

    def add(self, turn: Turn) -> Turn:
        """Put a turn at the end; the turn with its texts."""
        assert turn.number == len(self.turns)
        self.turns.append(replace(turn, text=self.decode(turn.token_ids), answer=self.decode(turn.answer_ids)))
        return self.turns[-1]

    def path(self, number: int | None) -> list[Turn]:
        """The turns from the first one to this one; none for None."""
        found: list[Turn] = []
        while number is not None:
            found.append(self.turns[number])
            number = found[-1].parent
        return found[::-1]

    def children(self, number: int | None) -> list[Turn]:
        """The turns that go on from one; from None: the first turns."""
        return [turn for turn in self.turns if turn.parent == number]

    def walk(self) -> Iterator[Turn]:
        """All turns, each before those that go on from it."""
        waiting = self.children(None)[::-1]
        while waiting:
            yield (turn := waiting.pop())
            waiting += self.children(turn.number)[::-1]

    def number(self, turn: object) -> int:
        """The number of a turn that is given as itself or by number; `BadInput` for one that is not here."""
        number = turn.number if isinstance(turn, Turn) else turn
        if isinstance(number, bool) or not isinstance(number, int) or not 0 <= number < len(self.turns):
            here = f"0 to {len(self.turns) - 1}" if self.turns else "none yet"
            raise BadInput(
                f"turn {shown(turn)}", f"the tree has turns {here}", "look at the chat: it shows their numbers"
            )
        return number

    def tokens(self, path: Sequence[Turn]) -> list[int]:
        """The response that these turns make, with what the last one was answered."""
        return [*self.first_ids, *(one for turn in path for one in (*turn.token_ids, *turn.answer_ids))]
