"""Rows of a source, with their places in it, and what becomes of those that cannot be used."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Literal

from workbench.errors import BadInput
from workbench.support.validation import one_of

Row = dict[str, Any]
MOST_TOLD = 1000
BadRows = Literal["error", "skip"]


class Skipped(list[str]):
    """Rows that could not be used: of the first `MOST_TOLD` the place and the reason. total: how many there are.
    bad_rows: "error" raises instead."""

    def __init__(self, bad_rows: BadRows = "error") -> None:
        one_of("bad_rows", bad_rows, ("error", "skip"))
        super().__init__()
        self._raises, self.total = bad_rows == "error", 0

    def add(self, error: BadInput) -> None:
        """One more; raises `error` where no row may be skipped."""
        if self._raises:
            raise error
        self.total += 1
        if len(self) < MOST_TOLD:
            self.append(f"{error.value}: {error.rule}" if error.rule else str(error.value))


class Rows(list[Row]):
    """Rows of a source, which can say where each of them stands in it.

    numbers: the place of each row in the source, from 0; rows that were skipped count. lines: the line number of each
    row in a file, from 1; None where the source has no lines. read_as: the convention in which its columns were read;
    "" where they have the names that are used here. skipped: see `Skipped`.
    """

    def __init__(
        self, rows: Iterable[Row], name: str, lines: Sequence[int] | None = None, numbers: Sequence[int] | None = None,
        skipped: Skipped | None = None,
    ) -> None:  # fmt: skip
        super().__init__(rows)
        self.name, self.lines, self.read_as = name, lines, ""
        self.numbers = range(len(self)) if numbers is None else numbers
        self.skipped = Skipped() if skipped is None else skipped

    def where(self, index: int) -> str:
        """Row `index` as an error names it, such as "pairs.jsonl, line 7"."""
        place = self.place(index)
        return f"{place} of {self.name}" if self.lines is None else f"{self.name}, {place}"

    def place(self, index: int) -> str:
        """Row `index` within its source, such as "line 7"."""
        return f"row {self.numbers[index]}" if self.lines is None else f"line {self.lines[index]}"

    def kept(self, places: Sequence[int]) -> Rows:
        """These of the rows."""
        lines = None if self.lines is None else [self.lines[place] for place in places]
        numbers = [self.numbers[place] for place in places]
        return Rows([self[place] for place in places], self.name, lines, numbers, self.skipped)
