"""The axis of a timeline: ticks at true times, and breaks where the picture leaves time out."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from workbench.display.html import seconds_text
from workbench.display.idle import CAUSES, UNCALLED
from workbench.display.timeline_shapes import CHAR, text

if TYPE_CHECKING:
    from workbench.display.timeline_svg import Drawing, Section

TICK_ROOM = 60  # pixels between two ticks at least
NARROW_BREAK = 4  # below which width a break is one line


def axis(drawing: Drawing, section: Section, top: float, bottom: float) -> str:
    """Lines and times, seconds from the start of a section."""
    step = _nice_step((drawing.to_s - drawing.from_s) / max(drawing.plot / 90, 1))
    digits, parts, last = max(0, -math.floor(math.log10(step) + 1e-9)), list[str](), -math.inf
    drawn_s = section.folding.time(drawing.drawn_from_s), section.folding.time(drawing.drawn_to_s)
    for start_s, end_s in section.folding.kept(*drawn_s):
        for n in range(math.ceil(start_s / step - 1e-9), int(end_s / step + 1e-9) + 1):
            x = drawing.x(section, n * step)
            if x < last + TICK_ROOM:
                continue
            told = f"{n * step:,.{digits}f} s"
            half = CHAR * len(told) / 2  # so that no time is cut at the edges of the plot
            last, anchor = x, "start" if -1 < x < half else "end" if 0 < drawing.plot + 1 - x < half else "middle"
            parts.append(
                f'<path d="M{x:.1f} {top:.0f}V{bottom:.0f}" stroke="currentColor" stroke-opacity=".16"/>'
                f'<text x="{x:.1f}" y="{bottom + 14:.0f}" text-anchor="{anchor}">{told}</text>'
            )
    return "".join(parts)


def breaks(drawing: Drawing, section: Section, top: float, bottom: float) -> str:
    """What is folded: two dashed lines through all lanes of a section, with its length above them."""
    folding, parts = section.folding, list[str]()
    lefts, rights = (drawing.x(section, times_s) for times_s in (folding.start_s, folding.end_s))
    lengths_s = folding.end_s - folding.start_s
    seen = [
        (left, right, length_s)
        for left, right, length_s in zip(lefts.tolist(), rights.tolist(), lengths_s.tolist(), strict=True)
        if right > -drawing.plot / 2 and left < 1.5 * drawing.plot
    ]
    middles = [(left + right) / 2 for left, right, _ in seen]
    for n, (left, right, length_s) in enumerate(seen):
        edges = (left, right) if right - left >= NARROW_BREAK else (middles[n],)
        lines = "".join(f"M{x:.1f} {top - 4:.0f}V{bottom + 4:.0f}" for x in edges)
        look = 'fill="none" stroke="currentColor" stroke-dasharray="4 3"'
        told = f"{seconds_text(length_s)}, {CAUSES[UNCALLED].words}"
        others = [abs(middle - middles[n]) for middle in middles[max(n - 1, 0) : n + 2] if middle != middles[n]]
        room = min(others, default=math.inf)
        label = next((one for one in (told, seconds_text(length_s)) if CHAR * len(one) < room), "")
        half = CHAR * len(label) / 2
        x, anchor = middles[n], "middle"
        if 0 <= x < half:
            x, anchor = max(left, 2.0), "start"
        elif drawing.plot - half < x <= drawing.plot:
            x, anchor = min(right, drawing.plot - 2.0), "end"
        written = f'<text x="{x:.1f}" y="{top - 8:.0f}" text-anchor="{anchor}">{text(label)}</text>' if label else ""
        parts.append(
            f'<g class="break" data-folded="{length_s!r}" pointer-events="none"><title>{text(told)}</title>'
            f'<path d="{lines}" {look}/>{written}</g>'
        )
    return "".join(parts)


def _nice_step(least: float) -> float:
    """The smallest of 1, 2, 5 x 10^k that is at least `least`."""
    power = 10.0 ** math.floor(math.log10(least))
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power >= least * (1 - 1e-9))
