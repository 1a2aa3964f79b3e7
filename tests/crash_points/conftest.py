from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.crash_points import processes


@pytest.fixture(scope="module", autouse=True)
def fork_server() -> Iterator[None]:
    """Others would fork their ranks from it too, each of which had to import DeepSpeed."""
    yield
    processes.stop()
