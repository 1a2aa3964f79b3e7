"""The memory of devices while a placement changes: before, meanwhile, after, and at the peak, as bars with figures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from workbench.display.html import bytes_text, svg

# what a bar means -> (how opaque it is, how its edge is drawn)
TIMES = {
    "before": (0.25, ""),
    "while it moves": (0.6, ""),
    "after": (0.4, ""),
    "at most, computing": (0.08, ' stroke-dasharray="3 2"'),
}
NOTHING_MOVES = {"held": TIMES["after"], "at most, computing": TIMES["at most, computing"]}
LEFT, BARS, RIGHT, LINE, HEAD, GAP = 130, 300, 170, 16, 20, 8


@dataclass(frozen=True)
class DeviceMemory:
    """Bytes on a device, or on several that share one memory; in the order of `TIMES`. has_bytes: what
    they may be at most, if known; capacity_bytes: of all the memory, of which others may use a part."""

    name: str
    before_bytes: int
    during_bytes: int
    after_bytes: int
    peak_bytes: int
    has_bytes: int | None = None
    capacity_bytes: int | None = None

    @property
    def all_bytes(self) -> tuple[int, int, int, int]:
        """By `TIMES`."""
        return self.before_bytes, self.during_bytes, self.after_bytes, self.peak_bytes

    def bars(self, *, moves: bool) -> list[tuple[str, int]]:
        """What is drawn: words and bytes."""
        if moves:
            return list(zip(TIMES, self.all_bytes, strict=True))
        return list(zip(NOTHING_MOVES, (self.after_bytes, self.peak_bytes), strict=True))


def memory_svg(devices: Sequence[DeviceMemory], *, moves: bool = True) -> str:
    """Bars of one scale. A line marks a device's capacity, where it lies within the width of the bars.

    moves: else before, meanwhile and after are one, "held".
    """
    scale = max((n for device in devices for n in device.all_bytes), default=0) or 1
    capacities = [device.has_bytes for device in devices if device.has_bytes]
    if capacities and max(capacities) < 4 * scale:
        scale = max(scale, *capacities)
    each = HEAD + LINE * (len(TIMES) if moves else len(NOTHING_MOVES)) + GAP
    width, height = LEFT + BARS + RIGHT, each * len(devices)
    parts = [_device(device, device.bars(moves=moves), n * each, scale) for n, device in enumerate(devices)]
    return svg("".join(parts), width, height, f"memory of {len(devices)} devices, estimated")


def _device(device: DeviceMemory, bars: Sequence[tuple[str, int]], y: float, scale: int) -> str:
    told = device.name
    if device.has_bytes:
        all_bytes = device.capacity_bytes or device.has_bytes
        told += f", of {bytes_text(all_bytes)}"
        told += f", {bytes_text(device.has_bytes)} free for these" if device.has_bytes < all_bytes else ""
    parts = [f'<text x="0" y="{y + 14:g}" fill="currentColor" font-weight="600">{escape(told)}</text>']
    top = y + HEAD
    for n, (when, held) in enumerate(bars):
        parts.append(_bar(when, held, device.has_bytes, top + n * LINE, scale))
    if device.has_bytes and device.has_bytes <= scale:
        x = LEFT + BARS * device.has_bytes / scale
        parts.append(
            f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{top - 2:g}" y2="{top + LINE * len(bars):g}" stroke="currentColor" '
            f'stroke-width="2"><title>room for these {bytes_text(device.has_bytes)}</title></line>'
        )
    return "".join(parts)


def _bar(when: str, held: int, has_bytes: int | None, y: float, scale: int) -> str:
    opacity, edge = (TIMES | NOTHING_MOVES)[when]
    figure = bytes_text(held)
    if has_bytes:
        figure += f", {held / has_bytes:.1%}" + (" \N{WARNING SIGN} too much" if held > has_bytes else "")
    return (
        f'<text x="10" y="{y + 11:g}" fill="currentColor">{escape(when)}</text>'
        f'<rect x="{LEFT}" y="{y + 2:g}" width="{BARS * held / scale:.1f}" height="{LINE - 5}" fill="currentColor" '
        f'fill-opacity="{opacity}" stroke="currentColor" stroke-width=".8"{edge}/>'
        f'<text x="{LEFT + BARS * held / scale + 6:.1f}" y="{y + 11:g}" fill="currentColor">{escape(figure)}</text>'
    )
