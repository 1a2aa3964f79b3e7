"""Draws spans and the gaps between them as SVG.

What is too narrow for a bar of its own is fused into one shape for each lane and role: 100,000 spans are a few hundred.

A page can move the group `wb-tl-moves` sideways; what is around it stays.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from workbench.display.folding import NOTHING_FOLDED, Folding
from workbench.display.html import seconds_text
from workbench.display.idle import CAUSES, Gaps
from workbench.display.palette import RoleStyle, role_styles
from workbench.display.span_table import QUEUE, TRANSFER, Row, SpanTable
from workbench.display.timeline_axis import axis, breaks
from workbench.display.timeline_shapes import (
    AXIS,
    BAR,
    CHAR,
    GAP,
    HATCHES,
    HEAD,
    HIT,
    LANE,
    NARROW,
    NARROW_GAP,
    ON_ANY_GROUND,
    QUEUE_LINE,
    STRIP,
    Patterns,
    box,
    cut,
    fused,
    hover_text,
    percent,
    shortened,
    strokes,
    text,
)

QUEUE_LABEL = "in the queue"
RIGHT = 84  # width of the column of idle shares
MOST_GAPS = 300  # that can be pointed at in one picture


@dataclass(frozen=True)
class Section:
    """Times that are drawn from the left edge on, unix times. lanes: by number, in the order in which they are drawn,
    from when to when each is there. folding: of seconds from its start."""

    title: str
    start_s: float
    end_s: float
    lanes: Mapping[int, tuple[float, float]]
    folding: Folding = NOTHING_FOLDED

    @property
    def drawn_s(self) -> float:
        """What it is drawn as, seconds."""
        return float(self.folding.drawn(self.end_s - self.start_s))


class Drawing:
    """Draws sections, one above the other.

    times: see `timeline.times_of`, a row a lane of each section. width: pixels. most: how many bars are drawn one by
    one, the longest of all; None: all that are wide enough. view: what is in sight, seconds from the left edge as they
    are drawn, see `Folding`; default all. hits: numbers of spans that get a line above them.
    """

    def __init__(
        self, spans: SpanTable, sections: Sequence[Section], gaps: Gaps, times: Sequence[Row],
        *, width: int, most: int | None = None, view: tuple[float, float] | None = None, hits: Sequence[int] = (),
    ) -> None:  # fmt: skip
        self.spans, self.sections, self.gaps, self.times = spans, sections, gaps, times
        self.width, self.most, self.hits = width, most, hits
        self.length_s = max([section.drawn_s for section in sections], default=0.0) or 1e-9
        self.from_s, self.to_s = view or (0.0, self.length_s)
        half_s = (self.to_s - self.from_s) / 2 if view else 0.0
        self.drawn_from_s, self.drawn_to_s = max(self.from_s - half_s, 0.0), min(self.to_s + half_s, self.length_s)
        names = [name for section in sections for lane in section.lanes for name in spans.lanes[lane]]
        self.left = min(24 + CHAR * 1.1 * max((len(name) for name in names), default=0), width / 4)
        self.plot = max(width - self.left - RIGHT, 1.0)
        self.styles = role_styles(spans.names["role"].all)
        self.pattern = Patterns()
        self.fused = 0  # spans that have no bar of their own

    # --- frame --------------------------------------------------------------------------------------------------------

    def svg(self) -> str:
        legend, top = self._legend()
        frame, moving, y, number = [legend], list[str](), float(top), 0
        folded = any(len(section.folding.start_s) for section in self.sections)
        for section, rows in zip(self.sections, self._rows, strict=True):
            if len(self.sections) > 1:
                frame.append(f'<text x="4" y="{y + 15}" font-weight="700">{text(section.title)}</text>')
                y += HEAD
            bars, pool, section_top = _Bars(self, section, rows), None, y + HEAD
            for lane in section.lanes:
                if self.spans.lanes[lane][0] != pool:
                    pool = self.spans.lanes[lane][0]
                    name = f"pool {pool}" if pool else "no stage"
                    frame.append(f'<text x="4" y="{y + 14}" font-weight="600">{text(name)}</text>')
                    y += HEAD
                height: float = bars.height(lane)
                frame.append(self._head(lane, self.times[number], y, height))
                moving.append(f'<g data-lane="{lane}">{self._gaps(section, lane, y, height)}{bars.draw(lane, y)}</g>')
                y, number = y + height + GAP, number + 1
            moving.append(breaks(self, section, section_top, y))
            if section is self.sections[-1] or folded:  # where each leaves out its own times, each has its own axis
                moving.insert(0, axis(self, section, section_top if folded else top, y))
                y += AXIS if section is not self.sections[-1] else 0
        note = self._footnote()
        whole = y + AXIS + (18 if note else 0)
        plot = (
            f'<svg class="wb-tl-plot" x="{self.left:.1f}" width="{self.plot:.1f}" height="{whole}" overflow="hidden">'
            f'<g class="wb-tl-moves">{"".join(moving)}</g></svg>'
        )
        place = f'x="{self.width - 4}" y="{y + 34}" text-anchor="end" font-size="11" opacity=".8"'
        frame.append(f"{plot}<text {place}>{note}</text>" if note else plot)
        attributes = {
            "xmlns": "http://www.w3.org/2000/svg",
            "color": ON_ANY_GROUND,
            "width": self.width,
            "height": whole,
            "viewBox": f"0 0 {self.width} {whole}",
            "style": "max-width:100%;height:auto",
            "role": "img",
            "aria-label": f"Timeline of {len({lane for one in self.sections for lane in one.lanes})} devices over "
            + seconds_text(max([one.end_s - one.start_s for one in self.sections], default=0.0)),
            "font-family": "system-ui,-apple-system,Segoe UI,Helvetica,Arial,sans-serif",
            "font-size": 12,
            "fill": "currentColor",
        }
        written = " ".join(f'{name}="{value}"' for name, value in attributes.items())
        return f"<svg {written}><defs>{''.join(self.pattern.definitions.values())}</defs>{''.join(frame)}</svg>"

    def x(self, section: Section, time_s: Any) -> Any:
        """Pixels from the left edge of the plot, of seconds from the start of a section."""
        return (section.folding.drawn(time_s) - self.from_s) / (self.to_s - self.from_s) * self.plot

    @cached_property
    def _rows(self) -> list[NDArray[np.intp]]:
        """The spans of each section, by number."""
        start_s, end_s = self.spans.columns["start_s"], self.spans.columns["end_s"]
        return [np.flatnonzero((end_s >= one.start_s) & (start_s <= one.end_s)) for one in self.sections]

    @property
    def span_count(self) -> int:
        return sum(map(len, self._rows))

    def _head(self, lane: int, times: Row, y: float, height: float) -> str:
        """The name and the idle share beside a lane, and its background."""
        middle, right = y + (height - QUEUE_LINE) / 2 + 4, self.left + self.plot
        called_s = times["window_s"] - times["uncalled_s"]
        hover = (
            ", ".join(f"{name} {seconds_text(times[f'{name}_s'])}" for name in ("busy", "transfer", "idle"))
            + f", of which {seconds_text(times['queued_s'])} with a stage in the queue; "
            + ", ".join(f"{cause.words} {seconds_text(times[cause.column])}" for cause in CAUSES)
        )
        name = cut(self.spans.lanes[lane][1], int((self.left - 18) / CHAR))
        return (
            f'<text x="12" y="{middle:.1f}">{text(name)}</text>'
            f'<rect x="{self.left:.1f}" y="{y:.1f}" width="{self.plot:.1f}" height="{height}" opacity=".06"/>'
            f'<text x="{right + 8:.1f}" y="{middle:.1f}">idle {percent(times["idle_share"] * called_s, called_s)}'
            f"<title>{text(hover)}</title></text>"
        )

    def _footnote(self) -> str:
        if not self.span_count:
            return "no spans in this window"
        some = f"{self.fused:,} span{'s are' if self.fused > 1 else ' is'} too short to draw one by one"
        folded = [float(length_s) for one in self.sections for length_s in one.folding.end_s - one.folding.start_s]
        places = f"{len(folded)} break{'s' if len(folded) > 1 else ''}"
        left_out = f"the axis is folded: {places}, {seconds_text(sum(folded))} in which nothing was called"
        return "; ".join([*([some] if self.fused else []), *([left_out] if folded else [])])

    def _legend(self) -> tuple[str, float]:
        columns, rows = self.spans.columns, np.concatenate([*self._rows, np.empty(0, int)]).astype(int)
        roles = {self.spans.names["role"].all[n] for n in np.unique(columns["role"][rows])}
        marked = rows[(columns["parent"][rows] != 0) | (columns["kind"][rows] == TRANSFER)]
        kinds = {self.spans.names["kind"].all[n] for n in np.unique(columns["kind"][marked])}
        entries = [
            (role or "no role", f'fill="{style.colour}"', style.letter, style.ink)
            for role, style in self.styles.items()
            if role in roles
        ]
        entries += [
            (kind.replace("_", " "), f'fill="{self.pattern(kind, ON_ANY_GROUND)}"', "", "")
            for kind in HATCHES
            if kind in kinds
        ]
        if (columns["kind"][rows] == QUEUE).any():
            entries.append((QUEUE_LABEL, f'fill="{ON_ANY_GROUND}"', "", ""))
        for number, cause in enumerate(CAUSES):
            if (self.gaps.cause == number).any():
                fill = f'fill="{self.pattern(cause.column, ON_ANY_GROUND)}" opacity=".6"'
                entries.append((cause.words, fill, cause.letter, "currentColor"))
        parts: list[str] = []
        x, y = 4.0, 4.0
        for name, fill, letter, ink in entries:
            needed = 22 + CHAR * 1.1 * len(name) + 14
            if x > 4 and x + needed > self.width:
                x, y = 4.0, y + 20
            top, height = (y + 6, QUEUE_LINE) if name == QUEUE_LABEL else (y, 14)
            parts.append(f'<rect x="{x:.1f}" y="{top}" width="16" height="{height}" rx="2" {fill}/>')
            if letter:
                place = f'x="{x + 8:.1f}" y="{y + 11}" text-anchor="middle"'
                parts.append(f'<text {place} font-size="11" font-weight="700" fill="{ink}">{text(letter)}</text>')
            parts.append(f'<text x="{x + 21:.1f}" y="{y + 11.5}">{text(name)}</text>')
            x += needed
        return "".join(parts), y + 26

    # --- gaps ---------------------------------------------------------------------------------------------------------

    def drawn_s(self, section: Section) -> tuple[float, float]:
        """Which times of a section are drawn."""
        from_s, to_s = (section.folding.time(edge_s) for edge_s in (self.drawn_from_s, self.drawn_to_s))
        return section.start_s + from_s, min(section.start_s + to_s, section.end_s)

    def _gap_edges(self, section: Section) -> tuple[NDArray[Any], NDArray[Any]]:
        """Left and right edge of every gap; one that is not drawn has no width."""
        drawn_s = self.drawn_s(section)
        left, right = (
            self.x(section, np.clip(time, *drawn_s) - section.start_s) for time in (self.gaps.start_s, self.gaps.end_s)
        )
        return left, right

    @cached_property
    def _narrow_gap(self) -> float:
        """Below which width a gap has no shape of its own."""
        edges = map(self._gap_edges, self.sections)
        widths = np.concatenate([np.empty(0), *(right - left for left, right in edges)])
        return max(NARROW_GAP, np.partition(widths, -MOST_GAPS)[-MOST_GAPS] if len(widths) > MOST_GAPS else 0.0)

    def _gaps(self, section: Section, lane: int, y: float, height: float) -> str:
        """The gaps of a lane: the widest can be pointed at, and have the letter of their cause, others are fused. Gaps
        of less than a pixel are not drawn."""
        left, right = self._gap_edges(section)
        here = np.flatnonzero((self.gaps.lane == lane) & (right - left >= NARROW_GAP))
        left, right, cause = left[here], right[here], self.gaps.cause[here]
        narrow = right - left < self._narrow_gap
        parts = []
        for number in np.unique(cause[narrow]).tolist():
            fill = self.pattern(CAUSES[number].column, ON_ANY_GROUND)
            mine = narrow & (cause == number)
            path = strokes(*fused(left[mine], right[mine]), y, height)
            parts.append(f'<path {path} stroke="{fill}" opacity=".6"/>')
        for n in np.flatnonzero(~narrow).tolist():
            what, gap = CAUSES[cause[n]], here[n]
            start_s, end_s = float(self.gaps.start_s[gap]), float(self.gaps.end_s[gap])
            where = f"on {' '.join(self.spans.lanes[lane])}, {seconds_text(end_s - start_s)}"
            hover = f"idle: {what.words} ({what.letter})\n{where}\n{what.meaning}"
            place = f'x="{left[n]:.1f}" y="{y:.0f}" width="{right[n] - left[n]:.1f}" height="{height:.0f}"'
            told = f'data-gap="{start_s!r} {end_s!r} {cause[n]}"'
            fill = f'fill="{self.pattern(what.column, ON_ANY_GROUND)}" opacity=".6"'
            parts.append(f'<rect class="gap" {told} {place} {fill}><title>{text(hover)}</title></rect>')
            inner = max(left[n], 0.0), min(right[n], self.plot)
            if inner[1] - inner[0] >= 12:
                place = (
                    f'x="{sum(inner) / 2:.1f}" y="{y + height / 2 + 4:.1f}" text-anchor="middle" font-style="italic"'
                )
                parts.append(f'<text {place} pointer-events="none">{what.letter}</text>')
        return "".join(parts)


class _Bars:
    """The spans of one section, each with its level: 0 for a stage's bar, 1 and 2 for what lies inside, 3 for a line
    under it that is its queue time."""

    def __init__(self, drawing: Drawing, section: Section, rows: NDArray[np.intp]) -> None:
        self.drawing, self.spans, self.section = drawing, drawing.spans, section
        columns = self.spans.columns
        self.sublanes = np.zeros(len(self.spans.lanes), int)
        np.maximum.at(self.sublanes, columns["lane"][rows], columns["sublane"][rows])
        drawn_s = drawing.drawn_s(section)
        self.rows = rows = rows[(columns["end_s"][rows] >= drawn_s[0]) & (columns["start_s"][rows] <= drawn_s[1])]
        self.lane, self.sublane = columns["lane"][rows], columns["sublane"][rows]
        self.level = np.where(columns["kind"][rows] == QUEUE, 3, columns["depth"][rows])
        start_s, end_s = (np.clip(columns[name][rows], *drawn_s) for name in ("start_s", "end_s"))
        self.left, self.right = (drawing.x(section, times_s - section.start_s) for times_s in (start_s, end_s))
        width = self.right - self.left
        # a short stage has a bar too, so that it can be pointed at, unless there are very many
        stage = (self.level == 0) & ((self.level == 0).sum() < drawing.plot)
        self.narrow = (width < NARROW) & ~stage
        if drawing.most is not None and (~self.narrow).sum() > drawing.most:
            self.narrow |= width <= np.partition(width, -drawing.most - 1)[-drawing.most - 1]
        drawing.fused += int(self.narrow.sum())

    def height(self, lane: int) -> int:
        return LANE * (1 + int(self.sublanes[lane]))

    def draw(self, lane: int, y: float) -> str:
        here = np.flatnonzero(self.lane == lane)
        parts = []
        # on top lie the deeper bars, and of several stages in the queue the one that runs next
        for level in (3, 0, 1, 2):
            mine = here[self.level[here] == level]
            parts += self._fused(mine[self.narrow[mine]], level, y)
            wide = mine[~self.narrow[mine]]
            for n in (wide[np.argsort(-self.right[wide], kind="stable")] if level == 3 else wide).tolist():
                parts.append(self._bar(n, y + LANE * int(self.sublane[n])))
        hits = here[np.isin(self.rows[here], self.drawing.hits)] if len(self.drawing.hits) else here[:0]
        for sublane in np.unique(self.sublane[hits]).tolist():
            mine = hits[self.sublane[hits] == sublane]
            path = strokes(*fused(self.left[mine], self.right[mine]), y + LANE * sublane - 3, HIT)
            parts.append(f'<path class="hit" {path} stroke="currentColor"/>')
        return "".join(parts)

    def _fused(self, which: NDArray[np.intp], level: int, y: float) -> list[str]:
        """Spans of one level as a shape for each role and sub-lane."""
        columns, parts = self.spans.columns, []
        looks = [self.sublane[which], columns["role"][self.rows[which]], columns["kind"][self.rows[which]] == TRANSFER]
        for sublane, role, pulls in sorted(set(zip(*(look.tolist() for look in looks), strict=True))):
            mine = which[(looks[0] == sublane) & (looks[1] == role) & (looks[2] == pulls)]
            name = self.spans.names["role"].all[role]
            style = self.drawing.styles[name]
            top, height = box(level, y + LANE * sublane)
            paint = f'stroke="{style.colour}"'
            if level in (1, 2):
                paint = f'stroke="{style.ink}" opacity=".5"'
            elif level == 0 and pulls:
                paint = f'stroke="{self.drawing.pattern("transfer", style.colour)}"'
            hover = f"{len(mine):,} spans of {name or 'no role'}, too short to draw one by one: zoom in"
            path = strokes(*fused(self.left[mine], self.right[mine]), top, height)
            parts.append(f'<path class="fused" {path} {paint}><title>{text(hover)}</title></path>')
        return parts

    def _bar(self, n: int, y: float) -> str:
        row, level = self.spans.row(int(self.rows[n])), int(self.level[n])
        style, pattern = self.drawing.styles[row["role"]], self.drawing.pattern
        left, right, label = self.left[n], self.right[n], ""
        top, height = box(level, y)
        attributes = f'fill="{style.colour}"'
        if level in (1, 2):
            attributes = f'fill="{pattern(row["kind"], style.ink)}"'
        elif row["kind"] == "transfer":
            attributes = f'fill="{pattern("transfer", style.colour)}"'
        elif level == 0:
            attributes += ' rx="2" stroke="currentColor" stroke-opacity=".35" stroke-width=".5"'
            label = self._label(row["stage"], style, max(left, 0.0), min(right, self.drawing.plot), top)
        place = f'x="{left:.2f}" y="{top:.1f}" width="{max(right - left, 1):.2f}" height="{height:g}"'
        told = f'data-n="{self.rows[n]}" data-level="{level}"'
        hover = text(hover_text(row, self.section.start_s))
        return f'<rect class="span" {told} {place} {attributes}><title>{hover}</title></rect>{label}'

    def _label(self, stage: str, style: RoleStyle, left: float, right: float, top: float) -> str:
        width = right - left
        if width < 11:
            return ""
        name = shortened(stage, int((width - 8) / CHAR) - 2)
        told = f'<tspan font-weight="700">{text(style.letter)}</tspan> {text(name)}'.strip()
        place = f'x="{left + 4:.1f}"' if name else f'x="{left + width / 2:.1f}" text-anchor="middle"'
        y = top + (BAR - STRIP) / 2 + 4
        return f'<text {place} y="{y:.1f}" font-size="11" fill="{style.ink}" pointer-events="none">{told}</text>'
