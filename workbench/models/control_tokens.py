"""Keeps control tokens in data as text: `<|im_end|>` in a user's message does not end the turn.

`escape` puts a mark into each control token that a text spells, before the chat template renders the conversation;
`encoded` tokenizes the pieces between marks. So only the template writes control tokens, however the tokenizer treats
special tokens, and decoding gives the text back.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar
from weakref import WeakKeyDictionary

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MARK = "\ufdd0"  # a code point that is no character
_BEFORE = "\n"  # put before each piece, because some tokenizers put a space before the beginning of a text
_finders: WeakKeyDictionary[Any, tuple[int, re.Pattern[str]]] = WeakKeyDictionary()  # with the tokenizer's size then

Value = TypeVar("Value")


def special_tokens(tokenizer: Any) -> list[str]:
    """Return all special tokens in the order of their ids, also tokens without a role (repository name, ...)."""
    added: Iterable[tuple[int, Any]] = sorted(tokenizer.added_tokens_decoder.items())
    return [token.content for _, token in added if token.special]


def _finder(tokenizer: PreTrainedTokenizerBase) -> re.Pattern[str]:
    """Return a pattern that matches the first character of each control token."""
    size, found = _finders.get(tokenizer, (-1, re.compile("")))
    if size != len(tokenizer):
        begun = dict[str, list[str]]()
        for token in special_tokens(tokenizer):
            begun.setdefault(token[0], []).append(re.escape(token[1:]))
        found = re.compile("|".join(f"{re.escape(c)}(?={'|'.join(rest)})" for c, rest in begun.items()) or r"(?!)")
        _finders[tokenizer] = len(tokenizer), found
    return found


def escape(tokenizer: PreTrainedTokenizerBase, value: Value) -> Value:
    """Return a value of lists and mappings with a mark in each control token that its texts and keys spell."""
    finder = _finder(tokenizer)

    def marked(one: Any) -> Any:
        if isinstance(one, str):
            return finder.sub(rf"\g<0>{MARK}", one) if finder.search(one) else one
        if isinstance(one, Mapping):
            return {marked(key): marked(part) for key, part in one.items()}
        if isinstance(one, (list, tuple)):
            return (tuple if isinstance(one, tuple) else list)(map(marked, one))
        return one

    return marked(value)


def unmarked(message: str) -> str:
    """Return a message without marks, also without marks that `repr` escaped."""
    return message.replace(MARK, "").replace(ascii(MARK)[1:-1], "")


def encoded(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """Return the token ids of a text that may contain marks. The caller checks the length."""
    if MARK not in text:
        return list(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])
    return [token for token, _, _ in placed(tokenizer, text)]


def placed(tokenizer: PreTrainedTokenizerBase, text: str) -> list[tuple[int, int, int]]:
    """Return (token id, start, end) for a text that may contain marks; start and end count without the marks."""

    def read(text: str, at: int) -> list[tuple[int, int, int]]:
        found = tokenizer(text, add_special_tokens=False, return_offsets_mapping=tokenizer.is_fast, verbose=False)
        places = found.get("offset_mapping") or [(0, 0)] * len(found["input_ids"])
        return [(token, at + start, at + end) for token, (start, end) in zip(found["input_ids"], places, strict=True)]

    first, *rest = text.split(MARK)
    tokens, at = read(first, 0), len(first)
    before = [token for token, _, _ in read(_BEFORE, 0)] if rest else []
    for piece in filter(None, rest):
        more = read(_BEFORE + piece, at - len(_BEFORE))
        apart = [token for token, _, _ in more[: len(before)]] == before  # False: a token spans both
        tokens += more[len(before) :] if apart else read(piece, at)
        at += len(piece)
    return tokens
