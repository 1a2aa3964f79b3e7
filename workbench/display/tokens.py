"""The tokens of a prompt, each with its writer."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING, NamedTuple

from workbench.display.curves import STROKES

if TYPE_CHECKING:
    import pandas as pd

WRITERS = ("template", "system", "user", "assistant", "tool", "other")
SIGNS = {"\n": "↵", "\t": "→", "\r": "␍"}  # shown in the place of what one does not see
TEMPLATE = "template"


class WrittenToken(NamedTuple):
    """text: the characters of the prompt that it covers; for a special token, its name."""

    token_id: int
    text: str
    writer: str
    special: bool


@dataclass(frozen=True)
class WrittenTokens:
    """Tokens in order, coloured by writer: the template, or the message of a role. df: a row a token."""

    tokens: tuple[WrittenToken, ...]
    name: str

    @property
    def df(self) -> pd.DataFrame:
        """`token_id`, `text`, `writer`, `special`."""
        import pandas as pd

        return pd.DataFrame(list(self.tokens), columns=list(WrittenToken._fields))

    def __repr__(self) -> str:
        counts = Counter(token.writer for token in self.tokens)
        told = ", ".join(f"{count} {writer}" for writer, count in counts.items())
        return f"<{self.name}: {len(self.tokens)} tokens: {told}>"

    def _repr_html_(self) -> str:
        counts = Counter(token.writer for token in self.tokens)
        key = " ".join(_piece(f"{writer} ({counts[writer]})", writer) for writer in WRITERS if counts[writer])
        special = sum(token.special for token in self.tokens)
        head = f"{self.name}: {len(self.tokens)} tokens, {special} of them special (in frames). The response is next."
        style = "font:13px/1.9 ui-monospace,monospace;white-space:pre-wrap;overflow-wrap:anywhere"
        return f'<div>{escape(head)}</div><div>{key}</div><div style="{style}">{"".join(self._pieces())}</div>'

    def _pieces(self) -> Iterator[str]:
        for token in self.tokens:
            text = "".join(SIGNS.get(one, one) for one in token.text) or "∅"
            yield _piece(text, token.writer, special=token.special, title=f"{token.token_id}: {token.writer}")
            yield "<br>" * token.text.count("\n")


def _piece(text: str, writer: str, *, special: bool = False, title: str = "") -> str:
    colour = "transparent" if writer == TEMPLATE else STROKES[WRITERS.index(writer) - 1].colour
    ground = f"background:color-mix(in srgb, {colour} 25%, transparent)"
    frame = "border:1px solid currentColor" if special else f"border-bottom:2px solid {colour}"
    look = f"{ground};{frame};border-radius:3px;margin-right:1px"
    return f'<span title="{escape(title)}" style="{look}">{escape(text)}</span>'
