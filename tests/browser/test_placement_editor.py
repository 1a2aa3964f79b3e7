"""The placement editor in a real notebook: cards by mouse, keyboard and menu, and live moves."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from tests.browser.notebook import Notebook

pytestmark = [pytest.mark.browser, pytest.mark.slow]

# pools of one rank, all in the kernel's process
HERE = """
from pathlib import Path
import workbench as wb
from tests.cases import TINY, vowels
from tests.session.test_moving import opened
opening = opened({"actor": TINY, "critic": TINY, "reference": TINY, "reward": vowels}, wb.Placement.of(
    {"policy": (1, ["actor", "critic"]), "scorers": (1, ["reference", "reward"])}), Path("runs"))
lab = opening.__enter__()
"""
RAY = """
from pathlib import Path
import workbench as wb
from tests.cases import tiny_lab
lab = tiny_lab("placed", Path("runs"), placement=wb.Placement.of(
    {"policy": (1, ["actor", "critic"]), "scorers": (1, ["reference", "reward"])}), devices=3, if_exists="replace")
"""
NAMES = """
ppo = wb.PPO(lab, prompts=4, sampling=wb.Sampling(max_new_tokens=6))
pools = lambda: {role: lab.placement.pool_of(role).name for role in lab.placement.roles}
live = lambda role: set(lab.topology().query("role == @role")["pool"])
editor = lambda: lab.panel("stepper", "placement").views["placement"]
drafted = lambda: editor().draft or lab.placement
"""
SHOW = 'lab.panel("stepper", "placement", algorithm=ppo)'
MOVE = 'lab.move(lab.placement.with_role("reward", "apart", devices=1))'
INLINE = """
from pathlib import Path
import workbench as wb
from tests.cases import tiny_lab
lab = tiny_lab("alone", Path("runs"), backend="inline", if_exists="replace")
"""


class Editor:
    """The placement tab of a panel in a cell."""

    def __init__(self, notebook: Notebook, cell: Any) -> None:
        self.notebook, self.panel = notebook, cell.locator(".wb-panel")
        tab = self.panel.get_by_role("tab", name="Placement")
        if tab.is_visible():
            tab.click()
        self.card("actor").wait_for()

    def card(self, role: str) -> Any:
        return self.panel.locator(f'[data-role="{role}"]')

    def pool(self, name: str) -> Any:
        return self.panel.locator(f'[data-pool="{name}"]')

    def lift(self, role: str) -> None:
        """Press on a card and move it a little: from then on it stays, whatever the kernel sends."""
        mouse, card = self.notebook.page.mouse, self.card(role)
        while True:
            card.hover(position={"x": 60, "y": 10})
            mouse.down()
            box = card.bounding_box()
            mouse.move(box["x"] + 70, box["y"] + 14, steps=2)
            if self.panel.locator("[data-dragged]").count() == 1:
                return
            mouse.up()  # it was drawn again in between

    def drag(self, role: str, pool: str) -> None:
        self.lift(role)
        onto, mouse = self.pool(pool).bounding_box(), self.notebook.page.mouse
        mouse.move(onto["x"] + onto["width"] / 2, onto["y"] + onto["height"] - 5, steps=6)
        assert self.pool(pool).get_attribute("data-over") is not None
        mouse.up()
        assert self.panel.locator("[data-dragged]").count() == 0

    def press(self, role: str, key: str) -> None:
        self.card(role).focus()
        self.notebook.page.keyboard.press(key)

    def button(self, name: str) -> Any:
        return self.panel.get_by_role("button", name=name)

    def told(self, text: str) -> None:
        self.panel.locator(".wb-status", has_text=text).wait_for()

    def apply(self) -> None:
        """Wait for the costs, then press Apply, and wait until it is done."""
        self.panel.locator('section[aria-label="what the draft would change"]').wait_for()
        self.button("Apply").click()
        self.told("moved ")


LIVE = {"actor": "policy", "critic": "policy", "reference": "scorers", "reward": "scorers"}


def test_models_are_moved_by_mouse_and_keyboard(shared_notebook: Callable[[Sequence[str]], Any]) -> None:
    notebook: Notebook = shared_notebook([HERE + NAMES, SHOW])
    notebook.run(0)
    editor = Editor(notebook, notebook.run(1))
    editor.panel.locator("section[aria-label='memory']").wait_for()

    # by mouse, and a stage after it
    editor.drag("critic", "scorers")
    notebook.wait_for("editor().draft is not None")
    assert notebook.ask("pools()") == LIVE, "a draft touches nothing"
    editor.panel.locator('section[aria-label="what the draft would change"]').wait_for()
    editor.button("take split").wait_for()
    notebook.picture("placement-draft")
    offers = editor.panel.locator('section[aria-label="plans"]')
    assert "not predicted" in offers.inner_text() and "Suggest calibrates it" in offers.inner_text()
    assert "?" not in editor.pool("scorers").inner_text()
    assert "at least " in editor.panel.locator('section[aria-label="what the draft would change"]').inner_text()
    bytes_told = notebook.ask("wb.display.html.bytes_text(lab.diff(editor().draft).total_bytes)")
    assert bytes_told in editor.panel.locator('section[aria-label="what the draft would change"]').inner_text()
    editor.apply()
    assert notebook.ask("live('critic')") == {"scorers"}
    assert notebook.ask("pools()") == {**LIVE, "critic": "scorers"}
    editor.panel.get_by_role("tab", name="Stepper").click()
    editor.button("Iterate").click()
    notebook.wait_for("lab.weights['critic'].steps > 0 and not editor().driver.busy")
    assert notebook.ask("lab.iteration") == 1
    assert not notebook.ask("editor().driver.error")
    editor.panel.get_by_role("tab", name="Placement").click()
    editor.button("Suggest").click()
    editor.button("take fastest").wait_for()
    offers.get_by_text("not predicted").first.wait_for(state="hidden")
    notebook.picture("placement-suggested")
    editor.button("take second").press("Enter")
    notebook.wait_for("editor().draft in [plan.placement for plan in lab.suggest(devices=4)]")
    editor.button("Discard draft").click()
    notebook.wait_for("editor().draft is None")
    editor.button("Undo (1)").click()
    editor.told("moved ")
    assert notebook.ask("(pools(), live('critic'))") == (LIVE, {"policy"})

    # by keyboard: there and back
    editor.press("critic", "ArrowRight")
    notebook.wait_for("drafted().pool_of('critic').name == 'scorers'")
    editor.pool("scorers").locator('[data-role="critic"]:focus').wait_for()
    notebook.page.keyboard.press("ArrowLeft")
    notebook.wait_for("editor().draft is None")


@pytest.mark.thorough
def test_ray_workers_are_moved_by_keyboard(shared_notebook: Callable[[Sequence[str]], Any]) -> None:
    notebook: Notebook = shared_notebook([RAY + NAMES, SHOW, MOVE, "lab.close()"])
    notebook.run(0)
    editor = Editor(notebook, notebook.run(1))

    # by keyboard: there, further, back, applied
    editor.press("critic", "ArrowRight")
    notebook.wait_for("drafted().pool_of('critic').name == 'scorers'")
    editor.pool("scorers").locator('[data-role="critic"]:focus').wait_for()
    notebook.page.keyboard.press("ArrowRight")
    notebook.wait_for("drafted().pool_of('critic').name == 'critic'")
    editor.pool("critic").locator('[data-role="critic"]:focus').wait_for()
    notebook.page.keyboard.press("ArrowLeft")
    notebook.wait_for("drafted().pool_of('critic').name == 'scorers'")
    editor.apply()
    assert notebook.ask("live('critic')") == {"scorers"}

    # what cannot be is refused with its reason, and everything stays and goes back
    placed, processes = notebook.ask("pools()"), notebook.ask("sorted(lab.topology()['process'])")
    size = editor.pool("scorers").get_by_label("devices")
    size.fill("9")
    size.press("Enter")
    editor.told("this workbench has 3 slots")
    notebook.picture("placement-refused")
    assert size.input_value() == "1"
    assert notebook.ask("(pools(), sorted(lab.topology()['process']))") == (placed, processes)
    assert notebook.ask("editor().draft is None")

    # another size; a plan; undo; discard
    size.fill("2")
    size.press("Enter")
    notebook.wait_for("drafted().devices == 3")
    editor.button("Discard draft").click()
    notebook.wait_for("editor().draft is None")
    editor.button("Undo (1)").press("Enter")
    notebook.wait_for("live('critic') == {'policy'} and not editor().driver.busy")
    editor.button("take colocate").click()
    notebook.wait_for("drafted().devices == 3")
    notebook.picture("placement-plan")

    # what a cell moves meanwhile is followed
    notebook.run(2)
    editor.panel.get_by_text("moves from apart").wait_for()
    notebook.picture("placement-followed")
    editor.button("Discard draft").click()
    editor.pool("policy").locator('[data-role="critic"]').wait_for()
    editor.pool("apart").locator('[data-role="reward"]').wait_for()
    notebook.run(3)


def test_inline_shows_its_one_process(shared_notebook: Callable[[Sequence[str]], Any]) -> None:
    notebook: Notebook = shared_notebook([INLINE, 'lab.panel("placement")'])
    notebook.run(0)
    editor = Editor(notebook, notebook.run(1))
    editor.panel.get_by_text("one process, the kernel").wait_for()
    editor.drag("critic", "new pool")
    editor.told("the inline backend runs everything in the kernel")
    assert editor.pool("shared").locator('[data-role="critic"]').count() == 1
    notebook.picture("placement-inline")

    # a drag that is given up, and one with a finger
    editor.lift("critic")
    card, onto = editor.card("critic").bounding_box(), editor.pool("new pool").bounding_box()
    start, aim = (card["x"] + 50, card["y"] + 6), (onto["x"] + 30, onto["y"] + 30)
    notebook.page.mouse.move(*aim, steps=4)
    notebook.page.keyboard.press("Escape")
    assert editor.panel.locator("[data-dragged]").count() == 0
    notebook.page.mouse.up()
    refused = "lab.panel('placement').views['placement']._refused"
    assert notebook.ask(refused) == 1
    finger = notebook.page.context.new_cdp_session(notebook.page)
    for kind, at in (("touchStart", start), ("touchMove", aim), ("touchMove", aim), ("touchEnd", None)):
        points = [{"x": at[0], "y": at[1]}] if at else []
        finger.send("Input.dispatchTouchEvent", {"type": kind, "touchPoints": points})
    notebook.wait_for(f"{refused} == 2")
