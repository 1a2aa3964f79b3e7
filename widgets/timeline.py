"""The timeline: which device did what when, what it waited for when it did nothing, and which cell asked for it."""

from __future__ import annotations

import threading
from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from html import escape
from typing import Any

import numpy as np

from workbench.display.html import bytes_text, kv, seconds_text
from workbench.display.idle import CAUSES, Gaps, Life, within
from workbench.display.lanes import TOUCH_S, lanes_of
from workbench.display.palette import role_styles
from workbench.display.timeline import HATCHES, SHADES, Timeline, ground_opacity, timeline, times_table
from workbench.errors import BadInput
from workbench.support.notebook_cell import code_of_cell
from workbench_widgets.span_table import SpanTable
from workbench_widgets.view import View, choice, entry, whole_number

WINDOWS = {"last": "last iteration", "several": "last N iterations", "all": "all", "compare": "compare N iterations"}
MOST_COMPARED = 12
MOST_STILL_BARS = 250  # keeps the picture in a saved notebook below 200 kB
MOST_LISTED = 500
NO_GAPS = SpanTable().gaps((0.0, 0.0))


@dataclass(frozen=True)
class Section:
    """Times that are drawn from the left edge on. end_s: None: no end yet."""

    title: str
    start_s: float
    end_s: float | None


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
        self._sent_spans, self._sent_gaps = 0, NO_GAPS
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
                self._table.add(self._follow["spans"].new())
            self._table.know(live := self.lab.devices())
            self._lives = self._table.lives(live, self._moves_s)

    def _gaps(self) -> Gaps:
        return self._table.gaps(self._window(), self._lives)

    def _times_of(self, section: Section) -> tuple[float, float]:
        """Its times as far as anything was recorded."""
        last_s = self._table.window()[1]
        end_s = last_s if section.end_s is None else min(section.end_s, last_s)
        return section.start_s, max(end_s, section.start_s)

    def _shown(self, section: Section) -> dict[int, tuple[float, float]]:
        """The lanes that are there in a section, by number, and for which of its times."""
        times, live = self._times_of(section), set(self.lab.devices())
        lived = [within(life, *times) for life in self._lives]
        return {
            number: (start_s, end_s)
            for number, (start_s, end_s) in enumerate(lived)
            if end_s > start_s or (times[0] == times[1] and self._table.lanes[number] in live)
        }

    def _window(self) -> tuple[float, float]:
        """From the first iteration, or span, to the end of the last span."""
        first_s, last_s = self._table.window()
        return min([first_s, *(start_s for _, start_s in self._starts[:1])]), last_s

    def _sections(self) -> list[Section]:
        first_s, _ = self._window()
        ends: list[float | None] = [*(start for _, start in self._starts[1:]), None]
        own = [
            Section(f"iteration {number}", start, end) for (number, start), end in zip(self._starts, ends, strict=False)
        ]
        if self.window.startswith("iteration "):
            return [section for section in own if section.title == self.window][-1:]
        if self.window == "all" or not own:
            return [Section("all", first_s, None)]
        if self.window == "compare":
            return own[-min(self.iterations, MOST_COMPARED) :]
        count = 1 if self.window == "last" else self.iterations
        shown = own[-count:]
        title = (
            shown[0].title
            if len(shown) == 1
            else f"iterations {shown[0].title.split()[1]} to {own[-1].title.split()[1]}"
        )
        return [Section(title, shown[0].start_s, None)]

    # --- what it shows ------------------------------------------------------------------------------------------------

    def controls(self) -> str:
        windows = WINDOWS if self.window in WINDOWS else {**WINDOWS, self.window: self.window}
        asked = entry("N", "iterations", self.iterations, kind="number", size=4)
        return choice("show", "show", windows, self.window) + (asked if self.window in ("several", "compare") else "")

    def payload(self, *, whole: bool) -> tuple[dict[str, Any], list[bytes]]:
        self._read()
        table, lanes = self._table, self._table.lanes
        gaps, before = self._gaps(), self._sent_gaps
        first = 0 if whole else self._sent_spans
        same = 0 if whole else _common(gaps, before)
        self._sent_spans, self._sent_gaps = len(table), gaps
        styles = role_styles(table.roles.all)
        shown = {lanes[number] for section in self._sections() for number in self._shown(section)}
        drawn = {device for _, device in shown}
        devices = [device for _, device in self.lab.devices() if device in drawn]
        ordered = lanes_of([{"pool": pool, "device": device} for pool, device in shown], devices)
        data = {
            "first": first,
            "lanes": lanes,
            "order": [lanes.index(lane) for lane in ordered],
            "stages": table.stages.all,
            "roles": [[role, styles[role].colour, styles[role].letter, styles[role].ink] for role in table.roles.all],
            "kinds": [[kind, HATCHES.get(kind, ""), ground_opacity(kind)] for kind in table.kinds.all],
            "causes": [[cause.words, SHADES[cause.column], cause.letter] for cause in CAUSES],
            "sections": [[section.title, section.start_s, section.end_s] for section in self._sections()],
            "end_s": table.window()[1],
            "same_gaps": same,
            "times": times_table(self._times(gaps), "times by device"),
            "details": self._details(gaps),
            "chosen": self._chosen.get("span", -1),
        }
        columns = (gaps.lane, gaps.start_s, (gaps.end_s - gaps.start_s).astype(np.float32), gaps.cause)
        return data, [*table.buffers(first), *(column[same:].tobytes() for column in columns)]

    def _times(self, gaps: Gaps) -> list[dict[str, Any]]:
        """A row a device, and a section where there are several; see `Timeline.summary`."""
        rows = []
        sections = self._sections()
        for section in sections:
            waits = gaps.seconds(len(self._table.lanes), *self._times_of(section))
            for number, (start_s, end_s) in self._shown(section).items():
                (pool, device), window = self._table.lanes[number], end_s - start_s
                title = {"iteration": section.title.removeprefix("iteration ")} if len(sections) > 1 else {}
                times = {cause.column: float(waits[number, n]) for n, cause in enumerate(CAUSES)}
                busy = {"window_s": window, "busy_s": max(window - sum(times.values()), 0.0)}
                rows.append({**title, "pool": pool, "device": device, **busy, **times})
        return rows

    def _still(self) -> Timeline:
        self._read()
        key = self.depends_on()
        if self._drawn_still is not None and self._drawn_still[0] == key:
            return self._drawn_still[1]
        sections = self._sections() or [Section("all", 0.0, None)]
        start_s, table = sections[0].start_s, self._table
        rows = [table.row(number) for number, end_s in enumerate(table.columns["end_s"]) if end_s >= start_s]
        devices = [device for _, device in self.lab.devices()]
        lives = dict(zip(table.lanes, self._lives, strict=True))
        end_s = sections[-1].end_s
        still = timeline(rows, devices=devices, start=start_s, end=end_s, most=MOST_STILL_BARS, lives=lives)
        self._drawn_still = key, still
        return still

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
            "role": f"{row['role']}, rank {row['rank']}",
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
        start_N, end_N = np.array(columns["start_s"]), np.array(columns["end_s"])
        parts = np.array(columns["depth"]) == 0
        during = np.flatnonzero(parts & (start_N < end_s) & (end_N > start_s))
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

    def on_whole(self) -> None:
        """A front end lacks what was sent before it was there."""
        self._sent_spans, self._sent_gaps = 0, NO_GAPS

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


def _common(one: Gaps, other: Gaps) -> int:
    """How many gaps at the start of both are the same."""
    shorter = min(len(one), len(other))
    columns = ("lane", "start_s", "end_s", "cause")
    differ = [getattr(one, name)[:shorter] != getattr(other, name)[:shorter] for name in columns]
    different = np.flatnonzero(np.logical_or.reduce(differ))
    return int(different[0]) if len(different) else shorter
