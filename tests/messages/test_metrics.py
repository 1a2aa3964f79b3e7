from __future__ import annotations

import pytest

from workbench.messages.metrics import Interval, Mean, Metrics, merge_metrics, reported
from workbench.support.intervals import clustered_half_width


def test_an_interval_is_the_same_however_rows_lie_on_ranks() -> None:
    first, second = {0: (1.0, 2.0), 1: (0.5, 1.0)}, {1: (1.5, 3.0), 2: (4.0, 4.0)}
    merged = merge_metrics({"half": Interval(clusters=first)}, {"half": Interval(clusters=second)})
    assert merged["half"].value == clustered_half_width([1.0, 2.0, 4.0], [2.0, 4.0, 4.0])
    assert first == {0: (1.0, 2.0), 1: (0.5, 1.0)}  # of the rank that sent it


def test_what_is_no_number_is_not_reported() -> None:
    one = Interval(clusters={3: (1.0, 2.0)})
    metrics: Metrics = {"mean": Mean(total=1.0, count=2.0), "half": one, "none": Mean(total=0.0, count=0.0)}
    assert reported(metrics) == {"mean": 0.5}
    assert reported({"half": one.merge(Interval(clusters={4: (0.0, 2.0)}))}) == {
        "half": pytest.approx(3.1766, abs=2e-4)
    }
