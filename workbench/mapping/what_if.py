"""Map the best placement over two of four axes: the best plan at each point of a grid, searched in stages that refine
the whole map step by step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import replace
from html import escape
from itertools import product
from typing import TYPE_CHECKING, Any

from workbench.display.curves import STROKES
from workbench.display.html import Markup, kv, seconds_text, table
from workbench.display.palette import role_styles
from workbench.errors import BadInput, MissingDependency
from workbench.mapping.hardware import Hardware
from workbench.mapping.hardware import hardware as hardware_of
from workbench.mapping.plan import Plan, Plans, describe
from workbench.mapping.search import search
from workbench.mapping.workload import Workload
from workbench.models.dense_config import SIZES
from workbench.support.checked_calls import checked_call
from workbench.support.validation import PositiveInt, one_of

if TYPE_CHECKING:
    from workbench_widgets.what_if import WhatIf

AXES: dict[str, tuple[Any, ...]] = {
    "devices": (8, 16, 32, 64, 96, 128), "link_speed": (0.25, 0.5, 1.0, 2.0, 4.0, 8.0),
    "response_tokens": (256, 512, 1024, 2048, 4096, 8192), "model": SIZES,
}  # fmt: skip
COARSE, FINE = 4, 64  # allocations are multiples of at most 1/COARSE, or 1/FINE, of the devices
NOTHING, TOGETHER, AS_GIVEN = "nothing fits", "all together", "as given"
BOX = "padding:2px 3px;font-size:12px;white-space:nowrap;text-align:center;line-height:1.3;border:3px solid"
Point = tuple[Any, ...]  # one value per axis


@checked_call("wb.mapping.what_if")
def what_if(models: Mapping[str, Any], *, devices: PositiveInt = 64, hardware: str | Hardware = "a100-80g",
            workload: Workload | str = "ppo", across: str = "devices", up: str = "response_tokens"
            ) -> WhatIf:  # fmt: skip
    """Show sliders for devices, link speed, response length and model size, with the best plan at their values, and a
    map of the best placement over two of them. `.frame()` has the map's numbers, also without a browser.

    models, devices, hardware, workload: as in `search`; they set the sliders' first values. across, up: the map's axes:
    "devices", "link_speed" (a factor of all links' bandwidths), "response_tokens", "model". Raises `BadInput` as
    `search` does, except if nothing fits, which the map shows; `MissingDependency` without the extra "notebook".
    """
    one_of("across", across, tuple(AXES))
    one_of("up", up, tuple(axis for axis in AXES if axis != across))
    work = workload if isinstance(workload, Workload) else Workload(algorithm=workload)
    grid = PlacementMap(models, devices, hardware_of(hardware), work)
    try:
        from workbench_widgets.what_if import WhatIf
    except ImportError as error:
        raise MissingDependency.of(f"{error.name}", "sliders need it", "notebook") from error
    return WhatIf(grid, across, up)


class PlacementMap:
    """Best plans by point. steps: the values of each axis. given: the point of the given arguments."""

    def __init__(self, models: Mapping[str, Any], devices: int, hardware: Hardware, workload: Workload) -> None:
        endless = replace(hardware, memory_bytes=2**60)  # everything fits: an error here is about wrong arguments
        search(models, devices=2, hardware=endless, workload=workload, top=1)
        self.models, self.hardware, self.workload = models, hardware, workload
        sizes = {str(model) for model in models.values() if model is not None}
        size = sizes.pop() if len(sizes) == 1 and sizes <= {*SIZES} else AS_GIVEN
        self.given: Point = devices, 1.0, round(workload.mean_response), size
        self.steps = {
            axis: values if one in values else (one, *values) if one == AS_GIVEN else tuple(sorted((one, *values)))
            for (axis, values), one in zip(AXES.items(), self.given, strict=True)
        }
        self._found: dict[Point, tuple[int, Plans | BadInput]] = {}  # the `parts` of the search, and its result
        self._colours: dict[str, str] = {}  # by placement

    def _search(self, point: Point, parts: int) -> Plans | BadInput:
        devices, speed, tokens, size = point
        rates = {name: speed * getattr(self.hardware, name) for name in ("inside_bytes_s", "machine_bytes_s")}
        lengths = [max(1, round(n * tokens / self.workload.mean_response)) for n in self.workload.lengths]
        models = {role: model and (model if size == AS_GIVEN else size) for role, model in self.models.items()}
        unit = 1 << max(0, (devices // parts).bit_length() - 1)  # a power of two, so that layouts can divide it
        hardware, workload = replace(self.hardware, **rates), replace(self.workload, response_tokens=lengths)
        try:
            return search(models, devices=devices, hardware=hardware, workload=workload, granularity=unit, top=2)
        except BadInput as error:
            return error

    def points(self, point: Point, across: str, up: str) -> list[Point]:
        """Return the cells of the map through a point, row by row, the largest value of `up` first."""
        given, values = dict(zip(AXES, point, strict=True)), product(reversed(self.steps[up]), self.steps[across])
        return [tuple((given | {across: x, up: y}).values()) for y, x in values]

    def refine(self, point: Point, across: str, up: str) -> Iterator[None]:
        """Search one point after another, in stages: the given point; every fourth row and column, then every second;
        the given point with smaller parts; all other points; all points with smaller parts."""
        every, wide = self.points(point, across, up), len(self.steps[across])
        y, x = divmod(every.index(point), wide)
        fourth, second = ([one for n, one in enumerate(every) if (n // wide - y) % k == (n % wide - x) % k == 0]
                          for k in (4, 2))  # fmt: skip
        stages = [point], fourth, second, [point], every, every
        for points, parts in zip(stages, (COARSE, COARSE, COARSE, FINE, COARSE, FINE), strict=True):
            for one in points:
                if one not in self._found or self._found[one][0] < parts:
                    new = parts, self._search(one, parts)  # while another thread may have found a finer answer
                    self._found[one] = max(new, self._found.get(one, new), key=lambda known: known[0])
                    yield

    def rows(self, point: Point, across: str, up: str) -> list[dict[str, Any]]:
        """Return one row per cell, with its results if it has been searched; see `WhatIf.frame`."""
        rows = []
        for one in self.points(point, across, up):
            _, found = self._found.get(one, (0, ""))
            row = {axis: value for axis, value in zip(AXES, one, strict=True) if axis in (across, up)}
            row |= {"placement": found and NOTHING, "iteration_s": None, "next": "", "slower": None, "why": str(found)}
            if isinstance(found, Plans):
                best, *others = found
                row |= {"placement": words(best), "iteration_s": best.iteration_s, "why": best.why}
                for other in others:
                    row |= {"next": words(other), "slower": other.iteration_s / best.iteration_s - 1}
            rows.append(row)
        return rows

    def picture(self, point: Point, across: str, up: str) -> str:
        """Return the map as html: a colour and letters for each placement, seconds, and how much slower the next plan
        is. Cells that are not searched yet have the colour of the nearest cell that is."""
        cells, wide, rows = self.rows(point, across, up), len(self.steps[across]), list[dict[str, Any]]()
        own, known = self.points(point, across, up).index(point), [n for n, one in enumerate(cells) if one["placement"]]
        for n, cell in enumerate(cells):
            near = min(known, key=lambda k: abs(k // wide - n // wide) + abs(k % wide - n % wide), default=n)
            name, text, tip = cells[near]["placement"], "\N{HORIZONTAL ELLIPSIS}<br>&nbsp;", "not searched yet"
            colour, short = self._looks(name)
            if near == n and name:
                takes = "" if name == NOTHING else seconds_text(cell["iteration_s"])
                later = f" <small>+{cell['slower']:.0%}</small>" if cell["next"] else ""
                text, tip = f"<b>{short}</b><br>{takes}{later}&nbsp;", f"{name} {takes}: {cell['why']}"
            if n % wide == 0:
                rows.append({"": value_text(cell[up])})
            style = f"{BOX} {'currentColor' if n == own else 'transparent'};background:{colour};width:100px"
            rows[-1][value_text(cell[across])] = Markup(f'<div style="{style}" title="{escape(tip)}">{text}</div>')
        key = ""
        for name, count in Counter(cells[n]["placement"] for n in known).most_common():
            colour, short = self._looks(name)
            told = f"in {count}" if name == NOTHING else f"best in {count}"
            box = f'<span style="{BOX} transparent;background:{colour}">{short}</span>'
            key += f'<div style="line-height:2">{box} {name}: {told}'
        axes = f"{label(across)} \N{RIGHTWARDS ARROW}, {label(up)} \N{UPWARDS ARROW}"
        return table(rows, caption=f"best placement ({axes}), its iteration's time, how much slower the next is") + key

    def _looks(self, name: str) -> tuple[str, str]:
        """Return the colour of a placement (with an alpha, so that text is readable in any theme) and its letters."""
        if name in ("", NOTHING):
            return "transparent", "\N{MULTIPLICATION X}"
        fresh = f"{STROKES[len(self._colours) % len(STROKES)].colour}59"
        letters = {role: style.letter for role, style in role_styles(self.models).items()}
        sets = ["".join(letters[role] for role in one.split(" + ")) for one in name.split(" | ") if name != TOGETHER]
        return self._colours.setdefault(name, fresh), "|".join(sets) or "all"

    def answer(self, point: Point) -> str:
        """Return the best plan at a point as html: its seconds by stage, and why it is the best."""
        _, found = self._found.get(point, (0, ""))
        told = {"best": found}
        if isinstance(found, Plans):
            stages = {"iteration": found.best.iteration_s, **found.best.stage_s}
            told = {"best": words(found.best), **{name: seconds_text(taken) for name, taken in stages.items()},
                    "plan": describe(found.best), "why": found.best.why}  # fmt: skip
        return kv(told, caption=", ".join(f"{label(n)} {value_text(one)}" for n, one in zip(AXES, point, strict=True)))


def words(plan: Plan) -> str:
    """Return a plan's placement as a text: which roles share devices."""
    return " | ".join(" + ".join(one.names) for one in plan.sets) if len(plan.sets) > 1 else TOGETHER


def label(axis: str) -> str:
    return axis.replace("_", " ")


def value_text(value: Any) -> str:
    if isinstance(value, float):
        return f"\N{MULTIPLICATION SIGN} {value:g}"
    return value if isinstance(value, str) else f"{value:,}"
