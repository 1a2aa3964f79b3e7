"""A picture of which device worked when: one lane a device, one bar a span, as plain SVG that needs no script.

    pool      | A generate_sequences |   R compute_ref..  | A update_actor ////  |   idle 12 %
    cpu:0     -----------------------------------------------------------------

Colours and letters tell roles, hatches tell kinds of work inside a bar, a thin line under a bar is its queue time. What
a device waits for is told by shading and a small letter.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from workbench.display.callers import Callers
from workbench.display.folding import foldings
from workbench.display.html import picture_id, seconds_text, table
from workbench.display.idle import CAUSES, DATA, Gaps, device_times
from workbench.display.lanes import lanes_of
from workbench.display.span_sums import Sums, sums_of
from workbench.display.span_table import Row, SpanTable
from workbench.display.timeline_shapes import ID, ON_ANY_GROUND, percent
from workbench.display.timeline_svg import Drawing, Section
from workbench.errors import BadInput
from workbench.support.checked_calls import checked_call
from workbench.telemetry.span_lines import SpanLines

if TYPE_CHECKING:
    import pandas


@dataclass(frozen=True)
class Timeline:
    """A drawn timeline. `svg` can be saved as a file; `summary` has one row a device, and a section where there are
    several: see `times_of`. `sums(from_s, to_s)` adds up a range."""

    drawn: str
    summary: list[dict[str, Any]]
    span_count: int
    drawn_from: tuple[SpanTable, Sequence[Section], Gaps] = field(repr=False, compare=False)

    @property
    def svg(self) -> str:
        """The picture, each time with ids of its own."""
        return self.drawn.replace(ID, f"t{picture_id(self.drawn)}-")

    @property
    def inline_svg(self) -> str:
        """The picture as a part of a page, whose text colour it takes."""
        return self.svg.replace(f'color="{ON_ANY_GROUND}" ', "", 1)

    @checked_call("timeline.sums")
    def sums(self, from_s: float = 0.0, to_s: float | None = None) -> Sums:
        """What lies between two times of the axis, seconds; None: the end. By stage, role and kind, and idle time by
        its cause. Raises `BadInput` where there is no time between them."""
        spans, (section, *_), gaps = self.drawn_from
        end_s = section.end_s - section.start_s
        start_s, to_s = max(float(from_s), 0.0), end_s if to_s is None else min(float(to_s), end_s)
        if not start_s < to_s:
            rule = f"there must be time between the two, on an axis from 0 to {end_s:.3f} s"
            raise BadInput(f"sums from {from_s} to {to_s}", rule, "give seconds as the axis of the picture has them")
        range_s = section.start_s + start_s, section.start_s + to_s
        return sums_of(spans, gaps, section.lanes, section.start_s, range_s)

    def __repr__(self) -> str:
        window = max((row["window_s"] for row in self.summary), default=0.0)
        devices = len({(row["pool"], row["device"]) for row in self.summary})
        lines = [f"timeline of {seconds_text(window)}: {self.span_count:,} spans on {devices} devices"]
        for row in self.summary:
            busy, transfer, queued = (
                percent(row[name], _called_s(row)) for name in ("busy_s", "transfer_s", "queued_s")
            )
            idle = percent(row["idle_s"] - row["uncalled_s"], _called_s(row))
            name = " ".join(filter(None, (row.get("iteration", ""), row["pool"], row["device"])))[:24]
            lines.append(f"  {name:24} busy {busy:>5} transfer {transfer:>5} idle {idle:>5} (queued {queued})")
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        # Viewers that strip inline SVG still show the table.
        details = (
            f'<details style="font-size:13px"><summary>times by device</summary>{times_table(self.summary)}</details>'
        )
        return f"<div>{self.inline_svg}{details}</div>"

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, str]:
        return {"text/html": self._repr_html_(), "image/svg+xml": self.svg, "text/plain": repr(self)}


def _called_s(row: Row) -> float:
    return float(row["window_s"] - row["uncalled_s"])


def times_table(summary: Sequence[Row], caption: str = "") -> str:
    """An html table of what devices did and waited for: a row of `Timeline.summary` each. Shares are of the time in
    which some stage was called."""

    def cell(row: Row, name: str) -> str:
        if not row[name]:
            return ""
        return seconds_text(row[name]) + (f" ({percent(row[name], _called_s(row))})" if name != "uncalled_s" else "")

    rows = [
        {
            **{name: row[name] for name in ("iteration", "pool", "device") if name in row},
            "busy": cell(row, "busy_s"),
            **{f"{cause.letter}: {cause.words}": cell(row, cause.column) for cause in CAUSES},
        }
        for row in summary
    ]
    return table(rows, caption=caption, max_rows=64)


def times_of(spans: SpanTable, sections: Sequence[Section], gaps: Gaps) -> list[dict[str, Any]]:
    """What each device did in each section, seconds; busy_s + transfer_s + idle_s = window_s.

    busy_s: some role computed. transfer_s: inputs were pulled and nothing computed. idle_s: neither; it is the sum of
    the other columns of `idle.CAUSES`. queued_s: the part of idle_s in which a stage was called on the device and
    waited. idle_share: of the time in which some stage was called, the share in which the device was idle, 0 to 1.
    """
    work, rows = spans.work(), list[dict[str, Any]]()
    for section in sections:
        waits = gaps.seconds(len(spans.lanes), section.start_s, section.end_s)
        for lane, window in section.lanes.items():
            here = spans.columns["lane"] == lane
            times = device_times(work[here], spans.columns["start_s"][here], spans.columns["end_s"][here], window)
            causes = {cause.column: float(waits[lane, n]) for n, cause in enumerate(CAUSES) if n != DATA}
            title = {"iteration": section.title.removeprefix("iteration ")} if len(sections) > 1 else {}
            pool, device = spans.lanes[lane]
            row: dict[str, Any] = {**title, "pool": pool, "device": device, **times, **causes}
            called_s = _called_s(row)
            row["idle_share"] = (row["idle_s"] - row["uncalled_s"]) / called_s if called_s > 0 else 0.0
            rows.append(row)
    return rows


def timeline(
    spans: pandas.DataFrame | Sequence[Row],
    *,
    devices: Sequence[str] = (),
    start: float | None = None,
    end: float | None = None,
    callers: Callers | None = None,
    fold: bool = True,
) -> Timeline:
    """Draw spans (the spans frame, or dicts with its columns).

    devices: which lanes come first; one without a span gets an empty lane. start, end: unix times between which to
    draw, such as the first and last of the newest iterations; default: all. callers: what called the runs; default:
    each was called by itself. fold: draw long stretches in which nothing was called as narrow breaks.
    Raises `BadInput`.
    """
    rows: list[Any] = list(spans) if isinstance(spans, Sequence) else spans.to_dict("records")
    start = start if start is not None else min((row["start_s"] for row in rows), default=0.0)
    end = end if end is not None else max((row["end_s"] for row in rows), default=start)
    if end < start:
        raise BadInput(f"timeline from {start} to {end}", "the start must not lie after the end", "swap the two")
    found = SpanTable()
    found.add(SpanLines.of_rows([row for row in rows if row["end_s"] >= start and row["start_s"] <= end]))
    found.know(ordered := lanes_of(found.lanes, devices))
    numbers = {lane: number for number, lane in enumerate(found.lanes)}
    section = Section("all", start, end, {numbers[lane]: (start, end) for lane in ordered})
    gaps = found.gaps((start, end), callers=callers)
    return drawn(found, folded([section], gaps) if fold else [section], gaps)


def folded(sections: Sequence[Section], gaps: Gaps) -> list[Section]:
    """The same, with long stretches in which nothing was called as narrow breaks."""
    found = foldings(gaps, [(section.start_s, section.end_s) for section in sections])
    return [replace(section, folding=folding) for section, folding in zip(sections, found, strict=True)]


def drawn(
    spans: SpanTable,
    sections: Sequence[Section],
    gaps: Gaps,
    *,
    width: int = 960,
    most: int | None = None,
    view: tuple[float, float] | None = None,
    hits: Sequence[int] = (),
) -> Timeline:
    """Draw sections of spans: see `Drawing`."""
    times = times_of(spans, sections, gaps)
    drawing = Drawing(spans, sections, gaps, times, width=width, most=most, view=view, hits=hits)
    return Timeline(drawing.svg(), times, drawing.span_count, (spans, sections, gaps))
