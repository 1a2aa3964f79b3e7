"""How old the rollouts are that wait in a buffer, as bars."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from workbench.display.html import svg

LEFT, BARS, RIGHT, LINE, HEAD = 110, 280, 190, 18, 24


def ages_html(waiting: Sequence[tuple[str, int, int]]) -> str:
    """A bar for each iteration that waits, oldest first. waiting: its name, optimizer steps since the weights that drew
    it, and how many responses it has."""
    if not waiting:
        return "<div>nothing waits in the buffer</div>"
    oldest = max(age for _, age, _ in waiting) or 1
    head = (
        '<text x="0" y="14" fill="currentColor" font-weight="600">optimizer steps since the rollouts were drawn</text>'
    )
    bars = [_bar(HEAD + n * LINE, *one, oldest) for n, one in enumerate(waiting)]
    label = f"ages of the rollouts of {len(waiting)} iterations"
    return svg(head + "".join(bars), LEFT + BARS + RIGHT, HEAD + LINE * len(waiting), label)


def _bar(y: float, name: str, age: int, rows: int, oldest: int) -> str:
    width = BARS * age / oldest
    return (
        f'<text x="0" y="{y + 12:g}" fill="currentColor">{escape(name)}</text>'
        f'<rect x="{LEFT}" y="{y + 2:g}" width="{max(width, 1):.1f}" height="{LINE - 5}" fill="currentColor" '
        f'fill-opacity=".4"><title>{escape(name)}: {age} steps</title></rect>'
        f'<text x="{LEFT + max(width, 1) + 6:.1f}" y="{y + 12:g}" fill="currentColor">{age}, {rows} responses</text>'
    )
