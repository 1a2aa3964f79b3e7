"""Runs without a workbench."""

from __future__ import annotations

import types
from collections.abc import Sequence
from typing import Any

from workbench.stages.run import Run
from workbench.stages.scheduler import Scheduler


def runner_of(backend: Any = None) -> Any:
    """Of runs that no journal notes, and of which nothing is kept."""
    nothing = lambda *_: None  # noqa: E731
    hosts: Any = types.SimpleNamespace(backend=backend)
    batches = types.SimpleNamespace(release_unused=lambda called: {})
    return types.SimpleNamespace(
        hosts=hosts, batches=batches, scheduler=Scheduler(hosts), record_replies=nothing,
        failures=types.SimpleNamespace(note=nothing),
        interrupted=types.SimpleNamespace(clean_up=nothing, not_received=nothing, received=nothing, record_end=nothing),
    )  # fmt: skip


def group_of(role: str, hosts: Sequence[str] = (), **operations: Any) -> Any:
    """Ranks on pool "a"."""
    pool = types.SimpleNamespace(name="a")
    return types.SimpleNamespace(role=role, hosts=tuple(hosts), pool=pool, operations=operations)


def run_of(number: int, stage: str) -> Run:
    """A run of the actor's that is in no scheduler's queue."""
    run = Run(runner_of(), group_of("actor", ("a-0",)), stage)
    run.number = number
    return run
