"""Folded time: the map is monotone, exact outside of breaks, and can be inverted; busy time fills the picture."""

from __future__ import annotations

import re
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.display.test_idle import LANES, gaps_of, row
from tests.display.test_timeline import STAGE, bars, extent
from workbench.display.idle import CONTROLLER, UNCALLED, Callers, DeviceSpans
from workbench.display.lanes import BREAKS, LEAST_S, REST, Folding, folding_of
from workbench.display.timeline import timeline

CALL = {"stage": "a", "role": "b", "rank": 0, "parent": ""}
spans = st.builds(
    lambda lane, start, length, kind: row(lane, start, start + length, kind),
    st.integers(0, 2),
    st.floats(0, 3e3),
    st.floats(0, 20),
    st.sampled_from(["compute", "forward", "transfer", "queue"]),
)


def later(rows: list[dict[str, Any]], by_s: float, run: int) -> list[dict[str, Any]]:
    return [{**one, "start_s": one["start_s"] + by_s, "end_s": one["end_s"] + by_s, "run": run} for one in rows]


@given(st.lists(spans, max_size=30), st.lists(st.floats(-10, 3e3), min_size=2, max_size=30))
def test_the_map_grows_is_exact_outside_of_breaks_and_is_inverted(rows: list[dict[str, Any]], at: list[float]) -> None:
    window = (0.0, 3020.0)
    gaps = gaps_of(rows, LANES, window)
    folding = folding_of(gaps, window)
    times = np.sort(np.array([*at, *folding.start_s, *folding.end_s]))
    drawn = folding.drawn(times)
    np.testing.assert_allclose(folding.drawn(folding.time(drawn)), drawn, rtol=0, atol=1e-9)
    within = np.zeros(len(times), bool)
    for start_s, end_s in zip(folding.start_s, folding.end_s, strict=True):
        within |= (times > start_s - 1e-3) & (times < end_s + 1e-3)
    np.testing.assert_allclose(folding.time(drawn)[~within], times[~within], rtol=0, atol=1e-9)
    steps, drawn_steps = np.diff(times), np.diff(drawn)
    assert (drawn_steps >= -1e-9).all()  # but for rounding of seconds in float64
    assert (drawn_steps <= steps + 1e-9).all()
    assert (drawn_steps[steps > 1e-3] > 0).all()
    middle = (times[1:] + times[:-1]) / 2
    in_break = np.any([(middle >= a) & (middle <= b) for a, b in zip(folding.start_s, folding.end_s, strict=True)], 0)
    if not len(folding.start_s):
        in_break = np.zeros(len(steps), bool)
    np.testing.assert_allclose(drawn_steps[~in_break], steps[~in_break], rtol=0, atol=1e-9)
    # in a break no device works and nothing is called
    for start_s, end_s in zip(folding.start_s, folding.end_s, strict=True):
        assert end_s - start_s >= LEAST_S
        assert not [one for one in rows if one["end_s"] > start_s + 1e-9 and one["start_s"] < end_s - 1e-9
                    and one["end_s"] > one["start_s"]]  # fmt: skip
    # what is drawn is busy time, but for breaks, short stretches, and those that a break would not shorten
    uncalled_s = sum(np.subtract(*gaps.uncalled(*window)[::-1]))
    other_s = window[1] - uncalled_s
    if other_s > 0:
        short_s = 2 * folding.width_s * len(gaps.uncalled(*window)[0]) + LEAST_S * len(rows)
        assert folding.drawn(window[1]) <= other_s * (1 + REST + BREAKS + 1e-6) + short_s


def test_two_minutes_between_two_stages_are_a_narrow_break_with_their_length_on_it() -> None:
    picture, whole = (timeline([*STAGE, *later(STAGE, 130, 5)], fold=fold) for fold in (True, False))
    assert ">2 min 00 s, nothing called</text>" in picture.svg
    assert "the axis is folded: 1 break, 2 min 00 s in which nothing was called" in picture.svg
    assert "folded" not in whole.svg
    assert picture.summary == whole.summary
    busy = {name: sum(np.subtract(*extent(bar)[::-1]) for bar in bars(one)) for name, one in
            (("folded", picture), ("whole", whole))}  # fmt: skip
    assert busy["folded"] > 6 * busy["whole"]
    # one scale outside of the break, so the same stage is as wide before and after it
    first, second = (extent(bar) for bar in bars(picture) if "update_critic" in "".join(bar.itertext()))
    assert first[1] - first[0] == pytest.approx(second[1] - second[0], abs=0.002)
    left, right = first[0] + (first[1] - first[0]) / 4 * 10, second[0]  # the break: from 10 s to 130 s
    assert 1 < right - left < 3  # percent of the width


def test_ticks_stand_at_true_times_and_none_in_a_break() -> None:
    svg = timeline([*STAGE, *later(STAGE, 130, 5)]).svg
    ticks = {
        float(at.replace(",", "")): float(x) for x, at in re.findall(r'<text x="([\d.]+)%"[^>]*>([\d,.]+) s<', svg)
    }
    critics = [bar for bar in bars(timeline([*STAGE, *later(STAGE, 130, 5)])) if "critic" in "".join(bar.itertext())]
    first, second = (extent(bar) for bar in critics if "update_critic" in "".join(bar.itertext()))
    scale = (first[1] - first[0]) / 4
    for at, x in ticks.items():
        expected = first[0] + at * scale if at <= 10 else second[0] + (at - 130) * scale
        assert x == pytest.approx(expected, abs=0.02), at
    assert {at for at in ticks if 10 < at < 130} == set()
    assert [at for at in ticks if at > 130]


def test_nothing_is_folded_where_all_is_called_or_nothing_is() -> None:
    for rows in (STAGE, [], [{**row(0, 5, 5), **CALL, "run": 0}]):
        svg = timeline(rows).svg
        ElementTree.fromstring(svg)
        assert "folded" not in svg
    assert folding_of(gaps_of([], LANES, (0.0, 100.0)), (0.0, 100.0)).drawn(100.0) == 100.0
    short = [{**row(0, at, at + 0.1), **CALL, "run": n} for n, at in enumerate((0, 0.2, 0.4))]
    assert "folded" not in timeline(short).svg  # nobody thinks for a tenth of a second


def test_a_map_done_by_hand() -> None:
    folding = Folding(np.array([2.0]), np.array([122.0]), 0.5)
    assert folding.drawn(np.array([1.0, 2.0, 62.0, 122.0, 130.0])).tolist() == [1.0, 2.0, 2.25, 2.5, 10.5]
    assert folding.time(10.5) == 130.0
    assert folding.kept(0.0, 125.0) == [(0.0, 2.0), (122.0, 125.0)]
    assert folding.kept(50.0, 60.0) == []


def test_a_button_of_the_panel_and_a_move_are_no_time_in_which_nothing_is_called() -> None:
    spans = DeviceSpans([{**row(0, at, at + 1), "run": n} for n, at in enumerate((0, 2, 100, 200))])
    events: list[dict[str, Any]] = [
        *({"event": "run", "details": {"run": run, "cell": 0, "drive": drive}} for run, drive in
          ((0, 1), (1, 1), (2, 2))),
        {"event": "move", "time_s": 190.0, "details": {"seconds": 30.0}},
    ]  # fmt: skip
    gaps = spans.gaps((0.0, 201.0), callers=Callers.of(events))
    told = list(zip(gaps.start_s.tolist(), gaps.end_s.tolist(), gaps.cause.tolist(), strict=True))
    assert told == [
        (1, 2, CONTROLLER), (3, 100, UNCALLED), (101, 160, UNCALLED), (160, 190, CONTROLLER), (190, 200, UNCALLED),
    ]  # fmt: skip
