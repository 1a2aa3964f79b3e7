"""Prompts from a source that is larger than memory: rows are read and rendered when they are drawn."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import numpy as np

from workbench.data.prompt_rows import PromptReader, PromptRow, prompt_column_of
from workbench.data.prompts import check_same
from workbench.data.readers import Placed, Row
from workbench.data.sources import OURS, Source, blocks_of, convention_of, row_of
from workbench.errors import BadInput
from workbench.support.validation import whole

WINDOW = 8192  # rows that are shuffled together


Position = tuple[int, int, int]  # epoch, number of finished blocks in it, number of rows read from the next block


class StreamedPrompts(PromptReader):
    """An endless, resumable supply of prompts, with only a window of rows in memory.

    source: see `blocks_of`. shuffle: each epoch orders the source's blocks (row groups of a parquet file, 4 MiB of a
    .jsonl file) by (seed, epoch), and shuffles the rows in each window of 8,192 rows of a block. A source of one block,
    such as a .csv file, is only shuffled within windows. Other options: see `Prompts`. The first row decides the
    columns. `dropped`, `cut` and `skipped` count rows that were read.
    """

    def _read(self, source: Source, column: str | None) -> None:
        self.position = 0
        self._blocks = blocks_of(source)
        self._first, row = self._first_row()
        self._convention = convention_of(row) if column is None else OURS
        self.read_as = self._convention.name
        row = self._convention.of(row, self._first.place)
        self._columns, self._column = tuple(row), prompt_column_of(row, column)
        self._place: Position = (0, 0, 0)
        self._stream = self._positioned_rows()

    def next(self, n: int, *, one_epoch: bool = False) -> list[PromptRow]:
        """Draw the next `n` prompts. At the end of an epoch the next epoch begins; with `one_epoch`, stop there."""
        whole("n", n, 1)
        before = self.state_dict()
        try:
            found = self._draw(n, one_epoch)
        except BaseException:  # no prompt counts as drawn
            self.load_state_dict(before)
            raise
        self.position += len(found)
        return found

    def _draw(self, n: int, one_epoch: bool) -> list[PromptRow]:
        found: list[PromptRow] = []
        began, rows = self._place[0], 0
        while len(found) < n:
            self._place, placed = next(self._stream)
            if placed is not None:
                rows += 1
                prompt = self._prompt_of(placed)
                found += [prompt] if prompt is not None else []
            if one_epoch and found and self._place[0] > began:
                return found
            if not found and self._place[0] > began + 1:  # a whole epoch without a prompt
                raise self.none_left(f"{rows} rows were read")
        return found

    @property
    def epoch(self) -> int:
        """The epoch of the next row, from 0."""
        return self._place[0]

    @property
    def extra_columns(self) -> tuple[str, ...]:
        """The columns of the first row other than the prompt."""
        return tuple(name for name in self._columns if name != self._column)

    @property
    def summary(self) -> str:
        """One line about the rows that were read so far."""
        rows = f"{self._blocks.rows:,} rows" if self._blocks.rows is not None else "rows that are not counted"
        return ", ".join([f"a stream of {rows}, {self.position} prompts drawn", *self.counts()])

    def __repr__(self) -> str:
        return self.repr_text("streamed", f"epoch {self.epoch}, {self.position} drawn")

    def _repr_html_(self) -> str:
        """Return the summary and the next three rows, without drawing them."""
        state = self.state_dict()
        try:
            following = self.next(3)
        except BadInput:  # drawing the rows will report this error
            following = []
        self.load_state_dict(state)
        return self.html_table(following, f"{self.summary}; epoch {self.epoch}")

    def state_dict(self) -> dict[str, Any]:
        """Return the stream's position and identity as plain values, which JSON can hold."""
        counts = {"dropped": self.dropped, "cut": self.cut, "skipped": self.skipped.total}
        return {"position": self.position, "place": list(self._place), "counts": counts, **self._identity()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue exactly from a `state_dict`. Raises `BadInput` if its source, or the rows' order, differs."""
        check_same("prompts", self._identity(), state)
        epoch, block, row = state["place"]
        self._place, self.position = (epoch, block, row), state["position"]
        self.dropped, self.cut, self.skipped.total = (state["counts"][name] for name in ("dropped", "cut", "skipped"))
        del self.skipped[self.skipped.total :]
        self._stream = self._positioned_rows()

    def _identity(self) -> dict[str, Any]:
        return {"seed": self.seed, "shuffle": self.shuffle, "column": self._column, "source": self._blocks.identity}

    # --- rows ---------------------------------------------------------------------------------------------------------

    def _first_row(self) -> tuple[Placed, Row]:
        """Return the first readable row, which decides the columns."""
        for block in range(self._blocks.count):
            for placed in self._blocks.read(block):
                with suppress(BadInput):  # drawing the row will report this error
                    return placed, row_of(placed, placed, self._name)
        raise BadInput(f"{self._name} holds no rows", "a source needs at least one row", "give another source")

    def _prompt_of(self, placed: Placed) -> PromptRow | None:
        try:
            row = self._convention.of(row_of(placed, self._first, self._name), placed.place)
        except BadInput as error:
            self.skipped.add(error)
            return None
        return self.prompt(placed.number, row, self._column, placed.place)

    def _positioned_rows(self) -> Iterator[tuple[Position, Placed | None]]:
        """Yield (position after the row, row) from the stream's position on; at the end of a block the row is None."""
        epoch, done, row = self._place
        while True:
            order = np.arange(self._blocks.count)
            if self.shuffle:
                order = np.random.default_rng([self.seed, epoch]).permutation(len(order))
            for place in range(done, len(order)):
                for placed in self._rows(epoch, int(order[place]), row):
                    row += 1
                    yield (epoch, place, row), placed
                row = 0
                yield (epoch, place + 1, 0), None
            epoch, done = epoch + 1, 0
            yield (epoch, 0, 0), None

    def _rows(self, epoch: int, block: int, start: int) -> Iterator[Placed]:
        """Yield the rows of a block from row `start` on, in this epoch's order."""
        first, behind = divmod(start, WINDOW)
        rows = itertools.islice(self._blocks.read(block), first * WINDOW, None)
        for window in itertools.count(first):
            if not (found := list(itertools.islice(rows, WINDOW))):
                return
            order = range(len(found))
            if self.shuffle:
                order = np.random.default_rng([self.seed, epoch, block, window]).permutation(len(found)).tolist()
            for number in order[behind:]:
                yield found[number]
            behind = 0
