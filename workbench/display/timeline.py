"""A picture of who worked when: one lane a device, one bar a span, as plain SVG that needs no script.

    pool      | A generate_sequences |   R compute_ref..  | A update_actor ////  |   idle 12 %
    cpu:0     -----------------------------------------------------------------

Colours and letters tell roles, hatches tell kinds of work inside a bar, a thin line under a bar is its queue time. What
a device waits for is told by shading and a small letter.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING, Any

from workbench.display.html import bytes_text, picture_id, seconds_text, table
from workbench.display.idle import CAUSES, DATA, Gaps, Lane, Life, Row, device_times, gaps_of, within
from workbench.display.lanes import Bar, lanes_of, place, records
from workbench.display.palette import RoleStyle, role_styles
from workbench.errors import BadInput

if TYPE_CHECKING:
    import pandas

BAR, STRIP, QUEUE, LANE, GAP, HEAD = 26, 9, 3, 33, 7, 22  # heights, pixels
QUEUE_LABEL = "in the queue"
RIGHT = 84  # width of the column of idle shares
CHAR = 6.3  # mean width of a character of the bars' font; a little wide, so that labels never run over
SHORTEST = 0.5  # narrower child spans are left out
ON_ANY_GROUND = "#777777"  # text of a picture that cannot know the page's theme: 4.5:1 on white, 4.2:1 on near black

ID = "\0"  # placeholder; `_text` lets no such character through

# What is drawn in a tile of 6 x 6 pixels to mark a kind of work.
HATCHES = {
    "transfer": "M-1 5L1 7M0 0L6 6M5-1L7 1",
    "generate": "M0 3H6",
    "forward": "",
    "backward": "M3 0V6",
    "optimizer": "M2 3H4",
    "communication": "M-1 1L1-1M0 6L6 0M5 7L7 5",
    "weight_sync": "M0 0L6 6M0 6L6 0",
    "offload": "M0 2H6M3 2V6",
    "load": "M0 4H6M3 4V0",
    "reward": "M1 3H5M3 1V5",
}

# The same for what a device waits for, by the column of `idle.CAUSES`.
SHADES = {
    "transfer_s": "M0 0L6 6M-1 5L1 7M5-1L7 1",
    "slowest_rank_s": "M1.5 0V6M4.5 0V6",
    "other_pool_s": "M0 6L6 0M-1 1L1-1M5 7L7 5",
    "controller_s": "M2.5 3H3.5",
}


@dataclass(frozen=True)
class Timeline:
    """A drawn timeline. `svg` stands alone as a file; `summary` has one row a device: see `idle.device_times`, and a
    column for each of `idle.CAUSES`: transfer_s, and what idle_s consists of."""

    drawn: str
    summary: list[dict[str, Any]]
    span_count: int

    @property
    def svg(self) -> str:
        """The picture, each time with ids of its own."""
        return self.drawn.replace(ID, f"t{picture_id(self.drawn)}-")

    def __repr__(self) -> str:
        window = self.summary[0]["window_s"] if self.summary else 0.0
        lines = [f"timeline of {seconds_text(window)}: {self.span_count:,} spans on {len(self.summary)} devices"]
        for row in self.summary:
            busy, transfer, idle, queued = (
                _percent(row[name], row["window_s"]) for name in ("busy_s", "transfer_s", "idle_s", "queued_s")
            )
            name = f"{row['pool']} {row['device']}".strip()[:24]
            lines.append(f"  {name:24} busy {busy:>5} transfer {transfer:>5} idle {idle:>5} (queued {queued})")
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        picture = self.svg.replace(f'color="{ON_ANY_GROUND}" ', "", 1)  # inline, it takes the page's text colour
        # Viewers that strip inline SVG still show the table.
        times = times_table(self.summary)
        details = f'<details style="font-size:13px"><summary>times by device</summary>{times}</details>'
        return f"<div>{picture}{details}</div>"

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, str]:
        return {"text/html": self._repr_html_(), "image/svg+xml": self.svg, "text/plain": repr(self)}


def times_table(summary: Sequence[Row], caption: str = "") -> str:
    """An html table of what devices did and waited for: a row of `Timeline.summary` each."""

    def cell(row: Row, name: str) -> str:
        return f"{seconds_text(row[name])} ({_percent(row[name], row['window_s'])})" if row[name] else ""

    rows = [
        {
            **{name: row[name] for name in ("iteration", "pool", "device") if name in row},
            "busy": cell(row, "busy_s"),
            **{f"{cause.letter}: {cause.words}": cell(row, cause.column) for cause in CAUSES},
        }
        for row in summary
    ]
    return table(rows, caption=caption, max_rows=64)


def timeline(
    spans: pandas.DataFrame | Sequence[Row],
    *,
    devices: Sequence[str] = (),
    start: float | None = None,
    end: float | None = None,
    width: int = 960,
    most: int | None = None,
    lives: Mapping[Lane, Life] | None = None,
) -> Timeline:
    """Draw spans (the spans frame, or dicts with its columns).

    devices: which lanes come first; one without a span gets an empty lane. start, end: unix times between which to
    draw, such as the first and last of the newest iterations; default: all. width: pixels. most: how many bars are
    drawn, the longest of all; None: all. lives: see `idle.lives_of`; a lane that it lacks is there all the time.
    Raises `BadInput`.
    """
    rows = records(spans)
    start = start if start is not None else min((row["start_s"] for row in rows), default=0.0)
    end = end if end is not None else max((row["end_s"] for row in rows), default=start)
    if end < start:
        raise BadInput(f"timeline from {start} to {end}", "the start must not lie after the end", "swap the two")
    rows = [row for row in rows if row["end_s"] >= start and row["start_s"] <= end]
    lanes = lanes_of(rows, devices)
    lived = [within((lives or {}).get(lane, (start, end)), start, end) for lane in lanes]
    gaps = gaps_of(rows, lanes, (start, end), lived)
    by_lane: dict[Lane, list[Row]] = {lane: [] for lane in lanes}
    for row in rows:
        by_lane[row["pool"], row["device"]].append(row)
    waits = gaps.seconds(len(lanes), start, end)
    summary = [
        {
            **device_times(by_lane[pool, device], device, pool, *lived[lane]),
            **{cause.column: float(waits[lane, n]) for n, cause in enumerate(CAUSES) if n != DATA},
        }
        for lane, (pool, device) in enumerate(lanes)
    ]
    picture = _Picture(list(by_lane.values()), summary, gaps, start, end, width, most)
    return Timeline(drawn=picture.svg(), summary=summary, span_count=len(rows))


class _Picture:
    """Draws rows already cut to the window, in the lanes of `summary`."""

    def __init__(
        self,
        by_lane: Sequence[Sequence[Row]],
        summary: Sequence[Row],
        gaps: Gaps,
        start_s: float,
        end_s: float,
        width: int,
        most: int | None,
    ) -> None:
        self.by_lane, self.rows = by_lane, [row for here in by_lane for row in here]
        self.summary, self.gaps, self.start_s, self.width = summary, gaps, start_s, width
        self.window_s = max(end_s - start_s, 1e-9)
        names = [str(row[name]) for row in summary for name in ("device", "pool")]
        self.left = min(24 + CHAR * 1.1 * max((len(name) for name in names), default=0), width / 4)
        self.styles = role_styles(str(row["role"]) for row in self.rows)
        self.patterns: dict[tuple[str, str], str] = {}
        self.too_short = 0
        longest = sorted((row["end_s"] - row["start_s"] for row in self.rows), reverse=True)
        self.least_s = (
            longest[most] if most is not None and len(longest) > most else -1.0
        )  # what is no longer is left out

    def svg(self) -> str:
        legend, legend_height = self._legend()
        y = legend_height
        lanes: list[str] = []
        pool = None
        for number, row in enumerate(self.summary):
            if row["pool"] != pool:
                pool = row["pool"]
                name = f"pool {pool}" if pool else "no stage"
                lanes.append(f'<text x="4" y="{y + 14}" font-weight="600">{_text(name)}</text>')
                y += HEAD
            drawn, height = self._lane(number, row, y)
            lanes.append(drawn)
            y += height + GAP
        body = legend + self._axis(legend_height, y) + "".join(lanes) + self._footnote(y)
        defs = "".join(self.patterns.values())
        # the ids of two pictures on one page must differ; a digest keeps a saved notebook the same when run again
        height = round(y + (40 if self._footnote(y) else 22))
        attributes = {
            "xmlns": "http://www.w3.org/2000/svg",
            "color": ON_ANY_GROUND,
            "width": self.width,
            "height": height,
            "viewBox": f"0 0 {self.width} {height}",
            "style": "max-width:100%;height:auto",
            "role": "img",
            "aria-label": f"Timeline of {len(self.summary)} devices over {seconds_text(self.window_s)}",
            "font-family": "system-ui,-apple-system,Segoe UI,Helvetica,Arial,sans-serif",
            "font-size": 12,
            "fill": "currentColor",
        }
        written = " ".join(f'{name}="{value}"' for name, value in attributes.items())
        return f"<svg {written}><defs>{defs}</defs>{body}</svg>"

    def _x(self, time_s: float) -> float:
        share = (time_s - self.start_s) / self.window_s
        return self.left + min(max(share, 0.0), 1.0) * (self.width - self.left - RIGHT)

    def _lane(self, number: int, times: Row, y: float) -> tuple[str, float]:
        bars = place(self.by_lane[number])
        height = LANE * (1 + max((bar.sublane for bar in bars), default=0))
        middle = y + (height - QUEUE) / 2 + 4
        right = self.width - RIGHT
        hover = (
            ", ".join(f"{name} {seconds_text(times[f'{name}_s'])}" for name in ("busy", "transfer", "idle"))
            + f", of which {seconds_text(times['queued_s'])} with a stage in the queue; "
            + ", ".join(f"{cause.words} {seconds_text(times[cause.column])}" for cause in CAUSES)
        )
        parts = [
            f'<text x="12" y="{middle:.1f}">{_text(_cut(str(times["device"]), int((self.left - 18) / CHAR)))}</text>',
            f'<rect x="{self.left:.1f}" y="{y:.1f}" width="{right - self.left:.1f}" height="{height}" opacity=".06"/>',
            f'<text x="{right + 8}" y="{middle:.1f}">idle {_percent(times["idle_s"], times["window_s"])}'
            f"<title>{_text(hover)}</title></text>",
            *(self._shade(number, cause, y, height) for cause in range(len(CAUSES))),
        ]
        # on top lie the deeper bars, and of several stages in the queue the one that runs next
        in_order = sorted(bars, key=lambda bar: (bar.depth, -bar.row["end_s"] if bar.row["kind"] == "queue" else 0))
        drawn = [self._bar(bar, y + LANE * bar.sublane) for bar in in_order]
        return "".join(parts + drawn), height

    def _shade(self, lane: int, cause: int, y: float, height: float) -> str:
        """The gaps of a lane with one cause, as one path; those that are wide enough with the cause's letter."""
        mine = (self.gaps.lane == lane) & (self.gaps.cause == cause)
        ends = zip(self.gaps.start_s[mine], self.gaps.end_s[mine], strict=True)
        boxes = [(left, right) for left, right in ((self._x(a), self._x(b)) for a, b in ends) if right - left >= 1]
        if not boxes:
            return ""
        what, fill = CAUSES[cause], self._pattern(CAUSES[cause].column, ON_ANY_GROUND)
        path = "".join(f"M{left:.1f} {y:.0f}H{right:.1f}v{height:.0f}H{left:.1f}z" for left, right in boxes)
        hover = f"{what.words}: {what.meaning}"
        place = f'y="{y + height / 2 + 4:.1f}" text-anchor="middle" font-style="italic"'
        letters = [
            f'<text x="{(left + right) / 2:.1f}" {place}>{what.letter}</text>'
            for left, right in boxes
            if right - left >= 12
        ]
        title = f"<title>{_text(hover)}</title>"
        return f'<path class="gap" d="{path}" fill="{fill}" opacity=".6">{title}</path>{"".join(letters)}'

    def _bar(self, bar: Bar, y: float) -> str:
        row, style = bar.row, self.styles[bar.row["role"]]
        x = self._x(row["start_s"])
        width = self._x(row["end_s"]) - x
        if (bar.depth and width < SHORTEST) or row["end_s"] - row["start_s"] <= self.least_s:
            self.too_short += 1
            return ""
        top, height, attributes, label = y + 2, float(BAR), f'fill="{style.colour}"', ""
        if row["kind"] == "queue":
            top, height, attributes = y + 3 + BAR, QUEUE, f'fill="{style.colour}"'
        elif bar.depth:
            height = STRIP if bar.depth == 1 else STRIP - 4
            top += BAR - height
            attributes = f'fill="{self._pattern(row["kind"], style.ink)}"'
        elif row["kind"] == "transfer":
            attributes = f'fill="{self._pattern("transfer", style.colour)}"'
        else:
            attributes += ' rx="2" stroke="currentColor" stroke-opacity=".35" stroke-width=".5"'
            label = self._label(row, style, x, width, top + (BAR - STRIP if bar.holds else BAR) / 2 + 4)
        place = f'x="{x:.2f}" y="{top:.1f}" width="{max(width, 1):.2f}" height="{height:g}"'
        return f'<rect class="span" {place} {attributes}><title>{_text(self._hover(row))}</title></rect>{label}'

    def _label(self, row: Row, style: RoleStyle, x: float, width: float, y: float) -> str:
        if width < 11:
            return ""
        name = _shortened(row["stage"], int((width - 8) / CHAR) - 2)
        text = f'<tspan font-weight="700">{_text(style.letter)}</tspan> {_text(name)}'.strip()
        place = f'x="{x + 4:.1f}"' if name else f'x="{x + width / 2:.1f}" text-anchor="middle"'
        return f'<text {place} y="{y:.1f}" font-size="11" fill="{style.ink}" pointer-events="none">{text}</text>'

    def _hover(self, row: Row) -> str:
        duration = row["end_s"] - row["start_s"]
        since, until = row["start_s"] - self.start_s, row["end_s"] - self.start_s
        lines = [
            f"{row['stage']}: {row['kind']}" + (f" in {row['parent']}" if row["parent"] else ""),
            f"{row['role']} rank {row['rank']} on {row['device']}, run {row['run']}",
            f"{seconds_text(duration)} (from {since:.3f} s to {until:.3f} s)",
        ]
        if row["moved_bytes"]:
            lines.append(f"{bytes_text(row['moved_bytes'])} moved")
        if row["processed_tokens"]:
            rate = f" ({row['processed_tokens'] / duration:,.0f} tokens/s)" if duration else ""
            lines.append(f"{row['processed_tokens']:,} tokens{rate}")
        if row["peak_memory_bytes"]:
            lines.append(f"{bytes_text(row['peak_memory_bytes'])} peak memory")
        return "\n".join([*lines, *filter(None, [row["note"]])])

    def _pattern(self, kind: str, stroke: str) -> str:
        """Reference to the hatch of `kind` in `stroke`; `ID` stands for the picture's id until that is known."""
        name = f"{ID}{kind}-{stroke.lstrip('#')}"
        lines = HATCHES.get(kind) or SHADES.get(kind, "")
        drawn = f'<path d="{lines}" stroke="{stroke}" stroke-width="1.3" fill="none"/>' if lines else ""
        ground = f'<rect width="6" height="6" fill="{stroke}" fill-opacity="{ground_opacity(kind)}"/>'
        self.patterns[kind, stroke] = (
            f'<pattern id="{name}" width="6" height="6" patternUnits="userSpaceOnUse">{ground}{drawn}</pattern>'
        )
        return f"url(#{name})"

    def _legend(self) -> tuple[str, float]:
        kinds = {row["kind"] for row in self.rows if row["parent"] or row["kind"] == "transfer"}
        entries = [
            (role or "no role", f'fill="{style.colour}"', style.letter, style.ink)
            for role, style in self.styles.items()
        ]
        entries += [
            (kind.replace("_", " "), f'fill="{self._pattern(kind, ON_ANY_GROUND)}"', "", "")
            for kind in HATCHES
            if kind in kinds
        ]
        if any(row["kind"] == "queue" for row in self.rows):
            entries.append((QUEUE_LABEL, f'fill="{ON_ANY_GROUND}"', "", ""))
        entries += [
            (
                cause.words,
                f'fill="{self._pattern(cause.column, ON_ANY_GROUND)}" opacity=".6"',
                cause.letter,
                "currentColor",
            )
            for number, cause in enumerate(CAUSES)
            if (self.gaps.cause == number).any()
        ]
        parts: list[str] = []
        x, y = 4.0, 4.0
        for name, fill, letter, ink in entries:
            needed = 22 + CHAR * 1.1 * len(name) + 14
            if x > 4 and x + needed > self.width:
                x, y = 4.0, y + 20
            parts.append(f'<rect x="{x:.1f}" y="{y}" width="16" height="14" rx="2" {fill}/>')
            if name == QUEUE_LABEL:
                parts[-1] = f'<rect x="{x:.1f}" y="{y + 6}" width="16" height="{QUEUE}" {fill}/>'
            if letter:
                place = f'x="{x + 8:.1f}" y="{y + 11}" text-anchor="middle"'
                parts.append(f'<text {place} font-size="11" font-weight="700" fill="{ink}">{_text(letter)}</text>')
            parts.append(f'<text x="{x + 21:.1f}" y="{y + 11.5}">{_text(name)}</text>')
            x += needed
        return "".join(parts), y + 26

    def _axis(self, top: float, bottom: float) -> str:
        step = _nice_step(self.window_s / max((self.width - self.left - RIGHT) / 90, 1))
        digits = max(0, -math.floor(math.log10(step) + 1e-9))
        parts = []
        for n in range(int(self.window_s / step + 1e-9) + 1):
            x = self._x(self.start_s + n * step)
            line = f'<path d="M{x:.1f} {top:.0f}V{bottom:.0f}" stroke="currentColor" stroke-opacity=".16"/>'
            parts.append(
                f'{line}<text x="{x:.1f}" y="{bottom + 14:.0f}" text-anchor="middle">{n * step:,.{digits}f} s</text>'
            )
        return "".join(parts)

    def _footnote(self, y: float) -> str:
        if not self.rows:
            note = "no spans in this window"
        elif self.too_short:
            note = f"{self.too_short:,} span{'s are' if self.too_short > 1 else ' is'} too short to draw"
        else:
            return ""
        return (
            f'<text x="{self.width - 4}" y="{y + 32:.0f}" text-anchor="end" font-size="11" opacity=".8">{note}</text>'
        )


def ground_opacity(kind: str) -> float:
    """Of the ground under a hatch: that of a gap lets its lane through, and a kind without a hatch is all ground."""
    return 0.06 if kind in SHADES else 0.25 if HATCHES.get(kind) else 0.45


def _nice_step(least: float) -> float:
    """The smallest of 1, 2, 5 x 10^k that is at least `least`."""
    power = 10.0 ** math.floor(math.log10(least))
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power >= least * (1 - 1e-9))


def _percent(part_s: float, window_s: float) -> str:
    return f"{part_s / window_s:.0%}".replace("%", " %") if window_s > 0 else "0 %"


def _cut(text: str, most: int) -> str:
    return text if len(text) <= most else text[: max(most - 1, 0)] + "…"


def _shortened(stage: str, most: int) -> str:
    """A stage's name in at most `most` characters: whole, or what tells it from others, or nothing."""
    if len(stage) <= most:
        return stage
    return _cut(stage.removeprefix("compute_"), most) if most >= 5 else ""


def _text(text: str) -> str:
    """Escaped, and without the control characters that XML does not allow."""
    return escape("".join(character for character in text if character.isprintable() or character == "\n"))
