"""Differences with their intervals, one above the other, on one axis with a line at 0."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape

from workbench.display.html import Markup, svg
from workbench.display.palette import ROLE_STYLES

WIDTH, LABELS, NUMBERS, ROW, AXIS = 760, 190, 210, 34, 40
DECIDED, OPEN = ROLE_STYLES["actor"].colour, "#8a8a8a"


@dataclass(frozen=True)
class Difference:
    """One row of the chart. low, high: ends of the interval; not finite: it has none, and is drawn as a point."""

    label: str
    value: float
    low: float
    high: float
    decided: bool


def interval_chart(rows: Sequence[Difference], caption: str) -> Markup:
    """The picture; what is decided (its interval leaves out 0) has colour and a full point."""
    ends = [end for row in rows for end in (row.value, row.low, row.high) if math.isfinite(end)]
    most = max((abs(end) for end in ends), default=0.0) or 1.0
    step = _step(most)
    reach = step * math.ceil(most / step)
    left, right = LABELS, WIDTH - NUMBERS
    height = ROW * len(rows) + AXIS

    def x(value: float) -> float:
        return left + (right - left) * (value + reach) / (2 * reach)

    parts = [_axis(x, reach, step, ROW * len(rows))]
    parts += [_row(row, ROW * n + ROW / 2, x) for n, row in enumerate(rows)]
    said = "; ".join(f"{row.label} {row.value:+.3g} [{row.low:+.3g}, {row.high:+.3g}]" for row in rows)
    return Markup(svg("".join(parts), WIDTH, height, f"{caption}: {said}"))


def _axis(x: Callable[[float], float], reach: float, step: float, bottom: float) -> str:
    found = []
    for n in range(-round(reach / step), round(reach / step) + 1):
        place, width = x(n * step), 1.5 if n == 0 else 0.5
        found.append(
            f'<line x1="{place:.1f}" x2="{place:.1f}" y1="0" y2="{bottom}" stroke="currentColor" '
            f'stroke-opacity="{0.7 if n == 0 else 0.25}" stroke-width="{width}"/>'
            f'<text x="{place:.1f}" y="{bottom + 18}" text-anchor="middle" font-size="12" fill="currentColor">'
            f"{n * step:+.3g}</text>"
        )
    return "".join(found).replace(">+0<", ">0<")


def _row(row: Difference, y: float, x: Callable[[float], float]) -> str:
    colour = DECIDED if row.decided else OPEN
    numbers = f"{row.value:+.3g}"
    bar = ""
    if math.isfinite(row.low) and math.isfinite(row.high):
        numbers += f" [{row.low:+.3g}, {row.high:+.3g}]"
        bar = (
            f'<line x1="{x(row.low):.1f}" x2="{x(row.high):.1f}" y1="{y}" y2="{y}" stroke="{colour}" stroke-width="3"/>'
        )
    text = 'font-size="13" fill="currentColor" dominant-baseline="middle"'
    return (
        f'<text x="{LABELS - 12}" y="{y}" text-anchor="end" {text}>{escape(row.label[:26])}</text>{bar}'
        f'<circle cx="{x(row.value):.1f}" cy="{y}" r="5" fill="{colour if row.decided else "none"}" stroke="{colour}" '
        f'stroke-width="2"/><text x="{WIDTH - NUMBERS + 14}" y="{y}" {text}>{numbers}</text>'
    )


def _step(most: float) -> float:
    """Of the axis: 1, 2 or 5 times a power of ten, with two to five steps to each side."""
    power = 10.0 ** math.floor(math.log10(most / 2))
    return next(power * one for one in (1, 2, 5, 10) if power * one * 5 >= most)
