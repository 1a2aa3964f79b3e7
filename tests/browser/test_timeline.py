"""The timeline in a real notebook: drawn, moved and asked by mouse and by keyboard, on a live workbench."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from tests.browser.notebook import PATIENCE_S, Notebook, two_frames

pytestmark = [pytest.mark.browser, pytest.mark.slow]

OPEN = """
import sys; from pathlib import Path
import workbench as wb
from tests.cases import tiny_lab
lab = tiny_lab("timeline", Path("runs"), backend="inline", if_exists="replace")
ppo = wb.PPO(lab, prompts=4, sampling=wb.Sampling(max_new_tokens=6))
"""
RUN = "ppo.run(2)"
SHOW = 'panel = lab.panel("timeline"); view = panel.views["timeline"]; panel'
FOLLOW = "ppo.run(1)"
BAR = '.span[data-level="0"]'
# How many times of the axis are in sight.
SHOWN = """(root) => {
  const { left, right } = root.querySelector(".wb-tl-plot").getBoundingClientRect();
  const ticks = [...root.querySelectorAll(".wb-tl-moves g[data-room] > text")]
    .map((one) => one.getBoundingClientRect());
  return ticks.filter((one) => one.width && one.left > left && one.right < right).length;
}"""

# Places of elements in the page, read at once; null where one is missing.
PLACES = """(root, found) => {
  const places = found.map((selector) => root.querySelector(selector)?.getBoundingClientRect().toJSON());
  return places.every(Boolean) ? places : null;
}"""
# The middle of a bar, or of a gap, whose facts begin with a text, where nothing lies over it.
POINTS = """(root, text) => {
  for (const one of root.querySelectorAll(".span, .gap")) {
    if (!(one.dataset.facts || one.querySelector("title")?.textContent || "").startsWith(text)) continue;
    const { x, y, width, height } = one.getBoundingClientRect();
    const middle = [x + width / 2, y + height / 2];
    if (width > 2 && document.elementFromPoint(...middle) === one) return middle;
  }
  return null;
}"""


class Drawn:
    """What the script says of what it has drawn."""

    def __init__(self, notebook: Notebook, panel: Any) -> None:
        self.notebook, self.root = notebook, panel.locator(".wb-tl")
        self.canvas = panel.locator(".wb-tl-stage")

    def __getitem__(self, name: str) -> float:
        return float(self.root.get_attribute(f"data-{name}") or "nan")

    def until(self, condition: Callable[[], Any], what: str) -> Any:
        """Wait until this is true; what it is then."""
        deadline = time.monotonic() + PATIENCE_S
        while time.monotonic() < deadline:
            if found := condition():
                return found
            self.notebook.page.wait_for_timeout(50)
        raise AssertionError(f"{what}: {self.root.evaluate('e => JSON.stringify(e.dataset)')}")

    def places(self, *selectors: str) -> list[dict[str, float]]:
        found: list[dict[str, float]] = self.until(lambda: self.root.evaluate(PLACES, list(selectors)), str(selectors))
        return found

    def drag(self, start: float, end: float) -> None:
        """Along the first bar, from one share of the canvas to another."""
        self.canvas.scroll_into_view_if_needed()
        canvas, bar = self.places(".wb-tl-stage", BAR)
        mouse, y = self.notebook.page.mouse, bar["y"] + 4
        mouse.move(canvas["x"] + start * canvas["width"], y)
        mouse.down()
        mouse.move(canvas["x"] + end * canvas["width"], y, steps=4)
        mouse.up()

    def point(self, text: str) -> None:
        """Point at what begins with this text, until it is told."""
        tip = self.root.locator(".wb-tl-tip")

        def told() -> bool:
            self.canvas.scroll_into_view_if_needed()
            if middle := self.root.evaluate(POINTS, text):
                self.notebook.page.mouse.move(*middle)
                two_frames(self.notebook.page)
            return bool(tip.is_visible() and tip.inner_text().startswith(text))

        self.until(told, f"{text!r} is told")

    @property
    def length(self) -> float:
        return self["to"] - self["from"]

    @property
    def told(self) -> str:
        return str(self.root.locator(".wb-tl-live").inner_text())

    def key(self, name: str) -> None:
        self.canvas.focus()
        self.notebook.page.keyboard.press(name)


def test_a_timeline_is_drawn_moved_and_asked_by_mouse_and_keyboard(
    shared_notebook: Callable[[Sequence[str]], Any],
) -> None:
    notebook: Notebook = shared_notebook([OPEN, RUN, SHOW, FOLLOW])
    notebook.run(0)
    notebook.run(1)
    cell = notebook.run(2)
    panel = cell.locator(".wb-panel")
    drawn = Drawn(notebook, panel)
    drawn.canvas.wait_for()
    drawn.until(lambda: drawn["spans"] > 20, "spans are drawn")
    assert drawn["spans"] == notebook.ask("len(view._drawn.rows)")
    notebook.picture("timeline")

    # choices: the last, several, one by its number
    panel.locator('select[data-act="show"]').select_option("several")
    panel.locator('input[data-act="iterations"]').fill("2")
    notebook.page.keyboard.press("Tab")
    notebook.wait_for("view.iterations == 2 and view.window == 'several'")
    drawn.until(lambda: drawn.length == pytest.approx(notebook.ask("view._drawn.length_s")), "two are drawn")
    panel.locator('select[data-act="show"]').select_option("iteration 1")
    notebook.wait_for("view.window == 'iteration 1'")
    drawn.until(lambda: drawn.length == pytest.approx(notebook.ask("view._drawn.length_s")), "the first is drawn")

    # zoom and pan: keys, buttons, wheel, drag
    whole = drawn.length
    drawn.key("+")
    drawn.until(lambda: drawn.length == pytest.approx(whole / 2), "+ halves what is in sight")
    at = drawn["from"]
    drawn.key("ArrowRight")
    drawn.until(lambda: drawn["from"] > at, "an arrow pans")
    drawn.key("-")
    drawn.until(lambda: drawn.length > 0.9 * whole, "- zooms out")
    drawn.key("Home")
    drawn.until(lambda: drawn.length == whole, "Home shows all")
    panel.get_by_role("button", name="zoom in").click()
    drawn.until(lambda: drawn.length < whole, "the button zooms in")
    before = drawn["from"]
    drawn.drag(0.5, 0.4)
    drawn.until(lambda: drawn["from"] > before, "dragging to the left goes on in time")
    drawn.canvas.focus()
    zoomed = drawn.length
    notebook.page.mouse.wheel(0, -240)
    drawn.until(lambda: drawn.length < zoomed, "the wheel zooms")
    for _ in range(4):
        drawn.key("+")
    assert drawn.root.evaluate(SHOWN) > 1, "times are told wherever one looks"
    notebook.picture("timeline_zoomed")
    panel.get_by_role("button", name="show all").click()
    drawn.until(lambda: drawn.length == whole, "the button shows all")

    # spans by keyboard, their facts, and the way to their cell
    panel.locator('select[data-act="show"]').select_option("last")
    notebook.wait_for("view.window == 'last' and view._drawn.window == view._window()")
    drawn.until(lambda: drawn.length == pytest.approx(notebook.ask("view._drawn.length_s")), "the last is drawn")
    drawn.key("n")
    drawn.until(lambda: drawn["marked"] >= 0, "a span is marked")
    first = drawn.told
    assert "rank 0" in first
    drawn.key("n")
    drawn.until(lambda: drawn.told != first, "the next span is told")
    drawn.key("p")
    drawn.until(lambda: drawn.told == first, "the one before is told again")
    drawn.key("Enter")
    details = panel.locator('section[aria-label="chosen span"]')
    details.wait_for()
    chosen = notebook.ask("next((r['stage'], r['kind']) for r in view._spans if r['number'] == view._chosen['span'])")
    assert first.startswith(f"{chosen[0]}: {chosen[1]}")
    assert RUN in details.inner_text()
    number = notebook.number(1)
    button = details.get_by_role("button", name=f"Go to cell [{number}]")
    button.focus()
    notebook.page.keyboard.press("Enter")
    drawn.until(lambda: f"cell [{number}] is shown" in drawn.told, "the cell is found")
    assert "wb-tl-found" in notebook.page.locator(".jp-CodeCell").nth(1).get_attribute("class")
    notebook.picture("timeline_chosen")
    drawn.key("Escape")
    notebook.wait_for("not view._chosen")

    # what is pointed at is told; a click chooses it
    drawn.point("update_actor: ")
    notebook.picture("timeline_hover")
    notebook.page.mouse.down()
    notebook.page.mouse.up()
    notebook.wait_for("'span' in view._chosen")
    drawn.point("idle: ")
    notebook.page.mouse.down()
    notebook.page.mouse.up()
    notebook.wait_for("'gap' in view._chosen")
    panel.locator('section[aria-label="chosen gap"]').wait_for()

    # a cell that runs on is followed, and may be folded away from what came before
    notebook.run(3)
    drawn.until(lambda: drawn["spans"] == notebook.ask("len(view._drawn.rows)"), "what a cell runs is added")
    panel.locator('select[data-act="show"]').select_option("several")
    notebook.wait_for("view.window == 'several'")
    assert "waiting for data" in panel.locator(".wb-tl-times").inner_text()
    _finds(notebook, drawn, panel)
    _folds(notebook, drawn, panel)
    _selects(notebook, drawn, panel)

    # without a kernel the notebook has a still picture
    assert "data:image/svg+xml" in "".join(str(one) for one in notebook.outputs(2))


def _finds(notebook: Notebook, drawn: Drawn, panel: Any) -> None:
    """Spans that tell what is searched for stand out, are counted, and are stepped through on all devices."""
    bars = panel.locator('.span:not([data-level="3"])')
    panel.get_by_role("searchbox", name="find spans").click()
    notebook.page.keyboard.type("update_actor compute")
    found = panel.locator(".wb-tl-match")
    drawn.until(lambda: found.count() > 0, "spans are found")
    assert 2 <= found.count() < bars.count()
    assert drawn.told == f"{found.count()} of the drawn spans match"
    notebook.picture("timeline_found")
    marks = [drawn["marked"]]
    for _ in range(2):
        notebook.page.keyboard.press("Enter")
        drawn.until(lambda: drawn["marked"] != marks[-1], "Enter goes to the next one")
        assert drawn.told.startswith("update_actor")
        marks.append(drawn["marked"])
    assert marks[1] != marks[2]
    notebook.page.keyboard.press("Control+a")
    notebook.page.keyboard.press("Delete")
    drawn.until(lambda: found.count() == 0, "nothing is searched for")
    drawn.key("Escape")


def _folds(notebook: Notebook, drawn: Drawn, panel: Any) -> None:
    """What lay between two cells is a narrow break with its length on it, and a control unfolds it."""
    box = panel.get_by_role("checkbox", name="fold time in which nothing was called")

    def busy() -> float:
        """The share of the plot that the bars of stages take."""
        return float(
            drawn.root.evaluate("""(root) => {
              const bars = [...root.querySelectorAll('.span[data-level="0"]')].map((bar) => bar.width.baseVal.value);
              return bars.reduce((a, b) => a + b, 0) / root.querySelector(".wb-tl-plot").width.baseVal.value;
            }""")
        )

    breaks = panel.locator(".wb-tl-moves .break")
    drawn.until(lambda: breaks.count() > 0, "the time between two cells is folded")
    drawn.canvas.scroll_into_view_if_needed()
    last = panel.locator(".break", has_text="nothing called").last  # before the last cell
    assert re.search(r"\d (s|min \d\d s), nothing called", last.text_content())
    assert "the axis is folded: " in drawn.canvas.inner_text()
    notebook.picture("timeline_folded")
    folded_s, folded_busy = drawn.length, busy()
    assert folded_busy > 0.4
    box.focus()
    notebook.page.keyboard.press("Space")
    drawn.until(lambda: breaks.count() == 0 and drawn.length > 2 * folded_s, "a control unfolds it")
    assert folded_busy > 2 * busy()
    box.click()
    drawn.until(lambda: drawn.length == pytest.approx(folded_s, rel=0.05), "and folds it again")


def _selects(notebook: Notebook, drawn: Drawn, panel: Any) -> None:
    """A range is selected by mouse and by keyboard, and added up."""
    page, sums = notebook.page, panel.locator('section[aria-label="selected range"]')
    before = drawn["from"]
    page.keyboard.down("Shift")
    drawn.drag(0.2, 0.9)
    page.keyboard.up("Shift")
    sums.wait_for()
    assert drawn["from"] == before  # Shift pans nothing
    marked, canvas = drawn.places(".wb-tl-range", ".wb-tl-stage")
    assert marked["width"] == pytest.approx(0.7 * canvas["width"], abs=4)
    told = sums.inner_text()
    for word in ("update_actor", "optimizer in compute", "tokens", "bytes", "idle time by its cause"):
        assert word in told
    seconds = notebook.ask("view._range[1] - view._range[0]")
    assert notebook.ask(f"__import__('workbench').display.seconds_text({seconds})") in told
    sums.scroll_into_view_if_needed()
    notebook.picture("timeline_range")
    drawn.key("Escape")
    sums.wait_for(state="detached")
    assert panel.locator(".wb-tl-range").count() == 0

    drawn.key("n")
    drawn.until(lambda: drawn["marked"] >= 0, "a span is marked")
    drawn.key("s")
    sums.wait_for()
    row = f"next(r for r in view._spans if r['number'] == {int(drawn['marked'])})"
    notebook.wait_for("view._range is not None")
    took_s = notebook.ask(f"{row}['end_s'] - {row}['start_s']")
    assert notebook.ask("view._range[1] - view._range[0]") == pytest.approx(took_s, rel=0.02, abs=2e-3)
    assert notebook.ask(f"{row}['stage']") in sums.inner_text()
    drawn.key("Escape")
    sums.wait_for(state="detached")
