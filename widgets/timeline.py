"""The timeline: what each device did when, why it was idle, and which cell called it."""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Mapping, Sequence
from html import escape
from typing import Any

import numpy as np

from workbench.display.html import bytes_text, kv, seconds_text
from workbench.display.idle import CAUSES, Callers, DeviceSpans, Gaps, Lane, Life, Row, lives_of, within
from workbench.display.lanes import TOUCH_S, lanes_of
from workbench.display.timeline import Timeline, drawn, times_table
from workbench.errors import BadInput
from workbench.support.notebook_cell import code_of_cell
from workbench_widgets.view import View, choice, entry, whole_number

WINDOWS = {"last": "last iteration", "several": "last N iterations"}
MOST_ITERATIONS, MOST_SPANS = 12, 20_000  # that can be looked at here; the others are in `lab.trace`
MOST_STILL_BARS = 250  # keeps the picture in a saved notebook below 200 kB
MOST_ZOOM = 50  # as in static/timeline.js


class TimelineView(View):
    """Lanes by device with the spans of stages, and the idle time between them by cause.

    window: a key of `WINDOWS`, or "iteration 7". iterations: N of these. fold: whether to draw long stretches in which
    nothing was called as narrow breaks. The kernel draws a window once; the page zooms and pans it.
    """

    name, title, script = "timeline", "Timeline", True

    def __init__(self, lab: Any, driver: Any) -> None:
        super().__init__(lab, driver)
        self.window, self.iterations, self.fold = "last", 3, True
        self._follow = {name: lab.telemetry.follow(name) for name in ("spans", "events")}
        self._spans: deque[Row] = deque(maxlen=MOST_SPANS)  # the newest, each with its `number`
        self._count = 0  # of all spans so far
        self._lived: dict[Lane, Life] = {}  # start of the first span of each device, end of its last
        self._starts: list[tuple[int, float]] = []  # of iterations: number, unix time
        self._moves_s: list[float] = []  # when changes of placement began, unix times
        self._callers = Callers()
        self._chosen: Mapping[str, Any] = {}
        self._range: tuple[float, float] | None = None  # what is selected: seconds from the start of the window
        self._drawn: Timeline | None = None  # what the page was sent last
        self._still: tuple[Hashable, Timeline] | None = None

    # --- what there is ------------------------------------------------------------------------------------------------

    def depends_on(self) -> Hashable:
        return tuple(follower.size_bytes for follower in self._follow.values())

    def _read(self) -> None:
        """Read the rows recorded since the last call."""
        for event in self._follow["events"].new():
            details = event["details"]
            if event["event"] == "iteration":
                self._starts.append((int(details["iteration"]), float(event["time_s"])))
            elif event["event"] == "move":
                self._moves_s.append(float(event["time_s"]) - float(details["seconds"]))
            self._callers.add(event)
        for row in self._follow["spans"].new():
            self._spans.append({**row, "number": self._count})
            self._count += 1
            lane = (row["pool"], row["device"])
            first_s, last_s = self._lived.get(lane, (row["start_s"], row["end_s"]))
            self._lived[lane] = min(first_s, row["start_s"]), max(last_s, row["end_s"])

    def _iterations(self) -> list[tuple[int, float, float]]:
        """The last iterations whose spans are kept: number, start, end."""
        first_s = self._spans[0]["start_s"] if self._count > len(self._spans) else float("-inf")
        starts = [(number, start_s) for number, start_s in self._starts[-MOST_ITERATIONS:] if start_s >= first_s]
        ends_s = [*(start_s for _, start_s in starts[1:]), max((row["end_s"] for row in self._spans), default=0.0)]
        return [(n, start_s, max(start_s, end_s)) for (n, start_s), end_s in zip(starts, ends_s, strict=False)]

    def _window(self) -> Life:
        """The start and end of the drawn window."""
        there = self._iterations()
        if self.window.startswith("iteration "):
            there = [one for one in there if f"iteration {one[0]}" == self.window][-1:] or there[-1:]
        else:
            there = there[-(1 if self.window == "last" else self.iterations) :]
        if there:
            return there[0][1], there[-1][2]
        rows = self._spans
        return min((row["start_s"] for row in rows), default=0.0), max((row["end_s"] for row in rows), default=0.0)

    def _draw(self, *, most: int | None = None) -> Timeline:
        """Draw the window. most: bars of a still picture; None: a picture for the page."""
        self._read()
        start_s, end_s = window = self._window()
        # calls of a cell in neighbouring iterations show that it continues past the window's edges
        from_s = max((at_s for _, at_s in self._starts if at_s < start_s), default=float("-inf"))
        to_s = min((at_s for _, at_s in self._starts if at_s > end_s), default=float("inf"))
        rows = [row for row in self._spans if row["end_s"] >= from_s and row["start_s"] <= to_s]
        live = self.lab.devices()
        spans = DeviceSpans(rows, [*live, *self._lived])
        never = (float("inf"), float("-inf"))
        ends = [self._lived.get(lane, never) for lane in spans.lanes]
        still_there = [lane in live for lane in spans.lanes]
        lives = lives_of([first_s for first_s, _ in ends], [last_s for _, last_s in ends], still_there, self._moves_s)
        gaps = spans.gaps(window, lives, self._callers)
        lived = {lane: within(life, start_s, end_s) for lane, life in zip(spans.lanes, lives, strict=True)}
        there = {lane for lane, (a, b) in lived.items() if b > a or (start_s == end_s and lane in live)}
        present = {
            spans.lanes.index(lane): lived[lane]
            for lane in lanes_of(there, [device for _, device in live if device in {name for _, name in there}])
        }
        shown = [row for row in rows if row["end_s"] >= start_s and row["start_s"] <= end_s]
        sizes = {"zoom": float(MOST_ZOOM)} if most is None else {"most": most}
        return drawn(shown, spans, gaps, present, window, fold=self.fold, **sizes)

    # --- what it shows ------------------------------------------------------------------------------------------------

    def controls(self) -> str:
        self._read()
        windows = WINDOWS | {name: name for name in (f"iteration {number}" for number, *_ in self._iterations())}
        asked = entry("N", "iterations", self.iterations, kind="number", size=4) if self.window == "several" else ""
        fold = entry("fold time in which nothing was called", "fold", self.fold, kind="checkbox")
        return choice("show", "show", windows, self.window) + asked + fold

    def payload(self) -> tuple[dict[str, Any], list[bytes]]:
        picture = self._drawn = self._draw()
        seen, sums = None, ""
        if self._range is not None:
            seen = picture.folding.drawn(np.array(self._range)).tolist()
            sums = f'<section aria-label="selected range">{picture.sums(*self._range)._repr_html_()}</section>'
        data = {
            "svg": picture.inline_svg,
            "spans": picture.span_count,
            "window": f"{picture.window[0]} {self.iterations} {self.fold}",
            "length_s": picture.length_s,
            "range": seen,
            "sums": sums,
            "times": times_table(picture.summary, "times by device"),
            "details": self._details(picture),
            "chosen": self._chosen.get("span", -1),
        }
        return data, []

    def _small(self) -> Timeline:
        """A small picture, for a cell to store."""
        of = self.window, self.iterations, self.fold, self.depends_on()
        if self._still is None or self._still[0] != of:
            self._still = of, self._draw(most=MOST_STILL_BARS)
        return self._still[1]

    def picture(self) -> str:
        return self._small()._repr_html_()

    def svg(self) -> str | None:
        return self._small().svg

    def text(self) -> str:
        return repr(self._small())

    # --- what was chosen ----------------------------------------------------------------------------------------------

    def _details(self, picture: Timeline) -> str:
        row = next((row for row in picture.rows if row["number"] == self._chosen.get("span")), None)
        if row is not None:
            return self._span_details(row, picture)
        return self._gap_details(picture, **self._chosen["gap"]) if "gap" in self._chosen else ""

    def _span_details(self, row: Row, picture: Timeline) -> str:
        lane = picture.lanes.index((row["pool"], row["device"]))
        before = zip(CAUSES, _before(picture.gaps, lane, row["start_s"]), strict=True)
        waits = [f"{seconds_text(s)} {cause.words}" for cause, s in before if s]
        tokens, took_s = row["processed_tokens"], row["end_s"] - row["start_s"]
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
        """The cell that called a run, with a link to it."""
        number, session = self._callers.of_run.get(run, (None, 0))
        if not isinstance(number, int):
            return f"<div>run {run} was called by {'a button of a panel' if number else 'no cell of a notebook'}</div>"
        if session != self._callers.session:
            return f"<div>called in cell [{number}] of an earlier kernel</div>"
        code = code_of_cell(number)
        return (
            f'<button type="button" data-cell="{number}">Go to cell [{number}]</button>'
            f"<pre>{escape(code) or 'its code is unknown'}</pre>"
        )

    def _gap_details(self, picture: Timeline, pool: str, device: str, start_s: float, end_s: float, cause: int) -> str:
        what = CAUSES[cause]
        rows = [row for row in picture.rows if not row["parent"] and row["start_s"] < end_s and row["end_s"] > start_s]
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
        """Choose the window."""
        known = [*WINDOWS, *(f"iteration {number}" for number, *_ in self._iterations())]
        if value not in known:
            rule = f"the choices are {', '.join(known)}"
            raise BadInput(f"show={value!r}", rule, "lab.trace('trace.json') has all that was recorded, for Perfetto")
        self.window, self._range = value, None

    def on_iterations(self, value: Any) -> None:
        self.iterations, self._range = whole_number("N", value), None
        if self.iterations > MOST_ITERATIONS:
            self.iterations = MOST_ITERATIONS
            rule = f"at most {MOST_ITERATIONS} iterations can be drawn here"
            raise BadInput(f"N={value}", rule, "lab.trace('trace.json') has all that was recorded, for Perfetto")

    def on_choose(self, **chosen: Any) -> None:
        """Select a span, by its number, or a gap of a lane, by its number in the picture; or nothing."""
        if self._drawn is not None and "gap" in chosen:
            gap = dict(chosen["gap"])
            pool, device = self._drawn.lanes[gap.pop("lane")]
            chosen = {"gap": {**gap, "pool": pool, "device": device}}
        self._chosen = chosen

    def on_fold(self, value: Any) -> None:
        """Draw long stretches in which nothing was called as narrow breaks, or at full length."""
        self.fold, self._range = bool(value), None

    def on_select(self, view: Sequence[float] | None = None) -> None:
        """Add up the range between two drawn positions, in seconds from the left edge; None: no range."""
        self._range = None
        if view is not None and self._drawn is not None and view[0] < view[1]:
            from_s, to_s = self._drawn.folding.time(np.array(view, float)).tolist()
            self._range = from_s, to_s

    def receive(self, iteration: int | None = None, **_: Any) -> None:
        if iteration is not None:
            self._read()
            self.on_show(f"iteration {iteration}")


def _before(gaps: Gaps, lane: int, start_s: float) -> list[float]:
    """Seconds by cause between the end of the device's last computation and the begin of a span."""
    seconds, reached_s = [0.0] * len(CAUSES), start_s
    here = np.flatnonzero((gaps.lane == lane) & (gaps.start_s < start_s))
    for n in here[::-1]:
        if gaps.end_s[n] < reached_s - TOUCH_S:
            break
        seconds[gaps.cause[n]] += float(min(gaps.end_s[n], reached_s) - gaps.start_s[n])
        reached_s = gaps.start_s[n]
    return seconds
