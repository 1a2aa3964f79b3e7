"""The script of charts in a plain page: what it asks for, two sheets in one page, and its end."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import workbench as wb
from tests.browser.notebook import two_frames
from tests.light import describe
from workbench.controller import Workbench
from workbench.telemetry import MemoryReading
from workbench_widgets import front_end
from workbench_widgets.driver import Driver
from workbench_widgets.front_end import module
from workbench_widgets.memory import Memory

pytestmark = [pytest.mark.browser, pytest.mark.slow]

MOUNT = """async (source) => {
  const { mountCharts } = await import(URL.createObjectURL(new Blob([source], { type: "text/javascript" })));
  window.sheets = [0, 1].map(() => {
    const area = document.createElement("div");
    document.body.append(area);
    const sent = [];
    return { area, sent, ...mountCharts(area, (act) => sent.push(act)) };
  });
}"""
DRAW = """async ([number, data, packed]) => {
  const buffers = await Promise.all(packed.map(async (one) => (await fetch("data:;base64," + one)).arrayBuffer()));
  sheets[number].draw(data, buffers);
  return sheets[number].sent.splice(0);
}"""
PLOTTED = "(number) => [...sheets[number].area.querySelectorAll('.js-plotly-plot')].map((box) => box.data?.length)"


@pytest.fixture
def page(browser: Any) -> Iterator[Any]:
    page = browser.new_page()
    page.evaluate(MOUNT, module("chart.js"))
    yield page
    page.close()


@pytest.fixture
def view(tmp_path: Path) -> Memory:
    lab = Workbench(describe({"actor": None, "reward": None}, wb.Placement.split(2)), tmp_path)
    held(lab, 1.0)
    held(lab, 2.0)
    return Memory(lab, Driver(lab))


def held(lab: Workbench, time_s: float) -> None:
    uses = {"parameters": 40, "gradients": 20, "optimizer": 80}
    lab.telemetry.append_memory(
        MemoryReading(
            time_s=time_s, iteration=1, host=f"main-{n}", device=f"cpu:{n}", held={"actor": uses},
            resident_bytes=300 + n, capacity_bytes=1000,
        )
        for n in range(2)
    )  # fmt: skip


def draw(page: Any, view: Memory, number: int, *, whole: bool) -> list[str]:
    """Draw what the view sends now; what the page then asks for."""
    data, buffers = view.payload(whole=whole)
    return list(page.evaluate(DRAW, [number, data, [base64.b64encode(one).decode() for one in buffers]]))


def test_a_page_that_lacks_points_asks_for_all(page: Any, view: Memory) -> None:
    view.payload(whole=True)  # to a page that is gone
    assert draw(page, view, 0, whole=False) == ["whole"]
    view.on_whole()
    assert draw(page, view, 0, whole=False) == ["library"]
    view.on_library()
    draw(page, view, 0, whole=False)
    page.wait_for_function(f"() => ({PLOTTED})(0).length === 2")
    held(view.lab, 3.0)
    assert draw(page, view, 0, whole=False) == []
    x = "() => Array.from(sheets[0].area.querySelector('.js-plotly-plot').data[0].x)"
    assert page.evaluate(x) == [0, 1, 2]

    # what was sent to another page in between is missed, and asked for
    held(view.lab, 4.0)
    view.payload(whole=False)
    held(view.lab, 5.0)
    assert draw(page, view, 0, whole=False) == ["whole"]
    view.on_whole()
    assert draw(page, view, 0, whole=False) == []
    assert page.evaluate(x) == [0, 1, 2, 3, 4]


OVER = """() => {
  const [box] = sheets[0].area.querySelectorAll('.js-plotly-plot');
  const of = (one) => one.getBoundingClientRect().toJSON();
  const texts = [...box.querySelectorAll('.annotation-text, .gtitle')];
  return {
    bar: of(box.querySelector('.modebar')), plot: of(box.querySelector('.nsewdrag')), box: of(box),
    sheet: of(box.parentElement), said: texts.map((one) => one.textContent), texts: texts.map(of),
    buttons: [...box.querySelectorAll('.modebar-btn')].map((one) => one.dataset.title),
  };
}"""

AS_WIDE = """() => [...sheets[0].area.querySelectorAll('.js-plotly-plot')]
  .every((box) => Math.abs(box.querySelector('.main-svg').getBoundingClientRect().width - box.clientWidth) < 2)"""


def test_buttons_cover_nothing_and_one_chart_takes_the_width(page: Any, view: Memory) -> None:
    page.add_style_tag(content=(Path(front_end.__file__).parent / "static" / "panel.css").read_text())
    draw(page, view, 0, whole=True)
    view.on_library()
    draw(page, view, 0, whole=True)
    page.wait_for_function(f"() => ({PLOTTED})(0).length >= 1 && document.querySelector('.modebar-btn')")
    page.wait_for_function(AS_WIDE)
    found = page.evaluate(OVER)
    bar, plot = found["bar"], found["plot"]
    assert bar["bottom"] <= plot["top"], "no point is under a button"
    for text, words in zip(found["texts"], found["said"], strict=True):
        apart = text["right"] <= bar["left"] or text["bottom"] <= bar["top"] or text["top"] >= bar["bottom"]
        assert apart, f"{words!r} is under the buttons"
    assert "memory in use" in found["said"] and any(" of 1.0 kB" in words for words in found["said"])
    assert not any("cloud" in str(title).lower() for title in found["buttons"]), "a chart is sent nowhere"
    columns = page.evaluate("() => getComputedStyle(sheets[0].area.querySelector('.wb-charts')).gridTemplateColumns")
    charts = page.evaluate(PLOTTED, 0)
    widths = [float(one.removesuffix("px")) for one in columns.split()]
    filled = [width for width in widths if width]
    assert len(filled) == len(charts), "no column is empty"
    assert sum(filled) > 0.95 * (found["sheet"]["right"] - found["sheet"]["left"])

    # the table behind them has the same numbers
    page.evaluate("() => { sheets[0].area.querySelector('details').open = true; }")
    page.wait_for_selector(".wb-numbers")
    told = page.locator(".wb-numbers").first.inner_text()
    assert "bytes" in told and "seconds since the first record" in told and "40" in told


def test_hatches_are_found_where_another_sheet_has_the_same_unseen(page: Any, view: Memory) -> None:
    draw(page, view, 0, whole=True)
    draw(page, view, 1, whole=True)
    page.evaluate("() => { sheets[0].area.hidden = true; }")
    ids = page.evaluate("() => [...document.querySelectorAll('[id]')].map((one) => one.id)")
    per_sheet = [
        set(page.evaluate(f"() => [...sheets[{number}].area.querySelectorAll('[id]')].map((one) => one.id)"))
        for number in range(2)
    ]
    assert per_sheet[0] and not per_sheet[0] & per_sheet[1]
    assert len(set(ids)) == len(per_sheet[0]) + len(per_sheet[1])
    fills = page.evaluate("""() => [...sheets[1].area.querySelectorAll('[fill^="url("]')]
        .map((one) => one.getAttribute("fill").slice(5, -1))""")
    assert fills
    assert set(fills) <= per_sheet[1]


def test_the_still_picture_stays_where_plotly_does_not_come(page: Any, view: Memory) -> None:
    page.evaluate("() => { window.DecompressionStream = undefined; }")
    draw(page, view, 0, whole=True)
    view.on_library()
    assert draw(page, view, 0, whole=True) == []
    page.wait_for_function("() => sheets[0].sent.includes('stills')")
    assert "plotly could not be loaded here" in page.locator(".wb-said").first.inner_text()
    view.on_stills()
    picture = "() => sheets[0].area.querySelector('.wb-charts').innerHTML"
    before = page.evaluate(picture)
    held(view.lab, 3.0)
    draw(page, view, 0, whole=False)
    assert "<svg" in before and page.evaluate(picture) != before
    assert page.locator(".js-plotly-plot").count() == 0


def test_what_has_ended_holds_and_draws_nothing(page: Any, view: Memory) -> None:
    view.on_library()
    draw(page, view, 0, whole=True)
    page.wait_for_function(f"() => ({PLOTTED})(0).length === 2")
    data, _ = view.payload(whole=True)
    page.evaluate("(data) => { sheets[1].draw(data, []); sheets[1].end(); }", data)  # before plotly has come to it
    page.evaluate("() => sheets[0].end()")
    page.evaluate("() => { document.body.className = 'dark'; sheets[0].area.style.width = '300px'; }")
    two_frames(page)
    assert page.evaluate("() => document.querySelectorAll('.main-svg').length") == 0
