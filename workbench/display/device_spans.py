"""Spans of devices as columns of numbers: from when to when each device is there, what it did, what it waited for."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np

from workbench.display.callers import Callers
from workbench.display.idle import CAUSES, DATA, Gaps, Lane, Life, device_times, idle_gaps, lives_of, work_of

Row = Mapping[str, Any]  # of a span: the columns of `lab.spans()`


def called_s(times: Row) -> float:
    """Of a row of `DeviceSpans.times`: the time in which some stage was called."""
    return float(times["window_s"] - times["uncalled_s"])


class DeviceSpans:
    """Spans, N of them. lanes: (pool, device), those given and then the spans' own. lane: [N], numbers of these. work:
    [N], see `work_of`. run, start_s, end_s: [N]."""

    def __init__(self, rows: Sequence[Row], lanes: Collection[Lane] = ()) -> None:
        places = [(row.get("pool", ""), row.get("device", "")) for row in rows]
        self.lanes: list[Lane] = list(dict.fromkeys([*lanes, *places]))
        numbers = {lane: number for number, lane in enumerate(self.lanes)}
        self.lane = np.array([numbers[place] for place in places], np.intp)
        self.work = np.array([work_of(row["kind"]) for row in rows], np.uint8)
        self.run = np.array([row["run"] for row in rows], np.int64)
        self.start_s, self.end_s = (np.array([row[name] for row in rows], float) for name in ("start_s", "end_s"))

    def lives(self, live: Collection[Lane], moves_s: Sequence[float]) -> list[Life]:
        """`lives_of` the lanes. live: those that are there now."""
        first_s, last_s = np.full(len(self.lanes), np.inf), np.full(len(self.lanes), -np.inf)
        np.minimum.at(first_s, self.lane, self.start_s)
        np.maximum.at(last_s, self.lane, self.end_s)
        return lives_of(first_s.tolist(), last_s.tolist(), [one in live for one in self.lanes], moves_s)

    def gaps(self, window: Life, lives: Sequence[Life] | None = None, callers: Callers | None = None) -> Gaps:
        """`idle_gaps` of a window. callers: what called the runs; None: each was called by itself."""
        callers = callers or Callers()
        runs, each = np.unique(self.run, return_inverse=True)
        known: dict[Any, int] = {}
        numbers = [known.setdefault(callers.of_run.get(run, -1 - run), len(known)) for run in runs.tolist()]
        caller = np.array(numbers, np.intp)[each]
        from_s, to_s = np.full(len(known), np.inf), np.full(len(known), -np.inf)
        np.minimum.at(from_s, caller, self.start_s)
        np.maximum.at(to_s, caller, self.end_s)
        acts = np.asarray(callers.acts, np.float64).reshape(-1, 2)
        called = np.concatenate([from_s, acts[:, 0]]), np.concatenate([to_s, acts[:, 1]])
        return idle_gaps(self.lanes, self.lane, self.work, self.start_s, self.end_s, window, lives, called)

    def times(self, present: Mapping[int, Life], gaps: Gaps) -> list[dict[str, Any]]:
        """What each device did in the time for which it is there, seconds; busy_s + transfer_s + idle_s = window_s.

        present: by lane, from when to when. busy_s: some role computed. transfer_s: inputs were pulled and nothing
        computed. idle_s: neither; it is the sum of the other columns of `idle.CAUSES`. queued_s: the part of idle_s in
        which a stage was called on the device and waited. idle_share: of the time in which some stage was called, the
        share in which the device was idle, 0 to 1.
        """
        rows = list[dict[str, Any]]()
        for lane, window in present.items():
            here = self.lane == lane
            times = device_times(self.work[here], self.start_s[here], self.end_s[here], window)
            waits = gaps.seconds(len(self.lanes), *window)[lane]
            causes = {cause.column: float(waits[n]) for n, cause in enumerate(CAUSES) if n != DATA}
            pool, device = self.lanes[lane]
            row: dict[str, Any] = {"pool": pool, "device": device, **times, **causes}
            row["idle_share"] = (row["idle_s"] - row["uncalled_s"]) / called_s(row) if called_s(row) > 0 else 0.0
            rows.append(row)
        return rows
