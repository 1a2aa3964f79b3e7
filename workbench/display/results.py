"""The result of a loop: a frame with a row an iteration; a notebook shows the most important metrics first."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

import pandas as pd

from workbench.display.curves import STROKES
from workbench.display.headlines import interval_of, looked_at
from workbench.display.html import Markup, as_images, seconds_text, svg, table

WIDTH, HEIGHT, EDGE = 96, 20, 3


def sparkline(values: Sequence[float], label: str) -> Markup:
    """Draw the values from left to right; values that are not finite are gaps, and the last value is marked. label: for
    screen readers."""
    finite = [value for value in values if math.isfinite(value)]
    if not finite:
        return Markup("")
    low, high = min(finite), max(finite)
    step = (WIDTH - 2 * EDGE) / max(1, len(values) - 1)

    def place(n: int) -> str:
        part = (values[n] - low) / (high - low) if high > low else 0.5
        return f"{EDGE + n * step:.1f},{HEIGHT - EDGE - (HEIGHT - 2 * EDGE) * part:.1f}"

    colour = STROKES[0].colour
    lines = "".join(
        f'<polyline points="{" ".join(map(place, run))}" fill="none" stroke="{colour}" stroke-width="1.5"/>'
        for drawn, run in groupby(range(len(values)), lambda n: math.isfinite(values[n]))
        if drawn
    )
    last = max(n for n, value in enumerate(values) if math.isfinite(value))
    x, y = place(last).split(",")
    dot = f'<circle cx="{x}" cy="{y}" r="2.2" fill="{colour}"/>'
    return Markup(svg(lines + dot, WIDTH, HEIGHT, f"{label}: from {low:.4g} to {high:.4g}, last {values[last]:.4g}"))


MOST_ROWS = 20


class Results(pd.DataFrame):
    """Metrics of iterations as "stage/metric", the most important first. Frames derived from it, such as slices, are
    plain frames.

    attrs: "algorithm", its name; "seconds", the duration of each iteration. It is no column, so that frames of two runs
    with equal metrics are equal.
    """

    @classmethod
    def of(cls, rows: Sequence[Mapping[str, float]], *, algorithm: str, seconds: Sequence[float]) -> Results:
        """rows: the metrics of each iteration, with its number as "iteration"."""
        frame = pd.DataFrame(rows, columns=None if rows else ["iteration"]).set_index("iteration")
        headlines = looked_at(frame.columns).values()
        first = [one for name in headlines for one in (name, interval_of(name)) if one in frame.columns]
        made = cls(frame[[*first, *(name for name in frame.columns if name not in first)]])
        made.attrs = {"algorithm": algorithm, "seconds": list(seconds)}
        return made

    @property
    def _constructor(self) -> Any:
        return pd.DataFrame

    def _looked_at(self) -> dict[str, list[tuple[float, float]]]:
        """By label, for each iteration: the value, and half the width of its interval; NaN if there is none."""
        seconds, no_widths = self.attrs.get("seconds", []), [math.nan] * len(self)
        columns = {}
        for label, name in looked_at(self.columns).items():
            half = interval_of(name)
            widths = self._numbers(half) if half in self.columns else no_widths
            columns[label] = list(zip(self._numbers(name), widths, strict=True))
        if seconds and len(seconds) == len(self):
            columns["seconds"] = list(zip(seconds, no_widths, strict=True))
        return columns

    def __repr__(self) -> str:
        columns = self._looked_at()
        if not columns or not len(self):
            return super().__repr__()
        first = max(0, len(self) - MOST_ROWS)
        cells = {
            label: [f"{value:.4g}" + (f" ± {width:.2g}" if width == width else "") for value, width in column[first:]]
            for label, column in columns.items()
        }
        shown = pd.DataFrame(cells, index=self.index[first:]).to_string()
        earlier = f"{first:,} earlier iterations are in the frame\n" if first else ""
        others = len(self.columns) - len(looked_at(self.columns))
        rest = f"{others} other columns as 'stage/metric': .columns has their names, .to_string() prints all"
        return f"{earlier}{shown}\n{rest}"

    def _repr_html_(self) -> str:
        columns, index, first = self._looked_at(), str(self.index.name or ""), max(0, len(self) - MOST_ROWS)
        rows: list[dict[str, Any]] = [{index: str(n)} for n in self.index[first:]]
        for label, column in columns.items():
            for row, (value, width) in zip(rows, column[first:], strict=True):
                row[label] = Markup(f"{value:.4g} &#177; {width:.2g}") if width == width else value
        if len(self) > 1 and columns:
            lines = {label: sparkline([value for value, _ in column], label) for label, column in columns.items()}
            rows = [lines, *rows]
        took = f" in {seconds_text(sum(self.attrs['seconds']))}" if "seconds" in columns else ""
        caption = f"{self.attrs.get('algorithm', 'Metrics')}: {len(self)} iteration{'s' * (len(self) != 1)}{took}"
        note = f'<div style="font-size:12px;opacity:.7">{first:,} earlier iterations are in the frame</div>'
        shown = table(rows, columns=[index, *columns], caption=caption)
        # as images: GitHub, and JupyterLab with an untrusted notebook, drop svg
        return as_images(shown + note * bool(first) + self._others(set(looked_at(self.columns).values())))

    def _numbers(self, name: str) -> list[float]:
        return pd.to_numeric(self[name], errors="coerce").astype(float).tolist()

    def _others(self, shown: set[str]) -> str:
        """A row for each other metric, in a fold."""
        rows = []
        for name in self.columns:
            if name in shown:
                continue
            values = self._numbers(name)
            finite = [value for value in values if value == value]
            ends = {"first": finite[0], "last": finite[-1], "least": min(finite), "most": max(finite)} if finite else {}
            rows.append({"metric": str(name), "": sparkline(values, str(name)), **ends})
        if not rows:
            return ""
        listed = table(rows, columns=["metric", "", "first", "last", "least", "most"], max_rows=len(rows))
        summary = f"{len(rows)} other columns of the frame"
        return f'<details style="font-size:13px"><summary>{summary}</summary>{listed}</details>'
