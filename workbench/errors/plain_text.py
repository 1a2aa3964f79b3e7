"""Makes foreign text safe for messages: without terminal control sequences, and cut to a maximum length."""

from __future__ import annotations

import re
from typing import Any

_SEQUENCES = re.compile(
    r"(?:\x1b\[|\x9b)[0-?]*[ -/]*[@-~]"  # colours, moves of the cursor
    r"|(?:\x1b\]|\x9d)[^\x07\x1b\x9c]*(?:\x07|\x1b\\|\x9c)?"  # titles, links, the clipboard
    r"|\x1b[ -/]*[0-~]?"
)
# control characters, marks that change the text direction, and lone surrogates, which cannot be printed
_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


def plain_text(text: str, characters: int = 2000) -> str:
    """Return `text` without terminal sequences, with other control characters `escaped`. Of a text that is longer than
    `characters`, keep the beginning and the end."""
    if len(text) > characters:
        kept = characters * 7 // 8, characters // 8
        text = f"{text[: kept[0]]} ... ({len(text):,} characters) ... {text[-kept[1] :]}"
    return escaped(_SEQUENCES.sub("", text))


def escaped(text: str) -> str:
    """Return a text in which control characters, except tab and newline, are written as Python escapes."""
    return _CONTROLS.sub(lambda found: ascii(found[0])[1:-1], text)


def shown(value: Any, characters: int = 60) -> str:
    """Return the beginning of a value's `repr` as plain text; its class name if `repr` raises or has several lines."""
    try:
        text = str.__str__(repr(value))  # a plain str, also where `repr` returns a subclass of str
    except KeyboardInterrupt:  # the stop button
        raise
    except BaseException:  # a user's class may raise anything
        text = "\n"
    if "\n" in text:
        return f"<{type(value).__name__}>"
    return plain_text(text if len(text) <= characters else f"{text[: characters - 1]}…")


def first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or ["no message"])[0]


def said(error: BaseException, characters: int = 2000) -> str:
    """Return an exception's message as plain text; a note that it cannot be read if its `str` raises."""
    try:
        return plain_text(str.__str__(str(error)), characters)
    except KeyboardInterrupt:
        raise
    except BaseException as second:
        return f"(its message cannot be read: {type(second).__name__})"
