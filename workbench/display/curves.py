"""Charts of curves: plain records, and their description as plotly's JSON."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape as escape_html
from typing import Any, Literal, NamedTuple

import pandas as pd

from workbench.display.html import bytes_text, folded, numbers_table

MIMETYPE = "application/vnd.plotly.v1+json"  # JupyterLab and VS Code draw it, also where there is no kernel


class Stroke(NamedTuple):
    """How a curve is drawn: colour, and plotly's names of a dash and a marker, so that colour is not the only
    difference."""

    colour: str
    dash: str = "solid"
    marker: str = "circle"


# Okabe and Ito, "Color Universal Design", 2008
STROKES = (
    Stroke("#0072b2"), Stroke("#d55e00", "6px,3px", "square"), Stroke("#009e73", "2px,3px", "diamond"),
    Stroke("#cc79a7", "8px,3px,2px,3px", "triangle-up"), Stroke("#e69f00", "1px,4px", "x"),
    Stroke("#56b4e9", "10px,4px", "square"), Stroke("#888888", "4px,4px", "diamond"),
    Stroke("#b0a000", "2px,6px", "triangle-up"),
)  # fmt: skip
INK, GRID = "#777777", "rgba(128,128,128,0.25)"  # of text and lines: read on white and on near black
COLUMNS, HEIGHT, KEY_LINE = 2, 260, 20  # of a sheet: charts in a row, pixels of a chart and of a line of the key
MOST_POINTS, MOST_MARKERS = 400, 60  # of a line
MOST_CELLS, MOST_ROWS, LEAST_ROWS = 1500, 50, 3  # of tables: all together, and each


@dataclass(frozen=True, kw_only=True)
class Curve:
    """Numbers y at x; a y that is not finite is a gap.

    kind: "line"; "faint", behind another line; "points", not joined; "area", stacked on the areas before it, which have
    the same x; "band", from `low` to y, behind a line; "intervals", points y, each with a bar from `low` to `high`.
    source: the run it comes from; "" for the current run. hatch: a plotly pattern shape, for an area. words: a label
    for each point, shown under the pointer.
    """

    name: str
    x: Sequence[float]
    y: Sequence[float]
    stroke: Stroke = STROKES[0]
    kind: Literal["line", "faint", "points", "area", "band", "intervals"] = "line"
    low: Sequence[float] = field(default=())
    high: Sequence[float] = field(default=())
    source: str = ""
    hatch: str = ""
    words: Sequence[str] = field(default=())


@dataclass(frozen=True, kw_only=True)
class Chart:
    """Curves over one x.

    y: a word or two for its axis. unit: "bytes", or "" for plain numbers. log: y in powers of ten; values of 0 or less
    are left out. note: a line under the title. at: an x that is marked. limit: a y and its label, drawn across. ticks:
    labels by x, in place of the axis's numbers.
    """

    title: str
    curves: tuple[Curve, ...]
    x: str = "iteration"
    y: str = ""
    unit: str = ""
    log: bool = False
    note: str = ""
    at: float | None = None
    limit: tuple[float, str] | None = None
    ticks: Mapping[float, str] | None = None


class Charted:
    """A result that a notebook shows as its html, if it has any, with its charts below."""

    def charts(self) -> list[Chart]:
        raise NotImplementedError

    def figure(self) -> dict[str, Any]:
        """Its charts as plotly's JSON; `plotly.io.from_json(json.dumps(...))` writes it as a file or a page."""
        return figure(self.charts())

    def _ipython_display_(self) -> None:
        from IPython.display import display

        html = getattr(self, "_repr_html_", str)()
        if html or not self.charts():
            display({"text/html": html, "text/plain": repr(self)}, raw=True)
        if charts := self.charts():
            display({MIMETYPE: figure(charts), "text/plain": "\n".join(map(summary, charts))}, raw=True)


@dataclass(frozen=True, repr=False)
class Sheet(Charted):
    """Charts side by side with one legend, for a notebook to show."""

    drawn: tuple[Chart, ...]

    def charts(self) -> list[Chart]:
        return list(self.drawn)

    def __repr__(self) -> str:
        return "\n".join(map(summary, self.drawn))


def sheet(charts: Iterable[Chart]) -> Sheet:
    """Arrange charts in columns with one legend, for a cell to show."""
    return Sheet(tuple(charts))


def smoothed(values: Sequence[float], factor: float) -> list[float]:
    """The exponential moving average m_t = factor m_{t-1} + (1 - factor) x_t from m_0 = 0, divided by 1 - factor^t,
    which removes the bias towards 0 (Kingma and Ba, arXiv:1412.6980, section 3). Values that are not finite stay, and
    do not enter the average. factor: 0 to below 1."""
    given = pd.Series(values, dtype="float64")
    finite = given.where(given.abs() < math.inf)
    return finite.ewm(alpha=1 - factor, ignore_na=True).mean().where(finite.notna(), given).tolist()


# --- as text ----------------------------------------------------------------------------------------------------------


def summary(chart: Chart) -> str:
    """A chart in one line of text: its title and the last number of each curve."""
    lasts = [f"{curve.name} {number(curve.y[-1], chart.unit)}" for curve in _named(chart.curves) if len(curve.y)]
    return f"{chart.title}: {', '.join(lasts) or 'no points'}" + (f" ({chart.note})" if chart.note else "")


def tables(charts: Sequence[Chart]) -> str:
    """The last points of charts as folded tables: a row an x, a column a curve; points that are not joined get their
    own table."""
    parts = [
        (chart, part)
        for chart, curves in ((chart, _named(chart.curves)) for chart in charts)
        for part in ([c for c in curves if c.kind != "points"], [c for c in curves if c.kind == "points"])
        if part
    ]
    columns = sum(1 + len(part) for _, part in parts)
    rows = min(MOST_ROWS, max(LEAST_ROWS, MOST_CELLS // max(1, columns)))
    return folded("These charts as tables", "".join(_table(chart, part, rows) for chart, part in parts))


def _table(chart: Chart, curves: Sequence[Curve], most: int) -> str:
    found: dict[float, dict[int, str]] = {}
    for column, curve in enumerate(curves):
        for x, y in zip(curve.x, curve.y, strict=True):
            found.setdefault(x, {})[column] = number(y, chart.unit) if math.isfinite(y) else "not finite"
    xs = sorted(found)[-most:]
    rows = [[f"{x:.6g}", *(found[x].get(n, "") for n in range(len(curves)))] for x in xs]
    unit = chart.y and f", {chart.y}"
    cut = f", the last {len(xs)} of {len(found)}" if len(xs) < len(found) else ""
    return numbers_table([chart.x, *(curve.name for curve in curves)], rows, caption=f"{chart.title}{unit}{cut}")


def number(value: float, unit: str = "") -> str:
    """Format a number of a chart for people."""
    return bytes_text(value) if unit == "bytes" and math.isfinite(value) else f"{value:.4g}"


def _named(curves: Iterable[Curve]) -> list[Curve]:
    return [curve for curve in curves if curve.kind not in ("faint", "band")]


# --- as plotly's JSON -------------------------------------------------------------------------------------------------


def figure(charts: Sequence[Chart]) -> dict[str, Any]:
    """Charts as one plotly figure in JSON: subplots in columns, with a legend if curves look different."""
    columns = min(COLUMNS, max(1, len(charts)))
    rows = -(-len(charts) // columns)
    looks = dict.fromkeys(look for chart in charts for look in map(_look, _named(chart.curves)))
    top = 8 + KEY_LINE * (1 + sum(8 + len(str(look[0])) for look in looks) // 110) if len(looks) > 1 else 8
    layout: dict[str, Any] = {
        "grid": {"rows": max(1, rows), "columns": columns, "pattern": "independent", "xgap": 0.16, "ygap": 0.38},
        "height": top + 40 + HEIGHT * max(1, rows), "margin": {"l": 56, "r": 12, "t": top + 44, "b": 44},
        "font": {"color": INK, "size": 11, "family": "system-ui, sans-serif"},
        "paper_bgcolor": "rgba(0,0,0,0)", "plot_bgcolor": "rgba(0,0,0,0)", "hovermode": "closest",
        "legend": {"orientation": "h", "x": 0, "yref": "container", "y": 1, "yanchor": "top"},
        "showlegend": len(looks) > 1, "annotations": [], "shapes": [],
    }  # fmt: skip
    data: list[dict[str, Any]] = []
    new = dict(looks)
    for n, chart in enumerate(charts, 1):
        at = "" if n == 1 else str(n)
        layout[f"xaxis{at}"], layout[f"yaxis{at}"] = _axes(chart)
        _add_words(layout, chart, at)
        for curve in chart.curves:
            if len(curve.x):
                is_new = curve.kind not in ("faint", "band") and new.pop(_look(curve), "") is None
                data += _traces(curve, at, unit=chart.unit, named=is_new)
    return {"data": data, "layout": layout}


def _look(curve: Curve) -> tuple[Any, ...]:
    return curve.name, curve.kind == "area", curve.stroke, curve.hatch


def _axes(chart: Chart) -> tuple[dict[str, Any], dict[str, Any]]:
    # uirevision: keeps the reader's zoom when points are added
    common = {"gridcolor": GRID, "linecolor": INK, "zerolinecolor": GRID, "uirevision": chart.title}
    xs = [x for curve in chart.curves for x in curve.x]
    across = {**common, "title": {"text": escape(chart.x), "standoff": 4}, "nticks": 8}
    if chart.ticks:
        across |= {"tickvals": list(chart.ticks), "ticktext": [escape(words) for words in chart.ticks.values()]}
    elif chart.x == "iteration" and xs and max(xs) - min(xs) < 9:  # whole numbers alone
        across |= {"tick0": 0, "dtick": 1}
    up = {**common, "type": "log" if chart.log else "linear", "title": {"text": escape(chart.y), "standoff": 4}}
    up["exponentformat"] = "e"  # 4e-8, not 40n
    if chart.unit == "bytes":
        up |= {"tickformat": "~s", "ticksuffix": "B"} | ({} if chart.log else {"rangemode": "tozero"})
    elif not (chart.log or any(y < 0 for curve in chart.curves for y in (*curve.y, *curve.low))):
        up["rangemode"] = "nonnegative"  # plotly draws a curve of zeros in the middle between -1 and 1
    return across, up


def _add_words(layout: dict[str, Any], chart: Chart, at: str) -> None:
    """Add a chart's title, note, marked x and limit."""
    words = {"showarrow": False, "xref": f"x{at} domain", "x": 0, "xanchor": "left"}
    over = {**words, "yref": f"y{at} domain", "y": 1, "yanchor": "bottom"}
    small = {"size": 10}
    layout["annotations"].append({**over, "text": f"<b>{escape(chart.title)}</b>", "yshift": 16 if chart.note else 4})
    if chart.note:
        layout["annotations"].append({**over, "text": escape(chart.note), "yshift": 2, "font": small})
    if chart.at is not None:
        ends = {"xref": f"x{at}", "x0": chart.at, "x1": chart.at, "yref": f"y{at} domain", "y0": 0, "y1": 1}
        layout["shapes"].append({**ends, "type": "line", "line": {"color": INK, "width": 1, "dash": "dot"}})
    if chart.limit is not None:
        limit, text = chart.limit
        ends = {"xref": f"x{at} domain", "x0": 0, "x1": 1, "yref": f"y{at}", "y0": limit, "y1": limit}
        layout["shapes"].append({**ends, "type": "line", "line": {"color": INK, "width": 1, "dash": "dash"}})
        y = math.log10(limit) if chart.log else limit
        layout["annotations"].append(
            {**words, "text": escape(text), "yref": f"y{at}", "y": y, "yanchor": "top", "font": small}
        )


def _traces(curve: Curve, at: str, *, unit: str, named: bool) -> list[dict[str, Any]]:
    stroke = curve.stroke
    kept = _kept(curve.y) if curve.kind in ("line", "faint") else range(len(curve.x))
    trace: dict[str, Any] = {
        "type": "scatter", "name": escape(curve.name), "x": [curve.x[n] for n in kept],
        "y": _finite(curve.y[n] for n in kept), "xaxis": f"x{at}", "yaxis": f"y{at}", "showlegend": named,
        "legendgroup": "/".join(map(str, _look(curve))), "meta": curve.source,
        "hovertemplate": f"%{{x}}: %{{y:.4~{'s}B' if unit == 'bytes' else 'g}'}<extra>%{{fullData.name}}</extra>",
    }  # fmt: skip
    if curve.words:
        trace["text"] = [escape(curve.words[n]) for n in kept]
        trace["hovertemplate"] = trace["hovertemplate"].replace("<extra>", "<br>%{text}<extra>")
    line = {"color": stroke.colour, "dash": stroke.dash, "width": 2}
    marker = {"color": stroke.colour, "symbol": stroke.marker, "size": 6}
    if curve.kind == "band":
        edge = {**trace, "mode": "lines", "line": {"width": 0}, "hoverinfo": "skip", "hovertemplate": None}
        filled = {"fill": "tonexty", "fillcolor": _shade(stroke.colour, 0.18)}
        return [{**edge, "y": _finite(curve.low)}, {**edge, **filled}]
    if curve.kind == "faint":
        return [{**trace, "mode": "lines", "line": {**line, "dash": "solid", "width": 1}, "opacity": 0.4}]
    if curve.kind == "intervals":
        ends = zip(curve.y, curve.low, curve.high, strict=True)
        below, above = zip(*((y - low, high - y) for y, low, high in ends), strict=True)
        bars = {"type": "data", "symmetric": False, "arrayminus": _finite(below), "array": _finite(above)}
        return [{**trace, "mode": "markers", "marker": {**marker, "size": 9}, "error_y": bars}]
    if curve.kind == "points":
        return [{**trace, "mode": "markers", "marker": {**marker, "symbol": f"{stroke.marker}-open", "size": 7}}]
    if curve.kind == "area":
        area: dict[str, Any] = {"mode": "lines" if len(curve.x) > 2 else "lines+markers", "stackgroup": f"areas{at}"}
        area |= {"line": {"color": stroke.colour, "width": 1}, "fillcolor": _shade(stroke.colour, 0.3)}
        if curve.hatch:
            pattern = {"shape": curve.hatch, "fgcolor": stroke.colour, "fillmode": "overlay", "size": 6}
            return [{**trace, **area, "fillpattern": pattern}]
        return [{**trace, **area, "fillcolor": _shade(stroke.colour, 0.9)}]
    mode = "lines" if len(kept) > MOST_MARKERS else "lines+markers"
    return [{**trace, "mode": mode, "line": line, "marker": marker}]


def _kept(y: Sequence[float]) -> Sequence[int]:
    """Indices of the points of a line that are drawn. A long line keeps the lowest and highest point of each stretch,
    which looks the same, and its gaps."""
    if len(y) <= MOST_POINTS:
        return range(len(y))
    each, kept = -(-2 * len(y) // MOST_POINTS), {0, len(y) - 1}
    for start in range(0, len(y), each):
        part = range(start, min(start + each, len(y)))
        finite = [n for n in part if math.isfinite(y[n])]
        kept |= {min(finite, key=y.__getitem__), max(finite, key=y.__getitem__)} if finite else set()
        kept |= {next(n for n in part if not math.isfinite(y[n]))} if len(finite) < len(part) else set()
    return sorted(kept)


def _finite(values: Iterable[float]) -> list[float | None]:
    """Turn values that are not finite into null: JSON has no NaN, and null is a gap."""
    return [value if math.isfinite(value) else None for value in values]


def escape(text: str) -> str:
    """Escape text for plotly, which reads it as html without quotes."""
    return escape_html(text, quote=False)


def _shade(colour: str, share: float) -> str:
    return f"rgba({','.join(str(int(colour[n : n + 2], 16)) for n in (1, 3, 5))},{share})"
