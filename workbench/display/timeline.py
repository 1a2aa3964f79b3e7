"""A picture of which device worked when: one lane a device, one bar a span, as plain SVG that needs no script.

    pool      | A generate_sequences |   R ref_log_prob | A update_actor ////  |
    cpu:0     -----------------------------------------------------------------

Colours and letters tell roles, hatches tell kinds of work inside a bar, a thin line under a bar is its queue time. What
a device waits for is told by shading and a small letter.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any

import numpy as np

from workbench.display.html import bytes_text, picture_id, seconds_text, table
from workbench.display.idle import CAUSES, UNCALLED, Callers, DeviceSpans, Gaps, Lane, Life, Row, called_s, within
from workbench.display.lanes import NOTHING_FOLDED, Folding, bars_of, folding_of, lanes_of
from workbench.display.timeline_svg import ID, ON_ANY_GROUND, Drawing, percent
from workbench.errors import BadInput
from workbench.support.checked_calls import checked_call

if TYPE_CHECKING:
    import pandas


GROUPED = ["role", "stage", "kind", "parent"]
MOST_SHOWN = 64  # rows


@dataclass(frozen=True)
class Sums:
    """Sums of a range: from_s and to_s, seconds from the start of the picture.

    stages: a row for each role, stage and kind, the longest role and stage first. spans: how many overlap the range.
    span_s: their seconds in it, of all devices. processed_tokens and moved_bytes: a span that the range cuts counts by
    its share of time, so that the sums of two halves add up to the whole. parent: the kind of the enclosing span, ""
    for none; a token therefore counts in the row of its stage and again in the row of its pass.

    idle: a row for each cause, seconds of all devices. device_s: seconds of all devices in the range; busy_s is
    device_s without idle.
    """

    from_s: float
    to_s: float
    device_s: float
    devices: int
    stages: list[dict[str, Any]]
    idle: list[dict[str, Any]]

    @property
    def busy_s(self) -> float:
        """Seconds of all devices in which a role computed."""
        return self.device_s - sum(row["idle_s"] for row in self.idle)

    @property
    def called_s(self) -> float:
        """Seconds of all devices in which anything was called: the denominator of shares."""
        return self.device_s - sum(row["idle_s"] for row in self.idle if row["cause"] == CAUSES[UNCALLED].words)

    @property
    def title(self) -> str:
        devices = f"{self.devices} device{'s' if self.devices != 1 else ''}"
        taken = f"{seconds_text(self.to_s - self.from_s)} on {devices}: busy {percent(self.busy_s, self.called_s)}"
        return f"from {self.from_s:,.3f} s to {self.to_s:,.3f} s, {taken}"

    def __repr__(self) -> str:
        lines = [f"<{self.title}>"]
        for row in self.stages:
            if not row["parent"]:
                name = f"{row['role']}.{row['stage']}".lstrip(".")
                lines.append(f"  {name[:32]:32} {row['kind'][:12]:12} {seconds_text(row['span_s']):>12}")
        lines += [f"  idle: {row['cause'][:26]:26} {'':12} {seconds_text(row['idle_s']):>12}" for row in self.idle]
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        def row_of(row: Mapping[str, Any]) -> dict[str, str]:
            return {
                "role": row["role"],
                "stage": row["stage"],
                "kind": row["kind"] + (f" in {row['parent']}" if row["parent"] else ""),
                "spans": f"{row['spans']:,}",
                "time": seconds_text(row["span_s"]),
                "tokens": f"{row['processed_tokens']:,.0f}" if row["processed_tokens"] else "",
                "bytes": bytes_text(row["moved_bytes"]) if row["moved_bytes"] else "",
            }

        waits = [
            {
                "idle": row["cause"],
                "time": seconds_text(row["idle_s"]),
                "share": "" if row["cause"] == CAUSES[UNCALLED].words else percent(row["idle_s"], self.called_s),
            }
            for row in self.idle
        ]
        stages = table([row_of(row) for row in self.stages], caption=self.title, max_rows=MOST_SHOWN)
        return f"<div>{stages}{table(waits, caption='idle time by its cause, all devices') if waits else ''}</div>"


def sums_of(
    rows: Sequence[Row], gaps: Gaps, present: Mapping[int, Life], start_s: float, range_s: tuple[float, float]
) -> Sums:
    """Sums of a range of unix times. present: by lane, the period in which it exists. start_s: the origin of
    `Sums.from_s`."""
    import pandas

    from_s, to_s = range_s
    added = ["span_s", "processed_tokens", "moved_bytes"]
    spans = pandas.DataFrame(rows, columns=[*GROUPED, "start_s", "end_s", *added[1:]]).fillna(0)
    whole_s = spans["end_s"] - spans["start_s"]
    spans["span_s"] = (spans["end_s"].clip(upper=to_s) - spans["start_s"].clip(lower=from_s)).clip(lower=0.0)
    spans[added[1:]] = spans[added[1:]].mul((spans["span_s"] / whole_s).where(whole_s > 0, 1.0), axis=0)
    at_once = (whole_s <= 0) & spans["start_s"].between(from_s, to_s, inclusive="left")
    inside = spans[(spans["span_s"] > 0) | at_once].assign(spans=1)
    sums = inside.groupby(GROUPED, as_index=False)[["spans", *added]].sum()
    # group rows by stage; the stage whose own spans took longest comes first
    own_s = sums["span_s"].where(sums["parent"] == "", 0.0).groupby([sums["role"], sums["stage"]]).transform("sum")
    first, rising = ["own_s", "role", "stage", "parent", "span_s"], [False, True, True, True, False]
    sums = sums.assign(own_s=own_s).sort_values(first, ascending=rising).drop(columns="own_s")
    stages: list[Any] = sums.to_dict("records")
    waits = (
        gaps.seconds(max(present, default=-1) + 1, from_s, to_s)[list(present)].sum(axis=0).tolist() if present else []
    )
    there_s = [end_s - begin_s for begin_s, end_s in (within(life, from_s, to_s) for life in present.values())]
    return Sums(
        from_s=from_s - start_s,
        to_s=to_s - start_s,
        device_s=sum(there_s),
        devices=sum(length_s > 0 for length_s in there_s),
        stages=stages,
        idle=[
            {"cause": cause.words, "idle_s": idle_s} for cause, idle_s in zip(CAUSES, waits, strict=False) if idle_s > 0
        ],
    )


MOST_BARS = 1500  # in one picture


@dataclass(frozen=True)
class Timeline:
    """A drawn timeline. `svg` can be saved as a file; `summary` has one row a device: see `DeviceSpans.times`.
    `sums(from_s, to_s)` adds up a range.

    rows, lanes, gaps, present, window: its data: spans, devices, their idle periods, when each drawn lane exists (by
    lane number), and the unix times of both edges. folding: of seconds from the left edge.
    """

    drawn: str
    summary: list[dict[str, Any]]
    rows: Sequence[Row] = field(repr=False, compare=False)
    lanes: Sequence[Lane] = field(repr=False, compare=False)
    gaps: Gaps = field(repr=False, compare=False)
    present: Mapping[int, Life] = field(repr=False, compare=False)
    window: Life
    folding: Folding = field(repr=False, compare=False)

    @property
    def length_s(self) -> float:
        """The drawn seconds, after folding."""
        return float(self.folding.drawn(self.window[1] - self.window[0]))

    @property
    def span_count(self) -> int:
        return len(self.rows)

    @property
    def svg(self) -> str:
        """The picture; each call gives it new ids."""
        return self.drawn.replace(ID, f"t{picture_id(self.drawn)}-")

    @property
    def inline_svg(self) -> str:
        """The picture for embedding in a page, in the page's text colour."""
        return self.svg.replace(f'color="{ON_ANY_GROUND}" ', "", 1)

    @checked_call("timeline.sums")
    def sums(self, from_s: float = 0.0, to_s: float | None = None) -> Sums:
        """Add up the range between two times of the axis, in seconds; None: the end. By stage, role and kind, and idle
        time by cause. Raises `BadInput` for an empty range."""
        start_s, end_s = self.window
        length_s = end_s - start_s
        from_s, to_s = max(float(from_s), 0.0), length_s if to_s is None else min(float(to_s), length_s)
        if not from_s < to_s:
            rule = f"the end must be after the start, on an axis from 0 to {length_s:.3f} s"
            raise BadInput(f"sums from {from_s} to {to_s}", rule, "give seconds on the axis of the picture")
        return sums_of(self.rows, self.gaps, self.present, start_s, (start_s + from_s, start_s + to_s))

    def __repr__(self) -> str:
        lines = [f"timeline of {seconds_text(self.window[1] - self.window[0])}: {self.span_count:,} spans on "
                 f"{len(self.summary)} devices"]  # fmt: skip
        for row in self.summary:
            busy, transfer, queued = (
                percent(row[name], called_s(row)) for name in ("busy_s", "transfer_s", "queued_s")
            )
            idle = percent(row["idle_s"] - row["uncalled_s"], called_s(row))
            name = " ".join(filter(None, (row["pool"], row["device"])))[:24]
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


def times_table(summary: Sequence[Row], caption: str = "") -> str:
    """An html table of what devices did and waited for: one row for each row of `Timeline.summary`. Shares are of the
    time in which any stage was called."""

    def cell(row: Row, name: str) -> str:
        if not row[name]:
            return ""
        return seconds_text(row[name]) + (f" ({percent(row[name], called_s(row))})" if name != "uncalled_s" else "")

    rows = [
        {
            "pool": row["pool"],
            "device": row["device"],
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
    callers: Callers | None = None,
    fold: bool = True,
) -> Timeline:
    """Draw spans (the spans frame, or dicts with its columns).

    devices: lanes that come first; a device without spans gets an empty lane. start, end: unix times between which to
    draw, such as those of the newest iterations; default: all. callers: what called the runs; default: each run was
    called separately. fold: draw long stretches in which nothing was called as narrow breaks.
    Raises `BadInput`.
    """
    rows: list[Any] = list(spans) if isinstance(spans, Sequence) else spans.to_dict("records")
    start = start if start is not None else min((row["start_s"] for row in rows), default=0.0)
    end = end if end is not None else max((row["end_s"] for row in rows), default=start)
    if end < start:
        raise BadInput(f"timeline from {start} to {end}", "the start must not be after the end", "swap the two")
    here = [row for row in rows if row["end_s"] >= start and row["start_s"] <= end]
    lanes = lanes_of(((row["pool"], row["device"]) for row in here), devices)
    found = DeviceSpans(rows, lanes)  # all rows: a cell that called earlier stages too may be between two of them
    present = dict.fromkeys(range(len(lanes)), (start, end))
    return drawn(here, found, found.gaps((start, end), callers=callers), present, (start, end), fold=fold)


def comparison(sides: Mapping[str, Sequence[Row]]) -> Timeline:
    """Draw several accounts of the same time, from 0 on, such as predicted and measured: a lane for each pool and side.
    A row's error sets its colour, see `ERROR_STYLES`; its `told` is the second line of its tooltip."""
    rows = [{**row, "device": side} for side, own in sides.items() for row in own]
    found = DeviceSpans(rows, lanes_of(((row["pool"], row["device"]) for row in rows), list(sides)))
    ends_s = {side: max(row["end_s"] for row in own) for side, own in sides.items()}
    present, parts = {n: (0.0, ends_s[side]) for n, (_, side) in enumerate(found.lanes)}, []
    for side, end_s in ends_s.items():  # a lane waits only for lanes of its own side
        alone = DeviceSpans([row for row in rows if row["device"] == side], found.lanes)
        lives = [(0.0, end_s if lane[1] == side else 0.0) for lane in found.lanes]
        parts.append(alone.gaps((0.0, end_s), lives, Callers(acts=[(0.0, end_s)])))
    gaps = Gaps(*(np.concatenate([getattr(part, one.name) for part in parts]) for one in fields(Gaps)))
    return drawn(rows, found, gaps, present, (0.0, max(ends_s.values())), fold=False)


def drawn(
    rows: Sequence[Row], spans: DeviceSpans, gaps: Gaps, present: Mapping[int, Life], window: Life, *,
    fold: bool, width: int = 960, most: int = MOST_BARS, zoom: float = 1.0,
) -> Timeline:  # fmt: skip
    """Draw the spans of a window. spans, gaps: of this window, or of a longer one. present: the drawn lanes in order,
    by their number in `spans`. width, most, zoom: see `Drawing`."""
    times = spans.times(present, gaps)
    numbers = {spans.lanes[number]: number for number in present}
    folding = folding_of(gaps, window) if fold else NOTHING_FOLDED
    bars = bars_of(row for row in rows if (row["pool"], row["device"]) in numbers)
    drawing = Drawing(bars, numbers, gaps, times, window, folding, width=width, most=most, zoom=zoom)
    return Timeline(drawing.svg(), times, rows, spans.lanes, gaps, present, window, folding)
