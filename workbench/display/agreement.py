"""Two verifiers side by side: how often they agree, and the rows on which they differ most."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from workbench.display.html import table

SHOWN_CHARACTERS = 160


def agreement(
    names: tuple[str, str],
    thresholds: tuple[float, float],
    counts: Mapping[tuple[bool, bool], int],
    kappa: float,
    lines: Sequence[Mapping[str, Any]],
    *,
    left_out: int,
    rows: int,
    one_sided: str,
) -> str:
    """Html: the rows by the two verdicts, Cohen's kappa, and the first lines. rows: how many lines there are in all.
    one_sided: why kappa says nothing, if it does not."""
    one, two = (f"{name} > {limit:.4g}" for name, limit in zip(names, thresholds, strict=True))
    total = sum(counts.values())
    apart = counts[True, False] + counts[False, True]
    without = f"; {left_out} failed rows are left out" if left_out else ""
    said = f"says nothing, since {one_sided}" if one_sided else f"{kappa:.2f}"
    caption = f"{apart} of {total} rows: one verdict, not the other. Cohen's kappa {said}{without}"
    verdicts = [
        {"": one if mine else f"not {one}", two: counts[mine, True], f"not {two}": counts[mine, False]}
        for mine in (True, False)
    ]
    shown = [{name: _short(value) for name, value in line.items()} for line in lines]
    more = f" (the first {len(lines)} of {rows}; .df has all)" if rows > len(lines) else ""
    return table(verdicts, caption=caption) + table(shown, caption=f"largest gaps first{more}")


def _short(value: Any) -> Any:
    text = value if isinstance(value, str) else None
    return value if text is None or len(text) <= SHOWN_CHARACTERS else f"{text[: SHOWN_CHARACTERS - 3]}..."
