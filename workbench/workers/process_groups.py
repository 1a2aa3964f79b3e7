"""The process group of a pool, and those of a role's layout over its ranks."""

from __future__ import annotations

import os
import socket
from datetime import timedelta
from typing import cast

import psutil
import torch
import torch.distributed as dist

from workbench.engines.training.groups import ParallelGroups
from workbench.errors import BadInput
from workbench.messages.calls import HostInfo
from workbench.placement import Layout
from workbench.settings.layout import Axis
from workbench.telemetry import Recorder
from workbench.workers.communicator import Communicator

COLLECTIVE_TIMEOUT = timedelta(minutes=30)
LOOPBACK = "127.0.0.1"


def open_store(*, several: bool) -> tuple[dist.Store, str, int]:
    """The rendezvous of a pool, on its rank 0, with its address and port. several: there are other ranks, perhaps on
    other machines.

    It listens on this machine's loopback or on its address in the cluster; not at all where there is one rank.
    """
    if not several:
        return dist.HashStore(), LOOPBACK, 0
    import ray

    on_cluster = sum(node["Alive"] for node in ray.nodes()) > 1
    address = ray.util.get_node_ip_address() if on_cluster else LOOPBACK
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        listening = socket.create_server((address, 0), family=family)
    except OSError as error:
        raise BadInput(
            f"{address}, by which Ray knows this machine, cannot be listened on ({error})",
            "the ranks of a pool meet at an address of their machine",
            "start Ray with --node-ip-address=<an address of this machine>",
        ) from error
    port = listening.getsockname()[1]
    store = dist.TCPStore(
        address, port, is_master=True, wait_for_workers=False, timeout=COLLECTIVE_TIMEOUT,
        master_listen_fd=listening.detach(),
    )  # fmt: skip
    return store, address, port


def join_pool(info: HostInfo, address: str, port: int, store: dist.Store | None) -> None:
    """Join a pool's process group, the default group of this process; NCCL on GPUs, gloo on CPUs. store: of rank 0.

    A default group of the same size that exists, of another inline workbench or of the user's, is used as it is.
    """
    rank, size = info.rank, info.world_size
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(size), LOCAL_RANK="0", MASTER_ADDR=address, MASTER_PORT=str(port))
    # by default gloo listens on the address that the host's name has, and NCCL on an interface that it chooses
    if interface := _interface_to(address):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
        os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={interface}")
    if not dist.is_initialized():
        backend = "cpu:gloo,cuda:nccl" if info.device.startswith("cuda") else "gloo"
        store = store or dist.TCPStore(address, port, timeout=COLLECTIVE_TIMEOUT)
        dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=COLLECTIVE_TIMEOUT)
    elif dist.get_world_size() != size:
        raise BadInput(
            f"a pool of {size} rank(s) in a process whose default process group has {dist.get_world_size()}",
            "torch has one default group a process",
            "open the workbench in a process of its own, or with backend='ray'",
        )


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


def _interface_to(store: str) -> str | None:
    """The interface by which this machine takes part in a pool whose store has that address: the loopback, or the one
    that has the address by which Ray knows this machine. None where no interface has it."""
    mine = LOOPBACK
    if store != LOOPBACK:
        import ray

        mine = ray.util.get_node_ip_address()
    found = psutil.net_if_addrs().items()
    return next((name for name, addresses in found if mine in (one.address for one in addresses)), None)
