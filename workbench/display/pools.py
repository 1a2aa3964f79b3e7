"""Pools as boxes: the devices of each, and a card for each role that runs on them. Styles are inline: viewers of saved
notebooks drop style sheets."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

from workbench.display.palette import RoleStyle

LINE = "color-mix(in srgb, currentColor 30%, transparent)"
_SMALL = "font-size:11px;opacity:.8"
_CHIP = f"border:1px solid {LINE};border-radius:3px;padding:0 5px;font-size:11px;white-space:nowrap"


def side_by_side(boxes: Iterable[str]) -> str:
    """Boxes in a line that wraps."""
    return f'<div style="display:flex;flex-wrap:wrap;gap:10px;align-items:stretch;margin:6px 0">{"".join(boxes)}</div>'


def box(
    name: str, devices: Sequence[str], cards: Iterable[str], *, note: str = "", size: str = "", attributes: str = ""
) -> str:
    """Html of a pool. devices: their names. cards: html of each. note: what a change makes of the pool; it is dashed
    then. size: html beside its name; "": how many devices there are. attributes: html of a control's element."""
    many = f"{len(devices)} device{'s' if len(devices) != 1 else ''}"
    chips = " ".join(f'<span style="{_CHIP}">{escape(device)}</span>' for device in devices)
    told = f'<div style="{_SMALL}">{escape(note)}</div>' if note else ""
    return (
        f'<section aria-label="pool {escape(name)}, {many}" {attributes} '
        f'style="border:1.5px {"dashed" if note else "solid"} {LINE};border-radius:6px;padding:6px 8px;'
        'min-width:230px">'
        f'<div style="display:flex;flex-wrap:wrap;gap:8px;align-items:center"><b>{escape(name)}</b>'
        f"{size or f'<span>{many}</span>'}</div>"
        f'<div style="margin:3px 0">{chips}</div>{told}{"".join(cards)}</section>'
    )


def card(role: str, style: RoleStyle, words: Iterable[str], *, note: str = "", attributes: str = "") -> str:
    """Html of a role in a pool. words: its model, its layout. note, attributes: as of a `box`."""
    letter = (
        f'<span aria-hidden="true" style="background:{style.colour};color:{style.ink};border-radius:3px;'
        f'padding:0 5px;font-weight:700">{escape(style.letter)}</span>'
    )
    told = " &middot; ".join(escape(text) for text in words if text)
    noted = f'<div style="font-size:11px;font-weight:600">{escape(note)}</div>' if note else ""
    return (
        f'<div {attributes} style="border:1px {"dashed" if note else "solid"} {LINE};'
        f'border-left:4px solid {style.colour};border-radius:4px;padding:3px 7px;margin:5px 0">'
        f'<div>{letter} <b>{escape(role)}</b></div><div style="{_SMALL}">{told}</div>{noted}</div>'
    )
