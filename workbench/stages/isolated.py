"""Calls of stages on the side, between two iterations, of which training sees nothing."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from workbench.controller import Workbench


@contextlib.contextmanager
def aside(lab: Workbench, stage: str) -> Iterator[None]:
    """Inside, stages run one by one, and report their metrics as `stage`. Afterwards the iteration, the numbers of
    draws, `last_metrics`, the store and the kernel's random state are as before; weights are `lab.kept`'s matter."""
    lab.wait()
    lab.scheduler.drain()
    metrics, iteration, draws, looping = lab.last_metrics, lab.iteration, dict(lab._draws), lab.looping
    overlapping, reusing, stored = lab._overlapping, lab._reusing, set(lab.store)
    lab.last_metrics, lab.looping, lab._overlapping, lab._reusing = {}, True, 0, False
    try:
        with lab.reported_as(stage), torch.random.fork_rng(devices=[]):
            yield
    finally:
        lab.last_metrics, lab.iteration, lab._draws, lab.looping = metrics, iteration, draws, looping
        lab._overlapping, lab._reusing = overlapping, reusing
        for name in set(lab.store) - stored:
            lab.store.release(name)
        lab._release()
        lab._save_state()
