"""Draw which roles are on which device: boxes with their roles, and bytes as bars."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from itertools import groupby

from workbench.display.html import bytes_text, folded, legend, numbers_table, svg
from workbench.display.palette import RoleStyle, role_styles
from workbench.telemetry.memory import MemoryReading

# Use -> opacity of its part of a bar; the colour is the role's.
USES = {
    "parameters": 1.0,
    "optimizer": 0.75,
    "gradients": 0.55,
    "generation weights": 0.4,
    "generation kv cache": 0.25,
    "activations": 0.12,
    "batches": 0.75,
}
WIDTH, GAP, PAD, LINE, BAR, HEAD = 300, 12, 10, 30, 11, 40
BARS = WIDTH - 2 * PAD
COLUMNS = 3
NAMED = 24  # the height of a machine's name


@dataclass(frozen=True)
class DeviceBox:
    """One device. name: such as "cuda:0". place: the process on it. held: bytes by role and use, such as "parameters";
    under the role "batch", bytes of batch rows. capacity_bytes: its memory, if known. machine: if there are several."""

    name: str
    place: str
    held: Mapping[str, Mapping[str, int]]
    capacity_bytes: int | None = None
    note: str = ""
    machine: str = ""

    @property
    def bytes(self) -> int:
        return sum(sum(held.values()) for held in self.held.values())


@dataclass(frozen=True)
class DeviceMap:
    """Draw devices, machine by machine; all bars share one scale. what: what the bytes are."""

    boxes: tuple[DeviceBox, ...]
    what: str

    def __repr__(self) -> str:
        total = sum(box.bytes for box in self.boxes)
        return f"<DeviceMap of {self.what}: {len(self.boxes)} devices, {bytes_text(total)}>"[:79]

    def _repr_html_(self) -> str:
        rows = [
            [box.name, role, use.replace("_", " "), bytes_text(n)]
            for box in self.boxes
            for role, held in box.held.items()
            for use, n in held.items()
            if n
        ]
        table = numbers_table(["device", "role", "use", "bytes"], rows, caption=self.what)
        return f'<div style="color:inherit">{_svg(self)}{folded("The bars as a table", table)}</div>'


def device_map(readings: Iterable[MemoryReading], what: str) -> DeviceMap:
    """Draw readings of memory. Roles that hold nothing are shown too."""
    boxes, readings = [], list(readings)
    several = len({reading.machine for reading in readings} - {""}) > 1
    for reading in sorted(readings, key=lambda reading: reading.machine if several else ""):
        held = {**reading.held} if reading.error else {**reading.held, "batch": {"batches": reading.batch_bytes}}
        place = f"{reading.host} on {reading.machine}, process {reading.process}"
        note = f"process {bytes_text(reading.resident_bytes)}"
        if reading.error:
            place, note = f"{reading.host}: {reading.error}", "no answer"
        capacity_bytes = reading.capacity_bytes if reading.on_gpu else None
        machine = reading.machine if several else ""
        boxes.append(DeviceBox(reading.device, place, held, capacity_bytes, note, machine))
    return DeviceMap(tuple(boxes), what)


def _svg(shown: DeviceMap) -> str:
    styles = role_styles(role for box in shown.boxes for role in box.held)
    scale = max((sum(held.values()) for box in shown.boxes for held in box.held.values()), default=0) or 1
    columns = min(COLUMNS, max(1, len(shown.boxes)))
    height = HEAD + LINE * max((len(box.held) for box in shown.boxes), default=0) + PAD
    used = {use.replace("_", " ") for box in shown.boxes for held in box.held.values() for use, n in held.items() if n}
    shades = [
        (use, f'fill="currentColor" fill-opacity="{opacity}" stroke="currentColor" stroke-opacity=".4"', "", "")
        for use, opacity in USES.items() if use in used and use != "batches"
    ]  # fmt: skip
    width = columns * (WIDTH + GAP) - GAP
    names, y = legend(shades, width, 18)
    parts = [names]
    for machine, group in groupby(shown.boxes, key=lambda box: box.machine):
        if machine:
            y += NAMED
            parts.append(f'<text x="0" y="{y - 6}" fill="currentColor" font-weight="600">{escape(machine)}</text>')
        there = list(group)
        for n, box in enumerate(there):
            left, top = (n % columns) * (WIDTH + GAP), y + (n // columns) * (height + GAP)
            parts.append(_box(box, left, top, height))
            for line, (role, held) in enumerate(box.held.items()):
                parts.append(_bar(role, held, styles[role].colour, left + PAD, top + HEAD + line * LINE, scale))
        y += -(-len(there) // columns) * (height + GAP)
    title = f'<text x="0" y="12" fill="currentColor" font-weight="600">{escape(shown.what)}</text>'
    return svg(f"{title}{''.join(parts)}", width, y, f"{shown.what}: {len(shown.boxes)} devices")


def _box(box: DeviceBox, x: float, y: float, height: float) -> str:
    told = box.note or bytes_text(box.bytes)
    if box.capacity_bytes:
        told += f" of {bytes_text(box.capacity_bytes)}"
    return (
        f'<rect x="{x + 0.5:g}" y="{y + 0.5:g}" width="{WIDTH - 1}" height="{height - 1}" rx="4" fill="none" '
        f'stroke="currentColor" stroke-opacity=".35"/>'
        f'<text x="{x + PAD:g}" y="{y + 16:g}" fill="currentColor" font-weight="600">{escape(box.name)}</text>'
        f'<text x="{x + WIDTH - PAD:g}" y="{y + 16:g}" fill="currentColor" text-anchor="end">{escape(told)}</text>'
        f'<text x="{x + PAD:g}" y="{y + 30:g}" fill="currentColor" font-size="10" opacity=".7">'
        f"{escape(box.place)}</text>"
    )


def _bar(role: str, held: Mapping[str, int], colour: str, x: float, y: float, scale: int) -> str:
    parts = [
        f'<text x="{x:g}" y="{y + 11:g}" fill="currentColor">{escape(role)}</text>'
        f'<text x="{x + BARS:g}" y="{y + 11:g}" fill="currentColor" text-anchor="end" font-size="10">'
        f"{bytes_text(sum(held.values()))}</text>"
    ]
    start = 0.0
    for use, n in ((use.replace("_", " "), n) for use, n in held.items() if n):
        width, tip = n / scale * BARS, escape(f"{role}, {use}: {n:,} bytes")
        parts.append(
            f"<g><title>{tip}</title>"
            f'<rect x="{x + start:.2f}" y="{y + 15:g}" width="{width:.2f}" height="{BAR}" fill="{colour}" '
            f'fill-opacity="{USES.get(use, 0.5)}" stroke="{colour}" stroke-width=".7"/></g>'
        )
        start += width
    return f"<g>{''.join(parts)}</g>"


BORDER = "color-mix(in srgb, currentColor 30%, transparent)"
_SMALL = "font-size:11px;opacity:.8"
_CHIP = f"border:1px solid {BORDER};border-radius:3px;padding:0 5px;font-size:11px;white-space:nowrap"


def side_by_side(boxes: Iterable[str]) -> str:
    """Lay boxes out in a line that wraps."""
    return f'<div style="display:flex;flex-wrap:wrap;gap:10px;align-items:stretch;margin:6px 0">{"".join(boxes)}</div>'


def box(
    name: str, devices: Sequence[str], cards: Iterable[str], *, note: str = "", size: str = "", attributes: str = ""
) -> str:
    """Html of a pool. devices: their names. cards: html of its roles. note: what a planned change does to the pool,
    which is then dashed. size: html beside its name; "" shows the number of devices. attributes: html attributes of its
    control."""
    many = f"{len(devices)} device{'s' if len(devices) != 1 else ''}"
    chips = " ".join(f'<span style="{_CHIP}">{escape(device)}</span>' for device in devices)
    told = f'<div style="{_SMALL}">{escape(note)}</div>' if note else ""
    return (
        f'<section aria-label="pool {escape(name)}, {many}" {attributes} '
        f'style="border:1.5px {"dashed" if note else "solid"} {BORDER};border-radius:6px;padding:6px 8px;'
        'min-width:230px">'
        f'<div style="display:flex;flex-wrap:wrap;gap:8px;align-items:center"><b>{escape(name)}</b>'
        f"{size or f'<span>{many}</span>'}</div>"
        f'<div style="margin:3px 0">{chips}</div>{told}{"".join(cards)}</section>'
    )


def card(role: str, style: RoleStyle, words: Iterable[str], *, note: str = "", attributes: str = "") -> str:
    """Html of a role in a pool. words: its model, its layout. note, attributes: see `box`."""
    letter = (
        f'<span aria-hidden="true" style="background:{style.colour};color:{style.ink};border-radius:3px;'
        f'padding:0 5px;font-weight:700">{escape(style.letter)}</span>'
    )
    told = " &middot; ".join(escape(text) for text in words if text)
    noted = f'<div style="font-size:11px;font-weight:600">{escape(note)}</div>' if note else ""
    return (
        f'<div {attributes} style="border:1px {"dashed" if note else "solid"} {BORDER};'
        f'border-left:4px solid {style.colour};border-radius:4px;padding:3px 7px;margin:5px 0">'
        f'<div>{letter} <b>{escape(role)}</b></div><div style="{_SMALL}">{told}</div>{noted}</div>'
    )
