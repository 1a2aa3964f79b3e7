"""Prompts: rows of a source, rendered to token ids and drawn in a seeded order that can be resumed."""

from __future__ import annotations

import functools
import hashlib
import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Generic, TypeVar

import numpy as np
import pandas as pd

from workbench.data.prompt_rows import PromptReader, PromptRow, prompt_column_of
from workbench.data.sources import Source, read_rows
from workbench.errors import BadInput
from workbench.support.validation import whole

R = TypeVar("R")


def check_same(called: str, identity: Mapping[str, Any], saved: Mapping[str, Any]) -> None:
    """Raise `BadInput` if a saved state belongs to other rows, or to another order. called: their name."""
    if differ := [key for key, value in identity.items() if saved.get(key) != value]:
        raise BadInput(
            f"the saved {called} differ in {', '.join(differ)}",
            f"rows can be resumed only with the same {', '.join(identity)}",
            "use the source, tokenizer and settings of the saved ones, or start without loading",
        )


class EpochRows(Generic[R]):
    """Draws each row once per epoch, in an order that depends on (seed, epoch), or without `shuffle` as given.

    position: the number of rows drawn so far, over all epochs. called: the name of the rows for messages.
    """

    def __init__(self, rows: Sequence[R], *, seed: int, shuffle: bool, called: str) -> None:
        self.rows, self.seed, self.shuffle, self._called = rows, seed, shuffle, called
        self.position = 0
        self._permutation: tuple[int, Sequence[int]] = (-1, ())  # the epoch that was read last, and its order

    def next(self, n: int) -> list[R]:
        """Draw the next `n` rows. At the end of an epoch, the next epoch begins."""
        whole("n", n, 1)
        rows = [self.at(self.position + i) for i in range(n)]
        self.position += n
        return rows

    def take(self, places: Sequence[int]) -> list[R]:
        """Draw the rows at these positions in `rows`, in place of the next rows."""
        self.position += len(places)
        return [self.rows[place] for place in places]

    def at(self, position: int) -> R:
        """Return the row that is drawn after `position` other rows."""
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
        """Return the position and the rows' identity as plain values, which JSON can hold."""
        return {"position": self.position, **self._identity}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue exactly from a `state_dict`. Raises `BadInput` if its rows, or their order, differ from these."""
        check_same(self._called, self._identity, state)
        self.position = state["position"]

    @functools.cached_property
    def _identity(self) -> dict[str, Any]:
        """The values that decide the order of the rows; each stage records them."""
        digest = hashlib.sha256()
        for row in self.rows:
            for numbers in self.numbers_of(row):
                digest.update(np.asarray(numbers, dtype="<i8").tobytes())
        return {"seed": self.seed, "shuffle": self.shuffle, "token ids": digest.hexdigest()}

    def numbers_of(self, row: R) -> Iterable[Sequence[int]]:
        raise NotImplementedError


class Prompts(PromptReader, EpochRows[PromptRow]):
    """An endless, resumable supply of prompts.

    source: see `read_rows`: a list, a frame, a file, a name under datasets/, a hub id. Without a `prompt_column`,
        columns of verl, TRL, OpenRLHF, Alpaca and ShareGPT are recognised; `read_as` has the convention.
    tokenizer: of the model that will respond. All rows are rendered at once, in about 0.2 ms per row.
    prompt_column: the column with the text or the messages; None: the first existing column of "prompt", "question",
        "messages", "problem".
    seed, shuffle: each epoch has a permutation of its own, drawn from (seed, epoch); else the source's order.
    max_prompt_tokens: the longest rendered prompt, chat template included.
    overlong: how to treat a longer prompt.
        "filter" drops the row and counts it in `dropped`.
        "cut" shortens the last user message from the left until the prompt fits, and keeps template, system message and
            earlier turns whole; `prompt` is then the remaining text. Counted in `cut`; costs about ten renderings. The
            row is dropped if not even one character fits.
        "error" raises `BadInput`.
    chat: whether the chat template renders a text; None: if the tokenizer has a template. It always renders messages. A
        `wb.ChatFormat(...)` adds a system prompt, tools, arguments of the template, the beginning of the answer.
    control_tokens: whether "<|im_end|>" and the like in a row are control tokens; None: only with chat=False, for
        prompts that a template has already rendered. Else they are text, and `with_control_tokens` counts such rows.
    bad_rows: "error": a row that is no valid prompt raises `BadInput`; "skip": the row is left out, and `skipped` lists
        its number and the reason.

    Raises `BadInput` for invalid rows, and if no prompt is left.
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
    def summary(self) -> str:
        """One line about the rows that were read, such as "1997 prompts, 3 over 512 tokens dropped"."""
        return ", ".join([f"{len(self)} {'prompt' if len(self) == 1 else 'prompts'}", *self.counts()])

    @functools.cached_property
    def extra_columns(self) -> tuple[str, ...]:
        """The data set's columns other than the prompt, in order of appearance."""
        return tuple(dict.fromkeys(name for row in self.rows for name in row.extra))

    @functools.cached_property
    def frame(self) -> pd.DataFrame:
        """A frame of the rows by their number in the source: `prompt`, `prompt_tokens`, and the other columns."""
        values: dict[str, list[Any]] = {
            "prompt": [row.prompt for row in self.rows],
            "prompt_tokens": [len(row.prompt_ids) for row in self.rows],
        }
        for name in self.extra_columns:
            values[f"data_{name}" if name in values else name] = [row.extra.get(name) for row in self.rows]
        return pd.DataFrame(values, index=pd.Index([row.index for row in self.rows], name="row"))

    def __len__(self) -> int:
        """Return the number of prompts in one epoch."""
        return len(self.rows)

    def __repr__(self) -> str:
        return self.repr_text(f"{len(self)} prompts", f"epoch {self.epoch}, next {self.position % len(self)}")

    def _repr_html_(self) -> str:
        """Return the summary and the next three rows, without drawing them."""
        following = [self.at(self.position + i) for i in range(min(3, len(self)))]
        return self.html_table(following, f"{self.summary}; epoch {self.epoch}, next {self.position % len(self)}")

    def numbers_of(self, row: PromptRow) -> list[list[int]]:
        return [[row.index, len(row.prompt_ids), *row.prompt_ids]]
