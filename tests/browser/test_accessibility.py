"""The whole panel as a screen reader and the Tab key meet it: by the browser's own accessibility tree."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from tests.browser.notebook import Notebook, accessible, two_frames

pytestmark = [pytest.mark.browser, pytest.mark.slow]

OPEN = """
from pathlib import Path
import workbench as wb
from tests.cases import tiny_lab
lab = tiny_lab("read", Path("runs"), backend="inline", if_exists="replace")
ppo = wb.PPO(lab, prompts=4, sampling=wb.Sampling(max_new_tokens=6))
ppo.run(2)
"""
VIEWS = ("Stepper", "Placement", "Timeline", "Traffic", "Samples", "Conversation", "Metrics", "Memory", "Checks")
# Roles of what a user acts on; each needs a name, from its text, its label or its title.
ACTS = {
    "button", "checkbox", "combobox", "link", "menuitem", "option", "radio", "searchbox", "slider", "spinbutton",
    "switch", "tab", "textbox", "DisclosureTriangle",
}  # fmt: skip
# What can be focused, in the panel, in sight, in document order.
FOCUSABLE = """(panel) => [...panel.querySelectorAll(
    'button, input, select, textarea, summary, a[href], [tabindex]')].filter((one) => one.tabIndex >= 0
    && !one.disabled && one.checkVisibility({ visibilityProperty: true })).length"""
WALKED = """(panel) => {
  [window.walked, window.left] = [new Set([document.activeElement]), false];
  panel.addEventListener('focusin', (event) => walked.add(event.target));
  window.addEventListener('keyup', () => { left ||= !panel.contains(document.activeElement); }, true);
}"""
# Pictures that a view shows without words: no name, or no table, figures or description beside them.
UNTOLD = """(panel) => [...panel.querySelectorAll('svg, canvas, [role=img]')]
  .filter((one) => one.checkVisibility())
  .filter((one) => !one.parentElement.closest('svg, [role=img], .js-plotly-plot, [aria-hidden=true]'))
  .filter((one) => one.getAttribute('aria-hidden') !== 'true')
  .filter((one) => !(one.getAttribute('aria-label') || one.querySelector(':scope > title')?.textContent))
  .map((one) => one.outerHTML.slice(0, 120))"""


def said(node: dict[str, Any], what: str) -> str:
    return str(node.get(what, {}).get("value", ""))


def faults(notebook: Notebook, view: str, panel: Any, start: Any) -> list[str]:
    """What a screen reader, or the Tab key, lacks in a panel that shows a view. start: what has the focus first."""
    page, tree = notebook.page, accessible(panel)
    wrong = [
        f"{view}: {said(n, 'role')} without a name" for n in tree if said(n, "role") in ACTS and not said(n, "name")
    ]
    focusable = [n for n in tree for p in n.get("properties", []) if p["name"] == "focusable" and p["value"]["value"]]
    wrong += [f"{view}: {said(n, 'role')} in Tab order without a name" for n in focusable if not said(n, "name")]
    wrong += [f"{view}: a picture without words: {one}" for one in panel.evaluate(UNTOLD)]
    if panel.locator(".wb-picture:visible svg, .wb-picture:visible [role=img]").count():
        tables = [n for n in tree if said(n, "role") in ("table", "grid", "treegrid")]
        wrong += [] if tables else [f"{view}: a picture without a table"]
    # Tab goes through all that is in sight, and out of it again
    count = panel.evaluate(FOCUSABLE)
    page.evaluate("document.activeElement.blur()")
    start.focus()
    panel.evaluate(WALKED)
    for _ in range(count + 3):
        page.keyboard.press("Tab")
    reached, left = page.evaluate("[walked.size, left]")
    if not left:
        wrong.append(f"{view}: Tab does not leave the panel")
    if reached < count:
        wrong.append(f"{view}: Tab reaches {reached} of {count} controls")
    notebook.picture(f"accessible_{view.lower()}")
    return wrong


@pytest.mark.thorough
def test_every_control_has_a_name_and_every_picture_a_table(shared_notebook: Callable[[Sequence[str]], Any]) -> None:
    notebook: Notebook = shared_notebook([OPEN, "panel = lab.panel(algorithm=ppo); panel", "lab.strip()"])
    page = notebook.page
    notebook.run(0)
    panel = notebook.run(1).locator(".wb-panel")
    page.set_viewport_size({"width": 1300, "height": 1600})
    wrong: list[str] = []
    for view in VIEWS:
        panel.get_by_role("tab", name=view).click()
        section = panel.get_by_role("tabpanel", name=view)
        section.wait_for()
        section.locator(".wb-waiting").wait_for(state="detached")
        if view in ("Metrics", "Memory"):
            section.locator(".js-plotly-plot").first.wait_for()
            section.get_by_text("These charts as tables").click()
            section.get_by_role("table").first.wait_for()
        notebook.wait_for("not panel._due()")
        two_frames(page)
        section.locator("details:not([open]) > summary").evaluate_all("(all) => all.forEach((one) => one.click())")
        wrong += faults(notebook, view, panel, panel.get_by_role("tab", name=view))
    notebook.run(2)
    strip = page.locator(".wb-strip")
    strip.locator("summary", has_text="reward").click()
    strip.get_by_role("table").wait_for()
    wrong += faults(notebook, "Strip", strip, strip.locator("summary"))
    assert not wrong, "\n".join(dict.fromkeys(wrong))
    notebook.ask("lab.close()")
