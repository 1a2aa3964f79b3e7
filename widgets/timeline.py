"""The timeline: which device did what when, what it waited for when it did nothing, and which cell asked for it."""

from __future__ import annotations

import threading
from collections.abc import Hashable, Mapping
from html import escape
from typing import Any

import numpy as np

from workbench.display.html import bytes_text, kv, seconds_text
from workbench.display.idle import CAUSES, Gaps, Life, within
from workbench.display.lanes import TOUCH_S, lanes_of
from workbench.display.span_table import SpanTable
from workbench.display.timeline import Timeline, drawn, times_table
from workbench.display.timeline_svg import Section
from workbench.errors import BadInput
from workbench.support.notebook_cell import code_of_cell
from workbench_widgets.view import View, choice, entry, whole_number

WINDOWS = {"last": "last iteration", "several": "last N iterations", "all": "all", "compare": "compare N iterations"}
MOST_COMPARED = 12
MOST_STILL_BARS = 250  # keeps the picture in a saved notebook below 300 kB, however many spans there are
MOST_LISTED = 500
LEAST_WIDTH, MOST_WIDTH = 320, 4000  # pixels
SHORTEST_S = 2e-5


class TimelineView(View):
    """Lanes by device with the spans of stages, and the idle time between them by its cause.

    window: a key of `WINDOWS`, or "iteration 7". iterations: N of these.
    """

    name, title, script = "timeline", "Timeline", True

    def __init__(self, lab: Any, driver: Any) -> None:
        super().__init__(lab, driver)
        self.window, self.iterations = "last", 3
        self._follow = {name: lab.telemetry.follow(name) for name in ("spans", "events")}
        self._table = SpanTable(lab.devices())
        self._starts: list[tuple[int, float]] = []  # of iterations: number, unix time
        self._moves_s: list[float] = []  # when changes of placement began, unix times
        self._lives: list[Life] = []  # by lane
        self._cells: dict[int, tuple[int, int]] = {}  # by run: the cell that called it, in which session of a kernel
        self._session = 0
        self._chosen: Mapping[str, Any] = {}
        self._changes = 0
        self._width = 960
        self._looked: tuple[float, float] | None = (
            None  # what is in sight, seconds from the start of a section; None: all
        )
        self._asked = ""  # what the front end last asked for
        self._titles: list[str] = []
        self._drawn_still: tuple[Hashable, Timeline] | None = None
        self._reading = threading.Lock()  # a picture is asked for in another thread than a payload

    # --- what there is ------------------------------------------------------------------------------------------------

    def depends_on(self) -> Hashable:
        return tuple(follower.size_bytes for follower in self._follow.values()), self._changes

    def _read(self) -> None:
        """Take in what was recorded since the last time."""
        with self._reading:
            for event in self._follow["events"].new():
                details = event["details"]
                if event["event"] == "iteration":
                    self._starts.append((int(details["iteration"]), float(event["time_s"])))
                elif event["event"] == "run":
                    self._cells[int(details["run"])] = int(details["cell"]), self._session
                elif event["event"] == "move":
                    self._moves_s.append(float(event["time_s"]) - float(details["seconds"]))
                elif event["event"] == "attached":
                    self._session += 1
            if self._follow["spans"].grown:
                self._table.add(self._follow["spans"].new_spans(), last=False)
            self._table.know(live := self.lab.devices())
            self._lives = self._table.lives(live, self._moves_s)

    def _gaps(self) -> Gaps:
        return self._table.gaps(self._window(), self._lives, self._cells)

    def _window(self) -> tuple[float, float]:
        """From the first iteration, or span, to the end of the last span."""
        first_s, last_s = self._table.window()
        return min([first_s, *(start_s for _, start_s in self._starts[:1])]), last_s

    def _sections(self) -> list[Section]:
        """What is drawn, as far as anything was recorded."""
        first_s, last_s = self._window()
        starts = [(f"iteration {number}", start_s) for number, start_s in self._starts]
        if self.window == "all" or not starts:
            return [self._section("all", first_s, last_s)]
        ends = [*(start_s for _, start_s in starts[1:]), last_s]
        own = [(title, start_s, end_s) for (title, start_s), end_s in zip(starts, ends, strict=True)]
        if self.window.startswith("iteration "):
            return [self._section(*one) for one in own if one[0] == self.window][-1:]
        if self.window == "compare":
            return [self._section(*one) for one in own[-min(self.iterations, MOST_COMPARED) :]]
        shown = own[-1:] if self.window == "last" else own[-self.iterations :]
        numbers = [title.split()[1] for title, *_ in shown]
        title = shown[0][0] if len(shown) == 1 else f"iterations {numbers[0]} to {numbers[-1]}"
        return [self._section(title, shown[0][1], last_s)]

    def _section(self, title: str, start_s: float, end_s: float) -> Section:
        """With the lanes that are there in these times."""
        end_s = max(start_s, min(end_s, self._table.window()[1]))
        live = set(self.lab.devices())
        numbers = {lane: number for number, lane in enumerate(self._table.lanes)}
        lived = {lane: within(self._lives[number], start_s, end_s) for lane, number in numbers.items()}
        there = {lane for lane, (a, b) in lived.items() if b > a or (start_s == end_s and lane in live)}
        devices = [device for _, device in self.lab.devices() if device in {name for _, name in there}]
        return Section(title, start_s, end_s, {numbers[lane]: lived[lane] for lane in lanes_of(there, devices)})

    # --- what it shows ------------------------------------------------------------------------------------------------

    def controls(self) -> str:
        windows = WINDOWS if self.window in WINDOWS else {**WINDOWS, self.window: self.window}
        asked = entry("N", "iterations", self.iterations, kind="number", size=4)
        return choice("show", "show", windows, self.window) + (asked if self.window in ("several", "compare") else "")

    def payload(self, *, whole: bool) -> tuple[dict[str, Any], list[bytes]]:
        self._read()
        sections, gaps = self._sections(), self._gaps()
        titles = [section.title for section in sections]
        if titles != self._titles:
            self._titles, self._looked = titles, None
        picture = drawn(self._table, sections, gaps, width=self._width, view=self._looked)
        data = {
            "svg": picture.inline_svg,
            "spans": len(self._table),
            "view": self._looked,
            "length_s": max([section.end_s - section.start_s for section in sections], default=0.0),
            "asked": self._asked,
            "times": times_table(picture.summary, "times by device"),
            "details": self._details(gaps),
            "chosen": self._chosen.get("span", -1),
        }
        return data, []

    def _still(self) -> Timeline:
        self._read()
        if self._drawn_still is None or self._drawn_still[0] != self.depends_on():
            still = drawn(self._table, self._sections(), self._gaps(), most=MOST_STILL_BARS)
            self._drawn_still = self.depends_on(), still
        return self._drawn_still[1]

    def picture(self) -> str:
        return self._still()._repr_html_()

    def svg(self) -> str | None:
        return self._still().svg

    def text(self) -> str:
        return repr(self._still())

    # --- what was chosen ----------------------------------------------------------------------------------------------

    def _details(self, gaps: Gaps) -> str:
        number = self._chosen.get("span", -1)
        if 0 <= number < len(self._table):
            return self._span_details(number, gaps)
        return self._gap_details(**self._chosen["gap"]) if "gap" in self._chosen else ""

    def _span_details(self, number: int, gaps: Gaps) -> str:
        row = self._table.row(number)
        waits = [f"{seconds_text(s)} {cause.words}" for cause, s in zip(CAUSES, _before(gaps, row), strict=True) if s]
        tokens, took_s = row["processed_tokens"], row["duration_s"]
        rate = f" ({tokens / took_s:,.0f} tokens/s)" if took_s else ""
        facts = {
            "what": row["kind"] + (f" in {row['parent']}" if row["parent"] else ""),
            "role": f"{row['role']}, rank {row['rank']}" if row["role"] else "",
            "device": f"{row['device']} of pool {row['pool']}",
            "run": row["run"],
            "took": seconds_text(took_s),
            "tokens": f"{tokens:,}{rate}" if tokens else "",
            "moved": bytes_text(row["moved_bytes"]) if row["moved_bytes"] else "",
            "peak memory": bytes_text(row["peak_memory_bytes"]) if row["peak_memory_bytes"] else "",
            "note": row["note"],
            "before it": ", ".join(waits),
        }
        shown = kv({name: value for name, value in facts.items() if value != ""}, caption=row["stage"])
        return f'<section aria-label="chosen span">{shown}{self._cell(row["run"])}</section>'

    def _cell(self, run: int) -> str:
        """The cell that called a run, and a way to it."""
        if run not in self._cells:
            return f"<div>run {run} was called by no cell of a notebook</div>"
        number, session = self._cells[run]
        if session != self._session:
            return f"<div>called in cell [{number}] of an earlier kernel</div>"
        code = code_of_cell(number)
        return (
            f'<button type="button" data-cell="{number}">Go to cell [{number}]</button>'
            f"<pre>{escape(code) or 'its code is not known'}</pre>"
        )

    def _gap_details(self, lane: int, start_s: float, end_s: float, cause: int) -> str:
        pool, device = self._table.lanes[lane]
        what, columns = CAUSES[cause], self._table.columns
        parts = columns["depth"] == 0
        during = np.flatnonzero(parts & (columns["start_s"] < end_s) & (columns["end_s"] > start_s))
        rows = [self._table.row(int(number)) for number in during[:MOST_LISTED]]
        running = {f"{row['role']}.{row['stage']} on pool {row['pool']}" for row in rows if row["kind"] != "queue"}
        queued = {
            f"{row['role']}.{row['stage']}"
            for row in rows
            if row["kind"] == "queue" and (row["pool"], row["device"]) == (pool, device)
        }
        facts = {
            "device": f"{device} of pool {pool}",
            "took": seconds_text(end_s - start_s),
            "because": what.meaning,
            "meanwhile": ", ".join(sorted(running)) or "nothing ran",
            "queued here": ", ".join(sorted(queued)) or "no stage",
        }
        return f'<section aria-label="chosen gap">{kv(facts, caption=f"idle: {what.words}")}</section>'

    # --- actions ------------------------------------------------------------------------------------------------------

    def on_show(self, value: str) -> None:
        """Choose what is drawn."""
        known = [*WINDOWS, *(f"iteration {number}" for number, _ in self._starts)]
        if value not in known:
            raise BadInput(f"show={value!r}", f"there is {', '.join(WINDOWS)}, and each iteration that has begun")
        self.window = value
        self._changes += 1

    def on_iterations(self, value: Any) -> None:
        self.iterations = whole_number("N", value)
        self._changes += 1

    def on_choose(self, **chosen: Any) -> None:
        """Look at a span, by its number, or at a gap; at nothing."""
        self._chosen = chosen
        self._changes += 1

    def on_look(self, asked: str, width: int, view: list[float] | None = None) -> None:
        """Draw for a page so many pixels wide, and with this in sight: seconds from the start of a section."""
        self._asked, self._width = asked, min(max(int(width), LEAST_WIDTH), MOST_WIDTH)
        self._looked = None if view is None else (float(view[0]), max(float(view[1]), float(view[0]) + SHORTEST_S))
        self._changes += 1

    def receive(self, iteration: int | None = None, **_: Any) -> None:
        """Show one iteration."""
        if iteration is not None:
            self._read()
            self.on_show(f"iteration {iteration}")


def _before(gaps: Gaps, row: Mapping[str, Any]) -> list[float]:
    """Seconds by cause from where the device last computed to where a span begins."""
    seconds, reached_s = [0.0] * len(CAUSES), row["start_s"]
    here = np.flatnonzero((gaps.lane == row["lane"]) & (gaps.start_s < row["start_s"]))
    for n in here[::-1]:
        if gaps.end_s[n] < reached_s - TOUCH_S:
            break
        seconds[gaps.cause[n]] += float(min(gaps.end_s[n], reached_s) - gaps.start_s[n])
        reached_s = gaps.start_s[n]
    return seconds
