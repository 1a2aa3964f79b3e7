"""Losses and workers on Ray that would end their process: an error in the cell, and hosts that live on."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest
from torch import Tensor

import workbench as wb
from tests.cases import TINY, stored, tiny_lab
from tests.integration.test_user_calls import hosts_of
from workbench.errors import StageError
from workbench.workers.roles.actor import ActorWorker


class Ends(BaseException):
    pass


class Unsayable(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no words")


class Mine(ActorWorker):
    @wb.register("ONE_TO_ALL")
    def ends(self, error: Any) -> None:
        raise error


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[wb.Workbench]:
    models = {"actor": wb.Model(TINY, worker=Mine)}
    placement = wb.Placement.colocate(2)
    with tiny_lab("hostile", tmp_path_factory.mktemp("runs"), models=models, placement=placement, devices=2) as lab:
        yield lab


@pytest.mark.parametrize(
    "raised", [SystemExit(3), KeyboardInterrupt(), asyncio.CancelledError(), Ends("now"), Unsayable()],
    ids=lambda error: type(error).__name__,
)  # fmt: skip
@pytest.mark.thorough
def test_hosts_live_on(lab: wb.Workbench, raised: BaseException) -> None:
    batch, hosts = lab.put(stored(4), meta={"temperature": 1.0}), hosts_of(lab)

    def loss(log_prob: Tensor, mask: Tensor) -> Tensor:
        raise raised

    with pytest.raises(StageError, match=rf"loss=loss raised {type(raised).__name__}"):
        lab.actor.update_actor(batch, loss=loss)
    with pytest.raises(StageError, match=rf"actor.ends failed on rank 0, 1: {type(raised).__name__}"):
        lab.actor.ends(raised)
    assert hosts_of(lab) == hosts
    assert lab.actor.compute_log_prob(batch).rows == 4
