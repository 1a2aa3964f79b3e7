"""Draw a dataflow: stages from left to right in an order in which they can run, coloured by role."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from html import escape
from typing import Any

from workbench.display.html import legend, svg
from workbench.display.palette import role_styles

WIDTH, HEIGHT, GAP_X, GAP_Y, MARGIN = 168, 44, 34, 14, 8


@dataclass(frozen=True)
class Mark:
    """The state of a stage: a sign, words, and the finished share. chosen: drawn with a frame."""

    sign: str
    words: str
    share: float = 0.0
    chosen: bool = False


def draw(graph: Any, marks: Mapping[str, Mark] | None = None, *, live: bool = False) -> str:
    """Html with an svg of the graph and the roles' colours. An arrow means that a stage reads columns another wrote.

    graph: an algorithm's, see `workbench.algorithms.graph`, with each stage after its inputs. marks: states of stages,
    by name. live: each marked box is a control; it sends the action "choose" with the stage's name.
    """
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
    boxes = ""
    for stage in graph.stages:
        style = styles[stage.role].colour, styles[stage.role].ink
        boxes += _box(stage, place[stage.name], style, (marks or {}).get(stage.name), live)
    width = 2 * MARGIN + (1 + max(depth.values())) * (WIDTH + GAP_X) - GAP_X
    bottom = 2 * MARGIN + (1 + max(rows.values())) * (HEIGHT + GAP_Y) - GAP_Y
    roles = [(role, f'fill="{style.colour}"', "", "") for role, style in styles.items()]
    names, height = legend(roles, width, bottom + 4)
    label = f"{graph.title}: " + ", ".join(f"{stage.name} on {stage.role}" for stage in graph.stages)
    picture = svg(f"{arrows}{boxes}{names}", width, height, label, role="group" if live else "img", font="12px")
    caption = f'<div style="font-size:13px;font-weight:600;padding:2px 4px">Dataflow of {escape(graph.title)}</div>'
    return f'<div style="overflow-x:auto">{caption}{picture}</div>'


def _arrow(start: tuple[float, float], end: tuple[float, float]) -> str:
    x1, y1, x2, y2 = start[0] + WIDTH, start[1] + HEIGHT / 2, end[0], end[1] + HEIGHT / 2
    bend = max(GAP_X, (x2 - x1) / 2)
    return (
        f'<path d="M{x1:g},{y1:g} C{x1 + bend:g},{y1:g} {x2 - bend:g},{y2:g} {x2:g},{y2:g}" fill="none" '
        'stroke="currentColor" stroke-opacity=".45"/>'
        f'<path d="M{x2:g},{y2:g} l-7,-3.5 v7 z" fill="currentColor"/>'
    )


def _box(stage: Any, at: tuple[float, float], style: tuple[str, str], mark: Mark | None, live: bool) -> str:
    x, y = at
    colour, ink = style
    reads, writes = ", ".join(stage.reads) or "nothing", ", ".join(stage.writes) or "no column"
    title = f"{stage.name} on {stage.role}\nreads {reads}\nwrites {writes}"
    start, words, extra = "<g>", stage.role, ""
    if mark is not None:
        if live:
            given, name = escape(json.dumps({"stage": stage.name})), escape(stage.name)
            label = escape(f"{stage.name} on {stage.role}: {mark.words}")
            start = f'<g data-act="choose" data-given="{given}" data-stage="{name}" tabindex="0" role="button" '
            start += f'aria-label="{label}" aria-pressed="{str(mark.chosen).lower()}">'
        words = f"{mark.sign} {mark.words}"
        title += f"\n{mark.words}"
        if mark.share:
            place = f'x="{x:g}" y="{y + HEIGHT - 4:g}" width="{WIDTH * min(mark.share, 1):g}" height="4"'
            extra = f'<rect {place} fill="{ink}" opacity=".7"/>'
        if mark.chosen:
            place = f'x="{x - 3:g}" y="{y - 3:g}" width="{WIDTH + 6}" height="{HEIGHT + 6}" rx="7"'
            extra += f'<rect {place} fill="none" stroke="currentColor" stroke-width="2"/>'
    return (
        f"{start}<title>{escape(title)}</title>"
        f'<rect x="{x:g}" y="{y:g}" width="{WIDTH}" height="{HEIGHT}" rx="5" fill="{colour}"/>'
        f'<text x="{x + 8:g}" y="{y + 18:g}" fill="{ink}" font-weight="600">{escape(stage.name)}</text>'
        f'<text x="{x + 8:g}" y="{y + 34:g}" fill="{ink}" opacity=".85">{escape(words)}</text>{extra}</g>'
    )
