"""Curves of several arms in one small picture."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape

# Okabe and Ito, "Color Universal Design", 2008; dashes for those who do not see the colours
STROKES = (("#0072b2", ""), ("#d55e00", "6 3"), ("#009e73", "2 3"), ("#cc79a7", "8 3 2 3"), ("#e69f00", "1 4"))
WIDTH, HEIGHT, LEFT, BOTTOM, TOP = 400, 180, 76, 50, 22


def overlay(series: Mapping[str, Sequence[float]], title: str, *, x: str) -> str:
    """An svg: each arm's numbers sorted, from its smallest to its largest, so that arms of other sizes compare.

    title: what the numbers are. x: what is sorted; the axis goes from the first of them to the last.
    """
    kept = {name: sorted(v for v in values if math.isfinite(v)) for name, values in series.items()}
    kept = {name: values for name, values in kept.items() if values}
    low = min((values[0] for values in kept.values()), default=0.0)
    high = max((values[-1] for values in kept.values()), default=1.0)
    span = (high - low) or 1.0

    def y(value: float) -> float:
        return TOP + (HEIGHT - TOP - BOTTOM) * (1 - (value - low) / span)

    parts = [f'<text x="0" y="12" font-weight="600" fill="currentColor">{escape(title)}</text>']
    parts += [_label(LEFT - 6, y(value) + 4, value) for value in (low, high)]
    parts.append(
        f'<path d="M{LEFT},{TOP} V{HEIGHT - BOTTOM} H{WIDTH}" fill="none" stroke="currentColor" stroke-opacity=".4"/>'
    )
    ticks = ((LEFT, "start", "smallest"), ((LEFT + WIDTH) / 2, "middle", x), (WIDTH, "end", "largest"))
    parts += [
        f'<text x="{at:g}" y="{HEIGHT - BOTTOM + 15}" text-anchor="{anchor}" fill="currentColor">{escape(text)}</text>'
        for at, anchor, text in ticks
    ]
    if low < 0 < high:
        parts.append(
            f'<path d="M{LEFT},{y(0):g} H{WIDTH}" stroke="currentColor" stroke-opacity=".25" stroke-dasharray="2 2"/>'
        )
    x_legend, y_legend = 0, HEIGHT - 6
    for number, (name, values) in enumerate(kept.items()):
        colour, dash = STROKES[number % len(STROKES)]
        step = (WIDTH - LEFT) / max(1, len(values) - 1)
        width = 34 + 7 * len(name)
        if x_legend and x_legend + width > WIDTH:  # a further line of the legend
            x_legend, y_legend = 0, y_legend + 16
        points = " ".join(f"{LEFT + i * step:g},{y(value):g}" for i, value in enumerate(values))
        parts.append(
            f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="2" stroke-dasharray="{dash}"/>'
            f'<path d="M{x_legend},{y_legend} h18" stroke="{colour}" stroke-width="2" stroke-dasharray="{dash}"/>'
            f'<text x="{x_legend + 22}" y="{y_legend + 4}" fill="currentColor">{escape(name)}</text>'
        )
        x_legend += width
    label = escape(f"{title}: {', '.join(kept)}")
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH + 8} {y_legend + 8}" width="{WIDTH + 8}" '
        f'height="{y_legend + 8}" role="img" aria-label="{label}" style="font:11px system-ui,sans-serif">'
        f"{''.join(parts)}</svg>"
    )


def _label(x: float, y: float, value: float) -> str:
    return f'<text x="{x:g}" y="{y:g}" text-anchor="end" fill="currentColor">{value:.3g}</text>'
