"""Prompts: rows of a source, rendered to token ids and handed out in a seeded order that can be resumed."""

from __future__ import annotations

import functools
import hashlib
import itertools
from collections.abc import Iterable, Sequence
from typing import Any, Generic, TypeVar

import numpy as np
import pandas as pd

from workbench.data.prompt_rows import PromptReader, PromptRow, prompt_column_of
from workbench.data.sources import Source, read_rows
from workbench.errors import BadInput
from workbench.support.validation import whole

R = TypeVar("R")


class EpochRows(Generic[R]):
    """Each epoch holds each row once: in an order drawn from (seed, epoch), or, without `shuffle`, as given.

    position: rows handed out since the beginning, over all epochs. called: what the rows are, for messages.
    """

    def __init__(self, rows: Sequence[R], *, seed: int, shuffle: bool, called: str) -> None:
        self.rows, self.seed, self.shuffle, self._called = rows, seed, shuffle, called
        self.position = 0
        self._permutation: tuple[int, Sequence[int]] = (-1, ())  # the epoch that was asked for last, and its order

    def next(self, n: int) -> list[R]:
        """The next `n` rows. Where an epoch ends, the next one begins."""
        whole("n", n, 1)
        rows = [self.at(self.position + i) for i in range(n)]
        self.position += n
        return rows

    def take(self, places: Sequence[int]) -> list[R]:
        """Hand out these rows, by their places in `rows`, in place of the next ones."""
        self.position += len(places)
        return [self.rows[place] for place in places]

    def at(self, position: int) -> R:
        """The row that is handed out after `position` others."""
        epoch, place = divmod(position, len(self.rows))
        if not self.shuffle:
            return self.rows[place]
        if self._permutation[0] != epoch:
            order = np.random.default_rng([self.seed, epoch]).permutation(len(self.rows)).tolist()
            self._permutation = (epoch, order)
        return self.rows[self._permutation[1][place]]

    @property
    def epoch(self) -> int:
        """The epoch of the next row, from 0."""
        return self.position // len(self.rows)

    def state_dict(self) -> dict[str, Any]:
        """Where the rows stand, as plain values (JSON will do)."""
        return {"position": self.position, **self._identity}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on exactly where `state` was taken. Raises `BadInput` if these rows are others, or in another order."""
        differ = [key for key, value in self._identity.items() if state.get(key) != value]
        if differ:
            raise BadInput(
                f"the saved {self._called} differ in {', '.join(differ)}",
                "rows are resumed with the same seed, shuffle and token ids",
                "build them with the source, tokenizer and settings of the saved ones, or start anew without loading",
            )
        whole("position", state.get("position"), 0)  # type: ignore[arg-type]
        self.position = state["position"]

    @functools.cached_property
    def _identity(self) -> dict[str, Any]:
        """What the order of the rows depends on; each stage records it."""
        digest = hashlib.sha256()
        for row in self.rows:
            for numbers in self.numbers_of(row):
                digest.update(np.asarray(numbers, dtype="<i8").tobytes())
        return {"seed": self.seed, "shuffle": self.shuffle, "token ids": digest.hexdigest()}

    def numbers_of(self, row: R) -> Iterable[Sequence[int]]:
        """What tells a row from others."""
        raise NotImplementedError


class Prompts(PromptReader, EpochRows[PromptRow]):
    """An endless, resumable supply of prompts.

    source: see `read_rows`: a list, a frame, a file, a name under datasets/, a hub id. Columns of verl, TRL, OpenRLHF,
        Alpaca and ShareGPT are recognised where no `prompt_column` is given; `read_as` says so.
    tokenizer: of the model that will respond. All rows are rendered at once, at about 0.2 ms a row.
    prompt_column: the column with the text or the messages; None: the first of "prompt", "question", "messages",
        "problem" that is there.
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
    control_tokens: whether "<|im_end|>" and the like in a row are control tokens; None: only with chat=False, for
        prompts that a template has written already. Else they are text, and `with_control_tokens` counts such rows.
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

    @functools.cached_property
    def extra_columns(self) -> tuple[str, ...]:
        """The data set's columns other than the prompt, in order of appearance."""
        return tuple(dict.fromkeys(name for row in self.rows for name in row.extra))

    @functools.cached_property
    def frame(self) -> pd.DataFrame:
        """The rows by their place in the source: `prompt`, `prompt_tokens`, and the other columns."""
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
