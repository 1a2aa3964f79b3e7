"""Turns rows of a source into prompts: checks them, renders them to token ids, cuts prompts that are too long."""

from __future__ import annotations

import json
import reprlib
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from workbench.batches.schema import SCHEMA
from workbench.data.readers import READERS, BadRows, Overlong, Row, Skipped, counts, named
from workbench.data.sources import PROMPT_COLUMNS, Source
from workbench.data.user_functions import LAST_TURN, short
from workbench.display.html import table
from workbench.display.tokens import WrittenTokens
from workbench.errors import BadInput
from workbench.errors.plain_text import shown
from workbench.models import render_prompt
from workbench.models.chat_format import ChatFormat, with_row_tools, written_tokens
from workbench.models.chat_template import unread, warn_if_rendered
from workbench.models.control_tokens import escape
from workbench.support.checked_calls import checked_call
from workbench.support.validation import NonNegativeInt, PositiveInt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


Message = dict[str, Any]
Conversation = str | list[Message]
FORM = (
    "messages: a list such as [{'role': 'user', 'content': 'Hi'}] whose content is text; a message of the assistant "
    "may have 'tool_calls' in its place, each with the name of its function, and arguments by name or as their JSON"
)


def chat_messages(value: Any) -> list[Message] | None:
    """Return the messages in a data set's value; None if it is no list of messages.

    Joins content in parts such as [{"type": "text", "text": "Hi"}]; a message that only calls tools gets content "".
    Leaves out keys whose value is None, which Arrow tables add. Turns `arguments` of a tool call that are JSON text, as
    in OpenAI's API, into a dict.
    """
    if isinstance(value, str) or not isinstance(value, Sequence) or not value:
        return None
    found = [_message(one) for one in value]
    return None if None in found else found  # type: ignore[return-value]


def messages_of(where: str, value: Any) -> list[Message]:
    """Return the messages in a value; raise `BadInput` if it is no list of messages. where: its place."""
    messages = chat_messages(value)
    if messages is None:
        raise BadInput(f"{where} is {shown(value)}", f"must be a text, or {FORM}", "correct or drop the row")
    return messages


def conversation_of(where: str, value: Any) -> Conversation:
    """Return a text that is not empty, or messages; raise `BadInput` for other values. where: its place."""
    if not isinstance(value, str):
        return messages_of(where, value)
    if not value.strip():
        raise BadInput(f"{where} is empty", "a prompt needs text", "drop the row")
    return value


def _message(value: Any) -> Message | None:
    if not isinstance(value, Mapping) or not isinstance(value.get("role"), str):
        return None
    message = {str(key): one for key, one in value.items() if one is not None}
    content = message.get("content")
    if isinstance(content, list):
        parts = [part for part in content if isinstance(part, Mapping) and part.get("type") == "text"]
        texts = [text for part in parts if isinstance(text := part.get("text"), str)]
        if len(texts) == len(content):
            content = "".join(texts)
    calls = message.get("tool_calls")
    if calls is not None:
        calls = _filled(calls)
        message["tool_calls"] = found = [_call(call) for call in calls] if isinstance(calls, list) else [None]
        if None in found:
            return None
        content = "" if calls and content is None else content
    if not isinstance(content, str):
        return None
    return {**message, "content": content}


def _call(call: Any) -> dict[str, Any] | None:
    """Return a tool call with its arguments by name; None if the value is no tool call."""
    function = call.get("function", call) if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not (isinstance(name := function.get("name"), str) and name):
        return None
    if isinstance(arguments := function.get("arguments"), str):
        with suppress(ValueError):
            arguments = json.loads(arguments or "{}")
        if not isinstance(arguments, dict):
            return None
        function = {**function, "arguments": arguments}
    return {**call, "function": function} if "function" in call else dict(function)


def row_tools(row: Mapping[str, Any]) -> list[Any]:
    """Return the row's own tools: JSON schemas in its column `tools`, as a list or JSON text, like TRL's rows; [] for
    any other value. Leaves out keys whose value is None, which Arrow tables add."""
    tools = row.get("tools")
    if isinstance(tools, str):
        try:
            tools = json.loads(tools)
        except ValueError:
            return []
    are = isinstance(tools, list) and all(
        isinstance(t, Mapping) and isinstance(t.get("function"), Mapping) for t in tools
    )
    return _filled(tools) if are else []


def _filled(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _filled(one) for key, one in value.items() if one is not None}
    return [_filled(one) for one in value] if isinstance(value, list) else value


# argument names of reward functions and environments whose values do not come from extra columns, besides `SCHEMA`
_RESERVED = ("prompt", "response", "ending", LAST_TURN)


@dataclass(frozen=True)
class PromptRow:
    """One prompt.

    index: the row's number in the source, from 0; dropped rows count.
    prompt: the text, or the last user message of a conversation; the argument `prompt` of reward functions.
    prompt_ids: token ids up to the beginning of the response, chat template included.
    extra: the row's other columns, such as the answer; reward functions receive them by name.
    messages: the messages, if the prompt is messages; else None.
    """

    index: int
    prompt: str
    prompt_ids: list[int]
    extra: dict[str, Any]
    messages: list[dict[str, Any]] | None = None


class PromptReader(ABC):
    """Makes prompts from rows; its options are those of `Prompts`.

    dropped, cut: how many rows were too long. with_control_tokens: how many rows have control tokens read as text.
    skipped: the rows that are no prompts. read_as: see `Rows`. unread: parts of rows that the chat template ignores.
    other_tools: how many rows have a column `tools` that does not hold JSON schemas.
    """

    @checked_call("prompts")
    def __init__(
        self, source: Source, *, tokenizer: PreTrainedTokenizerBase, prompt_column: str | None = None,
        seed: NonNegativeInt = 0, shuffle: bool = True, max_prompt_tokens: PositiveInt = 512,
        overlong: Overlong = "filter", chat: ChatFormat | bool | None = None, bad_rows: BadRows = "error",
        control_tokens: bool | None = None,
    ) -> None:  # fmt: skip
        if isinstance(chat, ChatFormat):
            chat.check(tokenizer)
        self.max_prompt_tokens, self.overlong = max_prompt_tokens, overlong
        self.dropped = self.cut = self.with_control_tokens = self.other_tools = 0
        self.unread = set[str]()
        self._name = _name(source)
        self.skipped, self.read_as = Skipped(bad_rows), ""
        self._tokenizer, self._chat = tokenizer, chat
        self._warned = chat is False or not tokenizer.chat_template
        self.control_tokens = chat is False if control_tokens is None else control_tokens
        self.seed, self.shuffle = seed, shuffle
        self._read(source, prompt_column)

    @abstractmethod
    def _read(self, source: Source, column: str | None) -> None:
        """Read the source, or begin to. column: the prompt column; None: find it."""

    def prompt(self, index: int, row: Row, column: str, place: str) -> PromptRow | None:
        """Return the prompt of a row; None if it is dropped or skipped. index, place: the row's place in the source."""
        try:
            return self._fit(index, row, column, place)
        except BadInput as error:
            self.skipped.add(error, place)
            return None

    def none_left(self, seen: str) -> BadInput:
        """Return the error for a source without a usable prompt. seen: how many rows were read, in words."""
        first = f"; {self.skipped[0]}" if self.skipped else ""
        only = f"only prompts over {self.max_prompt_tokens} tokens ({seen})" if self.dropped else "no prompts"
        remedy = "raise max_prompt_tokens" if self.dropped else "correct the rows"
        return BadInput(f"{self._name} holds {only}{first}", "at least one prompt must be left", remedy)

    def counts(self) -> list[str]:
        over = f"over {self.max_prompt_tokens} tokens"
        return counts(over, self.cut, self.dropped, self.skipped, self.with_control_tokens)

    def repr_text(self, many: str, place: str) -> str:
        """Return the repr of prompts. many: their number; place: their position, both in words."""
        many += f", {self.dropped} too long" if self.dropped else ""
        many += f", {self.skipped.total} bad skipped" if self.skipped else ""
        many += f", {self.with_control_tokens} with control tokens as text" if self.with_control_tokens else ""
        read = f", read as {self.read_as.partition(':')[0]}" if self.read_as else ""
        return f"Prompts({reprlib.repr(self._name)[1:-1]}, {many}, {place}{read})"

    def html_table(self, following: Sequence[PromptRow], summary: str) -> str:
        rows = [
            {"index": row.index, "prompt": short(row.prompt, 200), "tokens": len(row.prompt_ids),
             "other columns": ", ".join(f"{key}={short(str(value), 40)}" for key, value in row.extra.items())}
            for row in following
        ]  # fmt: skip
        caption = f"Prompts {self._name}: {summary}" + (f"; read as {self.read_as}" if self.read_as else "")
        bad = table([{"skipped": reason} for reason in self.skipped], max_rows=5) if self.skipped else ""
        return table(rows, caption=caption) + bad

    def _fit(self, index: int, row: Row, column: str, place: str) -> PromptRow | None:
        if column not in row:
            raise BadInput(
                f"{place} has no column {column!r}", "every row needs a prompt", "drop the row or complete it"
            )
        conversation = self._whole(f"column {column!r} of {place}", row[column])
        extra = {key: value for key, value in row.items() if key != column}
        if taken := [key for key in extra if key in _RESERVED or key in SCHEMA]:
            raise BadInput(
                f"{place} has a column {taken[0]!r} beside its prompt column {column!r}",
                "stages, reward functions and environments use this name for another value",
                f"rename or drop it first: row['data_{taken[0]}'] = row.pop({taken[0]!r})",
            )
        tools = row_tools(extra)
        self.other_tools += not tools and bool(extra.get("tools"))
        self.unread |= unread(self._tokenizer, () if isinstance(conversation, str) else conversation, tools)
        ids = self.render(conversation, tools=tools)
        self._warned = self._warned or warn_if_rendered(contents(conversation), named(place, self._name))
        self.with_control_tokens += not self.control_tokens and escape(self._tokenizer, conversation) != conversation
        if len(ids) > self.max_prompt_tokens:
            if self.overlong == "error":
                raise BadInput(
                    f"the prompt of {place} has {len(ids)} tokens",
                    f"max_prompt_tokens is {self.max_prompt_tokens}",
                    "raise it, or give overlong='filter' or overlong='cut'",
                )
            shorter = self._shortened(conversation, tools) if self.overlong == "cut" else None
            if shorter is None:
                self.dropped += 1
                return None
            self.cut += 1
            conversation, ids = shorter, self.render(shorter, tools=tools)
        messages = None if isinstance(conversation, str) else conversation
        return PromptRow(index, _text(conversation), ids, extra, messages)

    def render(self, conversation: Conversation, called: str = "the prompt", tools: Sequence[Any] = ()) -> list[int]:
        """Return the token ids of a text or of messages, rendered like the other prompts. called: its name in a
        `BadInput`. tools: the row's tools, see `row_tools`."""
        whole = self._whole(called, conversation)
        read = whole if self.control_tokens else escape(self._tokenizer, whole)
        return render_prompt(self._tokenizer, read, chat=self._with(tools))

    def _with(self, tools: Sequence[Any]) -> Any:
        read = tools if self.control_tokens else escape(self._tokenizer, tools)
        return with_row_tools(self._chat, read, self._tokenizer)

    def show(self, conversation: Conversation, called: str = "the prompt", tools: Sequence[Any] = ()) -> WrittenTokens:
        """Return the tokens of a text or of messages, as `render` makes them, each with its writer."""
        ids, chat = self.render(conversation, called, tools), self._with(tools)
        chat = chat if isinstance(chat, ChatFormat) else None
        return written_tokens(self._tokenizer, self._whole(called, conversation), ids, called, chat)

    def _whole(self, where: str, value: Any) -> Conversation:
        """Return a checked prompt, with the system prompt of the chat format, with which environments begin too."""
        found = _conversation(where, value)
        if isinstance(self._chat, ChatFormat) and self._chat.system is not None:
            return self._chat.messages(found)
        return found

    def _shortened(self, conversation: Conversation, tools: Sequence[Any]) -> Conversation | None:
        """Return the prompt with the longest end of its text that fits, found by bisection; None if nothing fits."""
        text = _text(conversation)
        too_long, fits = 0, len(text)  # text[too_long:] does not fit, text[fits:] does (or is empty)
        while fits - too_long > 1:
            start = (too_long + fits) // 2
            if len(self.render(_with_text(conversation, text[start:]), tools=tools)) <= self.max_prompt_tokens:
                fits = start
            else:
                too_long = start
        return _with_text(conversation, text[fits:]) if fits < len(text) else None


def _name(source: Source) -> str:
    if isinstance(source, str) and not source.endswith(tuple(READERS)):
        return repr(source)
    return repr(Path(source).name) if isinstance(source, (str, Path)) else f"a {type(source).__name__}"


def prompt_column_of(row: Row, asked: str | None) -> str:
    for name in (asked,) if asked else PROMPT_COLUMNS:
        if name in row:
            return name
    likely = next((name for name, value in row.items() if isinstance(value, str | list)), "...")
    raise BadInput(
        f"no column {asked!r}" if asked else f"no column named {', '.join(map(repr, PROMPT_COLUMNS))}",
        f"the source has the columns {', '.join(map(repr, row)) or 'of an empty row'}",
        f'name the one that holds the prompt: prompts={{"source": ..., "prompt_column": "{likely}"}}',
    )


def _conversation(where: str, value: Any) -> Conversation:
    """Return a checked prompt: a text, or messages that include a user's message and do not end with an assistant's."""
    found = conversation_of(where, value)
    if isinstance(found, str):
        return found
    if not any(m["role"] == "user" and m["content"].strip() for m in found):
        raise BadInput(f"{where} has no user message with text", "a prompt needs text", "drop the row")
    if found[-1]["role"] == "assistant":
        raise BadInput(
            f"{where} ends with the assistant's message", "the response must come next", "drop that last message"
        )
    return found


def contents(conversation: Conversation) -> list[str]:
    return [conversation] if isinstance(conversation, str) else [message["content"] for message in conversation]


def _last_user(messages: list[dict[str, Any]]) -> int:
    return max(i for i, message in enumerate(messages) if message["role"] == "user")


def _text(conversation: Conversation) -> str:
    return conversation if isinstance(conversation, str) else str(conversation[_last_user(conversation)]["content"])


def _with_text(conversation: Conversation, text: str) -> Conversation:
    if isinstance(conversation, str):
        return text
    place = _last_user(conversation)
    return [*conversation[:place], {**conversation[place], "content": text}, *conversation[place + 1 :]]
