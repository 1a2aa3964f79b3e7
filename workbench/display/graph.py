"""A picture of a dataflow: stages from left to right in the order in which they can run, coloured by role."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Protocol

from workbench.display.palette import role_styles

WIDTH, HEIGHT, GAP_X, GAP_Y, MARGIN = 168, 44, 34, 14, 8


class StageRecord(Protocol):
    """What is drawn of a stage."""

    @property
    def name(self) -> str: ...
    @property
    def role(self) -> str: ...
    @property
    def inputs(self) -> tuple[str, ...]: ...
    @property
    def reads(self) -> tuple[str, ...]: ...
    @property
    def writes(self) -> tuple[str, ...]: ...


class GraphRecord(Protocol):
    """A title and stages, each after those that it takes its input from."""

    @property
    def title(self) -> str: ...
    @property
    def stages(self) -> Sequence[StageRecord]: ...
    def edges(self) -> Mapping[str, set[str]]: ...


def draw(graph: GraphRecord) -> str:
    """The graph as html with an svg in it. An arrow: a stage reads columns that another wrote."""
    edges = graph.edges()
    depth: dict[str, int] = {}
    for stage in graph.stages:
        depth[stage.name] = 1 + max((depth[name] for name in edges[stage.name]), default=-1)
    rows: dict[int, int] = {}
    place: dict[str, tuple[float, float]] = {}
    for stage in graph.stages:
        column = depth[stage.name]
        row = rows[column] = rows.get(column, -1) + 1
        place[stage.name] = (MARGIN + column * (WIDTH + GAP_X), MARGIN + row * (HEIGHT + GAP_Y))
    styles = role_styles(stage.role for stage in graph.stages)
    arrows = "".join(_arrow(place[source], place[name]) for name, found in edges.items() for source in sorted(found))
    boxes = "".join(
        _box(stage, place[stage.name], {r: (s.colour, s.ink) for r, s in styles.items()}) for stage in graph.stages
    )
    width = 2 * MARGIN + (1 + max(depth.values())) * (WIDTH + GAP_X) - GAP_X
    height = 2 * MARGIN + (1 + max(rows.values())) * (HEIGHT + GAP_Y) - GAP_Y
    label = escape(f"{graph.title}: " + ", ".join(f"{s.name} on {s.role}" for s in graph.stages))
    svg = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        f'role="img" aria-label="{label}" style="font:12px system-ui,sans-serif">'
        '<defs><marker id="wb-tip" viewBox="0 0 8 8" refX="8" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
        '<path d="M0,0 L8,4 L0,8 z" fill="currentColor"/></marker></defs>'
        f"{arrows}{boxes}</svg>"
    )
    caption = f'<div style="font-size:13px;font-weight:600;padding:2px 4px">Dataflow of {escape(graph.title)}</div>'
    return f'<div style="overflow-x:auto">{caption}{svg}</div>'


def _arrow(start: tuple[float, float], end: tuple[float, float]) -> str:
    x1, y1, x2, y2 = start[0] + WIDTH, start[1] + HEIGHT / 2, end[0], end[1] + HEIGHT / 2
    bend = max(GAP_X, (x2 - x1) / 2)
    return (
        f'<path d="M{x1:g},{y1:g} C{x1 + bend:g},{y1:g} {x2 - bend:g},{y2:g} {x2:g},{y2:g}" fill="none" '
        'stroke="currentColor" stroke-opacity=".45" marker-end="url(#wb-tip)"/>'
    )


def _box(stage: StageRecord, at: tuple[float, float], styles: Mapping[str, tuple[str, str]]) -> str:
    x, y = at
    colour, ink = styles[stage.role]
    reads, writes = ", ".join(stage.reads) or "nothing", ", ".join(stage.writes) or "no column"
    title = f"{stage.name} on {stage.role}\nreads {reads}\nwrites {writes}"
    return (
        f"<g><title>{escape(title)}</title>"
        f'<rect x="{x:g}" y="{y:g}" width="{WIDTH}" height="{HEIGHT}" rx="5" fill="{colour}"/>'
        f'<text x="{x + 8:g}" y="{y + 18:g}" fill="{ink}" font-weight="600">{escape(stage.name)}</text>'
        f'<text x="{x + 8:g}" y="{y + 34:g}" fill="{ink}" opacity=".85">{escape(stage.role)}</text></g>'
    )
