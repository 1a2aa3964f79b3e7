"""Calls of stages between two iterations, of which training sees nothing."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from workbench.stages.runner import StageRunner


@contextlib.contextmanager
def isolated(runner: StageRunner, stage: str) -> Iterator[None]:
    """Inside, stages run one by one, and report their metrics as `stage`. Afterwards the iteration, the numbers of
    draws, `last_metrics`, the store and the kernel's random state are as before. Weights are not put back:
    `lab.kept(...)` does that."""
    runner.overlap.wait()
    runner.scheduler.drain()
    counters, batches = runner.counters, runner.batches
    metrics, iteration, draws = counters.last_metrics, counters.iteration, dict(counters.draws)
    looping, stored = batches.looping, set(batches.store)
    counters.last_metrics, batches.looping = {}, True
    try:
        with runner.one_by_one(), runner.reported_as(stage), torch.random.fork_rng(devices=[]):
            yield
    finally:
        counters.last_metrics, counters.iteration, counters.draws = metrics, iteration, draws
        batches.looping = looping
        for name in set(batches.store) - stored:
            batches.store.release(name)
        batches.release_unused()
        runner.ownership.record()
