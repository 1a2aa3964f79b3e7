"""Spans as columns of numbers, each with its place in a timeline; they grow as spans are recorded."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from workbench.display.callers import Callers
from workbench.display.idle import Gaps, Lane, Life, idle_gaps, lives_of, work_of
from workbench.display.lanes import SubLanes
from workbench.telemetry.span_lines import SpanLines
from workbench.telemetry.spans import KINDS

Row = Mapping[str, Any]

# column of a span: what a row that lacks it has
NUMBERS = {"start_s": 0.0, "end_s": 0.0, "processed_tokens": 0, "moved_bytes": 0, "peak_memory_bytes": 0, "run": 0,
           "rank": 0}  # fmt: skip
TEXTS = {"stage": "", "role": "", "kind": "compute", "parent": "", "note": ""}
CALL = ("run", "stage", "role", "rank", "lane")  # what spans of one call on one rank have in common
DEFAULTS = {**NUMBERS, **TEXTS}
PLACES = ("lane", "sublane", "depth")
QUEUE = 1 + KINDS.index("queue")  # as a number of `SpanTable.kinds`
TRANSFER = 1 + KINDS.index("transfer")


class Names:
    """Texts by number, numbered as they come."""

    def __init__(self, names: Collection[Any] = ()) -> None:
        self.all: list[Any] = []
        self._numbers: dict[Any, int] = {}
        self.numbers(names)

    def numbers(self, names: Collection[Any]) -> NDArray[np.int64]:
        """The number of each; those that are new get the next ones."""
        for name in dict.fromkeys(names):
            if name not in self._numbers:
                self._numbers[name] = len(self.all)
                self.all.append(name)
        return np.fromiter(map(self._numbers.__getitem__, names), np.int64, len(names))


def _numbered(known: Names, columns: Sequence[NDArray[np.int64]], *names: Names) -> NDArray[np.int64]:
    """The number of each row of columns in `known`, where it is a tuple: of numbers, or of what they are in `names`."""
    key = columns[0]
    for column in columns[1:]:
        _, key = np.unique(key << 32 | column, return_inverse=True)
    _, first, row = np.unique(key, return_index=True, return_inverse=True)
    values = [column[first].tolist() for column in columns]
    texts = [[one.all[number] for number in numbers] for one, numbers in zip(names, values, strict=False)]
    return known.numbers(list(zip(*(texts or values), strict=True)))[row]


class SpanTable:
    """Spans in the order in which they were recorded; a span keeps its number and its place.

    lanes: (pool, device), first those given and then as they came. columns: by name, one value a span; texts by their
    number in `names`. sublane: bars at the same time have one each. depth: 0 for the bar of a stage, 1 for a span
    inside it, 2 for one inside that.
    """

    def __init__(self, lanes: Sequence[Lane] = ()) -> None:
        self.columns: dict[str, NDArray[Any]] = {
            name: np.empty(0, type(NUMBERS.get(name, 0))) for name in (*NUMBERS, *TEXTS, *PLACES)
        }
        kinds = Names(("", *KINDS))
        self.names = {"stage": Names(), "role": Names(), "kind": kinds, "parent": kinds, "note": Names(("",))}
        self._lanes = Names(lanes)
        self._sublanes: dict[int, SubLanes] = {}
        self._calls = Names()
        # of bars at depth 0: call, start_s, end_s, kind, sublane
        self._bars: list[NDArray[Any]] = [np.empty(0, kind) for kind in (int, float, float, int, int)]
        self._early = {name: self.columns[name] for name in (*DEFAULTS, "lane")} | {"call": np.empty(0, int)}

    def __len__(self) -> int:
        return len(self.columns["start_s"])

    @property
    def lanes(self) -> list[Lane]:
        return self._lanes.all

    def know(self, lanes: Collection[Lane]) -> None:
        """Lanes that there are, whether a span has come from them or not."""
        self._lanes.numbers(lanes)

    def add(self, spans: SpanLines, *, last: bool = True) -> None:
        """Take in spans. last: else a span inside a stage whose bar has not come waits for it until the next `add`."""
        waited = len(self._early["call"])
        columns = self._columns_of(spans)
        new = {name: np.concatenate([early, columns[name]]) for name, early in self._early.items()}
        order = np.lexsort((-new["end_s"], new["start_s"]))
        if last:
            early = np.zeros(len(order), bool)
        else:
            has_bar = np.zeros(len(self._calls.all), bool)
            has_bar[self._bars[0]] = True
            has_bar[new["call"][(new["parent"] == 0) & (new["kind"] != QUEUE)]] = True
            early = (new["parent"] != 0) & ~has_bar[new["call"]]
            early[:waited] = False
        self._early = {name: column[early] for name, column in new.items()}
        order = order[~early[order]]
        new = {name: column[order] for name, column in new.items()}
        new["sublane"], new["depth"] = self._place(new, new["call"])
        self.columns = {name: np.concatenate([column, new[name]]) for name, column in self.columns.items()}

    def _columns_of(self, spans: SpanLines) -> dict[str, NDArray[Any]]:
        """The columns that spans come with, their lanes and calls."""

        def column(rows: Sequence[Row], name: str) -> NDArray[Any]:
            values = [row.get(name, DEFAULTS[name]) for row in rows]
            if name in self.names:
                return self.names[name].numbers(values)
            return np.array(values, type(NUMBERS[name]))

        labels = {name: column(spans.labels, name) for name in ("stage", "run", "role", "rank", "kind")}
        places = [Names(), Names()]
        pool, device = (
            names.numbers([row.get(name, "") for row in spans.labels])
            for names, name in zip(places, ("pool", "device"), strict=True)
        )
        labels["lane"] = _numbered(self._lanes, [pool, device], *places)
        labels["call"] = _numbered(self._calls, [labels[name] for name in CALL])
        counts = {name: column(spans.counts, name) for name in DEFAULTS.keys() - labels.keys() - {"start_s", "end_s"}}
        return {
            "start_s": spans.start_s,
            "end_s": spans.end_s,
            **{name: values[spans.label] for name, values in labels.items()},
            **{name: values[spans.count] for name, values in counts.items()},
        }

    def _place(self, new: Mapping[str, NDArray[Any]], call: NDArray[np.int64]) -> tuple[NDArray[Any], NDArray[Any]]:
        """Sub-lane and depth of spans given by start; bars among them go into `_bars`."""
        sublane, depth = np.zeros(len(call), int), np.zeros(len(call), int)
        queued = new["kind"] == QUEUE
        inside = np.flatnonzero((new["parent"] != 0) & ~queued)
        middle_s = (new["start_s"] + new["end_s"]) / 2

        def put(bars: NDArray[np.intp]) -> None:
            times = (new[name][bars].tolist() for name in ("lane", "start_s", "end_s"))
            taken = [
                self._sublanes.setdefault(lane, SubLanes()).take(*edges) for lane, *edges in zip(*times, strict=True)
            ]
            sublane[bars] = taken
            fields = (call, new["start_s"], new["end_s"], new["kind"], sublane)
            self._bars = [np.concatenate([had, field[bars]]) for had, field in zip(self._bars, fields, strict=True)]

        put(np.flatnonzero((new["parent"] == 0) & ~queued))
        bar = self._holding(call[inside], middle_s[inside])
        if (bar < 0).any():  # spans that no bar holds are bars, which may hold later ones
            alone: dict[int, list[int]] = {}  # by call
            for number in inside[bar < 0].tolist():
                others = alone.setdefault(int(call[number]), [])
                if not any(new["start_s"][one] <= middle_s[number] <= new["end_s"][one] for one in others):
                    others.append(number)
            put(own := np.array(sorted(number for numbers in alone.values() for number in numbers), np.intp))
            inside = np.setdiff1d(inside, own)
            bar = self._holding(call[inside], middle_s[inside])
        sublane[inside] = self._bars[4][bar]
        depth[inside] = np.where(new["parent"][inside] == self._bars[3][bar], 1, 2)

        first = np.full(len(self._calls.all), -1)  # bar of each call: a queue line lies under the one that it leads to
        first[self._bars[0][::-1]] = np.arange(len(self._bars[0]))[::-1]
        queue = np.flatnonzero(queued)[first[call[queued]] >= 0]
        sublane[queue] = self._bars[4][first[call[queue]]]
        return sublane, depth

    def _holding(self, call: NDArray[np.int64], at_s: NDArray[np.float64]) -> NDArray[np.intp]:
        """For each time the first bar of its call that is there then; -1 for none."""
        calls, start_s, end_s, *_ = self._bars
        order = np.argsort(calls, kind="stable")
        place, stop = (np.searchsorted(calls[order], call, side) for side in ("left", "right"))
        found, left = np.full(len(call), -1), np.arange(len(call))
        while len(left := left[place[left] < stop[left]]):
            bar = order[place[left]]
            holds = (start_s[bar] <= at_s[left]) & (at_s[left] <= end_s[bar])
            found[left[holds]] = bar[holds]
            left = left[~holds]
            place[left] += 1
        return found

    def row(self, number: int) -> dict[str, Any]:
        """A span as it was stored, with its duration_s and place."""
        values = {name: column[number].item() for name, column in self.columns.items()}
        values |= {name: names.all[values[name]] for name, names in self.names.items()}
        pool, device = self.lanes[values["lane"]]
        return {**values, "pool": pool, "device": device, "duration_s": values["end_s"] - values["start_s"]}

    def window(self) -> tuple[float, float]:
        """From the first start to the last end."""
        if not len(self):
            return 0.0, 0.0
        return float(self.columns["start_s"].min()), float(self.columns["end_s"].max())

    def lives(self, live: Collection[Lane], moves_s: Sequence[float]) -> list[Life]:
        """`lives_of` the lanes. live: those that are there now."""
        first_s, last_s = np.full(len(self.lanes), np.inf), np.full(len(self.lanes), -np.inf)
        np.minimum.at(first_s, self.columns["lane"], self.columns["start_s"])
        np.maximum.at(last_s, self.columns["lane"], self.columns["end_s"])
        return lives_of(first_s.tolist(), last_s.tolist(), [one in live for one in self.lanes], moves_s)

    def work(self) -> NDArray[np.uint8]:
        """What each span is to its device, see `work_of`."""
        return np.asarray([work_of(kind) for kind in self.names["kind"].all], np.uint8)[self.columns["kind"]]

    def gaps(self, window: Life, lives: Sequence[Life] | None = None, callers: Callers | None = None) -> Gaps:
        """`idle_gaps` of a window. callers: what called the runs; None: each was called by itself."""
        run, lane, start_s, end_s = (self.columns[name] for name in ("run", "lane", "start_s", "end_s"))
        callers = callers or Callers()
        runs, each = np.unique(run, return_inverse=True)
        known = Names()
        number = known.numbers([callers.of_run.get(one, -1 - one) for one in runs.tolist()])[each]
        from_s, to_s = np.full(len(known.all), np.inf), np.full(len(known.all), -np.inf)
        np.minimum.at(from_s, number, start_s)
        np.maximum.at(to_s, number, end_s)
        acts = np.asarray(callers.acts, np.float64).reshape(-1, 2)
        called = np.concatenate([from_s, acts[:, 0]]), np.concatenate([to_s, acts[:, 1]])
        return idle_gaps(self.lanes, lane, self.work(), start_s, end_s, window, lives, called)
