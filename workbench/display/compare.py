"""Curves of several arms in one small picture."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from workbench.display.curves import STROKES, Chart, Curve, sheet


def overlay(series: Mapping[str, Sequence[float]], title: str, *, x: str) -> str:
    """An svg: each arm's numbers sorted, from its smallest to its largest, so that arms of other sizes compare.

    title: what the numbers are. x: what is sorted; the axis goes from the first of them to the last.
    """
    kept = {name: sorted(v for v in values if math.isfinite(v)) for name, values in series.items()}
    curves = tuple(
        Curve(
            name=name,
            x=[n / max(1, len(values) - 1) for n in range(len(values))],
            y=values,
            stroke=STROKES[number % len(STROKES)],
        )
        for number, (name, values) in enumerate((name, values) for name, values in kept.items() if values)
    )
    return sheet([Chart(title=title, curves=curves, x=x, ends=("smallest", "largest"))])
