"""How a role looks in every picture: a colour that colour-blind readers can tell apart, and a letter; and how numbers
become colours.

Colours: Okabe and Ito, "Color Universal Design", 2008. `ink` is the text colour with the higher contrast on each.
"""

from __future__ import annotations

import math
from bisect import bisect
from collections.abc import Iterable
from dataclasses import dataclass
from html import escape
from typing import Literal

WHITE, BLACK = "#ffffff", "#111111"


@dataclass(frozen=True, kw_only=True)
class RoleStyle:
    """Fill colour, letter and text colour of a role."""

    colour: str
    letter: str
    ink: str = BLACK


ROLE_STYLES = {
    "actor": RoleStyle(colour="#0072b2", letter="A", ink=WHITE),
    "critic": RoleStyle(colour="#e69f00", letter="C"),
    "reference": RoleStyle(colour="#009e73", letter="R"),
    "reward": RoleStyle(colour="#d55e00", letter="W"),
    "cost": RoleStyle(colour="#cc79a7", letter="$"),
    "cost_critic": RoleStyle(colour="#f2c4de", letter="K"),
    "teacher": RoleStyle(colour="#a6761d", letter="T"),
    "rollout": RoleStyle(colour="#56459c", letter="G", ink=WHITE),
    "environment": RoleStyle(colour="#8c8c00", letter="E"),
    "numeric": RoleStyle(colour="#56b4e9", letter="N"),
    "prompts": RoleStyle(colour="#999999", letter="P"),
    "batch": RoleStyle(colour="#cccccc", letter="B"),
    "notebook": RoleStyle(colour="#f0e442", letter="F"),
}
AS_PREDICTED = RoleStyle(colour="#bbbbbb", letter="")
# Colours by the error of a prediction, predicted / measured - 1: PuOr of ColorBrewer.
ERROR_STYLES = {
    "took far longer (error below -30 %)": RoleStyle(colour="#e66101", letter=""),
    "took longer (below -10 %)": RoleStyle(colour="#fdb863", letter=""),
    "as predicted": AS_PREDICTED,
    "took less (above +10 %)": RoleStyle(colour="#b2abd2", letter=""),
    "took far less (above +30 %)": RoleStyle(colour="#5e3c99", letter="", ink=WHITE),
}
NO_ROLE = RoleStyle(colour="#b3e0f7", letter="")  # of what no role does, such as the start of a host


def error_style(error: float) -> RoleStyle:
    return list(ERROR_STYLES.values())[bisect((-0.3, -0.1, 0.1, 0.3), error)]


def role_styles(roles: Iterable[str]) -> dict[str, RoleStyle]:
    """A style for each role, the known roles first: the same in every picture."""
    wanted = set(roles)
    styles = {role: style for role, style in ROLE_STYLES.items() if role in wanted}
    return styles | dict.fromkeys(sorted(wanted - styles.keys()), NO_ROLE)


BELOW, ABOVE, UNLIKELY = "#0072b2", "#e69f00", "#009e73"
STRONGEST = 0.62  # beyond it text is hard to read on the page


@dataclass(frozen=True, kw_only=True)
class Scale:
    """Maps a number to a colour.

    "diverging": blue below 0, orange above, strongest at `limit` and beyond. "ratio": the same around 1, on a log scale
    that ends at `limit`. "sequential": green, from none at 0 down to -limit: log-probabilities.
    """

    kind: Literal["diverging", "ratio", "sequential"]
    limit: float

    def place(self, value: float) -> float:
        """The position of a number on the scale: -1 to 1, with 0 uncoloured; NaN for NaN."""
        if math.isnan(value):
            return math.nan
        if self.kind == "ratio":
            value = math.log(value) if value > 0 else -math.inf
        return max(-1.0, min(0.0 if self.kind == "sequential" else 1.0, value / (self.limit or 1.0)))

    def at(self, place: float) -> float:
        return math.exp(place * self.limit) if self.kind == "ratio" else place * self.limit

    def colour(self, value: float) -> str:
        """The colour as #rrggbbaa; "" for none."""
        place = self.place(value)
        strength = 0 if math.isnan(place) else round(abs(place) * STRONGEST * 255)
        hue = UNLIKELY if self.kind == "sequential" else BELOW if place < 0 else ABOVE
        return f"{hue}{strength:02x}" if strength else ""

    def legend(self, title: str, meaning: str = "") -> str:
        """A line with the colours and their numbers."""
        places = (-1.0, -0.5, 0.0) if self.kind == "sequential" else (-1.0, -0.5, 0.0, 0.5, 1.0)
        ends = {-1.0: "\N{LESS-THAN OR EQUAL TO} ", 1.0: "\N{GREATER-THAN OR EQUAL TO} "}
        boxes = "".join(
            f'<span style="padding:1px 7px;border:1px solid color-mix(in srgb,currentColor 25%,transparent);'
            f'background:{self.colour(self.at(place)) or "transparent"}">{ends.get(place, "")}'
            f"{f'{self.at(place):.3g}'.replace('-', chr(0x2212))}</span>"
            for place in places
        )
        told = f' <span style="opacity:.75">{escape(meaning)}</span>' if meaning else ""
        return f'<div style="font-size:12px;margin:3px 0"><b>{escape(title)}</b> {boxes}{told}</div>'
