"""Sliders that search for the best placement: made by `wb.mapping.what_if(...)`."""

from __future__ import annotations

import os
import time
from threading import Thread, current_thread
from typing import Any

import ipywidgets
import pandas as pd

from workbench.mapping.what_if import AXES, PlacementMap, Point, label, value_text
from workbench_widgets.panel import STATIC

EVERY_S, FIRST_S = 0.15, 2.0  # how often a map is drawn while it is refined; what a cell waits for the first at most


class WhatIf(ipywidgets.VBox):
    """The best plan at the sliders' point, and the map through that point over two of their axes. A thread searches,
    the fastest answers first; after a change a new search replaces it."""

    def __init__(self, grid: PlacementMap, across: str, up: str) -> None:
        self.grid = grid
        self.sliders = {
            axis: ipywidgets.SelectionSlider(
                description=label(axis), options=[(value_text(one), one) for one in grid.steps[axis]], value=value,
                style={"description_width": "110px"}, layout={"width": "380px"},
            )
            for axis, value in zip(AXES, grid.given, strict=True)
        }  # fmt: skip
        names = [(label(axis), axis) for axis in AXES]
        self.across = ipywidgets.Dropdown(description="across", options=names, value=across)
        self.up = ipywidgets.Dropdown(description="up", options=names, value=up)
        self._map, self._answer = ipywidgets.HTML(), ipywidgets.HTML(layout={"width": "370px"})
        rows = [*self.sliders.values()], [self.across, self.up], [self._map, self._answer]
        super().__init__([ipywidgets.HBox(row, layout={"flex_flow": "row wrap"}) for row in rows])
        for control in (*self.sliders.values(), self.across, self.up):
            control.observe(self._ask, "value")
        self._ask()

    @property
    def seen(self) -> tuple[Point, str, str]:
        """The sliders' point, and the axes of the map."""
        return tuple(slider.value for slider in self.sliders.values()), self.across.value, self.up.value

    def frame(self) -> pd.DataFrame:
        """One row a cell of the map; searches all of them first. Columns: the two axes, the best placement, its seconds
        an iteration, the second best, how much slower that is, as a share, and why."""
        for _ in self.grid.refine(*self.seen):
            pass
        return pd.DataFrame(self.grid.rows(*self.seen))

    def _ask(self, change: Any = None) -> None:
        """Search and draw for the current sliders. If one axis is set to the other, the two are swapped."""
        if self.across.value == self.up.value:
            (self.up if change.owner is self.across else self.across).value = change.old
        self.drawing = Thread(target=self._work, args=self.seen, daemon=True)  # a kernel that ends does not wait for it
        self.drawing.start()

    def _work(self, *seen: Any) -> None:
        drawn_s = 0.0
        for _ in self.grid.refine(*seen):
            if self.drawing is not current_thread():
                return
            if time.monotonic() > drawn_s + EVERY_S:
                self._draw(*seen)
                drawn_s = time.monotonic()
        self._draw(*seen)

    def _draw(self, point: Point, across: str, up: str) -> None:
        self._map.value, self._answer.value = self.grid.picture(point, across, up), self.grid.answer(point)

    def __repr__(self) -> str:
        return f"<WhatIf at {', '.join(map(value_text, self.seen[0]))}: .frame() has the map>"

    def _repr_mimebundle_(self, **options: Any) -> Any:
        static = os.environ.get(STATIC) == "static"
        self.drawing.join(None if static else FIRST_S)
        live = {} if static else super()._repr_mimebundle_(**options)
        return {**live, "text/html": self._map.value + self._answer.value, "text/plain": repr(self)}
