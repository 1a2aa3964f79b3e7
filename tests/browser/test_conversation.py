"""A conversation by hand in a real notebook: every control by mouse and by keyboard."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from tests.browser.notebook import Notebook

pytestmark = [pytest.mark.browser, pytest.mark.slow]

OPEN = """
from pathlib import Path
import workbench as wb
from tests.cases import tiny_lab
from tests.calculator import SUMS, sums
class Tool:
    def reset(self, prompt):
        self.turns = 0
        return "tool: "
    def step(self, response):
        self.turns += 1
        text = f" (answer {self.turns}: " + "the tool says a lot. " * 3 + ") "
        return text, float("7" in response), self.turns == 3
lab = tiny_lab("panel-talk", Path("runs"), backend="inline", if_exists="replace",
               models={"actor": "tiny-llama-tied", "critic": "tiny-llama-tied"}, training={"minibatches": 1})
given = sums(environment=Tool, logit_bias={**SUMS, 36: 17.0, 30: 15.0}, max_turns=4, max_new_tokens=170)
given = {**given, "max_new_tokens": 180}
chat = lab.conversation("1+1=", sampling=wb.Sampling(**given), seed=1)
panel = lab.panel("conversation")
view = panel.views["conversation"]
"""


def test_a_conversation_is_stepped_edited_forked_and_read(shared_notebook: Callable[[Sequence[str]], Any]) -> None:
    notebook: Notebook = shared_notebook([OPEN, "panel"])
    notebook.run(0)
    panel, page = notebook.run(1).locator(".wb-panel"), notebook.page
    panel.get_by_text("no turn yet").wait_for()

    def press(label: str) -> Any:
        return panel.get_by_role("button", name=label, exact=True)

    # turns, by mouse and by keyboard
    press("Step").click()
    notebook.wait_for("len(chat.path) == 1 and not view.driver.busy")
    turns = panel.get_by_role("treeitem")
    turns.first.wait_for()
    panel.locator('button[aria-disabled="false"]', has_text="Step").wait_for()  # a key waits for nothing
    press("Step").press("Enter")
    notebook.wait_for("len(chat.path) == 2 and not view.driver.busy")

    # another text for the last turn, and another answer
    field = panel.locator('[data-key="edit-text"]')
    notebook.wait_for_count(turns, 2)
    field.fill("77=")
    press("Replace the turn").click()
    notebook.wait_for("chat.path[-1].written_by == 'hand' and not view.driver.busy")
    notebook.wait_for_count(turns, 3)
    answer = panel.locator('[data-key="answer-text"]')
    answer.fill(" (forty-two) ")
    answer.press("Enter")
    notebook.wait_for("chat.path[-1].answered_by == 'hand' and not view.driver.busy")

    # continuations behind it and before it: the value of the turn, and its colour
    press("Fork here").click()
    notebook.wait_for("chat.value() is not None and not view.driver.busy")
    press("Fork before").click()
    notebook.wait_for("chat.value(1) is not None and not view.driver.busy")
    here = panel.locator('[role="treeitem"][aria-selected="true"]')
    expected = notebook.ask("f'advantage {chat.advantage(chat.here):+.3g}'")
    here.get_by_text(expected).wait_for()
    notebook.picture("conversation")

    # answers are folded, and opened by mouse without going there, and by the arrow keys
    before = notebook.ask("chat.here")
    fold = turns.first.locator("details")
    assert fold.get_attribute("open") is None
    fold.locator("summary").click()
    assert fold.get_attribute("open") is not None and notebook.ask("chat.here") == before
    turns.first.focus()
    page.keyboard.press("ArrowLeft")
    assert fold.get_attribute("open") is None
    page.keyboard.press("ArrowRight")
    assert fold.get_attribute("open") is not None

    # arrow keys go along the tree, Enter goes to a turn
    page.keyboard.press("ArrowDown")
    second = page.evaluate("document.activeElement.dataset.key")
    assert second != "turn-0"
    page.keyboard.press("Home")
    assert page.evaluate("document.activeElement.dataset.key") == "turn-0"
    page.keyboard.press("Enter")
    notebook.wait_for("chat.here == 0")
    panel.locator('[data-key="turn-0"][aria-selected="true"]').wait_for()
    assert page.evaluate("document.activeElement.dataset.key") == "turn-0"  # drawn again, it keeps the focus
    turns.nth(1).locator("b").click()
    notebook.wait_for("chat.here != 0")

    # search: those of other branches without the text are left out
    search = panel.locator('.wb-controls [data-act="search"]')
    search.fill("forty-two")
    search.press("Enter")
    notebook.wait_for("view.search == 'forty-two'")
    panel.get_by_text("turns of other branches do not have this text").wait_for()
    search.fill("")
    search.press("Enter")
    notebook.wait_for("view.search == ''")

    # an update on the branch
    press("Train").click()
    notebook.wait_for("lab.weights['actor'].steps == 1 and not view.driver.busy")
    notebook.picture("conversation-trained")
