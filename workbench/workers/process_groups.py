"""The process groups of a role's layout, over the ranks of its pool."""

from __future__ import annotations

from typing import cast

import torch
import torch.distributed as dist

from workbench.engines.training.groups import ParallelGroups
from workbench.placement import Layout
from workbench.settings.layout import Axis
from workbench.telemetry import Recorder
from workbench.workers.communicator import Communicator


def parallel_groups(layout: Layout, communicator: Communicator, recorder: Recorder, device: str) -> ParallelGroups:
    """The groups of a layout over the pool of `communicator`, whose ranks must all call this, in the same order.

    A role that is data parallel alone has the pool as its data group, and no groups of its own.
    """
    if layout.p * layout.t == 1:
        alone = Communicator(0, 1, recorder)
        return ParallelGroups(layout=layout, data=communicator, tensor=alone, pipeline=alone)
    made: dict[str, Communicator] = {}
    for axis, place in zip(("data", "pipeline", "tensor"), layout.coordinates(communicator.rank), strict=True):
        for ranks in layout.groups(cast(Axis, axis)):
            # in the layout's order, in which a rank's number in a group is its coordinate; torch would sort them
            group = dist.new_group(ranks, sort_ranks=False) if len(ranks) > 1 else None
            if communicator.rank in ranks:
                made[axis] = Communicator(place, len(ranks), recorder, group, inner=axis == "tensor")
    # NCCL wants all ranks of a group in its first call, and a pipeline's stages meet in pairs
    made["pipeline"].all_reduce(torch.zeros(1, device=device))
    return ParallelGroups(layout=layout, **made)
