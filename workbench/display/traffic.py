"""Draw how many bytes each process sent to each other, as a matrix with totals below."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape

import pandas as pd

from workbench.display.html import bytes_text, folded, numbers_table, svg

CELL, LEFT, TOP, CHARACTER = 44, 12, 28, 6.6
ROW, WIDEST, NARROWEST, TICK, LEAST_SHOWN = 16, 34, 7, 34, 1e-5  # of the heat map: pixels, and the lightest share
MOST_PAIRS = 200  # of the table
FILL = "#0072b2"  # Okabe and Ito's blue; its opacity shows how many bytes


@dataclass(frozen=True, eq=False)
class Traffic:
    """Bytes that moved between processes, counted where they arrived.

    matrix: bytes, a row a source, a column a destination. seconds: by destination, the time in which any transfer to it
    was under way. what: which movements these are, in words. minimum_bytes: the least that any schedule needs, if
    known.
    """

    matrix: pd.DataFrame
    seconds: Mapping[str, float]
    what: str
    minimum_bytes: int | None = None

    @property
    def total_bytes(self) -> int:
        return int(self.matrix.to_numpy().sum())

    def frame(self) -> pd.DataFrame:
        """One row for each pair that exchanged bytes: source, destination, moved_bytes; the largest first."""
        pairs = self.matrix.reset_index().melt(id_vars="source", var_name="destination", value_name="moved_bytes")
        moved = pairs[pairs["moved_bytes"] > 0]
        return moved.sort_values("moved_bytes", ascending=False, kind="stable").reset_index(drop=True)

    def __repr__(self) -> str:
        pairs = int((self.matrix.to_numpy() > 0).sum())
        return f"<Traffic of {self.what}: {bytes_text(self.total_bytes)}, {pairs} pairs>"[:79]

    def _repr_html_(self) -> str:
        rows = [
            [pair["source"], pair["destination"], bytes_text(pair["moved_bytes"])]
            for pair in self.frame().to_dict("records")
        ]
        cut = f", the {MOST_PAIRS} largest of {len(rows)}" if len(rows) > MOST_PAIRS else ""
        pairs = numbers_table(["from", "to", "bytes"], rows[:MOST_PAIRS], caption=f"{self.what}{cut}")
        told = f'<div style="font-size:12px">{escape(self.figures)}</div>'
        return f'<div style="color:inherit">{self.svg}{told}{folded("The pairs as a table", pairs)}</div>'

    @property
    def svg(self) -> str:
        """The matrix as a picture."""
        names = [str(name) for name in self.matrix.index]
        cells = self.matrix.to_numpy()
        most = max(1, int(cells.max(initial=0)))
        left = LEFT + CHARACTER * max((len(name) for name in names), default=0) + 8
        top = TOP + CHARACTER * max((len(name) for name in names), default=0) * 0.72 + 8
        title = "bytes: from a row to a column"
        parts = [f'<text x="0" y="12" fill="currentColor" font-weight="600">{title}</text>']
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
        width, height = max(left + len(names) * CELL + tail, CHARACTER * len(title)), top + len(names) * CELL + 4
        return svg("".join(parts), width, height, f"matrix of {self.what} between {len(names)} processes")

    @property
    def figures(self) -> str:
        """One line: bytes moved, the minimum, and the slowest destination."""
        told = f"{self.what}: {bytes_text(self.total_bytes)} in all"
        if self.minimum_bytes is not None:
            told += f", at least {bytes_text(self.minimum_bytes)} needed"
            told += " without patches" if self.total_bytes < self.minimum_bytes else ""
            if self.minimum_bytes:
                told += f" ({self.total_bytes / self.minimum_bytes:.2f} times)"
        if self.seconds:
            slowest = max(self.seconds, key=lambda name: self.seconds[name])
            told += f"; slowest to arrive: to {slowest}, {self.seconds[slowest]:.2f} s"
        return told


def traffic(transfers: pd.DataFrame, *, names: Sequence[str], what: str, minimum_bytes: int | None = None) -> Traffic:
    """Summarise a transfers frame. names: the processes that may occur, in the order of the picture."""
    order = [*names, *sorted({*transfers["source"], *transfers["destination"]} - set(names))]
    summed = transfers.pivot_table(
        index="source", columns="destination", values="moved_bytes", aggfunc="sum", fill_value=0
    )
    matrix = summed.reindex(index=order, columns=order, fill_value=0).astype("int64")
    matrix.index.name, matrix.columns.name = "source", "destination"
    seconds = pd.Series(transfers.groupby("destination")["duration_s"].sum(), dtype="float64")
    return Traffic(matrix, {str(name): float(s) for name, s in seconds.items()}, what, minimum_bytes)


def changed_map(changed: pd.DataFrame) -> str:
    """Draw what updates changed, a row a layer and a column an update: darker means that more elements changed
    after rounding, on a log scale. changed: as `lab.changed()` returns it."""
    keys, names = ["run", "since", "version"], ["trained", "visible"]
    counted = changed.assign(norm=changed["norm"] ** 2, **{n: changed[n] * changed["elements"] for n in names})
    cells = counted.groupby([*keys, "layer"], sort=False, as_index=False)[["elements", *names, "norm"]].sum()
    rows = {layer: i for i, layer in enumerate(dict.fromkeys(cells["layer"]))}
    columns = {note: j for j, note in enumerate(dict.fromkeys(cells[keys].itertuples(index=False, name=None)))}
    width, left, top = max(NARROWEST, min(WIDEST, 800 // len(columns))), CHARACTER * max(map(len, rows)) + 12, 48
    right, bottom = max(left + 330, 540, left + width * len(columns) + 20), top + ROW * len(rows)
    parts = [
        '<text x="0" y="12" font-weight="600">share of elements that an update changed, after rounding</text>',
        f'<text x="{left - 6:g}" y="{top - 6}" text-anchor="end">layer</text>',
        f'<text x="{left:g}" y="{bottom + 30}">weights version after the update, in optimizer steps</text>',
    ]
    for n, share in enumerate((0, 1e-5, 1e-4, 1e-3, 1e-2, 1e-1, 1)):
        parts.append(f'<rect x="{76 * n}" y="18" width="12" height="10" {_shade(share)}/>')
        parts.append(f'<text x="{76 * n + 16}" y="27">{100 * share:g} %</text>')
    for layer, i in rows.items():
        parts.append(f'<text x="{left - 6:g}" y="{top + ROW * i + 12}" text-anchor="end">{escape(layer)}</text>')
    for (_, _, version), j in list(columns.items())[:: math.ceil(TICK / width)]:
        x = left + width * (j + 0.5)
        parts.append(f'<text x="{x:g}" y="{bottom + 14}" text-anchor="middle">{version}</text>')
    for run, since, version, layer, elements, trained, visible, square in cells.itertuples(index=False, name=None):
        told = (
            f"{layer}, version {since} to {version}: {100 * visible / elements:.2g} % changed, "
            f"{100 * trained / elements:.3g} % in float32, norm {square**0.5:.2g}"
        )
        x, y = left + width * columns[run, since, version], top + ROW * rows[layer]
        parts.append(f'<rect x="{x:g}" y="{y}" width="{width - 1}" height="{ROW - 1}" {_shade(visible / elements)}>')
        parts.append(f"<title>{escape(told)}</title></rect>")
    label = f"heat map of {len(rows)} layers over {len(columns)} weights versions"
    return svg(f'<g fill="currentColor">{"".join(parts)}</g>', right, bottom + 38, label)


def _shade(share: float) -> str:
    opacity = max(1 - math.log10(share) / math.log10(LEAST_SHOWN), 0.1) if share > 0 else 0
    return f'fill="{FILL}" fill-opacity="{opacity:.2f}" stroke="currentColor" stroke-opacity=".2"'
