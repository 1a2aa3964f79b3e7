"""Sums of a range: against a frame of the same spans, and halves against the whole."""

from __future__ import annotations

from typing import Any

import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.display.test_folding import later
from tests.display.test_timeline import STAGE, row
from tests.expected import expect_error
from workbench.display.timeline import Sums, timeline
from workbench.errors import BadInput

KEYS = ["role", "stage", "kind", "parent"]
spans = st.builds(
    lambda stage, kind, device, start, length, tokens: row(
        stage, start, start + length, kind=kind, device=device, processed_tokens=tokens, moved_bytes=3 * tokens,
        role=stage[:2],
    ),
    st.sampled_from(["update_actor", "generate"]), st.sampled_from(["compute", "transfer", "queue"]),
    st.sampled_from(["slot:0", "slot:1"]), st.floats(0, 50), st.floats(0, 10), st.integers(0, 1000),
)  # fmt: skip


def by_key(sums: Sums, name: str) -> dict[Any, float]:
    return {tuple(one[key] for key in KEYS): one[name] for one in sums.stages}


def test_the_sums_of_all_are_those_of_the_frame_and_of_the_table_by_device() -> None:
    picture = timeline([*STAGE, *later(STAGE, 130, 5)])
    sums = picture.sums()
    frame = pd.DataFrame([*STAGE, *later(STAGE, 130, 5)]).fillna({"processed_tokens": 0, "moved_bytes": 0})
    frame["span_s"] = frame["end_s"] - frame["start_s"]
    grouped = frame.groupby(KEYS)
    for name in ("span_s", "processed_tokens", "moved_bytes"):
        assert by_key(sums, name) == pytest.approx(grouped[name].sum().to_dict())
    assert by_key(sums, "spans") == grouped.size().to_dict()
    assert sums.busy_s == pytest.approx(sum(one["busy_s"] for one in picture.summary))
    assert sums.device_s == pytest.approx(sum(one["window_s"] for one in picture.summary))
    assert {one["cause"]: one["idle_s"] for one in sums.idle} == pytest.approx(
        {"waiting for data": 2.0, "waiting for the slowest rank": 8.0, "nothing called": 240.0}
    )
    assert "busy 75 %" in repr(sums)
    assert "nothing called" in sums._repr_html_()


def test_a_span_that_the_range_cuts_counts_by_its_share() -> None:
    sums = timeline(STAGE).sums(5.0, 8.0)  # the second half of update_actor's 6 s and 1,200 tokens
    assert by_key(sums, "processed_tokens")["actor", "update_actor", "compute", ""] == 600.0
    assert by_key(sums, "span_s")["critic", "compute_values", "compute", ""] == 3.0
    assert ("critic", "update_critic", "compute", "") not in by_key(sums, "spans")
    assert sums.title == "from 5.000 s to 8.000 s, 3.0 s on 2 devices: busy 100 %"
    for wrong in ((3.0, 3.0), (20.0, 30.0), (5.0, 1.0)):
        with expect_error(BadInput, rule="the end must be after the start"):
            timeline(STAGE).sums(*wrong)


@given(st.lists(spans, min_size=1, max_size=20), st.floats(0.01, 0.99))
def test_the_sums_of_two_halves_are_those_of_the_whole(rows: list[dict[str, Any]], share: float) -> None:
    picture = timeline(rows, start=1000.0, end=1061.0)
    cut_s = 61.0 * share
    whole, parts = picture.sums(), (picture.sums(0.0, cut_s), picture.sums(cut_s))
    for name in ("span_s", "processed_tokens", "moved_bytes"):
        added = {key: sum(by_key(part, name).get(key, 0.0) for part in parts) for key in by_key(whole, name)}
        assert added == pytest.approx(by_key(whole, name), abs=1e-5)
    assert sum(part.busy_s for part in parts) == pytest.approx(whole.busy_s, abs=1e-5)
    idle = [{one["cause"]: one["idle_s"] for one in part.idle} for part in (whole, *parts)]
    for cause, idle_s in idle[0].items():
        assert sum(part.get(cause, 0.0) for part in idle[1:]) == pytest.approx(idle_s, abs=1e-5)
