"""Shared by all tests: a home of their own, and one Ray head, ended with the session."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from workbench.support.home import home

# how long one example takes says more about the machine than about the code
settings.register_profile("workbench", deadline=None)
settings.load_profile("workbench")


@pytest.fixture(scope="session", autouse=True)
def own_home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Workbenches of the tests do not meet those of the user; converted models, and what vLLM compiled, are shared."""
    mine, theirs = tmp_path_factory.mktemp("home"), home()
    for shared in ("models", "vllm"):
        (theirs / shared).mkdir(parents=True, exist_ok=True)
        (mine / shared).symlink_to(theirs / shared)
    before = os.environ.get("WORKBENCH_HOME")
    os.environ["WORKBENCH_HOME"] = str(mine)
    os.environ["WORKBENCH_KEEP_RAY"] = "1"  # one head for the workbenches of all tests, lessons' kernels among them
    yield mine
    from workbench.backends.cluster import stop_head

    stop_head()
    if before is None:
        del os.environ["WORKBENCH_HOME"]
    else:
        os.environ["WORKBENCH_HOME"] = before
