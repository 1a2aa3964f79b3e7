"""All spans of a workbench as columns of numbers, which grow as spans are recorded: what a script draws from."""

from __future__ import annotations

from array import array
from collections.abc import Collection, Sequence
from typing import Any

import numpy as np

from workbench.display.idle import Gaps, Lane, Life, idle_gaps, lives_of, work_of
from workbench.display.lanes import Placer, records
from workbench.telemetry.spans import KINDS

# column: type code of `array`; durations, tokens and bytes go to the script with seven digits
COLUMNS = {
    "start_s": "d", "end_s": "d", "processed_tokens": "q", "moved_bytes": "q", "run": "i", "stage": "H", "lane": "H",
    "rank": "H", "role": "B", "kind": "B", "parent": "B", "sublane": "B", "depth": "B",
}  # fmt: skip
MOST_SUBLANES = 255


class Names:
    """Texts by number, numbered as they come."""

    def __init__(self, names: Sequence[Any] = ()) -> None:
        self.all: list[Any] = list(names)
        self._numbers = {name: number for number, name in enumerate(self.all)}

    def number(self, name: Any) -> int:
        if name not in self._numbers:
            self._numbers[name] = len(self.all)
            self.all.append(name)
        return self._numbers[name]


class SpanTable:
    """Spans in the order in which they were recorded; a span keeps its number.

    lanes: (pool, device), first those given and then as they came. A child whose stage's bar has not been recorded
    yet waits for it until the next `add`.
    """

    def __init__(self, lanes: Sequence[Lane] = ()) -> None:
        self.columns = {name: array(code) for name, code in COLUMNS.items()}
        self.notes: dict[int, dict[str, Any]] = {}  # by number: what is too rare, or too large, for a column
        self.stages, self.roles, self.kinds = Names(), Names(), Names(("", *KINDS))
        self._lanes = Names(lanes)
        self._placers: dict[Lane, Placer] = {}
        self._early: list[dict[str, Any]] = []

    def __len__(self) -> int:
        return len(self.columns["start_s"])

    @property
    def lanes(self) -> list[Lane]:
        return self._lanes.all

    def know(self, lanes: Sequence[Lane]) -> None:
        """Lanes that there are, whether a span has come from them or not."""
        for lane in lanes:
            self._lanes.number(lane)

    def add(self, rows: Sequence[dict[str, Any]]) -> None:
        """Spans as they are stored."""
        known = {id(row) for row in self._early}
        rows = [*self._early, *rows]
        whole = {_call(row) for row in rows if not row["parent"] and row["kind"] != "queue"}
        self._early = [row for row in rows if id(row) not in known and row["parent"] and _call(row) not in whole]
        early = {id(row) for row in self._early}
        by_lane: dict[Lane, list[dict[str, Any]]] = {}
        for row in records([row for row in rows if id(row) not in early]):
            by_lane.setdefault((row["pool"], row["device"]), []).append(row)
        for lane, here in by_lane.items():
            placer = self._placers.setdefault(lane, Placer())
            for bar in placer.add(here):
                self._put(bar.row, lane, min(bar.sublane, MOST_SUBLANES), bar.depth)

    def _put(self, row: Any, lane: Lane, sublane: int, depth: int) -> None:
        if row["peak_memory_bytes"] or row["note"]:
            self.notes[len(self)] = {"peak_memory_bytes": row["peak_memory_bytes"], "note": row["note"]}
        values = (
            row["start_s"], row["end_s"], row["processed_tokens"], row["moved_bytes"], row["run"],
            self.stages.number(row["stage"]), self._lanes.number(lane), row["rank"], self.roles.number(row["role"]),
            self.kinds.number(row["kind"]), self.kinds.number(row["parent"]), sublane, depth,
        )  # fmt: skip
        for column, value in zip(self.columns.values(), values, strict=True):
            column.append(value)

    def buffers(self, first: int) -> list[bytes]:
        """The columns from a span on, as the script reads them: the end is a duration there."""
        columns = {name: np.array(column[first:]) for name, column in self.columns.items()}
        columns["end_s"] -= columns["start_s"]
        for name in ("end_s", "processed_tokens", "moved_bytes"):
            columns[name] = columns[name].astype(np.float32)
        return [column.tobytes() for column in columns.values()]

    def row(self, number: int) -> dict[str, Any]:
        """A span as it was stored, with its duration_s."""
        values = {name: column[number] for name, column in self.columns.items()}
        pool, device = self.lanes[values["lane"]]
        names = {"stage": self.stages, "role": self.roles, "kind": self.kinds, "parent": self.kinds}
        values |= {name: known.all[values[name]] for name, known in names.items()}
        rare = {"peak_memory_bytes": 0, "note": "", **self.notes.get(number, {})}
        return {**values, "pool": pool, "device": device, "duration_s": values["end_s"] - values["start_s"], **rare}

    def window(self) -> tuple[float, float]:
        """From the first start to the last end."""
        if not len(self):
            return 0.0, 0.0
        return min(self.columns["start_s"]), max(self.columns["end_s"])

    def lives(self, live: Collection[Lane], moves_s: Sequence[float]) -> list[Life]:
        """`lives_of` the lanes. live: those that are there now."""
        first_s, last_s = np.full(len(self.lanes), np.inf), np.full(len(self.lanes), -np.inf)
        lane = np.array(self.columns["lane"], np.intp)
        np.minimum.at(first_s, lane, np.array(self.columns["start_s"]))
        np.maximum.at(last_s, lane, np.array(self.columns["end_s"]))
        return lives_of(first_s.tolist(), last_s.tolist(), [one in live for one in self.lanes], moves_s)

    def gaps(self, window: tuple[float, float], lives: Sequence[Life] | None = None) -> Gaps:
        """`idle_gaps` of a window."""
        work = np.asarray([work_of(kind) for kind in self.kinds.all], np.uint8)[np.array(self.columns["kind"])]
        lane, start_s, end_s = (np.array(self.columns[name]) for name in ("lane", "start_s", "end_s"))
        return idle_gaps(self.lanes, lane, work, start_s, end_s, window, lives)


def _call(row: dict[str, Any]) -> tuple[Any, ...]:
    return row["run"], row["stage"], row["role"], row["rank"]
