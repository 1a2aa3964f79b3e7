"""How a role looks in every picture: a colour that colour-blind readers tell apart, and a letter for the rest.

Colours: Okabe and Ito, "Color Universal Design", 2008. `ink` is the text colour with the higher contrast on each.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

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
}
_SPARE_COLOURS = ("#56b4e9", "#f0e442", "#999999")


def role_styles(roles: Iterable[str]) -> dict[str, RoleStyle]:
    """A style for each role, the known roles first. Others take the spare colours in turn, and the first letter of
    their name that is free (or a digit)."""
    wanted = set(roles)
    styles = {role: style for role, style in ROLE_STYLES.items() if role in wanted}
    letters = {style.letter for style in ROLE_STYLES.values()}
    for number, role in enumerate(sorted(wanted - styles.keys())):
        choices = [*role.upper(), *"123456789", "?"]
        letter = next(choice for choice in choices if (choice.isalnum() and choice not in letters) or choice == "?")
        letters.add(letter)
        styles[role] = RoleStyle(colour=_SPARE_COLOURS[number % len(_SPARE_COLOURS)], letter=letter)
    return styles
