"""Curves in a real notebook: drawn by plotly, live, chosen, smoothed, beside another run's, and leading to samples."""

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
from workbench.telemetry import TelemetryStore
lab = tiny_lab("curves", Path("runs-curves"), backend="inline", if_exists="replace")
ppo = wb.PPO(lab, prompts=4, sampling=wb.Sampling(max_new_tokens=6))
other = TelemetryStore(Path("runs-curves/earlier/20250101-000000-000000"))
for n in range(1, 6):
    other.append_metrics("compute_log_prob", n, n, {"entropy": 4.0 + n / 10})
ppo.run(2)
view = (panel := lab.panel()).views["metrics"]
"""
ENTROPY = "compute_log_prob/entropy"
FIGURE = ".wb-charts.js-plotly-plot"
# The points of a curve in the chart with this title.
DRAWN = """([title, name]) => {
  const box = document.querySelector('.wb-charts.js-plotly-plot');
  const at = box?.layout.annotations.find((one) => one.text === `<b>${title}</b>`)?.yref.split(' ')[0];
  const found = (box?.data || []).find((one) => one.yaxis === at && one.name === name);
  return found ? [Array.from(found.x), Array.from(found.y)] : null;
}"""
CHARTS = """() => document.querySelector('.wb-charts.js-plotly-plot')?.layout.annotations
  .filter((one) => one.text.startsWith('<b>')).length"""

# where the second point of the curve is in its chart
SECOND = """(box, title) => {
  const at = box.layout.annotations.find((one) => one.text === `<b>${title}</b>`).yref.split(' ')[0];
  const { x, y, xaxis } = box.data.find((one) => one.yaxis === at && one.name === 'curves');
  const [across, up] = [xaxis, at].map((one) => box._fullLayout[one.replace(/^([xy])/, '$1axis')]);
  return { x: across._offset + across.d2p(x[1]), y: up._offset + up.d2p(y[1]) };
}"""

# of a sheet: how far plotly's buttons reach into the first row of charts, in pixels; its share of the panel's width;
# and what its axes say
SHEET = """(box) => {
  const { top, width } = box.getBoundingClientRect();
  const axes = Object.keys(box.layout).filter((name) => /^[xy]axis/.test(name)).map((name) => box.layout[name]);
  return {
    covered: box.querySelector('.modebar').getBoundingClientRect().bottom - top - box._fullLayout.yaxis._offset,
    share: width / box.closest('.wb-panel').clientWidth, titles: axes.map((one) => one.title.text),
  };
}"""


def test_curves_are_live_and_lead_to_samples(shared_notebook: Callable[[Sequence[str]], Any]) -> None:
    notebook: Notebook = shared_notebook([OPEN, 'panel.show("metrics"); panel', "panel.show('metrics').still()"])
    page = notebook.page
    notebook.run(0)
    panel = notebook.run(1).locator(".wb-panel")
    panel.locator(FIGURE).wait_for()

    def drawn(name: str, title: str = ENTROPY) -> Any:
        return page.evaluate(DRAWN, [title, name])

    def until(name: str, points: int) -> Any:
        page.wait_for_function(f"(given) => ({DRAWN})(given)?.[0].length === {points}", arg=[ENTROPY, name])
        return drawn(name)

    def measured() -> list[float]:
        return notebook.ask('lab.metrics("compute_log_prob")["entropy"].tolist()')

    assert page.evaluate(CHARTS) == 7
    assert drawn("as measured") == [[1, 2], pytest.approx(measured())]
    notebook.picture("metrics")
    sheet = panel.locator(FIGURE).evaluate(SHEET)
    assert sheet["covered"] <= 0 and sheet["share"] > 0.9, sheet
    assert all(sheet["titles"]) and {"iteration", "nats", "tokens", "reward"} <= {*sheet["titles"]}

    # live, while another thread of the kernel runs iterations
    notebook.in_thread("ppo.run(2)")
    assert until("as measured", 4) == [[1, 2, 3, 4], pytest.approx(measured())]
    a = measured()
    weights = [0.4 * 0.6 ** (3 - n) for n in range(4)]
    assert drawn("curves")[1][-1] == pytest.approx(sum(w * x for w, x in zip(weights, a, strict=True)) / sum(weights))

    # smoothing, by the arrow keys
    slider = panel.get_by_label("smoothing")
    slider.focus()
    page.keyboard.press("Home")
    notebook.wait_for("view.smoothing == 0")
    page.wait_for_function(f"(given) => ({DRAWN})(given) === null", arg=[ENTROPY, "as measured"])
    assert drawn("curves")[1] == pytest.approx(a)
    page.keyboard.press("ArrowRight")
    notebook.wait_for("view.smoothing == 0.02")
    panel.get_by_label("y axis").select_option("log")
    notebook.wait_for("view.y == 'log'")
    page.wait_for_function("() => document.querySelector('.wb-charts').layout.yaxis.type === 'log'")
    panel.get_by_label("y axis").select_option("linear")

    # which metrics: search, by mouse and by keyboard
    panel.get_by_text("Metrics shown: 7 of").click()
    search = panel.get_by_label("search")
    search.fill("clip_fraction update_critic")
    page.keyboard.press("Enter")
    notebook.wait_for("len(view._found()) == 2")
    box = panel.get_by_label("value_clip_fraction", exact=True)
    box.focus()
    page.keyboard.press("Space")
    notebook.wait_for("('update_critic', 'value_clip_fraction') in view.drawn()")
    page.wait_for_function(f"() => ({CHARTS})() === 8")
    panel.get_by_role("button", name="Hide these 2").click()
    notebook.wait_for("len(view.drawn()) == 7")
    panel.get_by_role("button", name="As at first").click()
    notebook.wait_for("view.shown is None")

    # another run beside it
    panel.get_by_text("Other runs beside: 0 of 1").click()
    panel.get_by_role("checkbox", name="earlier/20250101-000000-000000").check()
    assert until("earlier/20250101-000000-000000", 5)[0] == [1, 2, 3, 4, 5]
    assert page.evaluate(CHARTS) == 7
    panel.locator(FIGURE).scroll_into_view_if_needed()
    notebook.picture("metrics_beside")

    # the samples of an iteration: a click on a point, and a field and a button
    def samples_of(iteration: int) -> None:
        shown = "panel.views['samples'].shown_batch()"
        notebook.wait_for(f"panel.shown == 'samples' and lab.store.iteration({shown}) == {iteration}")
        panel.get_by_role("tab", name="Samples").and_(panel.locator('[aria-selected="true"]')).wait_for()
        panel.locator(f'[data-view="samples"] .wb-picture >> text=/iteration {iteration}/').first.wait_for()
        panel.get_by_role("tab", name="Metrics").click()
        notebook.wait_for("panel.shown == 'metrics'")

    chart = panel.locator(FIGURE)
    chart.hover(position=chart.evaluate(SECOND, ENTROPY))
    chart.locator(".hovertext").first.wait_for()
    chart.click(position=chart.evaluate(SECOND, ENTROPY))
    samples_of(2)
    panel.get_by_role("spinbutton", name="iteration").fill("3")
    page.keyboard.press("Tab")
    panel.get_by_role("button", name="Samples of iteration 3").focus()
    page.keyboard.press("Enter")
    samples_of(3)

    # the same is a table, and a cell shows charts as it does those of plotly: the file has them
    panel.get_by_text("These charts as tables").click()
    panel.get_by_role("table", name=f"{ENTROPY}, nats").wait_for()
    notebook.run(2)
    cell = page.locator(".jp-CodeCell").nth(2)
    cell.locator(".jp-RenderedPlotly .main-svg").first.wait_for()
    notebook.picture("metrics_still")
    html, figure = notebook.outputs(2)
    assert "These charts as tables" in str(html["data"]["text/html"])
    assert len(figure["data"]["application/vnd.plotly.v1+json"]["data"]) >= 6
