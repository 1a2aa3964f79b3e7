"""Ranks whose engine generates as one: lists that each of them makes a part of."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

import torch

from workbench.workers.communicator import Communicator


def shared_by_group(communicator: Communicator, size: int, make: Callable[[], list[Any]]) -> list[Any]:
    """The lists that `make` gives on the `size` consecutive ranks of this tensor group, end to end, in rank order.

    All ranks of the pool call it at the same time. Where `make` raises on one of them all raise that error, so that
    none waits for a rank that gave up.
    """
    if size == 1:
        return make()
    mine: list[Any] | Exception
    try:
        mine = make()
    except Exception as error:
        mine = error
    packed = torch.frombuffer(bytearray(pickle.dumps(mine)), dtype=torch.uint8)
    parts = [mine if rank == communicator.rank else pickle.loads(part.numpy().tobytes())
             for rank, part in enumerate(communicator.all_gather(packed))]  # fmt: skip
    whole: list[Any] = []
    first = communicator.rank - communicator.rank % size
    for rank, part in enumerate(parts):
        if isinstance(part, Exception):
            raise mine if isinstance(mine, Exception) else part  # a rank's own error has its cause and frames
        if first <= rank < first + size:
            whole += part
    return whole
