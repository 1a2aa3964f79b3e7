"""A conversation by hand as a tree whose turns can be selected, continued, edited and forked."""

from __future__ import annotations

from collections.abc import Hashable
from html import escape
from typing import Any

from workbench.display.conversation import has, says, tree_picture
from workbench_widgets.view import View, button, choice, entry, whole_number

NONE = "No conversation yet: chat = lab.conversation(row, environment=MyEnvironment)"
KEYS = "arrow keys move between turns and fold answers, Enter goes to a turn"


class ConversationView(View):
    """The tree of one conversation of `lab.conversation`: the newest, or a selected one."""

    name, title, script = "conversation", "Conversation", True
    fields = ("chosen", "search")

    def __init__(self, lab: Any, driver: Any) -> None:
        super().__init__(lab, driver)
        self.chosen = ""  # number of a chat; "": the newest
        self.search = ""
        self.continuations = 4

    @property
    def chat(self) -> Any:
        """The shown conversation; None if there is none."""
        chats = self.lab.conversation.chats
        if not chats:
            return None
        return chats[int(self.chosen)] if self.chosen else chats[-1]

    def depends_on(self) -> Hashable:
        chat = self.chat
        return len(self.lab.conversation.chats), self.chosen, self.search, None if chat is None else chat.changes

    def controls(self) -> str:
        chat = self.chat
        if chat is None:
            return ""
        chats = self.lab.conversation.chats
        names = {"": "newest", **{str(n): f"{n}: {repr(one)[1:-1]}" for n, one in enumerate(chats)}}
        path = chat.path
        over = chat.ended and f"the branch has ended: {chat.ended}"
        none = "" if path else "there is no turn yet"
        parts = [choice("conversation", "chosen", names, self.chosen)] if len(chats) > 1 else []
        parts += [
            entry("turns with text", "search", self.search, kind="search", size=10),
            button("Step", "step", drives=True, off=over, title="the policy takes a turn, and the environment answers"),
            button("Finish", "finish", drives=True, off=over, title="take turns until the branch ends"),
            button("Back", "back", off=none, title="go to the previous turn"),
            entry("continuations", "continuations", self.continuations, kind="number", size=4),
            button("Fork here", "fork", drives=True, off=over, title="continue after this turn several times"),
            button(
                "Fork before", "fork", drives=True, off=none, title="sample this turn again several times", before=True
            ),
            button("Train", "train", drives=True, off=none, title="one update of the actor on this branch"),
        ]
        if path:
            last = path[-1]
            parts.append(_field("turn", "Replace the turn", "edit", self.lab.decode(last.token_ids)))
            if last.answered and not last.done:
                answer = self.lab.decode(last.answer_ids)
                parts.append(_field("its answer", "Replace the answer", "answer", answer))
        return "".join(parts)

    def html(self, *, live: bool) -> str:
        if (chat := self.chat) is None:
            return f"<p>{escape(NONE)}</p>"
        title = f"{repr(chat)[1:-1]}" + (f" · {KEYS}" if live else "")
        return tree_picture(chat.pictures(), title, search=self.search, live=live)

    def text(self) -> str:
        if (chat := self.chat) is None:
            return NONE
        found = [turn for turn in chat.pictures() if not self.search or has(turn, self.search)]
        return "\n".join([repr(chat)[1:-1], *(f"{'  ' * turn.indent}{says(turn)}" for turn in found)])

    # --- actions ------------------------------------------------------------------------------------------------------

    def on_continuations(self, value: str) -> None:
        self.continuations = whole_number("continuations", value)

    def on_go(self, number: int) -> None:
        self.chat.go(number)

    def on_back(self) -> None:
        path = self.chat.path  # empty at a second press of Back
        self.chat.go(path[-1].parent if path else None)

    def on_step(self) -> None:
        self.driver.start("a turn", self.chat.step)

    def on_finish(self) -> None:
        self.driver.start("turns to the end", self.chat.finish)

    def on_fork(self, before: bool = False) -> None:
        chat = self.chat
        at = len(chat.path) - before
        self.driver.start(
            f"{self.continuations} continuations", lambda: repr(chat.fork(self.continuations, at=at))[1:-1]
        )

    def on_train(self) -> None:
        self.driver.start("an update on this branch", self.chat.train)

    def on_edit(self, value: str) -> None:
        at = len(self.chat.path) - 1
        self.driver.start("another text for the turn", lambda: self.chat.edit(at, value))

    def on_answer(self, value: str) -> None:
        at = len(self.chat.path) - 1
        self.driver.start("another answer", lambda: self.chat.edit(at, answer=value))


def _field(label: str, press: str, act: str, value: str) -> str:
    """A text field with a button that submits it."""
    field = f'<input type="text" value="{escape(value)}" style="width:16em" data-key="{act}-text">'
    press = button(press, act, drives=True, takes=True)
    return f'<span data-row style="white-space:nowrap"><label>{escape(label)} {field}</label> {press}</span>'
