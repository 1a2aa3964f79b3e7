"""Who sent how many bytes to whom: a matrix as a picture, and the figures under it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING

from workbench.display.html import bytes_text

if TYPE_CHECKING:
    import pandas as pd

CELL, LEFT, TOP, CHARACTER = 44, 12, 28, 6.6
FILL = "#0072b2"  # Okabe and Ito's blue; how opaque says how much


@dataclass(frozen=True, eq=False)
class Traffic:
    """Bytes that moved between processes, as counted where they arrived.

    matrix: a row a source, a column a destination, bytes. seconds: by destination, the time in which something was on
    its way to it. what: in words, which movements these are. minimum_bytes: what no schedule could do without, where
    that is known.
    """

    matrix: pd.DataFrame
    seconds: Mapping[str, float]
    what: str
    minimum_bytes: int | None = None

    @property
    def total_bytes(self) -> int:
        """Bytes of all movements."""
        return int(self.matrix.to_numpy().sum())

    def frame(self) -> pd.DataFrame:
        """One row a pair that exchanged something: source, destination, moved_bytes; the most first."""
        pairs = self.matrix.reset_index().melt(id_vars="source", var_name="destination", value_name="moved_bytes")
        moved = pairs[pairs["moved_bytes"] > 0]
        return moved.sort_values("moved_bytes", ascending=False, kind="stable").reset_index(drop=True)

    def __repr__(self) -> str:
        pairs = int((self.matrix.to_numpy() > 0).sum())
        return f"<Traffic of {self.what}: {bytes_text(self.total_bytes)}, {pairs} pairs>"[:79]

    def _repr_html_(self) -> str:
        return (
            f'<div style="color:inherit">{_svg(self)}<div style="font-size:12px">{escape(self._figures())}</div></div>'
        )

    def _figures(self) -> str:
        told = f"{self.what}: {bytes_text(self.total_bytes)} in all"
        if self.minimum_bytes is not None:
            told += f", at least {bytes_text(self.minimum_bytes)} needed"
            if self.minimum_bytes:
                told += f" ({self.total_bytes / self.minimum_bytes:.2f} times)"
        if self.seconds:
            slowest = max(self.seconds, key=lambda name: self.seconds[name])
            told += f"; longest on its way: to {slowest}, {self.seconds[slowest]:.2f} s"
        return told


def traffic(transfers: pd.DataFrame, *, names: Sequence[str], what: str, minimum_bytes: int | None = None) -> Traffic:
    """The movements of a transfers frame. names: the processes that may occur, in the order of the picture."""
    import pandas as pd

    others = sorted({*transfers["source"], *transfers["destination"]} - set(names))
    order = [*names, *others]
    summed = transfers.pivot_table(
        index="source", columns="destination", values="moved_bytes", aggfunc="sum", fill_value=0
    )
    matrix = summed.reindex(index=order, columns=order, fill_value=0).astype("int64")
    matrix.index.name, matrix.columns.name = "source", "destination"
    seconds = pd.Series(transfers.groupby("destination")["duration_s"].sum(), dtype="float64")
    return Traffic(matrix, {str(name): float(s) for name, s in seconds.items()}, what, minimum_bytes)


def _svg(shown: Traffic) -> str:
    names = [str(name) for name in shown.matrix.index]
    cells = shown.matrix.to_numpy()
    most = max(1, int(cells.max(initial=0)))
    left = LEFT + CHARACTER * max((len(name) for name in names), default=0) + 8
    top = TOP + CHARACTER * max((len(name) for name in names), default=0) * 0.72 + 8
    parts = [
        f'<text x="0" y="12" fill="currentColor" font-weight="600">{escape("bytes: from a row to a column")}</text>'
    ]
    for i, source in enumerate(names):
        y = top + i * CELL
        parts.append(
            f'<text x="{left - 6:g}" y="{y + CELL / 2 + 4:g}" text-anchor="end" fill="currentColor">'
            f"{escape(source)}</text>"
            f'<text transform="translate({left + i * CELL + CELL / 2:g},{top - 6:g}) rotate(-45)" '
            f'fill="currentColor">{escape(source)}</text>'
        )
        for j, destination in enumerate(names):
            n = int(cells[i, j])
            share = n / most
            ink = "#ffffff" if share > 0.5 else "currentColor"
            parts.append(
                f"<g><title>{escape(f'{source} to {destination}: {n:,} bytes')}</title>"
                f'<rect x="{left + j * CELL:g}" y="{y:g}" width="{CELL - 2}" height="{CELL - 2}" fill="{FILL}" '
                f'fill-opacity="{share:.3f}" stroke="currentColor" stroke-opacity=".2"/>'
                + (
                    f'<text x="{left + j * CELL + CELL / 2 - 1:g}" y="{y + CELL / 2 + 3:g}" text-anchor="middle" '
                    f'font-size="9" fill="{ink}">{bytes_text(n)}</text>'
                    if n
                    else ""
                )
                + "</g>"
            )
    tail = CHARACTER * len(names[-1]) * 0.72 if names else 0
    width, height = left + len(names) * CELL + tail, top + len(names) * CELL + 4
    label = escape(f"matrix of {shown.what} between {len(names)} processes")
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" width="{width:g}" '
        f'height="{height:g}" role="img" aria-label="{label}" style="font:11px system-ui,sans-serif">'
        f"{''.join(parts)}</svg>"
    )
