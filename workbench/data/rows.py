"""Rows of a source, with their places in it, and what becomes of those that cannot be used."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

from workbench.errors import BadInput

Row = dict[str, Any]
MOST_TOLD = 1000
BadRows = Literal["error", "skip"]
Overlong = Literal["filter", "cut", "error"]


class Placed(NamedTuple):
    """A row as it was read: a dict, or a text; a `BadInput` in place of a row that cannot be read.

    number: its place in the source, from 0; in a stream of a .jsonl file the byte at which its line begins.
    """

    number: int
    place: str
    row: Any


class Skipped(list[str]):
    """Rows that could not be used: of the first `MOST_TOLD` the place and the reason. total: how many there are.
    bad_rows: "error" raises instead."""

    def __init__(self, bad_rows: BadRows) -> None:
        super().__init__()
        self.bad_rows, self.total = bad_rows, 0

    def add(self, error: BadInput) -> None:
        """One more; raises `error` where no row may be skipped."""
        if self.bad_rows == "error":
            raise error
        self.total += 1
        if len(self) < MOST_TOLD:
            self.append(f"{error.value}: {error.rule}" if error.rule else str(error.value))


def counts(over: str, cut: int, dropped: int, skipped: Skipped) -> list[str]:
    """How many rows were cut, dropped and skipped, for a summary. over: what they were longer than, in words."""
    told = [f"{number} {over} {word}" for number, word in ((cut, "cut"), (dropped, "dropped")) if number]
    return [*(told or [f"none {over}"]), *[f"{skipped.total} bad skipped"] * bool(skipped)]


class Rows(list[Row]):
    """Rows of a source.

    numbers, places: of each row, where it stands in the source; skipped rows count. read_as: the convention in which
    its columns were read; "" where they have the names that are used here. skipped: see `Skipped`.
    """

    def __init__(self, name: str, skipped: Skipped) -> None:
        super().__init__()
        self.name, self.skipped, self.read_as = name, skipped, ""
        self.numbers, self.places = list[int](), list[str]()

    def where(self, index: int) -> str:
        """Row `index` as an error names it, such as "pairs.jsonl, line 7"."""
        return named(self.places[index], self.name)


def named(place: str, source: str) -> str:
    """A place with its source: "pairs.jsonl, line 7", "row 7 of a list"."""
    return f"{place} of {source}" if place.startswith("row") else f"{source}, {place}"
