"""Workbenches that move data and load no model: small worker classes, and many hosts in one process."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

import workbench as wb
from tests.cases import TINY
from workbench.backends.inline import InlineBackend
from workbench.backends.starting import begin_loading, settle
from workbench.config.description import Description
from workbench.controller import Workbench
from workbench.messages.calls import HostInfo
from workbench.workers.host import Host


class Together(InlineBackend):
    """Several hosts in this process, which pull from each other: for workers that meet in no collective."""

    def check_free(self, pools: Sequence[str], gpus: float) -> None:
        """There is room for any."""

    def start(self, infos: Sequence[HostInfo]) -> None:
        self._hosts |= {info.name: Host(info, self.call) for info in infos}


def describe(models: Mapping[str, type | None], placement: wb.Placement) -> Description:
    """A workbench of worker classes (None: the role's own), with a slot for each device of the placement."""
    return Description.of(
        "light",
        models={role: wb.Model(TINY, worker=worker) for role, worker in models.items()},
        placement=placement, devices=placement.devices, device="cpu", backend="ray", prompts=None, training=None,
        generation=None, dtype="float32", seed=0, address=None,
    )  # fmt: skip


@contextmanager
def together(models: Mapping[str, type | None], placement: wb.Placement, runs: Path) -> Iterator[Any]:
    """A workbench whose hosts are all in this process."""
    threads = torch.get_num_threads()
    # as inline, for which a description of more than one device is refused: nothing of it outlives the test
    description = replace(describe(models, placement), backend="inline")
    lab = Workbench(description, runs)
    lab.hosts.backend = Together()
    lab.hosts.backend.start(lab.hosts.infos)
    settle(lab.hosts.backend, begin_loading(lab.hosts.backend, lab.hosts.infos, description, print), print)
    torch.set_num_threads(threads)
    with lab:
        yield lab
