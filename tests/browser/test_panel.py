"""The panel in a real notebook: what blocks it, what does not, and that it survives its page."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from tests.browser.notebook import PATIENCE_S, Notebook, accessible

pytestmark = [pytest.mark.browser, pytest.mark.slow]

OPEN = """
from pathlib import Path
import time, asyncio
def block():
    while not Path("gate2").exists():
        time.sleep(0.1)
import workbench as wb
from tests.cases import tiny_lab
lab = tiny_lab("panel", Path("runs"), backend="inline", if_exists="replace")
ppo = wb.PPO(lab, prompts=4, sampling=wb.Sampling(max_new_tokens=6))
"""
SHOW = "panel = lab.panel(algorithm=ppo); panel"
BLOCKS = "while not Path('gate0').exists(): time.sleep(0.1)"
STRIP = "strip = lab.strip(); strip"
LONG = "\n".join(["print('a long output')"] + ["#"] * 120)
AWAITS = """
looks, blocked = [], panel._pulse.blocked
panel._pulse.blocked = lambda *slow: looks.append(blocked(*slow)) or looks[-1]
while not Path("gate1").exists():
    await asyncio.sleep(0.1)
    if len(looks) > 3:
        Path("looked").touch()
"""

AT_THE_TOP = """() => {
  const [strip, around] = ['.wb-strip', '.jp-WindowedPanel-outer'].map((one) => document.querySelector(one));
  const { top, height } = strip.getBoundingClientRect();
  return Math.abs(top - around.getBoundingClientRect().top) < 3 && height < 40;
}"""

# the next limit that anywidget sets for loading a widget, two seconds, is over at once
NO_TIME = """() => {
  const { timeout } = AbortSignal;
  AbortSignal.timeout = () => {
    const limit = new AbortController();
    Promise.resolve().then(() => limit.abort());
    AbortSignal.timeout = timeout;
    return limit.signal;
  };
}"""


def test_a_panel_lives_beside_its_cells(shared_notebook: Callable[[Sequence[str]], Any]) -> None:
    notebook: Notebook = shared_notebook(
        [OPEN, SHOW, BLOCKS, AWAITS, "lab.panel()", "lab.close()", STRIP, LONG, LONG, "ppo.run(3)"]
    )
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
    while not (notebook.path.parent / "looked").exists():
        page.wait_for_timeout(100)
    step.click()
    panel.locator('[data-stage="prompts"][aria-label*="done"]').wait_for()
    assert notebook.page.locator(".jp-CodeCell").nth(3).locator(".jp-InputPrompt").inner_text().strip() == "[*]:"
    (notebook.path.parent / "gate1").touch()
    notebook.wait_until_ended(3)
    assert notebook.ask("not all(looks[1:])")

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
    page.wait_for_function("() => document.body.innerText.includes('all that apply passed')")
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

    # the strip is at the top of what one sees, also at the end of a long notebook, and is there once
    notebook.run(6)
    notebook.run(9)
    notebook.run(6)
    notebook.run(9)
    strip = page.locator(".wb-strip")
    strip.get_by_text(f"iteration {notebook.ask('lab.iteration')}: nothing runs").wait_for()
    strip.get_by_text("connected", exact=True).wait_for()
    strip.get_by_text("tokens/s").wait_for()
    strip.get_by_role("img", name="reward of the last 6 iterations").wait_for()
    reward = notebook.ask("float(lab.metrics('compute_reward')['rewards/mean'].iloc[-1])")
    assert f"{reward:.4g}" in strip.inner_text()
    assert "no warnings" in strip.inner_text()
    page.locator(".jp-CodeCell").nth(9).scroll_into_view_if_needed()
    page.wait_for_function(AT_THE_TOP)
    assert strip.count() == 1
    notebook.picture("strip")

    # when the workbench closes, the last picture takes the panel's place, and one of an earlier page says so
    notebook.run(4)
    notebook.run(5)
    again.locator(".wb-status", has_text="the workbench is closed").wait_for()
    page.locator("details summary:visible", has_text="Checks").first.wait_for()
    strip.wait_for(state="detached")
    page.locator(".jp-CodeCell").nth(6).get_by_text(": nothing runs").first.wait_for()


def names_of(panel: Any) -> list[tuple[str, str]]:
    """Role and name of every control, as Chromium's accessibility tree has them."""
    controls = {"button", "textbox", "combobox", "spinbutton", "tab", "checkbox", "DisclosureTriangle"}
    told = [(one["role"]["value"], one.get("name", {}).get("value", "").strip()) for one in accessible(panel)]
    return [(role, name) for role, name in told if role in controls]


# the iteration that the strip shows, and the one that the stepper does
SHOWN = """() => ['.wb-strip', '.wb-panel:not(.wb-strip) [data-view=stepper] .wb-picture']
  .map((one) => document.querySelector(one).innerText.match(/iteration (\\d+)/)?.[1])"""


@pytest.mark.thorough
def test_a_page_that_is_too_busy_to_load_it_in_time(shared_notebook: Callable[[Sequence[str]], Any]) -> None:
    notebook: Notebook = shared_notebook([OPEN, SHOW])
    notebook.run(0)
    notebook.page.evaluate(NO_TIME)
    panel = notebook.run(1).locator(".wb-panel")
    panel.locator("section:visible[data-drawn]").wait_for()
    notebook.in_thread("ppo.run(1)")  # and what comes later is heard
    panel.get_by_text("iteration 1").first.wait_for()


def test_every_button_of_the_stepper(shared_notebook: Callable[[Sequence[str]], Any]) -> None:
    notebook: Notebook = shared_notebook(
        [OPEN, SHOW, "lab.actor.generate_sequences(lab.prompts.next(4), max_new_tokens=4)", "lab.strip()"]
    )
    notebook.run(0)
    panel = notebook.run(1).locator(".wb-panel")
    notebook.run(3)
    page = notebook.page
    panel.get_by_role("button", name="Step: prompts").click()
    notebook.wait_for("'prompts' in ppo.made")
    panel.get_by_role("button", name="Step: generate_sequences").focus()
    page.keyboard.press("Enter")
    notebook.wait_for("'generate_sequences' in ppo.made")

    # a stage is chosen by keyboard and by mouse: its batch, code and timing
    assert panel.locator("[data-legend]").get_by_text("reference").is_visible()
    stage = panel.locator('[data-stage="generate_sequences"]')
    stage.focus()
    page.keyboard.press("Enter")
    details = panel.locator('section[aria-label="generate_sequences"]')
    details.wait_for()
    assert "rollout_log_prob" in details.inner_text()
    assert "timing" in details.inner_text()
    details.get_by_text("what each time covers").click()
    assert "waiting for the device or for inputs" in details.inner_text()
    details.get_by_text("code", exact=True).click()
    assert "def generate_sequences" in details.inner_text()
    notebook.picture("stepper")

    # branching from it leaves the iteration where it stands
    details.locator('select[data-act="arm"]').select_option("ReMax")
    details.get_by_role("button", name="Branch from here").click()
    panel.get_by_text("arms on").wait_for()
    assert notebook.ask("list(ppo.made)") == ["prompts", "generate_sequences"]
    notebook.picture("stepper_branch")

    # the arguments of a stage that is to run: for this step by Enter, from now on by its button
    panel.locator('[data-stage="update_actor"]').click()
    form = panel.locator('section[aria-label="update_actor"]')
    clip = form.get_by_label("clip of update_actor", exact=True)
    clip.fill("0.4")
    page.keyboard.press("Enter")
    panel.get_by_text("clip of update_actor is 0.4 in its next run").wait_for()
    row = form.locator("tr", has=page.locator('th:text-is("clip")'))
    row.get_by_text("changed for the next run").wait_for()
    assert notebook.ask("(ppo.clip, ppo.graph()['update_actor'].kwargs['clip'])") == (None, 0.4)
    form.get_by_label("epochs of update_actor", exact=True).fill("2")
    form.get_by_role("button", name="From now on: epochs of update_actor").click()
    notebook.wait_for("ppo.epochs == 2")
    form.get_by_label("entropy_coefficient of update_actor", exact=True).fill("print('x')")
    form.get_by_role("button", name="This step: entropy_coefficient of update_actor").click()
    panel.locator('[data-kind="error"]').wait_for()
    assert "must be data" in panel.locator(".wb-status").inner_text()
    form.get_by_label("training.learning_rate of update_actor", exact=True).fill("5e-6")
    form.get_by_role("button", name="From now on: training.learning_rate of update_actor").click()
    notebook.wait_for("lab.actor.training.learning_rate == 5e-6")
    assert notebook.ask("lab.history.changes()['setting'].tolist()") == [
        "PPO.update_actor.clip once", "PPO.epochs", "lab.actor.training.learning_rate",
    ]  # fmt: skip
    notebook.picture("stepper_form")
    nameless = [role for role, name in names_of(panel) if not name]
    assert nameless == []
    assert ("textbox", "clip of update_actor") in names_of(panel)
    form.get_by_label("epochs of update_actor", exact=True).fill("1")
    form.get_by_role("button", name="From now on: epochs of update_actor").click()
    notebook.wait_for("ppo.epochs == 1")

    stage.click()
    panel.get_by_role("button", name="Iterate").click()
    notebook.wait_for("'update_actor' in ppo.made and not panel.driver.busy")
    assert notebook.ask("ppo.graph()['update_actor'].kwargs['clip']") is None
    assert notebook.ask("lab.metrics('update_actor')['learning_rate'].tolist()")[-1] == 5e-6
    steps = notebook.ask("lab.weights['actor'].steps")
    # a kernel that is blocked for a while takes neither focus nor what was typed
    panel.locator('input[data-act="iterations"]').fill("2")
    assert notebook.ask("bool(asyncio.get_running_loop().call_later(0.5, block))")
    panel.locator('[data-kind="blocked"]').wait_for()
    page.keyboard.press("Enter")
    (notebook.path.parent / "gate2").touch()
    panel.locator('[data-kind=""]').wait_for()
    notebook.wait_for("panel.views['stepper'].iterations == '2'")
    panel.get_by_role("button", name="Run", exact=True).click()
    notebook.wait_for("lab.iteration >= 3 and not panel.driver.busy")
    assert notebook.ask("lab.weights['actor'].steps") == steps + 4

    # Stop: what was asked for ends early
    # the page knows that the last one has ended
    panel.get_by_role("button", name="Stop", exact=True).wait_for(state="hidden")
    panel.locator('input[data-act="iterations"]').fill("500")
    page.keyboard.press("Enter")
    notebook.wait_for("panel.views['stepper'].iterations == '500'")
    panel.get_by_role("button", name="Run", exact=True).press("Enter")
    stop = panel.get_by_role("button", name="Stop", exact=True)
    stop.wait_for()
    # stepper and strip follow it, and show the same iteration in the end: see tests/widgets/test_pace.py
    first = page.evaluate(SHOWN)
    page.wait_for_function(f"(first) => ({SHOWN})().every((one, n) => one !== first[n])", arg=first)
    stop.click()
    notebook.wait_for("not panel.driver.busy")
    assert notebook.ask("lab.iteration") < 500
    page.wait_for_function(f"() => new Set(({SHOWN})()).size === 1")
    panel.locator(".wb-status", has_text="stopped").wait_for()

    # by hand: it follows what a cell does
    panel.get_by_label("algorithm").select_option("by hand")
    notebook.run(2)
    panel.get_by_text("what cells called").wait_for()
    panel.locator('[data-stage="generate_sequences"][aria-label*="done"]').wait_for()
    panel.get_by_text(f"called in cell [{notebook.number(2)}]").wait_for()  # the stage is chosen still

    # a drawing that is lost on its way to the page is asked for again
    notebook.ask("setattr(panel, 'lost', [])")
    notebook.ask("setattr(panel, 'send', lambda message, buffers=(): panel.lost.append(message['kind']))")
    notebook.run(2)
    notebook.wait_for("'draw' in panel.lost")
    notebook.ask("delattr(panel, 'send')")
    panel.get_by_text(f"called in cell [{notebook.number(2)}]").wait_for()
