"""Memory in a real notebook: what hosts say, drawn as areas by plotly, as they say it."""

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
lab = tiny_lab("held", Path("runs"), backend="inline", if_exists="replace")
ppo = wb.PPO(lab, prompts=4, sampling=wb.Sampling(max_new_tokens=6))
ppo.run(1)
view = (panel := lab.panel("memory")).views["memory"]
heard = view.on_library
view.on_library = lambda: setattr(view, "on_library", heard)  # the page's first question for plotly is lost
"""
AREAS = """() => Object.fromEntries([...document.querySelectorAll('.js-plotly-plot')[0].data]
  .filter((one) => one.stackgroup).map((one) => [one.name, Array.from(one.y)]))"""


def test_areas_are_what_hosts_hold(shared_notebook: Callable[[Sequence[str]], Any]) -> None:
    notebook: Notebook = shared_notebook([OPEN, "panel"])
    page = notebook.page
    notebook.run(0)
    panel = notebook.run(1).locator(".wb-panel")
    panel.locator(".js-plotly-plot").wait_for()
    areas = page.evaluate(AREAS)
    held = notebook.ask('lab.topology().set_index("role").filter(like="_bytes").to_dict("index")')
    for role in ("actor", "critic", "reference"):
        for use in ("parameters", "optimizer"):
            assert areas.get(f"{role}: {use}", [0])[-1] == held[role][f"{use}_bytes"], (role, use)
    assert areas["batch: batches"][-1] == held["actor"]["host_batch_bytes"]
    notebook.wait_for("not view._due()")  # no reading is on its way: a process grows by a page now and then
    last = notebook.ask('view._devices["cpu:0"].last.resident_bytes')
    page.wait_for_function(
        f"() => Object.values(({AREAS})()).reduce((sum, one) => sum + one.at(-1), 0) === {last}", timeout=20_000
    )

    # while stages run in the background, hosts are asked again, and marks of peaks come with the spans
    count = len(areas["actor: parameters"])
    notebook.in_thread("ppo.run(2)")
    page.wait_for_function(f"() => ({AREAS})()['actor: parameters'].length > {count}")
    peaks = "document.querySelectorAll('.js-plotly-plot')[0].data.find((one) => one.name === 'peak in a stage')"
    wanted = notebook.ask('int((lab.spans().query("parent == \'\'")["peak_memory_bytes"] > 0).sum())')
    page.wait_for_function(f"() => {peaks}.x.length === {wanted}")

    # by keyboard: capacity, and a reading now
    box = panel.get_by_label("up to capacity")
    box.focus()
    page.keyboard.press("Space")
    notebook.wait_for("view.capacity")
    whole = notebook.ask("view.charts()[0].limit[0]")
    page.wait_for_function(f"() => document.querySelector('.js-plotly-plot').layout.shapes[0]?.y0 === {whole}")
    notebook.picture("memory_capacity")
    page.keyboard.press("Space")
    notebook.wait_for("not view.capacity")
    rows = notebook.ask("len(lab.telemetry.memory())")
    button = panel.get_by_role("button", name="Read now")
    button.focus()
    page.keyboard.press("Enter")
    notebook.wait_for(f"len(lab.telemetry.memory()) > {rows}")
    panel.get_by_text("memory of held by role").first.wait_for()
    notebook.picture("memory")

    # until the workbench is closed the page hides what the cell keeps; then that is what it shows
    kept = page.locator(".jp-CodeCell").nth(1).locator(".jp-RenderedPlotly")
    assert kept.count() == 1 and kept.is_hidden()
    notebook.ask("lab.close()")
    panel.wait_for(state="detached")
    kept.locator(".main-svg").first.wait_for()
    areas = len(page.evaluate("() => document.querySelector('.jp-RenderedPlotly').data[0].x"))
    assert areas > count  # what was read last, not what there was when the page got it
    page.locator("[class^=wb-saved-]").get_by_text("These charts as tables").wait_for()
    notebook.picture("memory_closed")
