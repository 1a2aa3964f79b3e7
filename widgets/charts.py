"""What views of charts share: plotly where the page can have it, an svg else, and only what is new sent to the page."""

from __future__ import annotations

import gzip
import math
from abc import abstractmethod
from collections.abc import Hashable, Mapping, Sequence
from functools import cache
from typing import Any, ClassVar

from workbench.display.curves import Chart, Curve, key, sheet, summary, tables
from workbench_widgets.view import View


@cache
def plotly_js() -> bytes:
    """plotly.js as the installed package has it, zipped: it goes to a page once, and no network is asked for it."""
    import plotly.offline

    source: str = plotly.offline.get_plotlyjs()
    return gzip.compress(source.encode())


class Charts(View):
    """A view that is a sheet of charts. Subclasses say which charts; the script is `static/chart.js`.

    The page asks for plotly (`library`) when it first shows charts and has none, and shows the svg meanwhile. Where
    loading fails it says so (`stills`), and stays with the svg.

    looks_at: the action of a point that is chosen, with its x and the source of its curve; "" for none.
    """

    script = True
    looks_at: ClassVar[str] = ""

    def __init__(self, lab: Any, driver: Any) -> None:
        super().__init__(lab, driver)
        self._sent: dict[tuple[str, int], int] = {}  # points of each curve that the page has
        self._form: Hashable = None
        self._wanted = self._stills = False

    @abstractmethod
    def charts(self) -> list[Chart]:
        """What to draw now. While `edition` and the curves' names stay, curves only grow at their ends."""

    @abstractmethod
    def edition(self) -> Hashable:
        """Changes where points change that were there before."""

    def empty(self) -> str:
        """Html for when there is nothing to draw."""
        return "<p>Nothing has been recorded yet.</p>"

    def notes(self) -> str:
        """Html over the charts."""
        return ""

    def below(self) -> str:
        """Html under the charts."""
        return ""

    def picture(self) -> str:
        charts = self.charts()
        shown = sheet(charts) + tables(charts)
        return f"<div>{self.notes()}{shown if charts else self.empty()}{self.below()}</div>"

    def svg(self) -> str | None:
        charts = self.charts()
        return sheet(charts) if charts else None

    def text(self) -> str:
        charts = self.charts()
        return "\n".join(
            [self.title, *(f"  {summary(chart)}" for chart in charts)] if charts else [f"{self.title}: nothing"]
        )

    def payload(self, *, whole: bool) -> tuple[dict[str, Any], list[bytes]]:
        charts = self.charts()
        form = (self.edition(), tuple((c.title, c.log, c.unit, tuple(map(_look, c.curves))) for c in charts))
        whole = (
            whole
            or form != self._form
            or any(
                self._sent.get((chart.title, n), 0) > len(curve.x)
                for chart in charts
                for n, curve in enumerate(chart.curves)
            )
        )
        sent = {} if whole else self._sent
        data = {
            "whole": whole,
            "charts": [_chart(chart, sent) for chart in charts],
            "looks": self.looks_at,
            "key": key(charts),
            "notes": self.notes() if charts else self.empty(),
            "below": self.below(),
            "still": sheet(charts) if charts and (whole or self._wanted or self._stills) else None,
        }
        self._form = form
        self._sent = {(chart.title, n): len(curve.x) for chart in charts for n, curve in enumerate(chart.curves)}
        buffers = [plotly_js()] if self._wanted else []
        self._wanted = False
        return data, buffers

    def on_whole(self) -> None:
        """A front end lacks the points before those that it was sent."""
        self._form = None

    def on_library(self) -> None:
        self._wanted = True

    def on_stills(self) -> None:
        self._stills = True


def _look(curve: Curve) -> tuple[Hashable, ...]:
    return curve.name, curve.kind, curve.stroke, curve.source, curve.hatch


def _chart(chart: Chart, sent: Mapping[tuple[str, int], int]) -> dict[str, Any]:
    """Plain values; of each curve the points from the first that the page lacks."""
    plain = {name: getattr(chart, name) for name in ("title", "x", "y", "unit", "log", "note", "at", "limit")}
    curves = [
        {
            **{name: getattr(curve, name) for name in ("name", "kind", "source", "hatch")},
            **curve.stroke._asdict(),
            "first": (first := sent.get((chart.title, n), 0)),
            "x": list(curve.x[first:]),
            "y": _numbers(curve.y[first:]),
            "words": list(curve.words[first:]),
        }
        for n, curve in enumerate(chart.curves)
    ]
    return {**plain, "summary": summary(chart), "curves": curves}


def _numbers(values: Sequence[float]) -> list[float | None]:
    """JSON has no NaN: a gap is null."""
    return [value if math.isfinite(value) else None for value in values]
