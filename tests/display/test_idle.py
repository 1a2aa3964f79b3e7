"""Where idle time goes: closed forms, and properties of any spans at all."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.display.by_rows import device_times
from workbench.display.idle import CAUSES, CONTROLLER, DATA, POOL, RANK, UNCALLED, Callers, DeviceSpans, Gaps, Lane

LANES = [("train", "cpu:0"), ("train", "cpu:1"), ("rollout", "cpu:2")]


def row(lane: int, start: float, end: float, kind: str = "compute") -> dict[str, Any]:
    pool, device = LANES[lane]
    return {"pool": pool, "device": device, "kind": kind, "start_s": float(start), "end_s": float(end)}


def gaps_of(rows: list[dict[str, Any]], lanes: list[Lane], window: tuple[float, float]) -> Gaps:
    return DeviceSpans([{**row, "run": run} for run, row in enumerate(rows)], lanes).gaps(window)


def listed(gaps: Gaps, lane: int) -> list[tuple[float, float, int]]:
    columns = zip(gaps.lane, gaps.start_s, gaps.end_s, gaps.cause, strict=True)
    return [(float(start), float(end), int(cause)) for n, start, end, cause in columns if n == lane]


def test_each_cause_on_an_example_done_by_hand() -> None:
    rows = [
        row(0, 0, 4, "queue"), row(2, 0, 4),  # inputs are made in another pool
        row(0, 4, 5, "transfer"), row(1, 4, 6, "transfer"),
        row(0, 5, 8), row(1, 6, 10),  # rank 1 is slower by two seconds
    ]  # fmt: skip
    gaps = gaps_of(rows, LANES, (0.0, 12.0))
    assert listed(gaps, 0) == [(0, 4, POOL), (4, 5, DATA), (8, 10, RANK), (10, 12, UNCALLED)]
    assert listed(gaps, 1) == [(0, 4, POOL), (4, 6, DATA), (10, 12, UNCALLED)]
    assert listed(gaps, 2) == [(4, 10, POOL), (10, 12, UNCALLED)]
    seconds = gaps.seconds(3, 3.0, 11.0)
    assert seconds.tolist() == [[1, 2, 1, 0, 1], [2, 0, 1, 0, 1], [0, 0, 6, 0, 1]]


def test_a_stage_in_the_queue_while_nothing_runs_waits_for_the_controller() -> None:
    assert listed(gaps_of([row(0, 0, 3, "queue"), row(0, 3, 4)], LANES[:1], (0.0, 4.0)), 0) == [(0, 3, CONTROLLER)]
    # what is called on one device keeps all others waiting for the controller too
    gaps = gaps_of([row(0, 0, 3, "queue"), row(0, 3, 4), row(1, 6, 7)], LANES[:2], (0.0, 7.0))
    assert listed(gaps, 1) == [(0, 3, CONTROLLER), (3, 4, RANK), (4, 6, UNCALLED)]


def test_between_two_stages_of_one_cell_the_controller_works_and_between_cells_nothing_is_called() -> None:
    spans = DeviceSpans([{**row(0, start, start + 1), "run": run} for run, start in enumerate((1, 4, 7, 10))])
    events = [
        {"event": "run", "details": {"run": 0, "cell": 1}}, {"event": "run", "details": {"run": 1, "cell": 1}},
        {"event": "attached", "details": {}}, {"event": "run", "details": {"run": 2, "cell": 1}},
    ]  # fmt: skip
    gaps = spans.gaps((0.0, 12.0), callers=Callers.of(events))
    assert listed(gaps, 0) == [
        (0, 1, UNCALLED), (2, 4, CONTROLLER), (5, 7, UNCALLED), (8, 10, UNCALLED), (11, 12, UNCALLED),
    ]  # fmt: skip


def test_pulling_under_computing_is_no_gap_and_a_window_cuts() -> None:
    rows = [row(0, 0, 2), row(0, 1, 4, "transfer"), row(0, 6, 9)]
    assert listed(gaps_of(rows, LANES[:1], (1.0, 7.0)), 0) == [(2, 4, DATA), (4, 6, UNCALLED)]


@pytest.mark.parametrize("window", [(0.0, 0.0), (0.0, 5.0)])
def test_no_spans(window: tuple[float, float]) -> None:
    gaps = gaps_of([], LANES, window)
    assert gaps.seconds(3, *window).sum() == 3 * window[1]
    assert len(gaps_of([], [], window).lane) == 0


spans = st.builds(
    lambda lane, start, length, kind: row(lane, start, start + length, kind),
    st.integers(0, 2),
    st.integers(0, 40),
    st.integers(0, 12),
    st.sampled_from(["compute", "forward", "transfer", "queue"]),
)


@given(st.lists(spans, max_size=25), st.integers(0, 20), st.integers(0, 40))
def test_busy_times_and_gaps_fill_the_window_and_every_second_has_the_cause_that_its_definition_says(
    rows: list[dict[str, Any]], start: int, length: int
) -> None:
    window = (float(start), float(start + length))
    gaps = gaps_of(rows, LANES, window)
    seconds = gaps.seconds(len(LANES), *window)
    assert (gaps.end_s > gaps.start_s).all()
    for lane, (pool, device) in enumerate(LANES):
        times = device_times(rows, device, pool, *window)
        assert seconds[lane].sum() == times["transfer_s"] + times["idle_s"]
        assert seconds[lane, DATA] == times["transfer_s"]
        mine = listed(gaps, lane)
        assert all(a[1] < b[0] or (a[1] == b[0] and a[2] != b[2]) for a, b in pairwise(mine))
        for second in range(start, start + length):  # times are whole: one look a second sees all
            at = second + 0.5
            there = [r for r in rows if r["start_s"] < at < r["end_s"]]
            now = [r for r in there if r["kind"] != "queue"]
            here = [r["kind"] for r in now if r["device"] == device]
            found = [cause for first, last, cause in mine if first < at < last]
            if any(kind != "transfer" for kind in here):
                assert found == []
            elif here:
                assert found == [DATA]
            elif any(r["pool"] == pool for r in now):
                assert found == [RANK]
            else:
                assert found == ([POOL] if now else [CONTROLLER] if there else [UNCALLED])


@given(st.lists(st.tuples(st.integers(0, 2), st.floats(0, 1e3), st.floats(0, 1e2)), max_size=25))
def test_causes_sum_to_the_idle_time_at_any_times(drawn: list[tuple[int, float, float]]) -> None:
    rows = [row(lane, 1.7e9 + start, 1.7e9 + start + length) for lane, start, length in drawn]
    window = (1.7e9, 1.7e9 + 1e3)
    seconds = gaps_of(rows, LANES, window).seconds(len(LANES), *window)
    idle = [device_times(rows, device, pool, *window)["idle_s"] for pool, device in LANES]
    np.testing.assert_allclose(seconds.sum(axis=1), idle, rtol=0, atol=1e-4)


def test_each_cause_is_told_by_its_own_letter_and_words() -> None:
    assert len({cause.letter for cause in CAUSES}) == len({cause.words for cause in CAUSES}) == 5
    assert all(cause.letter.islower() for cause in CAUSES)
