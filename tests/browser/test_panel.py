"""The panel in a real notebook: what blocks it, what does not, and that it survives its page."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from tests.browser.notebook import PATIENCE_S, Notebook

pytestmark = [pytest.mark.browser, pytest.mark.slow]

OPEN = """
from pathlib import Path
import time, asyncio
import workbench as wb
from tests.cases import tiny_lab
lab = tiny_lab("panel", Path("runs"), backend="inline", if_exists="replace")
ppo = wb.PPO(lab, prompts=4, sampling=wb.Sampling(max_new_tokens=6))
"""
SHOW = "panel = lab.panel(algorithm=ppo); panel"
BLOCKS = "while not Path('gate0').exists(): time.sleep(0.1)"
AWAITS = "while not Path('gate1').exists(): await asyncio.sleep(0.1)"


def test_a_panel_lives_beside_its_cells(open_notebook: Callable[[Sequence[str]], Any]) -> None:
    notebook: Notebook = open_notebook([OPEN, SHOW, BLOCKS, AWAITS, "lab.panel()", "lab.close()"])
    page = notebook.page
    notebook.run(0)
    panel = notebook.run(1).locator(".wb-panel")
    step = panel.locator('button[data-act="step"]')
    step.wait_for()
    assert step.is_enabled()

    # a cell that blocks the kernel greys the buttons and says why; afterwards they work
    notebook.start(2)
    panel.locator('[data-kind="blocked"]').wait_for()
    assert "a cell is running" in panel.locator(".wb-status").inner_text()
    assert step.is_disabled()
    assert "buttons wait" in (step.get_attribute("title") or "")
    notebook.picture("panel_blocked")
    (notebook.path.parent / "gate0").touch()
    panel.locator('[data-kind=""]').wait_for()
    assert step.is_enabled()

    # one that awaits does not
    notebook.start(3)
    page.wait_for_timeout(1000)
    assert step.is_enabled()
    step.click()
    panel.locator('[data-stage="prompts"][aria-label*="done"]').wait_for()
    assert notebook.page.locator(".jp-CodeCell").nth(3).locator(".jp-InputPrompt").inner_text().strip() == "[*]:"
    (notebook.path.parent / "gate1").touch()
    notebook.wait_until_ended(3)

    # tabs by keyboard, and the tab that is shown is the same where the panel is shown twice
    panel.get_by_role("tab", name="Stepper").focus()
    page.keyboard.press("End")
    names = list(notebook.ask("list(panel.views)"))
    notebook.wait_for(f"panel.shown == {names[-1]!r}")
    page.keyboard.press("Home")
    notebook.wait_for("panel.shown == 'stepper'")
    twice = notebook.run(4).locator(".wb-panel")
    twice.locator('[data-stage="prompts"]').wait_for()
    twice.get_by_role("tab", name="Checks").click()
    page.wait_for_function("() => [...document.querySelectorAll('.wb-panel [role=tab][aria-selected=true]')]"
                           ".every(tab => tab.innerText === 'Checks')")  # fmt: skip

    # by mouse and by keyboard, checks are run beside the notebook
    twice.get_by_role("button", name="Check", exact=True).focus()
    page.keyboard.press("Enter")
    page.wait_for_function("() => document.body.innerText.includes('all that apply hold')")
    assert notebook.ask("panel.views['checks'].report.ok")
    notebook.picture("checks")

    # the page is closed and comes back: the same panel, on the tab where it was left
    page.keyboard.press("Control+s")
    deadline = time.monotonic() + PATIENCE_S
    while "widget-view" not in notebook.path.read_text():
        assert time.monotonic() < deadline, "it was not saved"
        page.wait_for_timeout(200)
    page.reload(wait_until="domcontentloaded")
    again = page.locator(".wb-panel").first
    again.wait_for()
    again.get_by_role("table").wait_for()
    assert again.get_by_role("tab", name="Checks").get_attribute("aria-selected") == "true"
    again.get_by_role("tab", name="Stepper").click()
    again.locator('[data-stage="prompts"][aria-label*="done"]').wait_for()
    notebook.picture("panel_again")

    # when the workbench closes, the last picture takes the panel's place, and one of an earlier page says so
    notebook.run(4)
    notebook.run(5)
    again.locator(".wb-status", has_text="the workbench is closed").wait_for()
    page.locator("details summary", has_text="Checks").first.wait_for()


def test_every_button_of_the_stepper(open_notebook: Callable[[Sequence[str]], Any]) -> None:
    notebook: Notebook = open_notebook(
        [OPEN, SHOW, "lab.actor.generate_sequences(lab.prompts.next(4), max_new_tokens=4)"]
    )
    notebook.run(0)
    panel = notebook.run(1).locator(".wb-panel")
    page = notebook.page
    panel.get_by_role("button", name="Step: prompts").click()
    notebook.wait_for("'prompts' in ppo.made")
    panel.get_by_role("button", name="Step: generate_sequences").focus()
    page.keyboard.press("Enter")
    notebook.wait_for("'generate_sequences' in ppo.made")

    # a stage is chosen by keyboard and by mouse: its batch, code and timing
    stage = panel.locator('[data-stage="generate_sequences"]')
    stage.focus()
    page.keyboard.press("Enter")
    details = panel.locator('section[aria-label="generate_sequences"]')
    details.wait_for()
    assert "rollout_log_prob" in details.inner_text()
    assert "timing" in details.inner_text()
    details.get_by_text("code", exact=True).click()
    assert "def generate_sequences" in details.inner_text()
    notebook.picture("stepper")

    # branching from it leaves the iteration where it stands
    details.locator('select[data-act="against"]').select_option("ReMax")
    details.get_by_role("button", name="Branch from here").click()
    panel.get_by_text("arms on").wait_for()
    assert notebook.ask("list(ppo.made)") == ["prompts", "generate_sequences"]
    notebook.picture("stepper_branch")

    panel.get_by_role("button", name="Iterate").click()
    notebook.wait_for("'update_actor' in ppo.made and not panel.driver.busy")
    steps = notebook.ask("lab.weights['actor'].steps")
    # a kernel that is blocked for a while takes neither focus nor what was typed
    panel.locator('input[data-act="iterations"]').fill("2")
    assert notebook.ask("bool(__import__('asyncio').get_running_loop().call_later(0.5, __import__('time').sleep, 5))")
    panel.locator('[data-kind="blocked"]').wait_for()
    page.keyboard.press("Enter")
    panel.locator('[data-kind=""]').wait_for()
    notebook.wait_for("panel.views['stepper'].iterations == '2'")
    panel.get_by_role("button", name="Run", exact=True).click()
    notebook.wait_for("lab.iteration >= 3 and not panel.driver.busy")
    assert notebook.ask("lab.weights['actor'].steps") == steps + 4

    # Stop: what was asked for ends early
    panel.locator('input[data-act="iterations"]').fill("500")
    page.keyboard.press("Enter")
    notebook.wait_for("panel.views['stepper'].iterations == '500'")
    panel.get_by_role("button", name="Run", exact=True).press("Enter")
    stop = panel.get_by_role("button", name="Stop")
    stop.wait_for()
    stop.click()
    notebook.wait_for("not panel.driver.busy")
    assert notebook.ask("lab.iteration") < 100
    panel.locator(".wb-status", has_text="stopped").wait_for()

    # by hand: it follows what a cell does
    panel.get_by_label("algorithm").select_option("by hand")
    notebook.run(2)
    panel.get_by_text("what cells called").wait_for()
    panel.locator('[data-stage="generate_sequences"][aria-label*="done"]').wait_for()
    panel.get_by_text("called in cell [3]").wait_for()  # the stage is chosen still
