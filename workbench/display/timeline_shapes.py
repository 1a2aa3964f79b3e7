"""What the pictures of a timeline consist of: sizes, hatches, shapes and words."""

from __future__ import annotations

from html import escape
from typing import Any

import numpy as np
from numpy.typing import NDArray

from workbench.display.html import bytes_text, seconds_text
from workbench.display.span_table import Row

BAR, STRIP, QUEUE_LINE, LANE, GAP, HEAD, AXIS, HIT = 26, 9, 3, 33, 7, 22, 22, 4  # heights, pixels
CHAR = 6.3  # mean width of a character of the bars' font; a little wide, so that labels never run over
NARROW, NARROW_GAP, FUSED = 2.0, 1.0, 0.2  # pixels: see `_Bars`, `Drawing._gaps`, `_fused`
ON_ANY_GROUND = "#777777"  # text of a picture that cannot know the page's theme: 4.5:1 on white, 4.2:1 on near black
ID = "\0"  # placeholder of the picture's id; `_text` lets no such character through

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
    "uncalled_s": "",
}


class Patterns:
    """The hatches that a picture uses, by kind of work, or cause of idle time, and colour."""

    def __init__(self) -> None:
        self.definitions: dict[tuple[str, str], str] = {}

    def __call__(self, kind: str, stroke: str) -> str:
        """Reference to the hatch of `kind` in `stroke`; `ID` is replaced by the picture's id once that is known."""
        name = f"{ID}{kind}-{stroke.lstrip('#')}"
        lines = HATCHES.get(kind) or SHADES.get(kind, "")
        drawn = f'<path d="{lines}" stroke="{stroke}" stroke-width="1.3" fill="none"/>' if lines else ""
        # the ground of a gap lets its lane through, and a kind without a hatch is all ground
        opacity = 0.06 if kind in SHADES else 0.25 if HATCHES.get(kind) else 0.45
        ground = f'<rect width="6" height="6" fill="{stroke}" fill-opacity="{opacity}"/>'
        self.definitions[kind, stroke] = (
            f'<pattern id="{name}" width="6" height="6" patternUnits="userSpaceOnUse">{ground}{drawn}</pattern>'
        )
        return f"url(#{name})"


def hover_text(row: Row, zero_s: float) -> str:
    """What the tooltip of a span says. zero_s: unix time from which its times count."""
    duration_s = row["duration_s"]
    lines = [
        f"{row['stage']}: {row['kind']}" + (f" in {row['parent']}" if row["parent"] else ""),
        f"{row['role']} rank {row['rank']} on {row['device']}, run {row['run']}".lstrip(),
        f"{seconds_text(duration_s)} (from {row['start_s'] - zero_s:.3f} s to {row['end_s'] - zero_s:.3f} s)",
    ]
    if row["moved_bytes"]:
        lines.append(f"{bytes_text(row['moved_bytes'])} moved")
    if row["processed_tokens"]:
        rate = f" ({row['processed_tokens'] / duration_s:,.0f} tokens/s)" if duration_s else ""
        lines.append(f"{row['processed_tokens']:,} tokens{rate}")
    if row["peak_memory_bytes"]:
        lines.append(f"{bytes_text(row['peak_memory_bytes'])} peak memory")
    return "\n".join([*lines, *filter(None, [row["note"]])])


def percent(part_s: float, window_s: float) -> str:
    return f"{part_s / window_s:.0%}".replace("%", " %") if window_s > 0 else "0 %"


def box(level: int, y: float) -> tuple[float, float]:
    """Top and height of a bar of a lane at y."""
    if level == 3:
        return y + 3 + BAR, QUEUE_LINE
    height = (BAR, STRIP, STRIP - 4)[level]
    return y + 2 + BAR - height, height


def fused(left: NDArray[Any], right: NDArray[Any]) -> tuple[NDArray[Any], NDArray[Any]]:
    """Intervals; those that lie closer than `FUSED` as one."""
    order = np.argsort(left, kind="stable")
    left, reached = left[order], np.maximum.accumulate(right[order])
    opens = np.flatnonzero(np.concatenate([[True], left[1:] > reached[:-1] + FUSED])) if len(left) else np.empty(0, int)
    return left[opens], reached[np.append(opens[1:], len(left)) - 1] if len(left) else reached


def strokes(left: NDArray[Any], right: NDArray[Any], y: float, height: float) -> str:
    """Boxes between left and right edges, in order, as strokes of one path: its attributes but for the paint."""
    starts, stops = np.round(left * 10).astype(int), np.round(right * 10).astype(int)
    stops = np.maximum(stops, starts + 3)  # so that a span alone is still seen
    moves = np.diff(starts, append=0)[:-1] - (stops - starts)[:-1]
    rest = "".join(
        f"m{_tenths(move)} 0h{_tenths(length)}"
        for move, length in zip(moves.tolist(), (stops - starts)[1:].tolist(), strict=True)
    )
    path = f"M{_tenths(starts[0])} {y + height / 2:g}h{_tenths(stops[0] - starts[0])}{rest}"
    return f'd="{path}" fill="none" stroke-width="{height:g}"'


def _tenths(number: int) -> str:
    return f"{number / 10:g}".replace("0.", ".", 1) if abs(number) < 10 else f"{number / 10:g}"


def cut(text: str, most: int) -> str:
    return text if len(text) <= most else text[: max(most - 1, 0)] + "…"


def shortened(stage: str, most: int) -> str:
    """A stage's name in at most `most` characters: whole, or what tells it from others, or nothing."""
    if len(stage) <= most:
        return stage
    return cut(stage.removeprefix("compute_"), most) if most >= 5 else ""


def text(text: str) -> str:
    """Escaped, and without the control characters that XML does not allow."""
    return escape("".join(character for character in text if character.isprintable() or character == "\n"))
