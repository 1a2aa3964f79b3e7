"""The view of a conversation by hand, on a real workbench: what it shows, and what its buttons do."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest

import workbench as wb
from tests.calculator import SUMS, sums
from tests.cases import TINY, tiny_lab
from tests.expected import expect_error
from workbench.errors import BadInput
from workbench_widgets.conversation import ConversationView
from workbench_widgets.driver import Driver


class Talker:
    """Long answers, with what would be html; over after three turns. A 7 is worth 1."""

    def reset(self, prompt: str) -> str:
        self.turns = 0
        return "<b>go</b> "

    def step(self, response: str) -> tuple[str, float, bool]:
        self.turns += 1
        return f"<i>{self.turns}</i> ", float("7" in response), self.turns == 3


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[wb.Workbench]:
    with tiny_lab(
        "talk", tmp_path_factory.mktemp("runs"), backend="inline", models={"actor": TINY, "critic": TINY},
        training={"minibatches": 1},
    ) as lab:  # fmt: skip
        yield lab


@pytest.fixture
def view(lab: wb.Workbench) -> ConversationView:
    bias = {**SUMS, 36: 17.0}
    given = sums(environment=Talker, logit_bias=bias, max_turns=4, max_new_tokens=120)
    lab.conversation("1+1=", sampling=wb.Sampling(**given), seed=len(lab.conversation.chats))
    return ConversationView(lab, Driver(lab))


def press(view: ConversationView, act: str, **given: object) -> None:
    view.act(act, given)
    assert view.driver.wait(60) and not view.driver.error, view.driver.error


def test_nothing_yet_is_said(tmp_path_factory: pytest.TempPathFactory) -> None:
    with tiny_lab("silent", tmp_path_factory.mktemp("runs"), backend="inline", models={"actor": TINY}) as lab:
        view = ConversationView(lab, Driver(lab))
        assert "No conversation yet" in view.picture() and not view.controls() and "lab.conversation" in view.text()


def test_its_buttons_do_what_the_chat_does(view: ConversationView) -> None:
    chat = view.chat
    press(view, "step")
    press(view, "step")
    assert len(chat.path) == 2 and chat.here == 1
    press(view, "edit", value="77=")
    assert [turn.written_by for turn in chat.path] == ["policy", "hand"] and chat.path[1].reward == 1
    press(view, "answer", value=" by hand ")
    assert view.lab.decode(chat.path[1].answer_ids) == " by hand "
    press(view, "finish")
    assert chat.ended == "done"
    press(view, "back")
    view.act("continuations", {"value": "3"})
    press(view, "fork")
    assert "Fork before turn 2: value" in view.driver.outcome
    value = chat.value()
    assert value is not None and value.n == 3
    press(view, "fork", before=True)
    assert chat.value(1).n == 3
    press(view, "go", number=0)
    assert chat.here == 0
    with view.lab.kept("actor"):
        steps = view.lab.weights["actor"].steps
        press(view, "train")
        assert view.lab.weights["actor"].steps == steps + 1
    press(view, "back")
    press(view, "back")  # a double click
    assert chat.here is None
    with expect_error(BadInput, value="continuations='x'"):
        view.act("continuations", {"value": "x"})


def test_the_picture_says_what_is_trained_and_what_a_hand_was_in(view: ConversationView) -> None:
    chat = view.chat
    chat.step()
    chat.edit(0, "7=")
    chat.step()
    live = view.payload()[0]["html"]
    assert live.count('role="treeitem"') == 3 and live.count("<details") == 3
    assert "<i>" not in live and "&lt;i&gt;1&lt;/i&gt;" in live  # text of a conversation is no html
    spoken = re.findall(r'aria-label="(turn [^"]*)"', live)
    assert spoken[1].startswith("turn 1, 2 tokens, reward 1, written by hand, of the branch, not trained")
    assert "of the branch, trained" in spoken[2] and "branch" not in spoken[0]
    assert live.count('aria-selected="true"') == 1 and live.count('tabindex="0"') == 1
    assert "data-act" not in view.still() and "▶" in view.still()
    assert "✎" in view.still()
    # its colours are the advantages
    assert "background:#" not in re.sub(r"<div style=\"font-size:12px.*?</div>", "", view.still())
    chat.fork(3, at=1)
    chat.fork(3)
    assert chat.advantage(2) is not None
    assert f"advantage {chat.advantage(2):+.3g}" in view.still()


def test_a_text_is_found(view: ConversationView) -> None:
    chat = view.chat
    chat.step()
    chat.edit(0, "123456=")
    chat.edit(0, "654321=")
    view.act("search", {"value": "123456"})
    still = view.still()
    assert "123456=" in still and "outline:2px" in still and "1 turns of other branches do not have this text" in still
    assert len(view.text().splitlines()) == 2
    before = view.depends_on()
    view.act("search", {"value": ""})
    assert view.depends_on() != before


def test_an_older_conversation_is_chosen(view: ConversationView) -> None:
    newest = view.chat
    view.act("chosen", {"value": "0"})
    assert view.chat is view.lab.conversation.chats[0] is not newest
    assert "newest" in view.controls()
