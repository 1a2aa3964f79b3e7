"""Numbers of tokens as colours that light and dark themes, and colour-blind readers, take: with a legend in numbers.

A colour is one of Okabe and Ito's ("Color Universal Design", 2008), laid over the page with more or less strength.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from html import escape
from typing import Literal

import torch
from torch import Tensor

BELOW, ABOVE, UNLIKELY = "#0072b2", "#e69f00", "#009e73"
STRONGEST = 0.62  # beyond it text is hard to read on the page
BEYOND = 0.02  # the share of numbers that a scale may leave outside, so that one of them does not pale all others

Kind = Literal["diverging", "ratio", "sequential"]


@dataclass(frozen=True, kw_only=True)
class Scale:
    """How a number becomes a colour.

    "diverging": blue below 0, orange above it, strongest at `limit` and beyond. "ratio": so around 1, by the logarithm,
    whose limit it is. "sequential": from 0, without colour, down to -limit, in green: log-probabilities.
    """

    kind: Kind
    limit: float

    def place(self, value: float) -> float:
        """Where a number is on the scale: from -1 to 1, 0 without colour; NaN for none."""
        if math.isnan(value):
            return math.nan
        if self.kind == "ratio":
            value = math.log(value) if value > 0 else -math.inf
        place = value / self.limit
        return max(-1.0, min(0.0 if self.kind == "sequential" else 1.0, place))

    def at(self, place: float) -> float:
        """The number at a place."""
        return math.exp(place * self.limit) if self.kind == "ratio" else place * self.limit

    def colour(self, value: float) -> str:
        """As #rrggbbaa; "" for no colour."""
        place = self.place(value)
        strength = 0 if math.isnan(place) else round(abs(place) * STRONGEST * 255)
        if not strength:
            return ""
        hue = UNLIKELY if self.kind == "sequential" else BELOW if place < 0 else ABOVE
        return f"{hue}{strength:02x}"


def scale_of(name: str, values: Iterable[Tensor]) -> Scale:
    """The scale of a column, for the numbers that are shown of it: wide enough for all of them but the outermost."""
    kind: Kind = "ratio" if name.endswith("ratio") else "sequential" if name.endswith("log_prob") else "diverging"
    parts = [value.double().flatten() for value in values]
    numbers = torch.cat(parts) if parts else torch.zeros(0)
    sizes = (numbers.clamp(min=1e-12).log() if kind == "ratio" else numbers).abs()
    sizes = sizes[sizes.isfinite()]
    if name in ("outside_range", "clipped", "response_mask") or not len(sizes):
        return Scale(kind=kind, limit=1.0)
    limit = float(torch.quantile(sizes, 1 - BEYOND)) or float(sizes.max())
    return Scale(kind=kind, limit=limit or 1.0)


def number(value: float) -> str:
    """Six digits, with a sign that is as wide as a plus."""
    return "none" if math.isnan(value) else f"{value:.6g}".replace("-", "\N{MINUS SIGN}")


def legend(scale: Scale, title: str, meaning: str = "") -> str:
    """A line with the scale's colours, and the number of each."""
    places = (-1.0, -0.5, 0.0) if scale.kind == "sequential" else (-1.0, -0.5, 0.0, 0.5, 1.0)
    ends = {-1.0: "\N{LESS-THAN OR EQUAL TO} ", 1.0: "\N{GREATER-THAN OR EQUAL TO} "}
    boxes = "".join(
        f'<span style="padding:1px 7px;border:1px solid color-mix(in srgb,currentColor 25%,transparent);'
        f'background:{scale.colour(scale.at(place)) or "transparent"}">{ends.get(place, "")}'
        f"{f'{scale.at(place):.3g}'.replace('-', chr(0x2212))}</span>"
        for place in places
    )
    told = f' <span style="opacity:.75">{escape(meaning)}</span>' if meaning else ""
    return f'<div style="font-size:12px;margin:3px 0"><b>{escape(title)}</b> {boxes}{told}</div>'


@dataclass(frozen=True, kw_only=True)
class Token:
    """How one token is drawn. says: its number, in words. sign: of one that is clipped, or outside the range. masked:
    the policy did not choose it. other: the responses are no longer the same there. attributes: html of a live view."""

    text: str
    says: str
    colour: str
    sign: str = ""
    masked: bool = False
    other: bool = False
    attributes: str = ""

    def html(self) -> str:
        """A span; spaces and ends of lines can be seen."""
        style = "padding:0 1px;margin-right:2px;" + (f"background:{self.colour};" if self.colour else "")
        if self.masked:
            style += "text-decoration:line-through;opacity:.55;"
        elif self.sign:
            style += "text-decoration:underline 2px;"
        if self.other:
            style += "outline:1px dotted currentColor;outline-offset:-1px;"
        sign = f'<sup style="font-size:65%;line-height:0">{self.sign}</sup>' if self.sign else ""
        text, line = visible(self.text), ""
        if text.endswith("\n"):  # the sign stays in the line of its token
            text, line = text[:-1], "\n"
        shown = f"{text}{sign}{line}"
        return f'<span title="{escape(self.says)}" style="{style}"{self.attributes}>{shown}</span>'


def visible(text: str) -> str:
    """The text as html, with a mark for each space, tab and end of line."""
    marked = escape(text).replace(" ", "·").replace("\t", "⇥\t").replace("\n", "↵\n")
    return marked or "∅"
