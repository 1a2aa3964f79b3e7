"""Prompts: rows of a source, rendered to token ids and handed out in a seeded order that can be resumed."""

from __future__ import annotations

import functools
import itertools
from typing import TYPE_CHECKING, Any

from workbench.data.epochs import EpochRows
from workbench.data.prompt_rows import PromptReader, PromptRow, prompt_column_of
from workbench.data.sources import Source, read_rows

if TYPE_CHECKING:
    import pandas as pd


class Prompts(PromptReader, EpochRows[PromptRow]):
    """An endless, resumable supply of prompts.

    source: see `read_rows`: a list, a frame, a file, a name under datasets/, a hub id. Columns of verl, TRL, OpenRLHF,
        Alpaca and ShareGPT are recognised where no `prompt_column` is given; `read_as` says so.
    tokenizer: of the model that will respond. All rows are rendered at once, at about 0.2 ms a row.
    prompt_column: the column with the text or the messages; None: the first of "prompt", "question", "messages" found.
    seed, shuffle: each epoch has a permutation of its own, drawn from (seed, epoch); else the source's order.
    max_prompt_tokens: the longest rendered prompt, chat template included.
    overlong: what becomes of a longer one.
        "filter" drops the row and counts it in `dropped`.
        "cut" keeps the longest end of the last user message with which the prompt fits, as truncation from the left
            does, but leaves template, system message and earlier turns whole; `prompt` then is the text that was kept.
            Counted in `cut`; costs about ten renderings. A row in which not one character has room is dropped.
        "error" raises `BadInput`.
    chat: whether a text goes through the chat template; None: if the tokenizer has one. Messages always do. A
        `wb.ChatFormat(...)` adds a system prompt, tools, arguments of the template, the beginning of the answer.
    bad_rows: "error": a row that is no prompt raises `BadInput`; "skip": it is left out, and `skipped` lists its number
        and the reason.

    Raises `BadInput` for rows that are no prompts, and when none is left.
    """

    def _read(self, source: Source, column: str | None) -> None:
        rows = read_rows(source, bad_rows=self.skipped.bad_rows, conventions=column is None)
        self.skipped, self.read_as = rows.skipped, rows.read_as
        column = prompt_column_of(rows[0], column)
        made = map(self.prompt, rows.numbers, rows, itertools.repeat(column), rows.places)
        kept = [row for row in made if row is not None]
        if not kept:
            raise self.none_left(f"{len(rows)} rows")
        EpochRows.__init__(self, kept, seed=self.seed, shuffle=self.shuffle, called="prompts")

    @property
    def longest(self) -> PromptRow:
        """The row with the most tokens."""
        return max(self.rows, key=lambda row: len(row.prompt_ids))

    @property
    def summary(self) -> str:
        """One line on what came of the source, such as "1997 prompts, 3 over 512 tokens dropped"."""
        return ", ".join([f"{len(self)} {'prompt' if len(self) == 1 else 'prompts'}", *self.counts()])

    @property
    def extra_columns(self) -> tuple[str, ...]:
        """The data set's columns other than the prompt, in order of appearance."""
        return tuple(dict.fromkeys(name for row in self.rows for name in row.extra))

    @functools.cached_property
    def frame(self) -> pd.DataFrame:
        """The rows by their place in the source: `prompt`, `prompt_tokens`, and the other columns."""
        import pandas as pd

        values: dict[str, list[Any]] = {
            "prompt": [row.prompt for row in self.rows],
            "prompt_tokens": [len(row.prompt_ids) for row in self.rows],
        }
        for name in self.extra_columns:
            values[f"data_{name}" if name in values else name] = [row.extra.get(name) for row in self.rows]
        return pd.DataFrame(values, index=pd.Index([row.index for row in self.rows], name="row"))

    def __len__(self) -> int:
        """Prompts in one epoch."""
        return len(self.rows)

    def __repr__(self) -> str:
        place = f"epoch {self.epoch}, next {self.position % len(self)}"
        return self.told(f"{len(self)} prompts", place)

    def _repr_html_(self) -> str:
        """The summary and the next three rows, which stay where they are."""
        following = [self.at(self.position + i) for i in range(min(3, len(self)))]
        return self.pictured(following, f"{self.summary}; epoch {self.epoch}, next {self.position % len(self)}")

    def numbers_of(self, row: PromptRow) -> list[list[int]]:
        return [[row.index, len(row.prompt_ids), *row.prompt_ids]]
