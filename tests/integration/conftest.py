"""One workbench of two ranks on Ray for the tests that need living ranks and no model of their own."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

import workbench as wb
from tests.cases import TINY, tiny_lab

LAST = "test_ranks_that_wait_for_a_failed_one_are_given_up"  # the pool of `two` is lost then


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: item.name == LAST)


@pytest.fixture(scope="package")
def two(tmp_path_factory: pytest.TempPathFactory) -> Iterator[wb.Workbench]:
    """Nobody trains its actor, and its critic is for `test_errors`."""
    from tests.integration.test_errors import Fragile
    from tests.integration.test_failures import MeetingActor

    def length(prompt: str, response: str, **row: Any) -> float:
        return 1.0 + len(response)

    models = {"actor": wb.Model(TINY, worker=MeetingActor), "critic": wb.Model(TINY, worker=Fragile), "reward": length}
    placement = wb.Placement.colocate(2)
    with tiny_lab("two", tmp_path_factory.mktemp("runs"), models=models, placement=placement, devices=2) as lab:
        yield lab
