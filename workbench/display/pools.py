"""Pools as boxes: the devices of each, and a card for each role that runs on them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape

from workbench.display.palette import RoleStyle, role_styles

LINE = "color-mix(in srgb, currentColor 30%, transparent)"
_SMALL = "font-size:11px;opacity:.8"
_CHIP = f"border:1px solid {LINE};border-radius:3px;padding:0 5px;font-size:11px;white-space:nowrap"


@dataclass(frozen=True)
class Card:
    """A role in a pool. note: what is to become of it, such as "moves from policy"; a card with a note is dashed.

    attributes, inside: raw html that makes it a control: attributes of the card's element, and what is below its text.
    """

    role: str
    model: str
    layout: str
    note: str = ""
    attributes: str = ""
    inside: str = ""


@dataclass(frozen=True)
class PoolBox:
    """A pool. devices: their names. note, attributes, inside: as of a `Card`; head: raw html beside its name."""

    name: str
    devices: Sequence[str]
    cards: Sequence[Card]
    note: str = ""
    attributes: str = ""
    head: str = ""


def pools_html(boxes: Sequence[PoolBox], after: str = "") -> str:
    """The boxes side by side. after: raw html shown after the last one."""
    styles = role_styles(card.role for box in boxes for card in box.cards)
    shown = "".join(_box(box, styles) for box in boxes)
    return f'<div style="display:flex;flex-wrap:wrap;gap:10px;align-items:stretch;margin:6px 0">{shown}{after}</div>'


def _box(box: PoolBox, styles: Mapping[str, RoleStyle]) -> str:
    many = f"{len(box.devices)} device{'s' if len(box.devices) != 1 else ''}"
    chips = " ".join(f'<span style="{_CHIP}">{escape(name)}</span>' for name in box.devices)
    note = f'<div style="{_SMALL}">{escape(box.note)}</div>' if box.note else ""
    cards = "".join(_card(card, styles[card.role]) for card in box.cards)
    dashed = "dashed" if box.note else "solid"
    return (
        f'<section aria-label="pool {escape(box.name)}, {many}" {box.attributes} '
        f'style="border:1.5px {dashed} {LINE};border-radius:6px;padding:6px 8px;min-width:230px">'
        f'<div style="display:flex;flex-wrap:wrap;gap:8px;align-items:center"><b>{escape(box.name)}</b>'
        f"{box.head or f'<span>{many}</span>'}</div>"
        f'<div style="margin:3px 0">{chips}</div>{note}{cards}</section>'
    )


def _card(card: Card, style: RoleStyle) -> str:
    letter = (
        f'<span aria-hidden="true" style="background:{style.colour};color:{style.ink};border-radius:3px;'
        f'padding:0 5px;font-weight:700">{escape(style.letter)}</span>'
    )
    told = " &middot; ".join(escape(text) for text in (card.model, card.layout) if text)
    note = f'<div style="font-size:11px;font-weight:600">{escape(card.note)}</div>' if card.note else ""
    dashed = "dashed" if card.note else "solid"
    return (
        f'<div {card.attributes} style="border:1px {dashed} {LINE};border-left:4px solid {style.colour};'
        f'border-radius:4px;padding:3px 7px;margin:5px 0">'
        f"<div>{letter} <b>{escape(card.role)}</b></div>"
        f'<div style="{_SMALL}">{told}</div>{note}{card.inside}</div>'
    )
