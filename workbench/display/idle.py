"""How each device spent a stretch of time, from the spans on it: what it did, and what it waited for.

pool train, cpu:0   | update_actor ..........    d | update_actor .... s s | c c c | n n n n
pool train, cpu:1   | update_actor .... s s s    d | update_actor ........ | c c c | n n n n
pool rollout, cpu:2 | p p p p p p p p p p p p p p p p p p p p p p p p p p  | c c c | n n n n
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

Lane = tuple[str, str]  # pool, device
Life = tuple[float, float]  # from when to when a lane is there, unix times


@dataclass(frozen=True)
class Cause:
    """Why a device does not compute. column: of its seconds in a table. letter: small, as those of roles are large."""

    column: str
    letter: str
    words: str
    meaning: str


# At a time for which several hold, the first one counts.
CAUSES = (
    Cause("transfer_s", "d", "waiting for data", "its stage pulls its inputs, and nothing computes here"),
    Cause("slowest_rank_s", "s", "waiting for the slowest rank", "a stage of its pool goes on, on other ranks alone"),
    Cause("other_pool_s", "p", "waiting for another pool", "its own pool is idle while another one works"),
    Cause(
        "controller_s", "c", "controller",
        "nothing runs: a stage was called, its cell has not called the next one, or roles are moved or saved",
    ),
    Cause("uncalled_s", "n", "nothing called", "no stage runs, and no cell is between two: it waits for you"),
)  # fmt: skip
DATA, RANK, POOL, CONTROLLER, UNCALLED = range(len(CAUSES))
_BUSY = len(CAUSES)

QUEUED, PULLS, COMPUTES = range(3)


def work_of(kind: str) -> int:
    """What a span of this kind is to its device: `QUEUED`, `PULLS` or `COMPUTES`."""
    return {"queue": QUEUED, "transfer": PULLS}.get(kind, COMPUTES)


@dataclass(frozen=True)
class Gaps:
    """Times at which a device did not compute, by start: columns of equal length. cause: index in `CAUSES`."""

    lane: NDArray[np.uint16]
    start_s: NDArray[np.float64]
    end_s: NDArray[np.float64]
    cause: NDArray[np.uint8]

    def __len__(self) -> int:
        return len(self.lane)

    def seconds(self, lanes: int, start_s: float, end_s: float) -> NDArray[np.float64]:
        """By lane and cause, within a window."""
        within = np.minimum(self.end_s, end_s) - np.maximum(self.start_s, start_s)
        cell = self.lane.astype(np.intp) * len(CAUSES) + self.cause
        found = np.bincount(cell, np.maximum(within, 0.0), lanes * len(CAUSES))
        return found.astype(np.float64).reshape(lanes, len(CAUSES))

    def uncalled(self, start_s: float, end_s: float) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Starts and ends of the stretches of a window in which no stage ran on any device and nothing was called."""
        here = self.cause == UNCALLED
        found = _Times.union(*(np.clip(times[here], start_s, end_s) for times in (self.start_s, self.end_s)))
        return found.start, found.end


def idle_gaps(
    lanes: Sequence[Lane],
    lane: ArrayLike,
    work: ArrayLike,
    start_s: ArrayLike,
    end_s: ArrayLike,
    window: tuple[float, float],
    lives: Sequence[Life] | None = None,
    cells: tuple[ArrayLike, ArrayLike] = ((), ()),
) -> Gaps:
    """Every time in a window at which a device does not compute, each with the one cause that it has.

    lanes: the devices. lane, work, start_s, end_s: one value a span; lane: index in lanes; work: see `work_of`. lives:
    by lane, see `lives_of`; None: each is there all the time. cells: starts and ends of what called several stages. The
    gaps of a lane do not overlap; with its computing they fill what of the window it is there for.
    """
    lane_N, work_N = np.asarray(lane, np.intp), np.asarray(work, np.uint8)
    start_N, end_N = (np.clip(np.asarray(times, np.float64), *window) for times in (start_s, end_s))

    def times(chosen: NDArray[np.bool_]) -> _Times:
        return _Times.union(start_N[chosen], end_N[chosen])

    works = work_N != QUEUED
    anywhere = times(works)
    in_cells = (np.clip(np.asarray(times_s, np.float64), *window) for times_s in cells)
    called = _Times.union(
        *(np.concatenate(pair) for pair in zip((start_N[~works], end_N[~works]), in_cells, strict=True))
    )
    pool_of_lane = np.asarray([[pool for pool, _ in lanes].index(pool) for pool, _ in lanes], np.intp)
    in_pool = {pool: times(works & (pool_of_lane[lane_N] == pool)) for pool in set(pool_of_lane.tolist())}
    found: list[tuple[NDArray[Any], ...]] = []
    for number in range(len(lanes)):
        here, pool = lane_N == number, in_pool[pool_of_lane[number]]
        computes, pulls = times(here & (work_N == COMPUTES)), times(here & (work_N == PULLS))
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


def device_times(
    work: NDArray[np.uint8], start_s: NDArray[np.float64], end_s: NDArray[np.float64], window: tuple[float, float]
) -> dict[str, float]:
    """What a device did in a window, seconds, from its spans: window_s, busy_s, transfer_s, idle_s, queued_s."""
    start_s, end_s = np.clip(start_s, *window), np.clip(end_s, *window)

    def covered_s(chosen: NDArray[np.bool_]) -> float:
        union = _Times.union(start_s[chosen], end_s[chosen])
        return float((union.end - union.start).sum())

    busy_s, working_s, window_s = covered_s(work == COMPUTES), covered_s(work != QUEUED), window[1] - window[0]
    idle = {"idle_s": window_s - working_s, "queued_s": covered_s(work >= QUEUED) - working_s}
    return {"window_s": window_s, "busy_s": busy_s, "transfer_s": working_s - busy_s, **idle}


def lives_of(
    first_s: Sequence[float], last_s: Sequence[float], live: Sequence[bool], moves_s: Sequence[float]
) -> list[Life]:
    """From when to when each lane is there, as far as its spans and the changes of placement tell.

    first_s, last_s: start of a lane's first span, end of its last; inf and -inf for none. live: whether it is there
    now. moves_s: when changes of placement began, in order. A lane comes with the last change before its first span,
    and one that is gone goes with the first after its last span.
    """
    lives = []
    for first, last, lives_on in zip(first_s, last_s, live, strict=True):
        came, gone = bisect_right(moves_s, first), bisect_left(moves_s, last)
        end_s = float("inf") if lives_on else moves_s[gone] if gone < len(moves_s) else last
        lives.append((moves_s[came - 1] if came else float("-inf"), end_s))
    return lives


def within(life: Life, start_s: float, end_s: float) -> Life:
    """What of a window a lane is there for; a window of no length where that is nothing."""
    start_s = min(max(start_s, life[0]), end_s)
    return start_s, max(min(end_s, life[1]), start_s)


@dataclass(frozen=True)
class _Times:
    """Intervals that do not touch, in order."""

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
        """For each time whether it, and what follows, lies in one of them."""
        if not len(self.start):
            return np.zeros(len(times), bool)
        at = np.searchsorted(self.start, times, side="right") - 1
        return (at >= 0) & (self.end[at] > times)
