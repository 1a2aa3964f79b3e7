"""Planning stays cheap: how cheap, `make bench NAME=control` measures; here is what no busy machine comes to."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.control import LIMIT_S, plan_s


def test_a_rank_costs_less_than_the_limit(tmp_path: Path) -> None:
    assert plan_s(1024, 1000, tmp_path)[0] / 1024 < 10 * LIMIT_S


@pytest.mark.thorough
def test_planning_is_linear_in_rows(tmp_path: Path) -> None:
    few, many = (plan_s(8, rows, tmp_path)[0] for rows in (10**5, 10**6))
    assert many < 20 * few
