"""The only module that hands tensors to torch.distributed, counted and timed; and the process groups of a pool, and of
a role's layout over its ranks."""

from __future__ import annotations

import os
import pickle
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, cast

import psutil
import torch
import torch.distributed as dist
from torch import Tensor

from workbench.errors import BadInput
from workbench.messages.calls import HostInfo, PeerFailed
from workbench.placement import Layout
from workbench.settings.layout import Axis
from workbench.telemetry import Recorder


class Communicator:
    """Collectives over a group of ranks: all ranks of a pool (its default process group), or some of them. A single
    rank sends nothing. Ranks are numbered within the group.

    process_group: torch's group; None for the whole pool, and for a single rank. inner: the ranks compute each layer
    together: their many small collectives are counted in `moved_bytes`, without spans of their own. hosts: the ranks'
    names in the record of transfers; without them ranks are named by pool and number.
    """

    def __init__(
        self,
        rank: int,
        world_size: int,
        recorder: Recorder,
        group: dist.ProcessGroup | None = None,
        inner: bool = False,
        hosts: Sequence[str] = (),
    ) -> None:
        self.rank, self.world_size = rank, world_size
        self.moved_bytes = 0
        self.process_group = group
        self._recorder, self._inner, self._hosts = recorder, inner, tuple(hosts)

    @contextmanager
    def _counted(self, nbytes: int) -> Iterator[None]:
        self.moved_bytes += nbytes
        if self._inner:
            yield
        else:
            with self._recorder.span("communication", bytes=nbytes):
                yield

    def end_group(self) -> None:
        """Destroy a group that was made for some ranks of a pool."""
        if self.process_group is not None:
            dist.destroy_process_group(self.process_group)

    def all_reduce(self, tensor: Tensor, how: Any = dist.ReduceOp.SUM) -> Tensor:
        """Sum a tensor over the ranks, or reduce it by `how`, in place."""
        if self.world_size > 1:
            with self._counted(tensor.nbytes):
                dist.all_reduce(tensor, op=how, group=self.process_group)
        return tensor

    def all_reduce_max(self, tensor: Tensor) -> Tensor:
        """Take the maximum over the ranks, in place."""
        return self.all_reduce(tensor, dist.ReduceOp.MAX)

    def all_gather(self, tensor: Tensor) -> list[Tensor]:
        """Return the tensors of all ranks, in rank order; their first axis may differ."""
        if self.world_size == 1:
            return [tensor]
        lengths = torch.zeros(self.world_size, dtype=torch.int64, device=tensor.device)
        lengths[self.rank] = len(tensor)
        self.all_reduce(lengths)
        padded = tensor.new_zeros((int(lengths.max()), *tensor.shape[1:]))
        padded[: len(tensor)] = tensor
        gathered = [torch.empty_like(padded) for _ in range(self.world_size)]
        with self._counted(padded.nbytes):
            dist.all_gather(gathered, padded, group=self.process_group)
        return [part[: int(n)] for part, n in zip(gathered, lengths, strict=True)]

    def gathered(self, tensor: Tensor) -> Tensor:
        """Return the tensors of all ranks as one tensor, in rank order, along the first axis."""
        return torch.cat(self.all_gather(tensor))

    def shared_by_group(self, size: int, make: Callable[[], list[Any]]) -> list[Any]:
        """Join, in rank order, the lists that `make` returns on the `size` consecutive ranks of this tensor group.

        All ranks of the pool call it at the same time. If `make` raises on one rank, all ranks raise that error: none
        waits for a rank that gave up.
        """
        if size == 1:
            return make()
        mine: list[Any] | Exception
        try:
            mine = make()
        except Exception as error:
            mine = error
        packed = torch.frombuffer(bytearray(pickle.dumps(mine)), dtype=torch.uint8)
        parts = [mine if rank == self.rank else pickle.loads(part.numpy().tobytes())
                 for rank, part in enumerate(self.all_gather(packed))]  # fmt: skip
        whole: list[Any] = []
        first = self.rank - self.rank % size
        for rank, part in enumerate(parts):
            if isinstance(part, Exception):
                raise mine if isinstance(mine, Exception) else part  # a rank's own error has its cause and frames
            if first <= rank < first + size:
                whole += part
        return whole

    def broadcast(self, tensor: Tensor, source: int) -> Tensor:
        """Broadcast the tensor of rank `source`, in place."""
        if self.world_size > 1:
            with self._counted(tensor.nbytes if self.rank == source else 0):
                dist.broadcast(tensor, group=self.process_group, group_src=source)
        return tensor

    @contextmanager
    def all_or_none(self) -> Iterator[None]:
        """Inside the block, a rank may raise alone: then all ranks raise at its end, the others `PeerFailed`. A rank
        that went on would wait in the next collective for the rank that raised."""
        error: Exception | None = None
        try:
            yield
        except Exception as caught:
            error = caught
        # several hosts in one process form no group, and share no collective
        met = self.world_size > 1 and dist.is_initialized()
        failed = met and bool(self.all_reduce_max(torch.tensor([int(error is not None)])).item())
        if error is not None:
            raise error
        if failed:
            raise PeerFailed("this rank stopped", "another rank of the stage failed")

    def exchange(
        self, sends: Sequence[tuple[int, Tensor]], receives: Sequence[tuple[int, Tensor]], weights: str = ""
    ) -> None:
        """Send tensors to ranks and fill tensors from ranks, all at the same time; all tensors must be contiguous.

        Two ranks must list the tensors between them in the same order. weights: a name, if the tensors are weights:
        then the receiver records one transfer per tensor.
        """
        if not sends and not receives:
            return
        operations = [
            dist.P2POp(how, tensor, group=self.process_group, group_peer=rank)
            for how, pairs in ((dist.isend, sends), (dist.irecv, receives))
            for rank, tensor in pairs
        ]
        with self._counted(sum(tensor.nbytes for _, tensor in sends)):
            start_s = self._recorder.now_s()
            works = dist.batch_isend_irecv(operations)
            ends_s = []
            # One work per operation, or one for all of them if the transport joins them (NCCL).
            for work in works[len(sends) :] if len(works) == len(operations) else works:
                work.wait()
                ends_s.append(self._recorder.now_s())
            for work in works[: len(sends)]:
                work.wait()
        names = self._hosts or [f"{self._recorder.pool}-{rank}" for rank in range(self.world_size)]
        for index, (rank, tensor) in enumerate(receives if weights else ()):
            self._recorder.add_transfer(
                names[rank], names[self.rank], start_s, ends_s[min(index, len(ends_s) - 1)],
                bytes=tensor.nbytes, columns=weights, kind="weights",
            )  # fmt: skip


# --- process groups ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class ParallelGroups:
    """The groups of one rank in a layout, each along one axis; the rank's number in a group is its coordinate.

    data: ranks with the same part of the model and different rows: sums over the batch are sums over this group.
    tensor: ranks with slices of the same layers. pipeline: ranks with the layers before and after.
    """

    layout: Layout
    data: Communicator
    tensor: Communicator
    pipeline: Communicator

    @property
    def model_parallel(self) -> bool:
        return self.layout.p * self.layout.t > 1

    @property
    def is_leader(self) -> bool:
        """Whether this rank's outputs and metrics count for its replica: it is the first tensor rank of the last stage.
        The replica's other ranks have the same rows."""
        return self.tensor.rank == 0 and self.last

    @property
    def first(self) -> bool:
        """Whether this is the first pipeline stage: it has the embeddings."""
        return self.pipeline.rank == 0

    @property
    def last(self) -> bool:
        """Whether this is the last pipeline stage: it has the head, and so outputs and losses."""
        return self.pipeline.rank == self.pipeline.world_size - 1


COLLECTIVE_TIMEOUT = timedelta(minutes=30)
LOOPBACK = "127.0.0.1"


def open_store(*, several: bool) -> tuple[dist.Store, str, int]:
    """Open the rendezvous store of a pool on rank 0; return it, its address and its port. several: there are other
    ranks, perhaps on other machines.

    It listens on this machine's loopback or on its address in the cluster; a single rank's store does not listen.
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
            f"cannot listen on {address}, the address that Ray has for this machine ({error})",
            "the ranks of a pool connect through an address of their machine",
            "start Ray with --node-ip-address=<an address of this machine>",
        ) from error
    port = listening.getsockname()[1]
    store = dist.TCPStore(
        address, port, is_master=True, wait_for_workers=False, timeout=COLLECTIVE_TIMEOUT,
        master_listen_fd=listening.detach(),
    )  # fmt: skip
    return store, address, port


def join_pool(info: HostInfo, address: str, port: int, store: dist.Store | None) -> dist.Store | None:
    """Join a pool's process group, the default group of this process; NCCL on GPUs, gloo on CPUs. store: rank 0's.
    Returns the store of this rank.

    An existing default group of the same size, of another inline workbench or of the user's, is used unchanged.
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
            "torch has one default group per process",
            "open the workbench in a process of its own, or with backend='ray'",
        )
    return store


def parallel_groups(layout: Layout, communicator: Communicator, recorder: Recorder, device: str) -> ParallelGroups:
    """Make the groups of a layout over the pool of `communicator`; all its ranks must call this, in the same order.

    A role that is only data parallel uses the pool as its data group, and has no groups of its own.
    """
    if layout.p * layout.t == 1:
        alone = Communicator(0, 1, recorder)
        return ParallelGroups(layout=layout, data=communicator, tensor=alone, pipeline=alone)
    made: dict[str, Communicator] = {}
    for axis, place in zip(("data", "pipeline", "tensor"), layout.coordinates(communicator.rank), strict=True):
        for ranks in layout.groups(cast(Axis, axis)):
            # ranks in the layout's order, so that a rank's number in a group is its coordinate; torch would sort them
            group = dist.new_group(ranks, sort_ranks=False) if len(ranks) > 1 else None
            if communicator.rank in ranks:
                made[axis] = Communicator(place, len(ranks), recorder, group, inner=axis == "tensor")
    # NCCL needs all ranks of a group in its first call: later calls may be between pairs
    for group in (communicator, *made.values()):
        group.all_reduce(torch.zeros(1, device=device))
    return ParallelGroups(layout=layout, **made)


def _interface_to(store: str) -> str | None:
    """Return the network interface by which this machine takes part in a pool whose store has that address: the
    loopback, or the interface with the address by which Ray knows this machine. None if no interface has it."""
    mine = LOOPBACK
    if store != LOOPBACK:
        import ray

        mine = ray.util.get_node_ip_address()
    found = psutil.net_if_addrs().items()
    return next((name for name, addresses in found if mine in (one.address for one in addresses)), None)
