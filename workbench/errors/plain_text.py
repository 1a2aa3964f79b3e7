"""Text that others wrote, for messages: without what a terminal would obey, and not without end."""

from __future__ import annotations

import re

MOST_CHARACTERS = 2000
_ESCAPES = re.compile(
    r"(?:\x1b\[|\x9b)[0-?]*[ -/]*[@-~]"  # colours, moves of the cursor
    r"|(?:\x1b\]|\x9d)[^\x07\x1b\x9c]*(?:\x07|\x1b\\|\x9c)?"  # titles, links, the clipboard
    r"|\x1b[ -/]*[0-~]?"
)
_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


def plain_text(text: str, characters: int = MOST_CHARACTERS) -> str:
    """`text` without terminal escapes, control characters other than tab and newline, marks that turn the direction of
    text, and lone surrogates; of a longer one the beginning and the end."""
    if len(text) > 4 * characters:  # what is cut anyway is not searched
        text = text[: 2 * characters] + text[-2 * characters :]
        whole = False
    else:
        whole = True
    text = _CONTROLS.sub("\N{REPLACEMENT CHARACTER}", _ESCAPES.sub("", text))
    if whole and len(text) <= characters:
        return text
    return f"{text[: characters * 3 // 4]} ... {text[len(text) - characters // 4 :]}"
