"""Losses, estimators, schedules and workers that end their process, or raise what cannot be shown: an error of that
stage, after which the same call works."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import workbench as wb
from tests.cases import TINY, stored, tiny_lab
from tests.expected import expect_error
from workbench.errors import BadInput, StageError, StageInterrupted
from workbench.workers.roles.actor import ActorWorker


class Unsayable(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no words")


class Escaping(Exception):
    def __str__(self) -> str:
        return "\x1b]0;owned\x07" + "x" * 10**6


class Ends(BaseException):
    pass


RAISED = [
    *(SystemExit(3), Ends("now"), Unsayable(), Escaping()),
    *(
        pytest.param(error, marks=pytest.mark.thorough)
        for error in (SystemExit(), GeneratorExit(), asyncio.CancelledError())
    ),
]


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[wb.Workbench]:
    models = {"actor": TINY, "critic": TINY}
    with tiny_lab("hostile", tmp_path_factory.mktemp("runs"), backend="inline", models=models) as lab:
        yield lab


def raising(error: BaseException) -> Callable[..., Any]:
    def loss(log_prob: Tensor, mask: Tensor) -> Tensor:
        raise error

    return loss


def check(error: StageError) -> None:
    text = str(error)
    assert len(text) < 10_000 and "\x1b" not in text and "\x07" not in text


@pytest.mark.parametrize("raised", RAISED, ids=lambda error: type(error).__name__)
def test_a_loss(lab: wb.Workbench, raised: BaseException) -> None:
    batch = lab.put(stored(4), meta={"temperature": 1.0})
    before = lab.actor.weight_digests()
    with pytest.raises(StageError, match=rf"loss=loss raised {type(raised).__name__}") as caught:
        lab.actor.update_actor(batch, loss=raising(raised))
    check(caught.value)
    assert lab.actor.weight_digests() == before
    with lab.kept("actor"):
        assert lab.actor.update_actor(batch)["optimizer_steps"] > 0


@pytest.mark.parametrize("raised", RAISED, ids=lambda error: type(error).__name__)
def test_an_estimator(lab: wb.Workbench, raised: BaseException) -> None:
    batch = lab.put({**stored(4), "rewards": torch.arange(4.0)})

    def estimator(rewards: Tensor) -> Tensor:
        raise raised

    with pytest.raises(StageError, match=rf"estimator=estimator raised {type(raised).__name__}") as caught:
        lab.compute_advantages(batch, estimator=estimator)
    check(caught.value)
    assert lab.compute_advantages(batch, estimator=lambda rewards: rewards).rows == 4


@pytest.mark.parametrize("raised", RAISED, ids=lambda error: type(error).__name__)
def test_a_schedule(raised: BaseException) -> None:
    def schedule(step: int) -> float:
        raise raised

    with pytest.raises(BadInput, match=rf"schedule\(0\) raised {type(raised).__name__}") as caught:
        wb.Training(schedule=schedule)
    assert "\x1b" not in str(caught.value)


@pytest.mark.thorough
def test_a_schedule_that_ends_its_process_later(tmp_path: Path) -> None:
    def schedule(step: int) -> float:
        if step == 150:  # after the steps that are tried
            raise SystemExit(3)
        return 1.0

    with tiny_lab("later", tmp_path, backend="inline", models={"actor": TINY}) as lab:
        lab.actor.training.schedule = schedule
        batch = lab.put(stored(4), meta={"temperature": 1.0})
        for _ in range(75):  # of two steps each
            lab.actor.update_actor(batch)
        with expect_error(BadInput, value=r"schedule\(150\) raised SystemExit: 3"):
            lab.actor.update_actor(batch)
        lab.actor.training.schedule = "constant"
        assert lab.actor.update_actor(batch)["optimizer_steps"] > 0


@pytest.mark.parametrize("raised", [RAISED[0], RAISED[3]], ids=lambda error: type(error).__name__)
def test_a_worker_of_ones_own(tmp_path: Path, raised: BaseException) -> None:
    class Mine(ActorWorker):
        @wb.register("ONE_TO_ALL")
        def ends(self) -> None:
            raise raised

    with tiny_lab("worker", tmp_path, backend="inline", models={"actor": wb.Model(TINY, worker=Mine)}) as lab:
        with pytest.raises(StageError, match=rf"ends failed on rank 0: {type(raised).__name__}") as caught:
            lab.actor.ends()
        check(caught.value)
        assert lab.actor.compute_log_prob(lab.put(stored(4), meta={"temperature": 1.0})).rows == 4


def test_an_interrupt_of_a_loss_itself_is_the_stop_of_its_stage(lab: wb.Workbench) -> None:
    batch = lab.put(stored(4), meta={"temperature": 1.0})
    with pytest.raises(StageInterrupted):
        lab.actor.update_actor(batch, loss=raising(KeyboardInterrupt()))
