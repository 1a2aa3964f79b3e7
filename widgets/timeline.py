"""The timeline: which device did what when, what it waited for when it did nothing, and which cell asked for it."""

from __future__ import annotations

import threading
from collections.abc import Hashable, Mapping, Sequence
from html import escape
from typing import Any

import numpy as np

from workbench.display.callers import Callers
from workbench.display.html import bytes_text, kv, seconds_text
from workbench.display.idle import CAUSES, Gaps, Life, within
from workbench.display.lanes import TOUCH_S, lanes_of
from workbench.display.span_search import found_spans
from workbench.display.span_sums import sums_of
from workbench.display.span_table import SpanTable
from workbench.display.timeline import Timeline, drawn, folded, times_table
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
LEAST_FOUND = 3  # pixels: a span that was searched for is made as wide at least


class TimelineView(View):
    """Lanes by device with the spans of stages, and the idle time between them by its cause.

    window: a key of `WINDOWS`, or "iteration 7". iterations: N of these. fold: whether long stretches in which nothing
    was called are narrow breaks.
    """

    name, title, script = "timeline", "Timeline", True

    def __init__(self, lab: Any, driver: Any) -> None:
        super().__init__(lab, driver)
        self.window, self.iterations, self.fold = "last", 3, True
        self._follow = {name: lab.telemetry.follow(name) for name in ("spans", "events")}
        self._table = SpanTable(lab.devices())
        self._starts: list[tuple[int, float]] = []  # of iterations: number, unix time
        self._moves_s: list[float] = []  # when changes of placement began, unix times
        self._lives: list[Life] = []  # by lane
        self._callers = Callers()
        self._chosen: Mapping[str, Any] = {}
        self._changes = 0
        self._width = 960
        # what is in sight, seconds from the start of the first section, whether folded or not; None: all
        self._looked: tuple[float, float] | None = None
        self._asked = ""  # what the front end last asked for
        self._drawn: Sequence[Section] = ()  # what it was sent last
        self._query, self._finds = "", 0  # what is searched for, how often a match was gone to
        self._range: tuple[float, float] | None = None  # what is selected, as `_looked`
        self._selected = ""  # by what the front end calls that selection
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
                elif event["event"] == "move":
                    self._moves_s.append(float(event["time_s"]) - float(details["seconds"]))
                self._callers.add(event)
            if self._follow["spans"].grown:
                self._table.add(self._follow["spans"].new_spans(), last=False)
            self._table.know(live := self.lab.devices())
            self._lives = self._table.lives(live, self._moves_s)

    def _gaps(self) -> Gaps:
        return self._table.gaps(self._window(), self._lives, self._callers)

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
        fold = entry("fold time in which nothing was called", "fold", self.fold, kind="checkbox")
        shown = choice("show", "show", windows, self.window)
        return shown + (asked if self.window in ("several", "compare") else "") + fold

    def payload(self, *, whole: bool) -> tuple[dict[str, Any], list[bytes]]:
        self._read()
        gaps = self._gaps()
        sections = self._folded(gaps)
        if [section.title for section in sections] != [section.title for section in self._drawn]:
            self._looked = self._range = None
        self._drawn = sections
        view = self._as_drawn(self._looked)
        hits, elsewhere = self._hits()
        picture = drawn(self._table, sections, gaps, width=self._width, view=view, hits=hits)
        data = {
            "svg": picture.inline_svg,
            "spans": len(self._table),
            "view": view,
            "length_s": max([section.drawn_s for section in sections], default=0.0),
            "asked": self._asked,
            "search": {"query": self._query, "told": self._told(hits, elsewhere), "finds": self._finds},
            "range": self._as_drawn(self._range),
            "selected": self._selected,
            "sums": self._sums(gaps),
            "times": times_table(picture.summary, "times by device"),
            "details": self._details(gaps),
            "chosen": self._chosen.get("span", -1),
        }
        return data, []

    def _folded(self, gaps: Gaps) -> list[Section]:
        return folded(self._sections(), gaps) if self.fold else self._sections()

    def _as_drawn(self, times_s: tuple[float, float] | None) -> tuple[float, float] | None:
        """Seconds from the start of the first section, as seconds from the left edge of the picture."""
        if times_s is None or not self._drawn:
            return None
        start_s, end_s = self._drawn[0].folding.drawn(np.array(times_s)).tolist()
        return start_s, end_s

    def _times(self, drawn_s: Sequence[float]) -> tuple[float, float]:
        """The inverse of `_as_drawn`."""
        edges = np.array([float(drawn_s[0]), max(float(drawn_s[1]), float(drawn_s[0]) + SHORTEST_S)])
        start_s, end_s = (self._drawn[0].folding.time(edges) if self._drawn else edges).tolist()
        return start_s, end_s

    def _still(self) -> Timeline:
        self._read()
        if self._drawn_still is None or self._drawn_still[0] != self.depends_on():
            gaps = self._gaps()
            still = drawn(self._table, self._folded(gaps), gaps, most=MOST_STILL_BARS)
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
        number, session = self._callers.of_run.get(run, (None, 0))
        if not isinstance(number, int):
            return f"<div>run {run} was called by {'a button of a panel' if number else 'no cell of a notebook'}</div>"
        if session != self._callers.session:
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

    # --- a search, and a range ----------------------------------------------------------------------------------------

    def _hits(self) -> tuple[list[int], int]:
        """Spans in the sections that are drawn that what is searched for matches, by start; how many more there are."""
        found = found_spans(self._table, self._callers, self._query, range(len(self._table.lanes)))
        start_s, end_s = (self._table.columns[name][found] for name in ("start_s", "end_s"))
        shown = np.zeros(len(found), bool)
        for section in self._drawn:
            shown |= (end_s >= section.start_s) & (start_s <= section.end_s)
        return found[shown].tolist(), int((~shown).sum())

    def _told(self, hits: Sequence[int], elsewhere: int) -> str:
        if not self._query.strip():
            return ""
        chosen, more = self._chosen.get("span"), f"; {elsewhere:,} in times that are not shown" if elsewhere else ""
        place = f"{hits.index(chosen) + 1:,} of " if chosen in hits else ""
        return f"{place}{len(hits) or 'no'} span{'s' if len(hits) != 1 else ''}{more}"

    def _go_to(self, number: int) -> None:
        """Choose a span, and have it in sight, wide enough to be seen."""
        row = self._table.row(number)
        section = next(one for one in self._drawn if row["end_s"] >= one.start_s and row["start_s"] <= one.end_s)
        start_s, end_s = section.folding.drawn(np.array([row["start_s"], row["end_s"]]) - section.start_s).tolist()
        from_s, to_s = self._as_drawn(self._looked) or (0.0, max(one.drawn_s for one in self._drawn))
        seen_s, length_s = to_s - from_s, max(end_s - start_s, SHORTEST_S)
        if start_s < from_s or end_s > to_s or length_s * self._width < LEAST_FOUND * seen_s:
            half_s = max(min(seen_s, 40 * length_s), 2 * length_s) / 2
            middle_s = (start_s + end_s) / 2
            self._looked = self._times((max(middle_s - half_s, 0.0), middle_s + half_s))
        self._chosen, self._finds = {"span": number}, self._finds + 1

    def _sums(self, gaps: Gaps) -> str:
        """The sums of what is selected, of each section."""
        parts = list[str]()
        for section in self._drawn if self._range is not None else ():
            times_s = section.folding.time(np.array(self._as_drawn(self._range))) + section.start_s
            from_s, to_s = np.clip(times_s, section.start_s, section.end_s).tolist()
            if to_s > from_s:
                sums = sums_of(self._table, gaps, section.lanes, section.start_s, (from_s, to_s))
                parts.append((f"<b>{escape(section.title)}</b>" if len(self._drawn) > 1 else "") + sums._repr_html_())
        return f'<section aria-label="selected range">{"".join(parts)}</section>' if parts else ""

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
        """Draw for a page so many pixels wide, and with this in sight: seconds from the left edge of the picture."""
        self._asked, self._width = asked, min(max(int(width), LEAST_WIDTH), MOST_WIDTH)
        self._looked = None if view is None else self._times(view)
        self._changes += 1

    def on_fold(self, value: Any) -> None:
        """Draw long stretches in which nothing was called as narrow breaks, or as long as they are."""
        self.fold = bool(value)
        self._changes += 1

    def on_find(self, value: str, by: int = 0) -> None:
        """Search for spans, see `found_spans`, and go to the first in sight or behind it; where this was searched for
        already, to the next (by: 1), or to the one before (-1)."""
        again, self._query = value == self._query, str(value)
        hits, _ = self._hits()
        if hits and again and self._chosen.get("span") in hits:
            self._go_to(hits[(hits.index(self._chosen["span"]) + by) % len(hits)])
        elif hits:
            seen_s = self._drawn[0].start_s + (self._looked or (0.0, 0.0))[0]
            after = [n for n in hits if self._table.columns["end_s"][n] >= seen_s]
            self._go_to(after[0] if after and by >= 0 else hits[-1 if by < 0 else 0])
        self._changes += 1

    def on_select(self, view: list[float] | None = None, asked: str = "") -> None:
        """Add up what lies between two places, seconds from the left edge of the picture; None: nothing."""
        self._range, self._selected = None if view is None else self._times(view), asked
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
