"""A curve in the height of a line of text."""

from __future__ import annotations

import math
from collections.abc import Sequence

from workbench.display.curves import STROKES
from workbench.display.html import Markup, svg

WIDTH, HEIGHT, EDGE = 96, 20, 3


def sparkline(values: Sequence[float], label: str) -> Markup:
    """The values from left to right, from the smallest below to the largest above; what is not finite is a gap, and the
    last value is marked. label: for those who do not see it."""
    finite = [value for value in values if math.isfinite(value)]
    if not finite:
        return Markup("")
    low, high = min(finite), max(finite)
    step = (WIDTH - 2 * EDGE) / max(1, len(values) - 1)

    def place(n: int) -> str:
        part = (values[n] - low) / (high - low) if high > low else 0.5
        return f"{EDGE + n * step:.1f},{HEIGHT - EDGE - (HEIGHT - 2 * EDGE) * part:.1f}"

    colour = STROKES[0].colour
    runs, run = list[list[str]](), list[str]()
    for n, value in enumerate(values):
        if math.isfinite(value):
            run.append(place(n))
        elif run:
            runs, run = [*runs, run], []
    lines = "".join(
        f'<polyline points="{" ".join(points)}" fill="none" stroke="{colour}" stroke-width="1.5"/>'
        for points in filter(None, (*runs, run))
    )
    last = max(n for n, value in enumerate(values) if math.isfinite(value))
    x, y = place(last).split(",")
    dot = f'<circle cx="{x}" cy="{y}" r="2.2" fill="{colour}"/>'
    return Markup(svg(lines + dot, WIDTH, HEIGHT, f"{label}: from {low:.4g} to {high:.4g}, last {values[last]:.4g}"))
