"""Prompts: rows of a source, rendered to token ids and handed out in a seeded order that can be resumed."""

from __future__ import annotations

import reprlib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from workbench.batches.schema import SCHEMA
from workbench.data.epochs import EpochRows
from workbench.data.sources import Row, Source, read_rows
from workbench.data.user_functions import short
from workbench.display.html import table
from workbench.errors import BadInput
from workbench.models import render_prompt
from workbench.support.validation import checked, one_of, whole

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

PROMPT_COLUMNS = ("prompt", "question", "messages")
# names of arguments of reward functions and environments that do not come from extra columns
_RESERVED = ("prompt", "response", "ending", "environment_rewards", "sample_seed")

Conversation = str | list[dict[str, Any]]


@dataclass(frozen=True)
class PromptRow:
    """One prompt.

    index: the row's place in the source, from 0; dropped rows count.
    prompt: the text, or the last user message of a conversation; what a reward function receives as `prompt`.
    prompt_ids: token ids up to where the response begins, chat template included.
    extra: the row's other columns, such as the answer; what a reward function receives by name.
    """

    index: int
    prompt: str
    prompt_ids: list[int]
    extra: dict[str, Any]


class Prompts(EpochRows[PromptRow]):
    """An endless, resumable supply of prompts.

    source: see `read_rows`: a list, a .jsonl file, a name under datasets/, a hub id.
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
    chat: whether a text goes through the chat template; None: if the tokenizer has one. Messages always do.

    Raises `BadInput` for rows that are no prompts, and when none is left.
    """

    def __init__(
        self,
        source: Source,
        *,
        tokenizer: PreTrainedTokenizerBase,
        prompt_column: str | None = None,
        seed: int = 0,
        shuffle: bool = True,
        max_prompt_tokens: int = 512,
        overlong: Literal["filter", "cut", "error"] = "filter",
        chat: bool | None = None,
    ) -> None:
        one_of("overlong", overlong, ("filter", "cut", "error"))
        whole("max_prompt_tokens", max_prompt_tokens, 1)
        whole("seed", seed, 0)
        checked("shuffle", shuffle, bool)
        checked("chat", chat, bool | None)
        self.max_prompt_tokens, self.overlong = max_prompt_tokens, overlong
        self.dropped = self.cut = 0
        self._name = _name(source)
        self._tokenizer, self._chat = tokenizer, chat
        rows = read_rows(source)
        column = _prompt_column(rows[0], prompt_column)
        fitted = [self._fit(index, row, column) for index, row in enumerate(rows)]
        kept = [row for row in fitted if row is not None]
        if not kept:
            raise BadInput(
                f"{self._name} holds only prompts over {max_prompt_tokens} tokens ({len(rows)} rows)",
                "at least one prompt must be left",
                "raise max_prompt_tokens",
            )
        super().__init__(kept, seed=seed, shuffle=shuffle, called="prompts")

    @property
    def longest(self) -> PromptRow:
        """The row with the most tokens."""
        return max(self.rows, key=lambda row: len(row.prompt_ids))

    @property
    def summary(self) -> str:
        """One line on what came of the source, such as "1997 prompts, 3 over 512 tokens dropped"."""
        counts = [f"{self.cut} over {self.max_prompt_tokens} tokens cut"] if self.cut else []
        counts += [f"{self.dropped} over {self.max_prompt_tokens} tokens dropped"] if self.dropped else []
        return f"{len(self)} {'prompt' if len(self) == 1 else 'prompts'}, " + (
            ", ".join(counts) or f"none over {self.max_prompt_tokens} tokens"
        )

    @property
    def extra_columns(self) -> tuple[str, ...]:
        """The data set's columns other than the prompt, in order of appearance."""
        return tuple(dict.fromkeys(name for row in self.rows for name in row.extra))

    def __len__(self) -> int:
        """Prompts in one epoch."""
        return len(self.rows)

    def __repr__(self) -> str:
        name = reprlib.repr(self._name)[1:-1]
        dropped = f", {self.dropped} too long" if self.dropped else ""
        return f"Prompts({name}, {len(self)} prompts{dropped}, epoch {self.epoch}, next {self.position % len(self)})"

    def _repr_html_(self) -> str:
        """The summary and the next three rows, which stay where they are."""
        rows = [
            {"index": row.index, "prompt": short(row.prompt, 200), "tokens": len(row.prompt_ids),
             "other columns": ", ".join(f"{key}={short(str(value), 40)}" for key, value in row.extra.items())}
            for row in (self.at(self.position + i) for i in range(min(3, len(self))))
        ]  # fmt: skip
        caption = f"Prompts {self._name}: {self.summary}; epoch {self.epoch}, next {self.position % len(self)}"
        return table(rows, caption=caption)

    def numbers_of(self, row: PromptRow) -> list[list[int]]:
        return [[row.index, len(row.prompt_ids), *row.prompt_ids]]

    def _fit(self, index: int, row: Row, column: str) -> PromptRow | None:
        """The row with its token ids, cut where asked for; None where it is dropped."""
        conversation = _conversation(index, row, column)
        extra = {key: value for key, value in row.items() if key != column}
        if taken := [key for key in _RESERVED if key in extra]:
            raise BadInput(
                f"row {index} has a column {taken[0]!r} beside its prompt column {column!r}",
                "reward functions and environments receive something else by this name",
                "rename or drop the column before",
            )
        if taken := [key for key in extra if key in SCHEMA]:
            raise BadInput(
                f"row {index} has a column {taken[0]!r}",
                "stages make a column of that name, and would take the data set's for it",
                f"rename or drop it before: row['data_{taken[0]}'] = row.pop({taken[0]!r})",
            )
        ids = self._render(conversation)
        if len(ids) <= self.max_prompt_tokens:
            return PromptRow(index, _text(conversation), ids, extra)
        if self.overlong == "error":
            raise BadInput(
                f"the prompt of row {index} has {len(ids)} tokens",
                f"max_prompt_tokens is {self.max_prompt_tokens}",
                "raise it, or give overlong='filter' or overlong='cut'",
            )
        shorter = self._shortened(conversation) if self.overlong == "cut" else None
        if shorter is None:
            self.dropped += 1
            return None
        self.cut += 1
        return PromptRow(index, _text(shorter), self._render(shorter), extra)

    def _render(self, conversation: Conversation) -> list[int]:
        return render_prompt(self._tokenizer, conversation, chat=self._chat)

    def _shortened(self, conversation: Conversation) -> Conversation | None:
        """The longest end of the text that fits, found by bisection over its characters; None if nothing fits."""
        text = _text(conversation)
        too_long, fits = 0, len(text)  # text[too_long:] does not fit, text[fits:] does (or is empty)
        while fits - too_long > 1:
            start = (too_long + fits) // 2
            if len(self._render(_with_text(conversation, text[start:]))) <= self.max_prompt_tokens:
                fits = start
            else:
                too_long = start
        return _with_text(conversation, text[fits:]) if fits < len(text) else None


def _name(source: Source) -> str:
    if isinstance(source, str) and not source.endswith(".jsonl"):
        return repr(source)
    return repr(Path(source).name) if isinstance(source, (str, Path)) else f"a {type(source).__name__}"


def _prompt_column(row: Row, asked: str | None) -> str:
    for name in (asked,) if asked else PROMPT_COLUMNS:
        if name in row:
            return name
    raise BadInput(
        f"no column {asked!r}" if asked else f"no column named {', '.join(map(repr, PROMPT_COLUMNS))}",
        f"the source has the columns {', '.join(map(repr, row)) or 'of an empty row'}",
        "name the one that holds the prompt: prompt_column=...",
    )


def _conversation(index: int, row: Row, column: str) -> Conversation:
    """The prompt of a row, checked: a text, or messages with a user's among them and no assistant's at the end."""
    where = f"column {column!r} of row {index}"
    if column not in row:
        raise BadInput(
            f"row {index} has no column {column!r}", "every row carries a prompt", "drop the row or complete it"
        )
    value = row[column]
    if isinstance(value, str):
        if not value.strip():
            raise BadInput(f"{where} is empty", "a prompt holds text", "drop the row")
        return value
    rule = "a prompt is a text, or messages such as [{'role': 'user', 'content': 'Hi'}] whose content is text"
    if not isinstance(value, list) or not all(
        isinstance(m, dict) and isinstance(m.get("role"), str) and isinstance(m.get("content"), str) for m in value
    ):
        raise BadInput(f"{where} is {short(repr(value), 60)}", rule, "convert the column before")
    if not any(m["role"] == "user" and m["content"].strip() for m in value):
        raise BadInput(f"{where} has no user message with text", rule, "drop the row")
    if value[-1]["role"] == "assistant":
        raise BadInput(
            f"{where} ends with the assistant's message", "the response comes next", "drop that last message"
        )
    return value


def _last_user(messages: list[dict[str, Any]]) -> int:
    return max(i for i, message in enumerate(messages) if message["role"] == "user")


def _text(conversation: Conversation) -> str:
    return conversation if isinstance(conversation, str) else str(conversation[_last_user(conversation)]["content"])


def _with_text(conversation: Conversation, text: str) -> Conversation:
    if isinstance(conversation, str):
        return text
    place = _last_user(conversation)
    return [*conversation[:place], {**conversation[place], "content": text}, *conversation[place + 1 :]]
