"""Preferences and distillation on one rank and two, with both engines: the same numbers."""

from __future__ import annotations

import pytest

from tests.engines.training_ranks import run_ranks
from tests.workers.preference_ranks import stages, stages_of
from workbench.messages.metrics import Metrics, merge_metrics, reported

pytestmark = pytest.mark.slow

ENGINES = ["torch", "zero3"]


def test_ranks_and_engines_agree() -> None:
    expected = {stage: reported(metrics) for stage, metrics in stages("torch").items()}
    assert expected["kto"]["kl"] > 0
    for engine, of_ranks in zip(ENGINES, zip(*run_ranks(stages_of, 2, ENGINES), strict=True), strict=True):
        for stage, alone in expected.items():
            merged: Metrics = {}
            for rank in of_ranks:
                merge_metrics(merged, rank[stage])
            found = reported(merged)
            assert found.keys() == alone.keys()
            for name, value in alone.items():
                assert found[name] == pytest.approx(value, rel=2e-3, abs=2e-5), (engine, stage, name)
