"""Curves of several arms in one small picture."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from workbench.display.curves import STROKES, Chart, Curve, sheet


def overlay(series: Mapping[str, Sequence[float]], title: str, *, x: str) -> str:
    """An svg: each arm's numbers sorted, from its smallest to its largest, so that arms of other sizes compare.

    title: what the numbers are. x: what is sorted; the axis goes from the first of them to the last.
    """
    curves: list[Curve] = []
    for name, given in series.items():
        if values := sorted(value for value in given if math.isfinite(value)):
            places = [n / max(1, len(values) - 1) for n in range(len(values))]
            curves.append(Curve(name=name, x=places, y=values, stroke=STROKES[len(curves) % len(STROKES)]))
    return sheet([Chart(title=title, curves=tuple(curves), x=x, ends=("smallest", "largest"))])
