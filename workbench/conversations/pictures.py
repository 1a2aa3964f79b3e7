"""The turns of a conversation as they are drawn."""

from __future__ import annotations

from collections.abc import Sequence

from workbench.conversations.credit import Credit
from workbench.conversations.rows import trained_turns
from workbench.conversations.tree import Tree, Turn
from workbench.display.conversation import TurnPicture


def pictures(tree: Tree, path: Sequence[Turn], credit: Credit) -> list[TurnPicture]:
    """All turns of a tree, each before those that go on from it. path: the branch that is shown."""
    found: list[TurnPicture] = []
    on_path = {turn.number for turn in path}
    trained = dict(zip([turn.number for turn in path], trained_turns([path], before_edits=False)[0], strict=True))
    indents: dict[int | None, int] = {None: 0}
    for _, turn in tree.walk():
        forked = len(tree.children(turn.parent)) > 1
        indents[turn.number] = indents[turn.parent] + forked
        value = credit.value_behind(turn.number)
        found.append(
            TurnPicture(
                number=turn.number, indent=indents[turn.number], text=turn.text, answer=turn.answer,
                by_hand=turn.written_by == "hand", answered_by_hand=turn.answered_by == "hand", reward=turn.reward,
                done=turn.done, ending=turn.ending, advantage=credit.advantage(turn), value=str(value) if value else "",
                on_path=turn.number in on_path, here=bool(path) and turn is path[-1],
                trained=trained.get(turn.number, False), tokens=len(turn.token_ids),
            )
        )  # fmt: skip
    return found
