"""The process groups of a role's layout, over the ranks of its pool."""

from __future__ import annotations

import torch
from torch.distributed.device_mesh import DeviceMesh

from workbench.engines.training.groups import ParallelGroups
from workbench.placement import Layout
from workbench.telemetry import Recorder
from workbench.workers.communicator import Communicator


def parallel_groups(layout: Layout, communicator: Communicator, recorder: Recorder, device: str) -> ParallelGroups:
    """The groups of a layout over the pool of `communicator`, whose ranks must all call this, in the same order.

    A role that is data parallel alone has the pool as its data group, and no groups of its own.
    """
    if layout.p * layout.t == 1:
        alone = Communicator(0, 1, recorder)
        return ParallelGroups(layout=layout, data=communicator, tensor=alone, pipeline=alone)
    axes = ("data", "pipeline", "tensor")
    mesh = DeviceMesh(device, torch.from_numpy(layout.mesh()), mesh_dim_names=axes)
    place = dict(zip(axes, layout.coordinates(communicator.rank), strict=True))
    made = {
        axis: Communicator(place[axis], mesh.size(number), recorder, mesh.get_group(axis), inner=axis == "tensor")
        for number, axis in enumerate(axes)
    }
    # NCCL wants all ranks of a group in its first call, and a pipeline's stages meet in pairs
    made["pipeline"].all_reduce(torch.zeros(1, device=device))
    return ParallelGroups(layout=layout, **made)
