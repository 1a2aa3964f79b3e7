"""How each device spent a stretch of time, from the spans on it: what it did, and what it waited for.

pool train, cpu:0   | update_actor ..........    d | update_actor .... s s | c c c | n n n n
pool train, cpu:1   | update_actor .... s s s    d | update_actor ........ | c c c | n n n n
pool rollout, cpu:2 | p p p p p p p p p p p p p p p p p p p p p p p p p p  | c c c | n n n n
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

Lane = tuple[str, str]  # pool, device
Life = tuple[float, float]  # from when to when a lane is there, unix times


@dataclass(frozen=True)
class Cause:
    """A reason why a device is idle. column: its column of seconds in a table. letter: lower case, as roles have upper
    case."""

    column: str
    letter: str
    words: str
    meaning: str


# At a time for which several hold, the first one counts.
CAUSES = (
    Cause("transfer_s", "d", "waiting for data", "its stage pulls its inputs, and nothing computes here"),
    Cause("slowest_rank_s", "s", "waiting for the slowest rank", "a stage of its pool runs on other ranks only"),
    Cause("other_pool_s", "p", "waiting for another pool", "its own pool is idle while another one works"),
    Cause(
        "controller_s", "c", "controller",
        "nothing runs: a stage was called, its cell has not yet called the next one, or roles are moved or saved",
    ),
    Cause("uncalled_s", "n", "nothing called", "no stage runs, and no cell is between two stages: it waits for you"),
)  # fmt: skip
DATA, RANK, POOL, CONTROLLER, UNCALLED = range(len(CAUSES))
_BUSY = len(CAUSES)

QUEUED, PULLS, COMPUTES = range(3)  # classes of spans
WORK = {"queue": QUEUED, "transfer": PULLS}  # by the kind of span; all other kinds compute


@dataclass(frozen=True)
class Gaps:
    """Periods in which a device did not compute, by start, as columns of equal length. cause: index in `CAUSES`."""

    lane: NDArray[np.uint16]
    start_s: NDArray[np.float64]
    end_s: NDArray[np.float64]
    cause: NDArray[np.uint8]

    def seconds(self, lanes: int, start_s: float, end_s: float) -> NDArray[np.float64]:
        """Idle seconds by lane and cause, within a window."""
        within = np.minimum(self.end_s, end_s) - np.maximum(self.start_s, start_s)
        cell = self.lane.astype(np.intp) * len(CAUSES) + self.cause
        found = np.bincount(cell, np.maximum(within, 0.0), lanes * len(CAUSES))
        return found.astype(np.float64).reshape(lanes, len(CAUSES))

    def uncalled(self, start_s: float, end_s: float) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Starts and ends of the parts of a window in which no device ran a stage and nothing was called."""
        here = self.cause == UNCALLED
        found = _Times.union(*(np.clip(times[here], start_s, end_s) for times in (self.start_s, self.end_s)))
        return found.start, found.end


def lives_of(
    first_s: Sequence[float], last_s: Sequence[float], live: Sequence[bool], moves_s: Sequence[float]
) -> list[Life]:
    """When each lane existed, as far as its spans and the placement changes show.

    first_s, last_s: start of a lane's first span, end of its last; inf and -inf for none. live: whether it exists now.
    moves_s: when placement changes began, in order. A lane begins with the last change before its first span; a lane
    that no longer exists ends with the first change after its last span.
    """
    lives = []
    for first, last, lives_on in zip(first_s, last_s, live, strict=True):
        came, gone = bisect_right(moves_s, first), bisect_left(moves_s, last)
        end_s = float("inf") if lives_on else moves_s[gone] if gone < len(moves_s) else last
        lives.append((moves_s[came - 1] if came else float("-inf"), end_s))
    return lives


def within(life: Life, start_s: float, end_s: float) -> Life:
    """The part of a window in which a lane exists; of length 0 if there is none."""
    start_s = min(max(start_s, life[0]), end_s)
    return start_s, max(min(end_s, life[1]), start_s)


@dataclass(frozen=True)
class _Times:
    """Intervals in order that do not touch."""

    start: NDArray[np.float64]
    end: NDArray[np.float64]

    @classmethod
    def union(cls, start: NDArray[np.float64], end: NDArray[np.float64]) -> _Times:
        some = end > start
        start, end = start[some], end[some]
        order = np.argsort(start, kind="stable")
        start, reached = start[order], np.maximum.accumulate(end[order])
        opens = np.flatnonzero(np.concatenate([[True], start[1:] > reached[:-1]])) if len(start) else np.empty(0, int)
        return cls(start[opens], reached[np.append(opens[1:], len(start)) - 1] if len(start) else reached)

    def edges(self) -> NDArray[np.float64]:
        return np.concatenate([self.start, self.end])

    def hold(self, times: NDArray[np.float64]) -> NDArray[np.bool_]:
        """For each time, whether an interval contains it and the moment after it."""
        if not len(self.start):
            return np.zeros(len(times), bool)
        at = np.searchsorted(self.start, times, side="right") - 1
        return (at >= 0) & (self.end[at] > times)


ACTS = ("move", "saved", "recovered", "restarted")  # events with the seconds that they took until then


@dataclass
class Callers:
    """What called each run, read from a run's events.

    of_run: by run, the cell that called it, or a panel's button ("" and a number), and the kernel session. acts:
    periods in which roles moved, a checkpoint was written, or hosts were restarted.
    """

    of_run: dict[int, tuple[Hashable, int]] = field(default_factory=dict)
    acts: list[Life] = field(default_factory=list)
    session: int = 0

    @classmethod
    def of(cls, events: Iterable[Mapping[str, Any]]) -> Callers:
        found = cls()
        for event in events:
            found.add(event)
        return found

    def add(self, event: Mapping[str, Any]) -> None:
        name, details = event["event"], event["details"]
        if name == "run":
            cell = int(details["cell"])
            self.of_run[int(details["run"])] = cell or ("", details["drive"]), self.session
        elif name in ACTS:
            self.acts.append((float(event["time_s"]) - float(details["seconds"]), float(event["time_s"])))
        elif name == "attached":
            self.session += 1


Row = Mapping[str, Any]  # of a span: the columns of `lab.spans()`


def called_s(times: Row) -> float:
    """From a row of `DeviceSpans.times`: the seconds in which any stage was called."""
    return float(times["window_s"] - times["uncalled_s"])


class DeviceSpans:
    """N spans. lanes: (pool, device), first the given ones, then others found in the spans. lane: [N], indices of
    lanes. work: [N], see `WORK`. run, start_s, end_s: [N]."""

    def __init__(self, rows: Sequence[Row], lanes: Collection[Lane] = ()) -> None:
        places = [(row.get("pool", ""), row.get("device", "")) for row in rows]
        self.lanes: list[Lane] = list(dict.fromkeys([*lanes, *places]))
        numbers = {lane: number for number, lane in enumerate(self.lanes)}
        self.lane = np.array([numbers[place] for place in places], np.intp)
        self.work = np.array([WORK.get(row["kind"], COMPUTES) for row in rows], np.uint8)
        self.run = np.array([row["run"] for row in rows], np.int64)
        self.start_s, self.end_s = (np.array([row[name] for row in rows], float) for name in ("start_s", "end_s"))

    def lives(self, live: Collection[Lane], moves_s: Sequence[float]) -> list[Life]:
        """Apply `lives_of` to the lanes. live: those that exist now."""
        first_s, last_s = np.full(len(self.lanes), np.inf), np.full(len(self.lanes), -np.inf)
        np.minimum.at(first_s, self.lane, self.start_s)
        np.maximum.at(last_s, self.lane, self.end_s)
        return lives_of(first_s.tolist(), last_s.tolist(), [one in live for one in self.lanes], moves_s)

    def gaps(self, window: Life, lives: Sequence[Life] | None = None, callers: Callers | None = None) -> Gaps:
        """All idle periods of a window, each with its one cause.

        lives: by lane, see `lives_of`; None: all exist the whole time. callers: what called the runs; None: each run
        was called separately. The gaps of a lane do not overlap; gaps and computing together fill the time in which it
        exists.
        """
        callers = callers or Callers()
        runs, each = np.unique(self.run, return_inverse=True)
        known: dict[Any, int] = {}
        numbers = [known.setdefault(callers.of_run.get(run, -1 - run), len(known)) for run in runs.tolist()]
        caller = np.array(numbers, np.intp)[each]
        from_s, to_s = np.full(len(known), np.inf), np.full(len(known), -np.inf)
        np.minimum.at(from_s, caller, self.start_s)
        np.maximum.at(to_s, caller, self.end_s)
        acts = np.asarray(callers.acts, np.float64).reshape(-1, 2)
        start_N, end_N = np.clip(self.start_s, *window), np.clip(self.end_s, *window)

        def times(chosen: NDArray[np.bool_]) -> _Times:
            return _Times.union(start_N[chosen], end_N[chosen])

        works = self.work != QUEUED
        anywhere = times(works)
        called = _Times.union(
            np.concatenate([start_N[~works], np.clip([*from_s, *acts[:, 0]], *window)]),
            np.concatenate([end_N[~works], np.clip([*to_s, *acts[:, 1]], *window)]),
        )
        pool_of_lane = np.asarray([[pool for pool, _ in self.lanes].index(pool) for pool, _ in self.lanes], np.intp)
        in_pool = {pool: times(works & (pool_of_lane[self.lane] == pool)) for pool in set(pool_of_lane.tolist())}
        found: list[tuple[NDArray[Any], ...]] = []
        for number in range(len(self.lanes)):
            here, pool = self.lane == number, in_pool[pool_of_lane[number]]
            computes, pulls = times(here & (self.work == COMPUTES)), times(here & (self.work == PULLS))
            life = np.clip(window if lives is None else lives[number], *window)
            edges = np.unique(
                np.concatenate([window, life, *(t.edges() for t in (computes, pulls, pool, anywhere, called))])
            )
            starts, ends = edges[:-1], edges[1:]
            tests = [one.hold(starts) for one in (computes, pulls, pool, anywhere, called)]
            cause = np.select(tests, [_BUSY, DATA, RANK, POOL, CONTROLLER], UNCALLED).astype(np.uint8)
            cause[(starts < life[0]) | (starts >= life[1])] = _BUSY  # or not there: no gap either way
            first = np.flatnonzero(np.diff(cause, prepend=_BUSY + 1))  # of each stretch with one cause
            last = np.append(first[1:], len(cause))[: len(first)] - 1
            gap = cause[first] != _BUSY
            found.append((np.full(gap.sum(), number), starts[first][gap], ends[last][gap], cause[first][gap]))
        columns = [np.concatenate(parts) for parts in zip(*found, strict=True)] if found else [np.empty(0)] * 4
        order = np.lexsort((columns[0], columns[1]))
        types = (np.uint16, np.float64, np.float64, np.uint8)
        return Gaps(*(column[order].astype(kind) for column, kind in zip(columns, types, strict=True)))

    def times(self, present: Mapping[int, Life], gaps: Gaps) -> list[dict[str, Any]]:
        """What each device did in the time for which it is there, seconds; busy_s + transfer_s + idle_s = window_s.

        present: by lane, from when to when. busy_s: some role computed. transfer_s: inputs were pulled and nothing
        computed. idle_s: neither; it is the sum of the other columns of `idle.CAUSES`. queued_s: the part of idle_s in
        which a stage was called on the device and waited. idle_share: of the time in which some stage was called, the
        share in which the device was idle, 0 to 1.
        """

        def covered_s(chosen: NDArray[np.bool_]) -> float:
            union = _Times.union(*(np.clip(times[chosen], *window) for times in (self.start_s, self.end_s)))
            return float((union.end - union.start).sum())

        rows = list[dict[str, Any]]()
        for lane, window in present.items():
            here, window_s = self.lane == lane, window[1] - window[0]
            busy_s, working_s = covered_s(here & (self.work == COMPUTES)), covered_s(here & (self.work != QUEUED))
            waits = gaps.seconds(len(self.lanes), *window)[lane]
            causes = {cause.column: float(waits[n]) for n, cause in enumerate(CAUSES) if n != DATA}
            pool, device = self.lanes[lane]
            row: dict[str, Any] = {
                "pool": pool, "device": device, "window_s": window_s, "busy_s": busy_s,
                "transfer_s": working_s - busy_s, "idle_s": window_s - working_s,
                "queued_s": covered_s(here) - working_s, **causes,
            }  # fmt: skip
            row["idle_share"] = (row["idle_s"] - row["uncalled_s"]) / called_s(row) if called_s(row) > 0 else 0.0
            rows.append(row)
        return rows
