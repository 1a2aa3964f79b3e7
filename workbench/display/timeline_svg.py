"""Draw the bars of a timeline, and the gaps between them, as SVG.

Positions in the plot are shares of its width: a page zooms by widening the group `wb-tl-moves`, and pans by moving it.
Elements narrower than `data-least` pixels (their `data-room`, a share of the width, times the width) are hidden.
"""

from __future__ import annotations

import math
from bisect import bisect
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from workbench.display.html import SVG, bytes_text, legend, seconds_text, text
from workbench.display.idle import CAUSES, UNCALLED, Gaps, Lane
from workbench.display.lanes import Bar, Folding
from workbench.display.palette import AS_PREDICTED, ERROR_STYLES, RoleStyle, error_style, role_styles

BAR, STRIP, QUEUE_LINE, LANE, GAP, HEAD, AXIS = 26, 9, 3, 33, 7, 22, 22  # heights, pixels
CHAR = 6.9  # mean width of a character; a little wide, so that the column of names is never too narrow
LETTER, TICK_ROOM = 11, 55  # pixels that a letter takes, and a tick with its time
QUEUE_LABEL = "in the queue"
ON_ANY_GROUND = "#777777"  # text of a picture that cannot know the page's theme: 4.5:1 on white, 4.2:1 on near black
ID = "\0"  # placeholder of the picture's id; `text` lets no such character through

# The hatch of a kind of work, or of a cause of idle time, in a tile of 6 x 6 pixels.
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
SHADES = {
    "transfer_s": "M0 0L6 6M-1 5L1 7M5-1L7 1",
    "slowest_rank_s": "M1.5 0V6M4.5 0V6",
    "other_pool_s": "M0 6L6 0M-1 1L1-1M5 7L7 5",
    "controller_s": "M2.5 3H3.5",
    "uncalled_s": "",
}


class Drawing:
    """Draws the bars of a window of unix times.

    numbers: the lanes in `gaps`, in drawing order. times: see `DeviceSpans.times`, a row a lane. most: the number of
    bars: those of stages first, then the longest; of gaps half as many. zoom: how many times wider a page may make it;
    elements that only fit when zoomed are in the picture, hidden.
    """

    def __init__(
        self, bars: Sequence[Bar], numbers: Mapping[Lane, int], gaps: Gaps, times: Sequence[Mapping[str, Any]],
        window: tuple[float, float], folding: Folding, *, width: int, most: int, zoom: float,
    ) -> None:  # fmt: skip
        self.start_s, self.end_s = window
        self.numbers, self.gaps, self.times, self.folding, self.zoom = numbers, gaps, times, folding, zoom
        self.span_count, self.width = len(bars), width
        ranked = sorted(range(len(bars)), key=lambda n: (bars[n].level != 0, -bars[n].length_s))
        self.bars = [bars[n] for n in sorted(ranked[:most])]
        self.length_s = float(folding.drawn(self.end_s - self.start_s)) or 1e-9
        self.gap_edges = self.share(gaps.start_s), self.share(gaps.end_s)
        widths = np.where(np.isin(gaps.lane, list(numbers.values())), self.gap_edges[1] - self.gap_edges[0], 0.0)
        longest = np.argsort(-widths, kind="stable")[: most // 2]
        self.shown_gaps = longest[widths[longest] > 0]
        names = [name for lane in numbers for name in lane]
        self.left = math.ceil(min(24 + CHAR * max([len("idle 100 %"), *map(len, names)]), width / 4))
        self.plot = max(width - self.left - 4, 1)
        self.styles = role_styles(bar.row["role"] for bar in bars)
        self.compared = any("error" in bar.row for bar in bars)
        if self.compared:  # colours tell errors, and letters roles
            self.styles = {role: replace(AS_PREDICTED, letter=one.letter) for role, one in self.styles.items()}
        self.patterns: dict[tuple[str, str], str] = {}

    def svg(self) -> str:
        frame, y = self._legend()
        moving, pool, top = list[str](), None, y + HEAD
        sublanes = dict.fromkeys(self.numbers, 1)
        for bar in self.bars:
            sublanes[bar.lane] = max(sublanes[bar.lane], 1 + bar.sublane)
        for lane, times in zip(self.numbers, self.times, strict=True):
            if lane[0] != pool:
                pool = lane[0]
                frame += (
                    f'<text x="4" y="{y + 14}" font-weight="600">{text(f"pool {pool}" if pool else "no stage")}</text>'
                )
                y += HEAD
            height = LANE * sublanes[lane]
            frame += self._head(lane, times, y)
            drawn = "".join(self._bar(bar, y + LANE * bar.sublane) for bar in self.bars if bar.lane == lane)
            ground = f'<rect y="{y}" width="100%" height="{height}" opacity=".06"/>'
            number = self.numbers[lane]
            moving.append(f'<g data-lane="{number}">{ground}{self._gaps(number, y, height)}{drawn}</g>')
            y += height + GAP
        whole = y + AXIS + 18
        inner = f"{self._axis(top, y)}{''.join(moving)}{self._breaks(top, y)}"
        frame += (
            f'<svg class="wb-tl-plot" x="{self.left}" width="{self.plot}" height="{whole}">'
            f'<svg class="wb-tl-moves" width="100%" height="{whole}">{inner}</svg></svg>'
            f'<text x="{self.left}" y="{y + 34}" font-size="11" opacity=".8">{self._footnote()}</text>'
        )
        label = f"Timeline of {len(self.numbers)} devices over {seconds_text(self.end_s - self.start_s)}"
        return (
            f'<svg xmlns="{SVG}" color="{ON_ANY_GROUND}" width="{self.width}" height="{whole}" '
            f'viewBox="0 0 {self.width} {whole}" style="max-width:100%;height:auto" role="img" aria-label="{label}" '
            'font-family="system-ui,-apple-system,Segoe UI,Helvetica,Arial,sans-serif" font-size="12" '
            f'fill="currentColor"><defs>{"".join(self.patterns.values())}</defs>{frame}</svg>'
        )

    # --- places -------------------------------------------------------------------------------------------------------

    def share(self, time_s: Any) -> Any:
        """The position of a unix time, as a share of the width, 0 to 1."""
        return self.folding.drawn(np.clip(time_s, self.start_s, self.end_s) - self.start_s) / self.length_s

    def _place(self, left: float, right: float) -> str:
        return f'x="{_percent(left)}" width="{_percent(right - left)}"'

    def _room(self, share: float, least: float) -> str | None:
        """Attributes of an element that needs this many pixels and has a share of the width; None if it never fits."""
        if share * self.plot * self.zoom < least:
            return None
        hidden = ' style="display:none"' if share * self.plot < least else ""
        return f' data-room="{share:.6g}" data-least="{least:g}"{hidden}' if self.zoom > 1 else hidden

    def _inside(self, left: float, right: float, y: float, height: float, words: str) -> str:
        """Text clipped at the edges of its box; left out if not even a letter fits."""
        room = self._room(right - left, LETTER)
        if room is None:
            return ""
        place = f'{self._place(left, right)} y="{y:g}" height="{height:g}"'
        return f'<svg class="words" {place} pointer-events="none"{room}>{words}</svg>'

    def pattern(self, kind: str, stroke: str) -> str:
        """Reference to the hatch of a kind of work, or of a cause of idle time, in a colour."""
        name = f"{ID}{kind}-{stroke.lstrip('#')}"
        lines = HATCHES.get(kind) or SHADES.get(kind, "")
        drawn = f'<path d="{lines}" stroke="{stroke}" stroke-width="1.3" fill="none"/>' if lines else ""
        # the background of a gap is translucent; a kind without a hatch has only a background
        opacity = 0.06 if kind in SHADES else 0.25 if HATCHES.get(kind) else 0.45
        ground = f'<rect width="6" height="6" fill="{stroke}" fill-opacity="{opacity}"/>'
        self.patterns[kind, stroke] = (
            f'<pattern id="{name}" width="6" height="6" patternUnits="userSpaceOnUse">{ground}{drawn}</pattern>'
        )
        return f"url(#{name})"

    # --- frame --------------------------------------------------------------------------------------------------------

    def _legend(self) -> tuple[str, float]:
        """The colours, letters and hatches in use; and the legend's height."""
        roles = {bar.row["role"] for bar in self.bars}
        kinds = {bar.row["kind"] for bar in self.bars if bar.row["parent"] or bar.row["kind"] == "transfer"}
        entries = [
            (role or "no role", f'fill="{style.colour}"', style.letter, style.ink)
            for role, style in self.styles.items()
            if role in roles
        ]
        if self.compared:
            entries += [(words, f'fill="{one.colour}"', "", "") for words, one in ERROR_STYLES.items()]
        entries += [
            (kind.replace("_", " "), f'fill="{self.pattern(kind, ON_ANY_GROUND)}"', "", "")
            for kind in HATCHES
            if kind in kinds
        ]
        if any(bar.level == 3 for bar in self.bars):
            entries.append((QUEUE_LABEL, 'fill="none"', "\N{BOX DRAWINGS HEAVY HORIZONTAL}", ON_ANY_GROUND))
        for number, cause in enumerate(CAUSES):
            if (self.gaps.cause[self.shown_gaps] == number).any():
                fill = f'fill="{self.pattern(cause.column, ON_ANY_GROUND)}" opacity=".6"'
                entries.append((cause.words, fill, cause.letter, "currentColor"))
        return legend(entries, self.width, 4)

    def _head(self, lane: Lane, times: Mapping[str, Any], y: float) -> str:
        """The name of a lane, and its idle share."""
        told = ", ".join(f"{name} {seconds_text(times[f'{name}_s'])}" for name in ("busy", "transfer", "idle"))
        told += f", of which {seconds_text(times['queued_s'])} with a stage in the queue; "
        told += ", ".join(f"{cause.words} {seconds_text(times[cause.column])}" for cause in CAUSES)
        most = int((self.left - 18) / CHAR)
        name = lane[1] if len(lane[1]) <= most else f"{lane[1][: most - 1]}…"
        idle = percent(times["idle_share"], 1.0)
        return (
            f'<text x="12" y="{y + 13}">{text(name)}</text>'
            f'<text x="12" y="{y + 27}" font-size="11" opacity=".8">idle {idle}<title>{text(told)}</title></text>'
        )

    def _footnote(self) -> str:
        if not self.span_count:
            return "no spans in this window"
        told = []
        if (left_out := self.span_count - len(self.bars)) > 0:
            told.append(f"the longest of {self.span_count:,} spans; {left_out:,} more are in lab.trace(), for Perfetto")
        lengths_s = (self.folding.end_s - self.folding.start_s).tolist()
        if lengths_s:
            places = f"{len(lengths_s)} break{'s' if len(lengths_s) > 1 else ''}"
            told.append(f"the axis is folded: {places}, {seconds_text(sum(lengths_s))} in which nothing was called")
        return "; ".join(told)

    def _axis(self, top: float, bottom: float) -> str:
        """Ticks at true times, seconds from the start. The step is 1 or 5 times a power of ten; a tick is shown if its
        label fits before the next tick of its step, or of a larger step."""
        step, parts = _step(self.length_s * TICK_ROOM / self.plot), list[str]()
        taken, steps = [-math.inf, math.inf], [step]
        while (step := _step(step / 5)) * self.plot * self.zoom >= TICK_ROOM * self.length_s:
            steps.append(step)
        for step in steps:
            digits = max(0, -math.floor(math.log10(step) + 1e-9))
            for from_s, to_s in self.folding.kept(0.0, self.end_s - self.start_s):
                for n in range(math.ceil(from_s / step - 1e-9), int(to_s / step + 1e-9) + 1):
                    x = float(self.share(self.start_s + n * step))
                    at = bisect(taken, x)
                    near = min(x - taken[at - 1], taken[at] - x)
                    room = self._room(min(near, step / self.length_s), TICK_ROOM) if near > 1e-9 else None
                    if room is None:
                        continue
                    taken.insert(at, x)
                    anchor = "start" if x < 0.01 else "end" if x > 0.99 else "middle"
                    parts.append(
                        f'<g{room}><line x1="{_percent(x)}" x2="{_percent(x)}" y1="{top:g}" y2="{bottom:g}" '
                        f'stroke="currentColor" stroke-opacity=".16"/><text x="{_percent(x)}" y="{bottom + 14:g}" '
                        f'text-anchor="{anchor}">{n * step:,.{digits}f} s</text></g>'
                    )
        return "".join(parts)

    def _breaks(self, top: float, bottom: float) -> str:
        """Draw each fold as two dashed lines through all lanes, with its length above."""
        lefts, rights = (self.share(self.start_s + t).tolist() for t in (self.folding.start_s, self.folding.end_s))
        lengths_s = (self.folding.end_s - self.folding.start_s).tolist()
        middles, parts = [(a + b) / 2 for a, b in zip(lefts, rights, strict=True)], list[str]()
        for n, (left, right, length_s) in enumerate(zip(lefts, rights, lengths_s, strict=True)):
            lines = "".join(
                f'<line x1="{_percent(x)}" x2="{_percent(x)}" y1="{top - 4:g}" y2="{bottom + 4:g}" '
                'stroke="currentColor" stroke-dasharray="4 3"/>'
                for x in (left, right)
            )
            told = f"{seconds_text(length_s)}, {CAUSES[UNCALLED].words}"
            room = min((abs(other - middles[n]) for other in middles if other != middles[n]), default=1.0) * self.plot
            label = next((one for one in (told, seconds_text(length_s)) if CHAR * len(one) < room), "")
            half = CHAR * len(label) / 2 / self.plot
            x, anchor = middles[n], "middle"
            if x < half or x > 1 - half:
                x, anchor = (left, "start") if x < half else (right, "end")
            place = f'x="{_percent(x)}" y="{top - 8:g}" text-anchor="{anchor}"'
            words = f"<text {place}>{text(label)}</text>" if label else ""
            parts.append(f'<g class="break" pointer-events="none"><title>{text(told)}</title>{lines}{words}</g>')
        return "".join(parts)

    # --- gaps and bars ------------------------------------------------------------------------------------------------

    def _gaps(self, lane: int, y: float, height: float) -> str:
        """Draw the longest gaps of the picture that are on this lane, each with the letter of its cause."""
        parts = []
        for n in self.shown_gaps[self.gaps.lane[self.shown_gaps] == lane].tolist():
            cause, left, right = CAUSES[self.gaps.cause[n]], *(edges[n] for edges in self.gap_edges)
            start_s, end_s = float(self.gaps.start_s[n]), float(self.gaps.end_s[n])
            where = next(" ".join(one) for one, number in self.numbers.items() if number == lane)
            hover = (
                f"idle: {cause.words} ({cause.letter})\non {where}, {seconds_text(end_s - start_s)}\n{cause.meaning}"
            )
            told = f'data-gap="{start_s!r} {end_s!r} {self.gaps.cause[n]}"'
            fill = f'fill="{self.pattern(cause.column, ON_ANY_GROUND)}" opacity=".6"'
            place = f'{self._place(left, right)} y="{y:g}" height="{height:g}"'
            letter = f'<text x="50%" y="60%" text-anchor="middle" font-style="italic">{cause.letter}</text>'
            parts.append(f'<rect class="gap" {told} {place} {fill}><title>{text(hover)}</title></rect>')
            parts.append(self._inside(left, right, y, height, letter))
        return "".join(parts)

    def _bar(self, bar: Bar, y: float) -> str:
        row, style = bar.row, self.styles[bar.row["role"]]
        if "error" in row:
            style = replace(error_style(row["error"]), letter=style.letter)
        left, right = (float(self.share(row[name])) for name in ("start_s", "end_s"))
        height = (BAR, STRIP, STRIP - 4, QUEUE_LINE)[bar.level]
        top = y + 3 + BAR if bar.level == 3 else y + 2 + BAR - height
        fill, label = f'fill="{style.colour}"', ""
        if bar.level in (1, 2):
            fill = f'fill="{self.pattern(row["kind"], style.ink)}"'
        elif row["kind"] == "transfer":
            fill = f'fill="{self.pattern("transfer", style.colour)}"'
        elif bar.level == 0:
            fill += ' rx="2" stroke="currentColor" stroke-opacity=".35" stroke-width=".5"'
            label = self._inside(left, right, top, BAR, _label(row, style))
        told = f'data-n="{row.get("number", 0)}" data-level="{bar.level}"'
        place = f'{self._place(left, right)} y="{top:g}" height="{height}"'
        hover = text(hover_text(row, self.start_s))
        return f'<rect class="span" {told} {place} {fill}><title>{hover}</title></rect>{label}'


def _label(row: Mapping[str, Any], style: RoleStyle) -> str:
    letter, stage = f'<tspan font-weight="700">{text(style.letter)}</tspan>', row["stage"].removeprefix("compute_")
    error = f"{row['error']:+.0%} " if "error" in row else ""
    return f'<text x="2px" y="12" font-size="11" fill="{style.ink}">{letter} {error}{text(stage)}</text>'


def hover_text(row: Mapping[str, Any], zero_s: float) -> str:
    """The tooltip of a span. zero_s: the unix time that counts as 0."""
    duration_s, tokens = row["end_s"] - row["start_s"], row.get("processed_tokens", 0)
    lines = [
        f"{row['stage']}: {row['kind']}" + (f" in {row['parent']}" if row["parent"] else ""),
        row.get("told") or f"{row['role']} rank {row['rank']} on {row.get('device', '')}, run {row['run']}".lstrip(),
        f"{seconds_text(duration_s)} (from {row['start_s'] - zero_s:.3f} s to {row['end_s'] - zero_s:.3f} s)",
    ]
    if row.get("moved_bytes"):
        lines.append(f"{bytes_text(row['moved_bytes'])} moved")
    if tokens:
        lines.append(f"{tokens:,} tokens" + (f" ({tokens / duration_s:,.0f} tokens/s)" if duration_s else ""))
    if row.get("peak_memory_bytes"):
        lines.append(f"{bytes_text(row['peak_memory_bytes'])} peak memory")
    return "\n".join([*lines, *filter(None, [row.get("note", "")])])


def percent(part_s: float, window_s: float) -> str:
    return f"{part_s / window_s:.0%}".replace("%", " %") if window_s > 0 else "0 %"


def _percent(share: float) -> str:
    return f"{100 * share:.7g}%"


def _step(least: float) -> float:
    """The smallest of 1, 5 x 10^k that is at least `least`: each is a multiple of the smaller ones."""
    power = 10.0 ** math.floor(math.log10(least))
    return next(factor * power for factor in (1, 5, 10) if factor * power >= least * (1 - 1e-9))
