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
DRAWN = """([title, kind]) => {
  const box = [...document.querySelectorAll('.js-plotly-plot')].find((box) => box.dataset.chart === title);
  const found = (box?.data || []).filter((one) => one.name === kind);
  return found.length ? [Array.from(found[0].x), Array.from(found[0].y)] : null;
}"""

# where the second point of the curve is in its chart
SECOND = """(box) => {
  const { x, y } = box.data.find((one) => one.name === 'curves');
  const { xaxis, yaxis } = box._fullLayout;
  return { x: xaxis._offset + xaxis.d2p(x[1]), y: yaxis._offset + yaxis.d2p(y[1]) };
}"""


def test_curves_are_live_and_lead_to_samples(shared_notebook: Callable[[Sequence[str]], Any]) -> None:
    notebook: Notebook = shared_notebook([OPEN, 'panel.show("metrics"); panel'])
    page = notebook.page
    notebook.run(0)
    panel = notebook.run(1).locator(".wb-panel")
    panel.locator(".wb-charts svg").first.wait_for()
    panel.locator(".js-plotly-plot").nth(5).wait_for()

    def drawn(name: str, title: str = ENTROPY) -> Any:
        return page.evaluate(DRAWN, [title, name])

    def until(name: str, points: int) -> Any:
        page.wait_for_function(f"(given) => ({DRAWN})(given)?.[0].length === {points}", arg=[ENTROPY, name])
        return drawn(name)

    def measured() -> list[float]:
        return notebook.ask('lab.metrics("compute_log_prob")["entropy"].tolist()')

    assert panel.locator(".js-plotly-plot").count() == 6
    assert drawn("as measured") == [[1, 2], pytest.approx(measured())]
    notebook.picture("metrics")

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
    page.wait_for_function("() => document.querySelector('.js-plotly-plot')?.layout.yaxis.type === 'log'")
    panel.get_by_label("y axis").select_option("linear")

    # which metrics: search, by mouse and by keyboard
    panel.get_by_text("Metrics shown: 6 of").click()
    search = panel.get_by_label("search")
    search.fill("clip_fraction update_critic")
    page.keyboard.press("Enter")
    notebook.wait_for("len(view._found()) == 2")
    box = panel.get_by_label("value_clip_fraction", exact=True)
    box.focus()
    page.keyboard.press("Space")
    notebook.wait_for("('update_critic', 'value_clip_fraction') in view.drawn()")
    panel.locator('[data-chart="update_critic/value_clip_fraction"].js-plotly-plot').wait_for()
    panel.get_by_role("button", name="Hide these 2").click()
    notebook.wait_for("len(view.drawn()) == 6")
    panel.get_by_role("button", name="As at first").click()
    notebook.wait_for("view.shown is None")

    # another run beside it
    panel.get_by_text("Other runs beside: 0 of 1").click()
    panel.get_by_role("checkbox", name="earlier/20250101-000000-000000").check()
    assert until("earlier/20250101-000000-000000", 5)[0] == [1, 2, 3, 4, 5]
    page.wait_for_function("() => document.querySelectorAll('.js-plotly-plot').length === 6")
    panel.locator(f'[data-chart="{ENTROPY}"]').scroll_into_view_if_needed()
    notebook.picture("metrics_beside")

    # the samples of an iteration: a click on a point, a field and a button, and the arrow keys on a chart
    def samples_of(iteration: int) -> None:
        notebook.wait_for(f"panel.shown == 'samples' and panel.views['samples'].iteration == {iteration}")
        panel.get_by_role("tab", name="Samples").and_(panel.locator('[aria-selected="true"]')).wait_for()
        panel.locator(f'[data-view="samples"] >> text=/iteration {iteration}/').first.wait_for()
        panel.get_by_role("tab", name="Metrics").click()
        notebook.wait_for("panel.shown == 'metrics'")

    chart = panel.locator(f'[data-chart="{ENTROPY}"]')
    chart.hover(position=chart.evaluate(SECOND))
    chart.locator(".hovertext").first.wait_for()
    chart.click(position=chart.evaluate(SECOND))
    samples_of(2)
    panel.get_by_role("spinbutton", name="iteration").fill("3")
    page.keyboard.press("Tab")
    panel.get_by_role("button", name="Samples of iteration 3").focus()
    page.keyboard.press("Enter")
    samples_of(3)
    chart.focus()
    page.keyboard.press("Home")
    page.wait_for_function("() => document.querySelector('.wb-said').textContent.includes('at 1:')")
    page.keyboard.press("Enter")
    samples_of(1)
