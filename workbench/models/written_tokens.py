"""Who wrote each token of a prompt: the chat template, or the message of a role."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from workbench.display.tokens import TEMPLATE, WRITERS, WrittenToken, WrittenTokens
from workbench.models.chat_format import ChatFormat

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Span = tuple[int, int, str]
MARK = "\u2042"  # no template writes it


def written_tokens(
    tokenizer: PreTrainedTokenizerBase, prompt: str | Sequence[Mapping[str, Any]], token_ids: Sequence[int], name: str,
    chat: ChatFormat | None = None,
) -> WrittenTokens:  # fmt: skip
    """The tokens of a prompt with who wrote them. prompt: a text, which went through the template if its ids say so, or
    messages. Where the text behind the ids is not known, as of a tokenizer without offsets, the writer is "other"."""
    chat = chat or ChatFormat()
    messages = chat.messages(prompt)
    plain_text = [prompt] if isinstance(prompt, str) else []
    tries = [(text, [(0, len(text), "user")], adds) for text in plain_text for adds in (True, False)]
    if tokenizer.chat_template:
        text = chat.text(tokenizer, messages)
        spans = _spans(tokenizer, text, messages, chat)
        start = len(text) - len(chat.prefill)
        tries.insert(0, (text, [*spans, (start, len(text), "assistant")], False))
    special = {number for number, token in tokenizer.added_tokens_decoder.items() if token.special}
    for text, spans, adds in tries if tokenizer.is_fast else ():
        read = tokenizer(text, add_special_tokens=adds, return_offsets_mapping=True, verbose=False)
        if list(read["input_ids"])[: len(token_ids)] == list(token_ids):  # the tokenizer may put an end behind a text
            found = [
                _token(tokenizer, number, text, start, end, spans, number in special)
                for number, (start, end) in zip(token_ids, read["offset_mapping"], strict=False)
            ]
            return WrittenTokens(tuple(found), name)
    plain = [WrittenToken(n, str(tokenizer.decode([n])), "other", n in special) for n in token_ids]
    return WrittenTokens(tuple(plain), name)


def _token(
    tokenizer: PreTrainedTokenizerBase, number: int, text: str, start: int, end: int, spans: Sequence[Span],
    special: bool,
) -> WrittenToken:  # fmt: skip
    shown = str(tokenizer.convert_ids_to_tokens(number)) if special else text[start:end]
    writer = next((who for first, last, who in spans if first <= start < last), TEMPLATE)
    return WrittenToken(number, shown, TEMPLATE if special and start == end else writer, special)


def _spans(
    tokenizer: PreTrainedTokenizerBase, text: str, messages: Sequence[Mapping[str, Any]], chat: ChatFormat
) -> list[Span]:
    """Where the messages stand in what the template made of them: between what it writes around marks in their place,
    which it may strip. None of those from where on it wrote something else around the marks."""
    said = [str(message.get("content") or "") for message in messages]
    marks = [f"{MARK}{n}{MARK}" for n in range(len(messages))]
    marked = chat.text(tokenizer, [{**m, "content": mark} for m, mark in zip(messages, marks, strict=True)])
    found, at = list[Span](), 0
    for n, (message, mark) in enumerate(zip(messages, marks, strict=True)):
        before, there, marked = marked.partition(mark)
        behind = marked.partition(marks[n + 1])[0] if n + 1 < len(marks) else marked
        start = at + len(before)
        content = next((c for c in (said[n], said[n].strip()) if text.startswith(c + behind, start)), None)
        if not there or content is None or text[at:start] != before:
            return found
        at = start + len(content)
        found.append((start, at, message["role"] if message["role"] in WRITERS else "other"))
    return found
