"""Charts of curves: plain records, and each drawn as a small svg with axes and a key, without a script."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from html import escape
from typing import Literal, NamedTuple
from zlib import crc32

from workbench.display.html import bytes_text, folded, numbers_table, picture_id


class Stroke(NamedTuple):
    """How a curve is drawn: its colour, and dashes and a marker for those who do not see the colours."""

    colour: str
    dash: str = ""
    marker: str = "circle"


# Okabe and Ito, "Color Universal Design", 2008
STROKES = (
    Stroke("#0072b2", "", "circle"), Stroke("#d55e00", "6 3", "square"), Stroke("#009e73", "2 3", "diamond"),
    Stroke("#cc79a7", "8 3 2 3", "triangle-up"), Stroke("#e69f00", "1 4", "x"),
    Stroke("#56b4e9", "10 4", "square"), Stroke("#888888", "4 4", "diamond"), Stroke("#b0a000", "2 6", "triangle-up"),
)  # fmt: skip
# in a box from -1 to 1
MARKERS = {
    "circle": "M-1,0 a1,1 0 1,0 2,0 a1,1 0 1,0 -2,0",
    "square": "M-.9,-.9 H.9 V.9 H-.9 z",
    "diamond": "M0,-1.2 L1.2,0 L0,1.2 L-1.2,0 z",
    "triangle-up": "M0,-1.2 L1.2,1 H-1.2 z",
    "x": "M-1,-1 L1,1 M-1,1 L1,-1",
}
# Lines of a hatch, by the name that plotly has for it; "": a plain ground.
HATCHES = {
    "": "", "/": "M0,6 L6,0", "\\": "M0,0 L6,6", "-": "M0,3 H6", "|": "M3,0 V6", "x": "M0,0 L6,6 M0,6 L6,0",
    "+": "M0,3 H6 M3,0 V6", ".": "M2,3 h2",
}  # fmt: skip
WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 400, 190, 62, 10, 30, 38
ID = "<id>"  # of a picture, until it is known; text is escaped, and holds no such
COLUMNS, GAP, KEY_LINE, CHARACTER = 2, 14, 17, 6.8
MOST_POINTS, MOST_MARKERS = 400, 40
MOST_CELLS, MOST_ROWS, LEAST_ROWS = 1500, 50, 3  # of tables: all together, and each


@dataclass(frozen=True, kw_only=True)
class Curve:
    """Numbers y at x; a y that is not finite is a gap.

    kind: "line"; "faint", the ground of another line; "points", not joined; "area", stacked on the areas before it,
    which have the same x; "band", from `low` to y, the ground of a line (in pictures; the panel has none).
    source: which run it is of; "" for the one that is looked at. hatch: of an area, see
    `HATCHES`. words: what each point is, shown where the pointer is.
    """

    name: str
    x: Sequence[float]
    y: Sequence[float]
    stroke: Stroke = STROKES[0]
    kind: Literal["line", "faint", "points", "area", "band"] = "line"
    low: Sequence[float] = field(default=())
    source: str = ""
    hatch: str = ""
    words: Sequence[str] = field(default=())


@dataclass(frozen=True, kw_only=True)
class Chart:
    """Curves over one x.

    y: what it counts, in a word or two over its axis. unit: "bytes", or "" for plain numbers. log: y in powers of ten;
    what is not above 0 is left out. note: a line under the title. at: an x that is marked. limit: a y with words for
    it, drawn across. ends: words at the two ends of the x axis, in place of its numbers.
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
    ends: tuple[str, str] | None = None


def smoothed(values: Sequence[float], factor: float) -> list[float]:
    """The exponential moving average m_t = factor m_{t-1} + (1 - factor) x_t from m_0 = 0, divided by 1 - factor^t,
    which takes out the pull of the 0 (Kingma and Ba, arXiv:1412.6980, section 3). What is not finite stays as it is,
    and counts for nothing. factor: 0 to below 1."""
    mean, weight, found = 0.0, 0.0, []
    for value in values:
        if math.isfinite(value):
            weight = factor * weight + (1 - factor)  # 1 - factor^t
            mean += (
                (1 - factor) / weight * (value - mean)
            )  # the mean that is divided already: exact where all are equal
            found.append(mean)
        else:
            found.append(value)
    return found


# --- as svg -----------------------------------------------------------------------------------------------------------


def sheet(charts: Sequence[Chart]) -> str:
    """Charts in columns under one key of their curves, as one svg."""
    columns = min(COLUMNS, max(1, len(charts)))
    width = columns * (WIDTH + GAP) - GAP
    head, top = _key((curve for chart in charts for curve in chart.curves), width)
    parts = [head]
    for n, chart in enumerate(charts):
        x, y = n % columns * (WIDTH + GAP), top + n // columns * (HEIGHT + GAP)
        parts.append(f'<g transform="translate({x:g},{y:g})">{draw(chart)}</g>')
    height = top + -(-len(charts) // columns) * (HEIGHT + GAP)
    label = escape("; ".join(summary(chart) for chart in charts))
    return _svg("".join(parts), width, height, label)


def key(charts: Sequence[Chart]) -> str:
    """The key of the charts' curves, as an svg of its own; "" where all have one look."""
    inner, height = _key((curve for chart in charts for curve in chart.curves), 2 * WIDTH)
    return _svg(inner, 2 * WIDTH, height, "key of the curves") if inner else ""


def summary(chart: Chart) -> str:
    """A chart in a line of text: its title and the last number of each curve."""
    lasts = [f"{curve.name} {number(curve.y[-1], chart.unit)}" for curve in _shown(chart.curves) if len(curve.y)]
    return f"{chart.title}: {', '.join(lasts) or 'no points'}" + (f" ({chart.note})" if chart.note else "")


def tables(charts: Sequence[Chart], *, most_cells: int = MOST_CELLS) -> str:
    """The last points of charts as tables, folded: a row an x, a column a curve; points that are not joined have a
    table of their own. most_cells: of all together."""
    shown = [(chart, _shown(chart.curves)) for chart in charts]
    parts = [
        (chart, part)
        for chart, curves in shown
        for part in ([c for c in curves if c.kind != "points"], [c for c in curves if c.kind == "points"])
        if part
    ]
    columns = sum(1 + len(part) for _, part in parts)
    rows = min(MOST_ROWS, max(LEAST_ROWS, most_cells // max(1, columns)))
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
    """A number of a chart, as people read it."""
    return bytes_text(value) if unit == "bytes" and math.isfinite(value) else f"{value:.4g}"


def draw(chart: Chart) -> str:
    """A chart, `WIDTH` by `HEIGHT`, as the inside of an svg."""
    lines = _stacked(chart.curves)
    low, high = _range(chart, lines)
    scale = math.log10 if chart.log else float
    xs = [x for line in lines for x in (min(line.curve.x), max(line.curve.x))]
    xs += [] if chart.at is None or not xs else [chart.at]
    first, last = (min(xs), max(xs)) if xs else (0.0, 1.0)
    bottom = HEIGHT - BOTTOM

    def at_x(x: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * ((x - first) / (last - first) if last > first else 0.5)

    def at_y(y: float) -> float:
        return bottom - (bottom - TOP) * (scale(y) - scale(low)) / (scale(high) - scale(low))

    parts = [_text(0, 12, chart.title, extra='font-weight="600"')]
    if chart.y:
        parts.append(_text(0, 25, chart.y, extra='font-size="10" opacity=".75"'))
    if chart.note:
        parts.append(_text(WIDTH - RIGHT, 23, chart.note, anchor="end", extra='font-size="10" opacity=".75"'))
    for y in _ticks(low, high, log=chart.log):
        parts.append(f'<path d="M{LEFT},{at_y(y):.1f} H{WIDTH - RIGHT}" stroke="currentColor" stroke-opacity=".15"/>')
        parts.append(_text(LEFT - 5, at_y(y) + 4, number(y, chart.unit), anchor="end"))
    if chart.ends:
        parts += [
            _text(LEFT, bottom + 15, chart.ends[0]),
            _text(WIDTH - RIGHT, bottom + 15, chart.ends[1], anchor="end"),
        ]
    else:
        steps = [x for x in _ticks(first, last, most=6) if chart.x != "iteration" or x == int(x)]
        parts += [_text(at_x(x), bottom + 15, f"{x:g}", anchor="middle") for x in steps]
    parts.append(_text((LEFT + WIDTH - RIGHT) / 2, bottom + (15 if chart.ends else 29), chart.x, anchor="middle"))
    parts.append(
        f'<path d="M{LEFT},{TOP} V{bottom} H{WIDTH - RIGHT}" fill="none" stroke="currentColor" stroke-opacity=".4"/>'
    )
    parts += [_line(line, at_x, at_y, chart.log) for line in lines]
    if chart.limit is not None and low <= chart.limit[0] <= high:
        y = at_y(chart.limit[0])
        parts.append(f'<path d="M{LEFT},{y:.1f} H{WIDTH - RIGHT}" stroke="currentColor" stroke-dasharray="7 4"/>')
        parts.append(_text(LEFT + 4, y + 12, chart.limit[1], extra='font-size="10"'))
    if chart.at is not None and xs:
        x = at_x(chart.at)
        parts.append(f'<path d="M{x:.1f},{TOP} V{bottom}" stroke="currentColor" stroke-dasharray="2 3"/>')
    return "".join(parts)


class _Line(NamedTuple):
    """A curve and where it is: y is its own, or what it and the areas under it come to; base: the top of these."""

    curve: Curve
    y: Sequence[float]
    base: Sequence[float]


def _stacked(curves: Iterable[Curve]) -> list[_Line]:
    lines: list[_Line] = []
    base: Sequence[float] = ()
    for curve in curves:
        if curve.kind != "area":
            lines.append(_Line(curve, curve.y, curve.low))
            continue
        under = base or [0.0] * len(curve.y)
        base = [low + (y if math.isfinite(y) else 0.0) for low, y in zip(under, curve.y, strict=True)]
        lines.append(_Line(curve, base, under))
    return [line for line in lines if len(line.curve.x)]


def _range(chart: Chart, lines: Sequence[_Line]) -> tuple[float, float]:
    """From the smallest to the largest that is drawn; never of no height."""
    lows = [y for line in lines if line.curve.kind == "band" for y in line.base]
    values = [
        y for y in (*lows, *(y for line in lines for y in line.y)) if math.isfinite(y) and (y > 0 or not chart.log)
    ]
    values += [chart.limit[0]] if chart.limit is not None else []
    low, high = (min(values), max(values)) if values else (1.0, 10.0)
    if chart.unit == "bytes" and not chart.log:
        low = 0.0
    if low == high:
        low, high = (low / 2, high * 2) if chart.log else (low - (abs(low) / 2 or 1), high + (abs(high) / 2 or 1))
    return low, high


def _ticks(low: float, high: float, *, most: int = 4, log: bool = False) -> list[float]:
    """Round numbers from low to high: multiples of 1, 2 or 5 times a power of ten; with `log` powers of ten, or the
    ends where there are fewer than two."""
    if log:
        powers = range(math.ceil(math.log10(low) - 1e-9), math.floor(math.log10(high) + 1e-9) + 1)
        return [10.0**n for n in powers[:: max(1, -(-len(powers) // (most + 1)))]] if len(powers) > 1 else [low, high]
    if high <= low:
        return [low]
    power = 10.0 ** math.floor(math.log10((high - low) / most))
    step = next(f * power for f in (1, 2, 5, 10) if f * power >= (high - low) / most * (1 - 1e-9))
    first = math.ceil(low / step - 1e-9)
    return [
        round(n * step, 12 - math.floor(math.log10(step))) for n in range(first, math.floor(high / step + 1e-9) + 1)
    ]


def _line(line: _Line, at_x: Callable[[float], float], at_y: Callable[[float], float], log: bool) -> str:
    curve, stroke = line.curve, line.curve.stroke
    if curve.kind == "band":
        return "".join(_band(line, run, at_x, at_y) for run in _runs(line.y, log=log))
    if curve.kind == "area":
        there = list(range(len(curve.x)))
        if len(there) == 1:  # one reading: a bar
            left, right = LEFT, WIDTH - RIGHT
            tops = f"{left},{at_y(line.y[0]):.1f} {right},{at_y(line.y[0]):.1f}"
            under = f"{right},{at_y(line.base[0]):.1f} {left},{at_y(line.base[0]):.1f}"
        else:
            kept = _thinned(there, line.y)
            tops = " ".join(f"{at_x(curve.x[n]):.1f},{at_y(line.y[n]):.1f}" for n in kept)
            under = " ".join(f"{at_x(curve.x[n]):.1f},{at_y(line.base[n]):.1f}" for n in reversed(kept))
        title = f"<title>{escape(curve.name)}</title>"
        ground = _ground(stroke.colour, curve.hatch)
        shape = f'<polygon points="{tops} {under}" fill="{ground[0]}" stroke="{stroke.colour}" stroke-width=".7"/>'
        return f"<g>{ground[1]}{title}{shape}</g>"
    runs = list(_runs(line.y, log=log))
    parts = []
    if curve.kind != "points":
        look = f'fill="none" stroke="{stroke.colour}" stroke-dasharray="{stroke.dash}"'
        look += ' stroke-opacity=".35"' if curve.kind == "faint" else ' stroke-width="2"'
        for run in runs:
            points = " ".join(f"{at_x(curve.x[n]):.1f},{at_y(line.y[n]):.1f}" for n in _thinned(run, line.y))
            parts.append(f'<polyline points="{points}" {look}/>')
    drawn = [n for run in runs for n in run]
    if curve.kind == "points" or (curve.kind == "line" and len(drawn) <= MOST_MARKERS):
        places = [(at_x(curve.x[n]), at_y(line.y[n])) for n in drawn]
        parts.append(_markers(stroke, places, open_=curve.kind == "points"))
    return "".join(parts)


def _band(line: _Line, run: Sequence[int], at_x: Callable[[float], float], at_y: Callable[[float], float]) -> str:
    """Between two gaps."""
    kept = [n for n in _thinned(run, line.y) if math.isfinite(line.base[n])]
    tops = [f"{at_x(line.curve.x[n]):.1f},{at_y(line.y[n]):.1f}" for n in kept]
    under = [f"{at_x(line.curve.x[n]):.1f},{at_y(line.base[n]):.1f}" for n in reversed(kept)]
    return f'<polygon points="{" ".join([*tops, *under])}" fill="{line.curve.stroke.colour}" fill-opacity=".18"/>'


def _runs(y: Sequence[float], *, log: bool) -> Iterator[list[int]]:
    """Numbers of the points between the gaps."""
    run: list[int] = []
    for n, value in enumerate(y):
        if math.isfinite(value) and (value > 0 or not log):
            run.append(n)
        elif run:
            yield run
            run = []
    if run:
        yield run


def _thinned(run: Sequence[int], y: Sequence[float]) -> list[int]:
    """Of many points the lowest and the highest of each stretch: what the eye sees of them."""
    if len(run) <= MOST_POINTS:
        return list(run)
    each = -(-2 * len(run) // MOST_POINTS)
    kept = {run[0], run[-1]}
    for start in range(0, len(run), each):
        stretch = run[start : start + each]
        kept |= {min(stretch, key=y.__getitem__), max(stretch, key=y.__getitem__)}
    return sorted(kept)


def _markers(stroke: Stroke, places: Sequence[tuple[float, float]], *, open_: bool, size: float = 2.6) -> str:
    fill = "none" if open_ else stroke.colour
    drawn = "".join(
        f'<path d="{MARKERS[stroke.marker]}" transform="translate({x:.1f},{y:.1f}) scale({size})"/>' for x, y in places
    )
    look = f'fill="{fill}" stroke="{stroke.colour}" stroke-width="{1 / size:.2f}"'
    return f"<g {look}>{drawn}</g>" if drawn else ""


def _ground(colour: str, hatch: str) -> tuple[str, str]:
    """What an area is filled with, and the definition that this needs."""
    if not hatch:
        return colour, ""
    name = f"wb-{ID}-{crc32(f'{colour}{hatch}'.encode()):08x}"
    inner = f'<rect width="6" height="6" fill="{colour}" fill-opacity=".3"/>'
    inner += f'<path d="{HATCHES[hatch]}" stroke="{colour}" stroke-width="1.4" fill="none"/>'
    return f"url(#{name})", f'<pattern id="{name}" width="6" height="6" patternUnits="userSpaceOnUse">{inner}</pattern>'


def _shown(curves: Iterable[Curve]) -> list[Curve]:
    """The curves that a key names."""
    return [curve for curve in curves if curve.kind not in ("faint", "band")]


def _key(curves: Iterable[Curve], width: float) -> tuple[str, float]:
    """An entry for each look, and the height of all; nothing where all look the same."""
    looks = {(c.name, c.kind, c.stroke, c.hatch): c for c in _shown(curves)}
    if len(looks) < 2:
        return "", 0.0
    parts, x, y = [], 0.0, 0.0
    for curve in looks.values():
        needed = 42 + CHARACTER * len(curve.name)
        if x and x + needed > width:
            x, y = 0.0, y + KEY_LINE
        stroke = curve.stroke
        if curve.kind == "area":
            fill, definition = _ground(stroke.colour, curve.hatch)
            place = f'x="{x:g}" y="{y + 2:g}" width="22" height="11"'
            parts.append(f'{definition}<rect {place} fill="{fill}" stroke="{stroke.colour}"/>')
        else:
            if curve.kind == "line":
                dash = f'stroke-width="2" stroke-dasharray="{stroke.dash}"'
                parts.append(f'<path d="M{x:g},{y + 8:g} h22" stroke="{stroke.colour}" {dash}/>')
            parts.append(_markers(stroke, [(x + 11, y + 8)], open_=curve.kind == "points", size=3))
        parts.append(_text(x + 27, y + 12, curve.name))
        x += needed
    return "".join(parts), y + KEY_LINE + 8


def _text(x: float, y: float, text: str, *, anchor: str = "start", extra: str = "") -> str:
    place = f'x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"'
    return f'<text {place} fill="currentColor" {extra}>{escape(text)}</text>'


def _svg(inner: str, width: float, height: float, label: str) -> str:
    inner = inner.replace(ID, picture_id(f"{label}{inner}"))
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="-2 0 {width + 4:g} {height:g}" width="{width + 4:g}" '
        f'height="{height:g}" role="img" aria-label="{label}" '
        f'style="font:11px system-ui,sans-serif;max-width:100%;height:auto">{inner}</svg>'
    )
