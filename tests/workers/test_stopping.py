"""Ranks that leave a stage: at one point, whoever is ahead, whenever they are asked."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from workbench.backends.base import Pending
from workbench.backends.inline import Finished
from workbench.stages.interrupted import StopCoordinator
from workbench.workers.stopping import StageStopped, Stopping


class Ranks:
    """Threads that meet between points, as ranks do in a collective; `StopCoordinator` asks them as a backend would."""

    def __init__(self, count: int, points: int, dice: random.Random) -> None:
        self.stopping = [Stopping(count) for _ in range(count)]
        self.left: dict[int, int | None] = {}
        self._barrier = threading.Barrier(count, timeout=10)
        self._points = points
        self.waits = [[dice.uniform(0, 0.002) for _ in range(points)] for _ in range(count)]
        self.threads = [threading.Thread(target=self._work, args=(rank,)) for rank in range(count)]
        for thread in self.threads:
            thread.start()

    def _work(self, rank: int) -> None:
        stopping = self.stopping[rank]
        stopping.begin(7)
        for point in range(self._points):
            try:
                stopping.point()
            except StageStopped:
                self.left[rank] = point
                return
            time.sleep(self.waits[rank][point])
            self._barrier.wait()
        self.left[rank] = None
        stopping.end()

    def ask(self, host: str, method: str, *args: Any) -> Pending:
        ask: Callable[..., Any] = getattr(self.stopping[int(host)], method)
        return Finished(lambda: ask(*args))


@pytest.mark.parametrize("seed", range(12))
def test_all_stop_at_the_same_point(seed: int) -> None:
    dice = random.Random(seed)
    count = dice.choice([2, 3, 5])
    ranks = Ranks(count, 40, dice)
    time.sleep(dice.uniform(0, 0.06))
    leaving = StopCoordinator(ranks, [str(rank) for rank in range(count)], 7)  # type: ignore[arg-type]
    began = time.monotonic()
    while any(thread.is_alive() for thread in ranks.threads):
        leaving.poll([rank for rank, thread in enumerate(ranks.threads) if thread.is_alive()])
        time.sleep(0.001)
        assert time.monotonic() - began < 60  # nobody waits for who cannot come
    assert len(set(ranks.left.values())) == 1, ranks.left


def test_a_run_that_has_not_begun_is_left_at_its_first_point() -> None:
    stopping = Stopping(1)
    stopping.stop_alone(3)
    stopping.begin(2)
    stopping.point()
    stopping.begin(3)
    with pytest.raises(StageStopped, match="as before the stage"):
        stopping.point()
    stopping.end()
    stopping.point()  # outside a run it is nothing


def test_an_update_is_left_between_optimizer_steps_only() -> None:
    stopping = Stopping(1)
    stopping.begin(3, updates=True)
    stopping.stop_alone(3)
    stopping.point()
    with pytest.raises(StageStopped, match="after optimizer step 2 of 8") as left:
        stopping.point(2, 8)
    assert left.value.part.steps == 2
