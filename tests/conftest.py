"""Shared by all tests: a home of their own, one Ray head, ended with the session, and the order of the files."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

from workbench.support.files import home

# one thread for torch, as `make test` has it: sums in two are added in another order
os.environ.setdefault("OMP_NUM_THREADS", "1")

# how long one example takes says more about the machine than about the code
settings.register_profile("workbench", deadline=None)
settings.load_profile("workbench")

# The tests of a group run in one process, after each other: they share a Ray head, a browser, or an engine. Groups come
# first, in this order, so that no long one begins last; every other file is a group of its own.
GROUPS = {
    "tests/integration/": "ray",
    "tests/browser/": "browser",
    "tests/kernel/": "kernels",
    "tests/engines/test_generation_vllm.py": "vllm",
    "tests/engines/test_weight_copies.py": "vllm",
    "tests/workers/test_sync_sabotage.py": "vllm",
}


def group_of(node_id: str) -> str:
    file = node_id.partition("::")[0]
    return next((group for path, group in GROUPS.items() if file.startswith(path)), file)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    order = [*dict.fromkeys(GROUPS.values())]
    items.sort(key=lambda item: order.index(group) if (group := group_of(item.nodeid)) in order else len(order))


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    from xdist.scheduler import LoadScopeScheduling

    if config.getvalue("dist") != "loadfile":
        return None

    class ByGroup(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return group_of(nodeid)

    config.option.loadscopereorder = False
    return ByGroup(config, log)


# Objects that the garbage collector would walk through again and again.
MANY = 100_000


@pytest.fixture(scope="module", autouse=True)
def old_objects_are_left_alone() -> None:
    """What was imported lives as long as the process, a million objects with all test files and vLLM. Python walks
    through all of them whenever they have grown by a quarter, DeepSpeed's ZeRO-3 in each step."""
    if len(gc.get_objects()) > MANY:
        gc.unfreeze()  # what the last file left behind
        gc.collect()
        gc.freeze()


def pytest_unconfigure() -> None:
    """Have the interpreter end them, or libraries say that they are leaked."""
    gc.unfreeze()


_seen: set[str] = set()


def pytest_runtest_logfinish(nodeid: str) -> None:
    """Under `make test`: note which test an entry of the run's folder came from, see `scripts/run_tests.py`."""
    folder = Path(os.environ.get("TMPDIR", "/"))
    if not (folder / "lock").exists() or not folder.name.startswith("wbt-"):
        return
    new = {path.name for path in folder.iterdir()} - _seen
    with open(folder / "appeared", "a") as file:
        file.writelines(f"{name}\t{nodeid}\n" for name in new)
    _seen.update(new)


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
    if (mine / "head.json").exists():
        from workbench.backends.cluster import stop_head

        stop_head()
    if before is None:
        del os.environ["WORKBENCH_HOME"]
    else:
        os.environ["WORKBENCH_HOME"] = before
