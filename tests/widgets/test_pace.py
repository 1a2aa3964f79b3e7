"""The rounds in which the panels of a workbench draw."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest

from workbench_widgets import Panel, View
from workbench_widgets.driver import LEAST_REST_S, MOST_REST_S, REST, Driver, Pace


class Lab(SimpleNamespace):
    """What a view of this file looks at."""

    iteration = 0

    def open_runs(self) -> list[Any]:
        return []


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    clock = SimpleNamespace(now_s=100.0, spent_s=0.0)
    times = SimpleNamespace(monotonic=lambda: clock.now_s, thread_time=lambda: clock.spent_s)
    monkeypatch.setattr("workbench_widgets.driver.time", times)
    monkeypatch.setattr(sys.modules["workbench_widgets.panel"], "time", times)  # `panel` of the package is a function
    return clock


class Page:
    """Has the last drawing that it was sent."""

    shown = ""

    def send(self, message: dict[str, Any], buffers: list[bytes]) -> None:
        if message["kind"] == "draw":
            self.shown = message["html"]


def test_panels_of_one_workbench_show_the_same_iteration(clock: SimpleNamespace) -> None:
    class Follows(View):
        costs_s = 0.0

        def depends_on(self) -> int:
            return int(self.lab.iteration)

        def picture(self) -> str:
            clock.spent_s += self.costs_s
            return f"iteration {self.lab.iteration}"

    lab = Lab()
    driver, panels, pages = Driver(lab), list[Panel](), list[Page]()
    for name, costs_s in (("strip", 0.0003), ("stepper", 0.008)):
        view = type(name, (Follows,), {"name": name, "title": name, "costs_s": costs_s})
        panel, page = Panel(lab, [view(lab, driver)], driver), Page()
        panel._front, panel._page_is_there = page, True  # type: ignore[assignment]  # and its thread is this test
        panels.append(panel)
        pages.append(page)
    seen = set[str]()
    for _ in range(300):  # looks of 0.1 s, an iteration each; now one looks first, now the other
        lab.iteration += 1
        clock.now_s += 0.1
        for panel in panels if lab.iteration % 2 else panels[::-1]:
            panel._look()
        shown = {page.shown for page in pages}
        assert len(shown) == 1
        seen |= shown
    assert 20 < len(seen) < 30  # 8.3 ms a round, 30 s
    assert clock.spent_s < 0.01 * 30


def test_a_round_is_followed_by_rest(clock: SimpleNamespace) -> None:
    pace = Pace()
    assert pace.round() == pace.round() == 1
    clock.now_s += LEAST_REST_S
    assert pace.round() == 2
    pace.took(0.01)
    pace.took(0.01)
    clock.now_s += REST * 0.02 - 0.01
    assert pace.round() == 2
    clock.now_s += 0.02
    assert pace.round() == 3
    pace.took(10.0)
    clock.now_s += MOST_REST_S
    assert pace.round() == 4
