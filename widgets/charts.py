"""Base class of chart views: one plotly figure, live in the page and stored in the notebook."""

from __future__ import annotations

import gzip
from abc import abstractmethod
from functools import cache
from typing import Any, ClassVar

from workbench.display.curves import Chart, figure, summary, tables
from workbench_widgets.view import View


@cache
def plotly_js() -> bytes:
    """plotly.js from the installed package, compressed. A page gets it once, without any network access."""
    import plotly.offline

    source: str = plotly.offline.get_plotlyjs()
    return gzip.compress(source.encode())


class Charts(View):
    """A view that shows a sheet of charts. Subclasses define the charts; the script is `static/chart.js`.

    The page asks for plotly (`library`) when it first shows charts and has not loaded it. If loading fails, the page
    says so and shows the tables.

    looks_at: the action when a point is selected, with its x and its curve's source; "" for none.
    """

    script, has_figure = True, True
    looks_at: ClassVar[str] = ""

    def __init__(self, lab: Any, driver: Any) -> None:
        super().__init__(lab, driver)
        self._wanted = False

    @abstractmethod
    def charts(self) -> list[Chart]:
        """The charts to draw now."""

    def empty(self) -> str:
        """Html to show if there is nothing to draw."""
        return "<p>Nothing has been recorded yet.</p>"

    def notes(self) -> str:
        """Html above the charts."""
        return ""

    def below(self) -> str:
        """Html below the charts."""
        return ""

    def picture(self) -> str:
        """The texts and tables; the charts are in `figure`."""
        charts = self.charts()
        return f"<div>{self.notes()}{tables(charts) if charts else self.empty()}{self.below()}</div>"

    def figure(self) -> dict[str, Any] | None:
        charts = self.charts()
        return figure(charts) if charts else None

    def text(self) -> str:
        charts = self.charts()
        return "\n".join(
            [self.title, *(f"  {summary(chart)}" for chart in charts)] if charts else [f"{self.title}: nothing"]
        )

    def payload(self) -> tuple[dict[str, Any], list[bytes]]:
        charts = self.charts()
        data = {
            "figure": figure(charts) if charts else None,
            "looks": self.looks_at,
            "notes": self.notes() if charts else self.empty(),
            "below": tables(charts) + self.below(),
        }
        buffers = [plotly_js()] if self._wanted else []
        self._wanted = False
        return data, buffers

    def on_library(self) -> None:
        self._wanted = True
