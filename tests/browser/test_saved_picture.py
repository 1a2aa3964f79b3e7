"""A live panel that is saved, loses its kernel, or whose kernel is restarted."""

from __future__ import annotations

import base64
import json
import re
import time
from collections.abc import Callable, Sequence
from typing import Any

import nbformat
import pytest
from nbconvert import HTMLExporter

from tests.browser.notebook import PATIENCE_S, Notebook, picture

pytestmark = [pytest.mark.browser, pytest.mark.slow]

OPEN = """
from pathlib import Path
import os
import re
import workbench as wb
from tests.cases import tiny_lab
lab = tiny_lab("saved", Path("runs"), backend="inline", if_exists="replace")
ppo = wb.PPO(lab, prompts=4, sampling=wb.Sampling(max_new_tokens=6))
"""


# those of saved pictures that are in sight, or folded
IMAGES = "[...document.querySelectorAll('[class^=wb-saved-] img')]"


def saved_text(notebook: Notebook) -> str:
    """The html of the outputs of the panel's cell, as the file has it; "" while the server is writing it."""
    try:
        outputs = json.loads(notebook.path.read_text())["cells"][1]["outputs"]
    except json.JSONDecodeError:
        return ""
    return "".join("".join(output["data"].get("text/html", "")) for output in outputs)


def with_drawings(html: str) -> str:
    """And what its images say."""
    found = re.findall(r"data:image/svg\+xml;base64,([A-Za-z0-9+/=]+)", html)
    return html + "".join(base64.b64decode(one).decode() for one in found)


def save_until(notebook: Notebook, text: str, also: Callable[[str], bool] = bool) -> str:
    """Save until the file has a text, in an image too, and what `also` wants: the page takes in what the kernel sends a
    moment later."""
    deadline = time.monotonic() + PATIENCE_S
    while text not in with_drawings(html := saved_text(notebook)) or not also(html):
        assert time.monotonic() < deadline, html[:500]
        notebook.page.keyboard.press("Control+s")
        notebook.page.wait_for_timeout(300)
    return html


@pytest.mark.thorough
def test_what_a_kernel_leaves_that_is_restarted_ends_or_dies(open_notebook: Callable[[Sequence[str]], Any]) -> None:
    cells = [OPEN, "panel = lab.panel(algorithm=ppo); panel", "ppo.iterate(); ppo.iterate()", "lab.strip()"]
    notebook: Notebook = open_notebook([*cells, "ppo.iterate(); exit()", "os._exit(1)"])
    page, cell = notebook.page, notebook.page.locator(".jp-Notebook .jp-CodeCell").nth(1)
    panel, strip = cell.locator(".wb-panel"), page.locator(".wb-strip")
    opens(notebook)
    notebook.run(3)
    assert panel.locator(".wb-gone").is_hidden()
    picture = cell.locator("[class^=wb-saved-]")
    assert picture.count() == 1
    assert picture.is_hidden()  # the live panel is seen, not its picture

    # a page that was reloaded keeps it too: what happens in a later cell is in the file, whenever that is saved
    save_until(notebook, "saved, iteration 0, ")
    page.reload(wait_until="domcontentloaded")
    panel.get_by_role("button", name="Step: prompts").wait_for()
    strip.get_by_text("connected", exact=True).wait_for()
    notebook.run(2)
    html = save_until(notebook, "saved, iteration 2, ")
    assert "update_actor" in html
    assert all(f"<summary>{title}</summary>" in html for title in ("Stepper", "Timeline", "Samples", "Metrics"))
    assert len(html.encode()) <= 200_000

    # the user restarts it: panel and strip are grey, and say how to go on
    page.evaluate("() => { const now = Date.now(); Date.now = () => now; }")  # it is not silence that tells
    page.locator(".jp-CodeCell").first.locator(".jp-InputPrompt").click()
    page.keyboard.press("Escape")
    page.keyboard.press("0")
    page.keyboard.press("0")
    page.get_by_role("button", name="Confirm Kernel Restart").click()
    for one in (strip, panel):
        one.get_by_text("Disconnected: the kernel does not answer").wait_for()
        assert "run the notebook's cells again" in one.locator(".wb-gone").inner_text()
        assert one.locator(":scope > .wb-status").evaluate("(one) => getComputedStyle(one).filter") == "grayscale(1)"
    assert strip.get_by_text("connected", exact=True).is_hidden()
    notebook.picture("panel_restarted")

    # cells are run again, and the kernel ends by itself: its last state is kept
    opens(notebook)
    notebook.start(4)
    html = save_until(notebook, "update_actor ✓ done", lambda html: "saved, iteration 1, " in html)
    assert "iteration 1: " in html
    page.get_by_role("button", name="Ok").click()  # JupyterLab's own word about it

    # it dies: the panel says so, and the line that goes on; not because it has heard nothing for 30 s
    opens(notebook)
    notebook.run(2)
    save_until(notebook, "saved, iteration 2, ")
    notebook.start(5)
    panel.locator(".wb-gone").wait_for(state="visible")
    assert "the kernel does not answer" in panel.locator(".wb-gone").inner_text()
    page.get_by_role("button", name="Ok").click()
    panel.scroll_into_view_if_needed()
    notebook.picture("panel_gone")

    # and the notebook that is opened again without it shows the last state
    page.reload(wait_until="domcontentloaded")
    page.locator("[class^=wb-saved-]").first.wait_for(state="visible")  # that of the strip may follow
    assert page.locator("[class^=wb-saved-] details[open]").first.inner_text().startswith("Stepper")
    assert loaded(page) >= 3  # its drawings are images
    page.locator(".jp-RenderedPlotly").first.wait_for(state="visible")
    error = page.get_by_text("Error displaying widget")
    error.first.wait_for(state="attached")
    assert not any(one.is_visible() for one in error.all())
    notebook.picture("panel_reopened")
    # (the kernel that comes by itself has no such workbench)


def opens(notebook: Notebook) -> None:
    """The workbench, and its panel, in a kernel that has neither."""
    notebook.wait_until_idle()
    notebook.run(0)
    notebook.run(1).get_by_role("button", name="Step: prompts").wait_for()


def loaded(page: Any) -> int:
    """How many images of saved pictures there are; all of them are there, and are drawn."""
    drawn = "one.complete && one.naturalWidth > 0 && one.alt"
    page.wait_for_function(f"() => {IMAGES}.length && {IMAGES}.every((one) => {drawn})")
    count: int = page.evaluate(f"() => {IMAGES}.length")
    return count


def test_it_is_read_where_scripts_svg_and_styles_are_dropped(shared_notebook: Callable[[Sequence[str]], Any]) -> None:
    notebook: Notebook = shared_notebook([OPEN, "lab.panel(algorithm=ppo)", "ppo.iterate(); ppo.iterate()"])
    notebook.save()
    notebook.run(0)
    notebook.run(1).locator(".wb-panel").wait_for()
    notebook.run(2)
    save_until(notebook, "saved, iteration 2, ")
    written = nbformat.read(notebook.path, 4)
    page = notebook.page.context.new_page()

    # JupyterLab, of somebody else's notebook: what is not trusted is sanitized, and inline svg is dropped
    written.cells.append(nbformat.v4.new_markdown_cell("edited by somebody else"))
    copied = notebook.path.with_name(f"copy-{notebook.path.name}")
    nbformat.write(written, copied)
    page.goto(notebook.page.url.replace(notebook.path.name, copied.name), wait_until="domcontentloaded")
    assert loaded(page) >= 3
    assert page.locator("[class^=wb-saved-] svg").count() == 0
    page.locator(
        ".jp-RenderedPlotly .main-svg, .jp-RenderedPlotly img[src]"
    ).first.wait_for()  # charts are drawn, without a kernel
    folds = page.locator("[class^=wb-saved-] details", has_text="compute_reward/rewards/mean, reward")
    folds.evaluate_all("(all) => all.forEach((one) => { one.open = true; })")
    page.get_by_role("table", name="compute_reward/rewards/mean, reward").wait_for()
    picture(page, "saved_untrusted")

    # a renderer that takes the first of these types (VS Code's order) and lets nothing in but data; nbconvert
    order = ("text/html", "image/svg+xml", "text/plain")
    outputs = [output["data"] for output in written.cells[1].outputs]
    shown = [next(data[kind] for kind in order if kind in data) for data in outputs]
    assert "<Panel of saved" in shown[0]
    policy = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"
    (converted, _) = HTMLExporter().from_notebook_node(written)
    for name, html in {"vscode": "".join(shown), "nbconvert": converted}.items():
        page.goto("about:blank")
        page.set_content(f'<meta http-equiv="Content-Security-Policy" content="{policy}">{html}')
        assert loaded(page) >= 3
        assert page.locator("[class^=wb-saved-] details").first.get_attribute("open") is not None
        picture(page, f"saved_{name}")
    page.close()


def rewards(html: str) -> list[str]:
    """The iterations in the table of rewards."""
    table = html.partition("<caption>compute_reward/rewards/mean, reward</caption>")[2].partition("</table>")[0]
    return re.findall(r'<th scope="row">(\d+)</th>', table)


def test_iterations_that_are_fast_leave_the_last_and_the_end_leaves_one_picture(
    shared_notebook: Callable[[Sequence[str]], Any],
) -> None:
    notebook: Notebook = shared_notebook([OPEN, "lab.panel(algorithm=ppo)", "history = ppo.run(5)", "lab.close()"])
    notebook.save()
    notebook.run(0)
    cell = notebook.run(1)
    cell.locator(".wb-panel").wait_for()
    notebook.run(2)
    # a picture of the fifth may have been taken before its rewards were there; the last one has them
    save_until(notebook, "saved, iteration 5, ", lambda html: rewards(html) == ["1", "2", "3", "4", "5"])
    assert notebook.ask("lab.iteration") == 5
    assert cell.locator(".jp-RenderedPlotly").count() == 2
    assert not any(one.is_visible() for one in cell.locator(".jp-RenderedPlotly").all())
    notebook.run(3)
    cell.locator("details summary", has_text="Checks").wait_for()
    assert cell.locator(".wb-panel").count() == 0
    cell.locator(".jp-RenderedPlotly .main-svg").first.wait_for()
    html = save_until(notebook, "<summary>Checks</summary>")
    assert html.count("<summary>Checks</summary>") == 1
    charts = [one["data"] for one in notebook.outputs(1) if "application/vnd.plotly.v1+json" in one["data"]]
    assert len(charts) == 2 and "compute_reward/rewards/mean" in json.dumps(charts)
    notebook.picture("saved_closed")
