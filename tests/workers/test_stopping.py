"""Ranks that leave a stage: at one point, whoever is ahead, whenever they are asked."""

from __future__ import annotations

import random
import threading
import time
from datetime import timedelta

import pytest
import torch.distributed as dist

from workbench.messages.calls import UpdatePart
from workbench.workers import stopping as module
from workbench.workers.stopping import StageStopped, Stopping


def in_step(count: int) -> list[Stopping]:
    """The ranks of a pool, each with its connection to the pool's store."""
    first = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    ranks = [Stopping(rank, count) for rank in range(count)]
    for rank in ranks:
        rank.store = first if rank is ranks[0] else dist.TCPStore("127.0.0.1", first.port)
    return ranks


class Ranks:
    """Threads that meet between points, as ranks do in a collective. left: the point at which each stopped."""

    def __init__(self, count: int, points: int, dice: random.Random) -> None:
        self.stopping = in_step(count)
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


@pytest.mark.parametrize("seed", range(12))
def test_all_stop_at_the_same_point(seed: int) -> None:
    dice = random.Random(seed)
    count = dice.choice([2, 3, 5])
    ranks = Ranks(count, 40, dice)
    time.sleep(dice.uniform(0, 0.06))
    for rank in dice.sample(ranks.stopping, count):  # they hear of it one after another
        time.sleep(dice.uniform(0, 0.005))
        rank.stop(7)
    for thread in ranks.threads:
        thread.join(60)  # nobody waits for who cannot come
    assert len(ranks.left) == count
    assert len(set(ranks.left.values())) == 1, ranks.left


def test_where_the_controller_asked_only_some_all_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PATIENCE", timedelta(seconds=0.05))
    first, second = in_step(2)
    for rank in (first, second):
        rank.begin(7)
    first.stop(7)
    first.point()  # waits, and goes on
    second.stop(7)
    second.point()
    first.point()


def test_a_run_that_has_not_begun_is_left_at_its_first_point() -> None:
    stopping = Stopping()
    stopping.stop(3)
    stopping.begin(2)
    stopping.point()
    stopping.begin(3)
    with pytest.raises(StageStopped, match="as before the stage"):
        stopping.point()
    stopping.end()
    stopping.point()  # outside a run it is nothing


def test_an_update_is_left_between_optimizer_steps_only() -> None:
    stopping = Stopping()
    stopping.begin(3, updates=True)
    stopping.stop(3)
    stopping.point()
    with pytest.raises(StageStopped, match="after optimizer step 2 of 8") as left:
        stopping.point(2, 8)
    assert left.value.part.steps == 2


def test_an_operation_that_takes_steps_twice_is_left_only_the_first_time() -> None:
    stopping, part = Stopping(), UpdatePart(steps=1, of=2, metrics={})
    stopping.begin(1, part, updates=True)
    assert stopping.part_if_failed == part
    assert stopping.begin_steps() == part
    stopping.point(1, 2)
    assert stopping.part_if_failed == part
    stopping.note(None)
    assert stopping.part_if_failed is None
    stopping.note(UpdatePart(steps=2, of=2, metrics={}))
    assert stopping.begin_steps() is None
    stopping.stop(1)
    stopping.point(0, 2)
    assert stopping.part_if_failed is None
