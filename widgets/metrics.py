"""Metrics as curves over iterations, smoothed, beside other runs' curves; a point links to its iteration's samples."""

from __future__ import annotations

import math
import time
from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from typing import Any

from workbench.display.curves import STROKES, Chart, Curve, smoothed
from workbench.display.headlines import looked_at, unit_of
from workbench.errors import BadInput
from workbench.telemetry.store import TelemetryStore
from workbench_widgets.charts import Charts
from workbench_widgets.view import button, choice, entry

MOST_UNKNOWN = 6  # charts at first, where no metric is known
MOST_RUNS, LISTED_FOR_S = 30, 5.0
LINEAR, LOG = "linear", "log"


@dataclass
class Points:
    """The values of one metric. aside: those of comparisons and checks, which are not part of the curve."""

    iterations: list[int] = field(default_factory=list)
    values: list[float] = field(default_factory=list)
    aside_iterations: list[int] = field(default_factory=list)
    aside_values: list[float] = field(default_factory=list)


class MetricCurves:
    """The growing metrics of one run folder, by "stage/metric"."""

    def __init__(self, store: TelemetryStore) -> None:
        self._follower = store.follow("metrics")
        self.by_name: dict[tuple[str, str], Points] = {}
        self.rows = 0

    def read(self) -> None:
        for row in self._follower.new():
            self.rows += 1
            for metric, value in row["values"].items():
                points = self.by_name.setdefault((row["stage"], metric), Points())
                (points.aside_iterations if row["aside"] else points.iterations).append(row["iteration"])
                (points.aside_values if row["aside"] else points.values).append(float(value))


class Metrics(Charts):
    """One chart a metric: this run's curve, smoothed and raw, and those of other runs.

    shown: as (stage, metric); None: `first_shown`. others: names of other runs. smoothing: see `smoothed`; 0 shows raw
    curves only. iteration: the marked one.
    """

    name, title = "metrics", "Metrics"
    looks_at, fields = "look", ("y", "sought")

    def __init__(self, lab: Any, driver: Any) -> None:
        super().__init__(lab, driver)
        self.shown: list[tuple[str, str]] | None = None
        self.others: list[str] = []
        self.smoothing, self.y, self.sought = 0.6, LINEAR, ""
        self.iteration: int | None = None
        self._own = MetricCurves(lab.telemetry)
        self._runs: dict[str, MetricCurves] = {}
        self._listed: tuple[float, dict[str, Path]] = (-math.inf, {})

    # --- what it reads ------------------------------------------------------------------------------------------------

    def depends_on(self) -> Hashable:
        self._read()
        return self._own.rows, *(self._runs[name].rows for name in self.others)

    def _read(self) -> None:
        for run in (self._own, *(self._runs[name] for name in self.others)):
            run.read()

    def runs(self) -> dict[str, Path]:
        """Folders of other runs with metrics, by "name/time", the newest first."""
        if time.monotonic() - self._listed[0] > LISTED_FOR_S:
            own = Path(self.lab.run_folder)
            found = (path.parent for path in own.parent.parent.glob("*/*/metrics.jsonl"))
            newest = sorted((path for path in found if path != own), key=lambda path: path.name, reverse=True)
            named = {f"{path.parent.name}/{path.name}": path for path in newest[:MOST_RUNS]}
            self._listed = (time.monotonic(), named)
        return self._listed[1]

    def names(self) -> list[tuple[str, str]]:
        """All metrics of this run and of the runs beside it, in order of appearance."""
        read = (self._own, *(self._runs[name] for name in self.others))
        return list(dict.fromkeys(name for run in read for name in run.by_name))

    def drawn(self) -> list[tuple[str, str]]:
        """The metrics that have a chart."""
        there = self.names()
        return first_shown(there) if self.shown is None else [name for name in there if name in self.shown]

    # --- what it shows ------------------------------------------------------------------------------------------------

    def charts(self) -> list[Chart]:
        self._read()
        return [self._chart(stage, metric) for stage, metric in self.drawn()]

    def _chart(self, stage: str, metric: str) -> Chart:
        curves, notes = list[Curve](), list[str]()
        sources = {"": self._own, **{name: self._runs[name] for name in self.others}}
        for number, (source, run) in enumerate(sources.items()):
            points = run.by_name.get((stage, metric), Points())
            if not points.values and not points.aside_values:
                continue
            common: dict[str, Any] = {"stroke": STROKES[number % len(STROKES)], "source": source}
            name = source or self.lab.name
            if self.smoothing:
                curves.append(Curve(name="as measured", x=points.iterations, y=points.values, kind="faint", **common))
            line = smoothed(points.values, self.smoothing) if self.smoothing else points.values
            curves.append(Curve(name=name, x=points.iterations, y=line, **common))
            if points.aside_values:
                x, y = points.aside_iterations, points.aside_values
                curves.append(Curve(name=f"{name}, in comparisons and checks", x=x, y=y, kind="points", **common))
            undrawn = sum(not math.isfinite(value) for value in points.values)
            notes += [f"{undrawn} not finite"] if undrawn else []
            if self.y == LOG and (low := sum(value <= 0 for value in points.values)):
                notes.append(f"{low} not above 0")
        unit = unit_of(metric)
        return Chart(
            title=f"{stage}/{metric}", curves=tuple(curves), y=unit, unit="bytes" if unit == "bytes" else "",
            log=self.y == LOG, note=", ".join(notes), at=self.iteration,
        )  # fmt: skip

    def empty(self) -> str:
        if self._own.rows or self.others:
            return "<p>No metric is chosen: see <b>Metrics shown</b>.</p>"
        return "<p>No stage has reported metrics yet. Run one, in a cell or in the stepper.</p>"

    def controls(self) -> str:
        slider = (
            '<label>smoothing <input type="range" min="0" max="0.98" step="0.02" data-act="smooth" '
            f'value="{self.smoothing:g}" aria-valuetext="{self.smoothing:g}"> '
            f"<output>{self.smoothing:.2f}</output></label>"
        )
        wanted = self._last() if self.iteration is None else self.iteration
        return (
            slider
            + choice("y axis", "y", (LINEAR, LOG), self.y)
            + entry("iteration", "iteration", wanted, kind="number", size=5)
            + button(f"Samples of iteration {wanted}", "samples", off="" if wanted else "there is no iteration yet")
            + self._choice_of_metrics()
            + self._choice_of_runs()
        )

    def _choice_of_metrics(self) -> str:
        drawn, by_stage = self.drawn(), dict[str, list[str]]()
        found = self._found()
        for stage, metric in found:
            by_stage.setdefault(stage, []).append(metric)
        groups = "".join(
            f"<fieldset><legend>{escape(stage)}</legend>"
            + "".join(
                entry(metric, "show", (stage, metric) in drawn, kind="checkbox", stage=stage, metric=metric)
                for metric in metrics
            )
            + "</fieldset>"
            for stage, metrics in by_stage.items()
        )
        total = len(self.names())
        return (
            f'<details class="wb-choices"><summary>Metrics shown: {len(drawn)} of {total}</summary>'
            + entry("search", "sought", self.sought, kind="search", size=16)
            + button(f"Show these {len(found)}", "show_found")
            + button(f"Hide these {len(found)}", "hide_found")
            + button("As at first", "show_first")
            + f'<div class="wb-list" data-scrolls>{groups or "no metric has this name"}</div></details>'
        )

    def _choice_of_runs(self) -> str:
        runs = self.runs()
        listed = "".join(entry(name, "beside", name in self.others, kind="checkbox", run=name) for name in runs)
        return (
            f'<details class="wb-choices"><summary>Other runs beside: {len(self.others)} of {len(runs)}</summary>'
            f'<div class="wb-list" data-scrolls>{listed or "no other run in the folder of runs"}</div></details>'
        )

    def _found(self) -> list[tuple[str, str]]:
        words = self.sought.lower().split()
        return [name for name in self.names() if all(word in "/".join(name).lower() for word in words)]

    def _last(self) -> int:
        return max((max(points.iterations, default=0) for points in self._own.by_name.values()), default=0)

    # --- actions ------------------------------------------------------------------------------------------------------

    def on_smooth(self, value: Any) -> None:
        self.smoothing = float(value)

    def on_show(self, stage: str, metric: str, value: bool) -> None:
        self._show([(stage, metric)], value)

    def on_show_found(self) -> None:
        self._show(self._found(), True)

    def on_hide_found(self) -> None:
        self._show(self._found(), False)

    def on_show_first(self) -> None:
        self.shown = None

    def _show(self, names: Iterable[tuple[str, str]], value: bool) -> None:
        changed = set(names)
        kept = [name for name in self.drawn() if name not in changed]
        self.shown = [*kept, *changed] if value else kept

    def on_beside(self, run: str, value: bool) -> None:
        """Show or hide another run's curves."""
        self.others = [name for name in self.others if name != run]
        if not value:
            return
        folder = self.runs().get(run)
        if folder is None:
            raise BadInput(f"run {run!r}", f"{len(self.runs())} others have metrics", "choose one from the list")
        if run not in self._runs:
            self._runs[run] = MetricCurves(TelemetryStore(folder))
        self.others.append(run)
        self._read()

    def on_iteration(self, value: Any) -> None:
        number = int(value) if str(value).isdigit() else 0
        if not 1 <= number <= self._last():
            raise BadInput(f"iteration {value!r}", f"iterations go from 1 to {self._last()}", "choose one of these")
        self.iteration = number

    def on_samples(self) -> None:
        """Show the samples of the marked iteration, or of the last one."""
        self.turn("samples", iteration=self._last() if self.iteration is None else self.iteration)

    def on_look(self, x: float, source: str = "") -> None:
        """Show the samples of a point's iteration."""
        if source:
            raise BadInput(f"samples of {source}", "only this workbench's run has samples", "choose a point of it")
        self.on_iteration(int(x))
        self.on_samples()


def first_shown(names: Iterable[tuple[str, str]]) -> list[tuple[str, str]]:
    """The (stage, metric) pairs that tell most about training, the headlines and the entropy; if there are none, the
    first few."""
    there = {"/".join(name): name for name in names}
    found = [there[name] for name in looked_at(there).values()]
    found += [name for name in there.values() if name[1] == "entropy"][:1]
    return found or list(there.values())[:MOST_UNKNOWN]
