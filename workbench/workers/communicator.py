"""The one place where tensors are handed to torch.distributed, counted and timed."""

from __future__ import annotations

import pickle
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from workbench.messages.replies import PeerFailed
from workbench.telemetry import Recorder


class Communicator:
    """Collectives over a group of ranks: those of a pool (its default process group), or some of them. With one rank
    nothing is sent. Ranks are numbered within the group.

    group: None for the whole pool. inner: of ranks that compute each layer together: their many small collectives are
    counted in `moved_bytes`, without spans of their own. hosts: the ranks' names in the record of transfers; without
    them they are named by pool and rank. sent_bytes: bytes that `exchange` has sent, by destination.
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
        self.sent_bytes: Counter[int] = Counter()
        self._recorder, self._group, self._inner, self._hosts = recorder, group, inner, tuple(hosts)

    @property
    def process_group(self) -> dist.ProcessGroup | None:
        """torch's group of these ranks; None for the whole pool, and for a single rank."""
        return self._group

    @contextmanager
    def _counted(self, nbytes: int = 0) -> Iterator[None]:
        self.moved_bytes += nbytes
        if self._inner:
            yield
        else:
            with self._recorder.span("communication", bytes=nbytes):
                yield

    def end_group(self) -> None:
        """Destroy a group that was made for some ranks of a pool."""
        if self._group is not None:
            dist.destroy_process_group(self._group)

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """Sum over the ranks, in place."""
        return self._reduce(tensor, dist.ReduceOp.SUM)

    def all_reduce_max(self, tensor: Tensor) -> Tensor:
        """Maximum over the ranks, in place."""
        return self._reduce(tensor, dist.ReduceOp.MAX)

    def _reduce(self, tensor: Tensor, how: Any) -> Tensor:
        if self.world_size > 1:
            with self._counted(tensor.nbytes):
                dist.all_reduce(tensor, op=how, group=self._group)
        return tensor

    def all_gather(self, tensor: Tensor) -> list[Tensor]:
        """The tensors of all ranks, in rank order; their first axis may differ."""
        if self.world_size == 1:
            return [tensor]
        lengths = torch.zeros(self.world_size, dtype=torch.int64, device=tensor.device)
        lengths[self.rank] = len(tensor)
        self.all_reduce(lengths)
        padded = tensor.new_zeros((int(lengths.max()), *tensor.shape[1:]))
        padded[: len(tensor)] = tensor
        gathered = [torch.empty_like(padded) for _ in range(self.world_size)]
        with self._counted(padded.nbytes):
            dist.all_gather(gathered, padded, group=self._group)
        return [part[: int(n)] for part, n in zip(gathered, lengths, strict=True)]

    def gathered(self, tensor: Tensor) -> Tensor:
        """The tensors of all ranks as one, in rank order, along the first axis."""
        return torch.cat(self.all_gather(tensor))

    def shared_by_group(self, size: int, make: Callable[[], list[Any]]) -> list[Any]:
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
        """The tensor of rank `source`, in place."""
        if self.world_size > 1:
            with self._counted(tensor.nbytes if self.rank == source else 0):
                dist.broadcast(tensor, group=self._group, group_src=source)
        return tensor

    def barrier(self) -> None:
        if self.world_size > 1:
            with self._counted():
                dist.barrier(group=self._group)

    @contextmanager
    def all_or_none(self) -> Iterator[None]:
        """Inside, a rank may raise alone: then all ranks raise at the end, the others `PeerFailed`. One that went on
        would wait in the next collective for the rank that raised."""
        error: Exception | None = None
        try:
            yield
        except Exception as caught:
            error = caught
        # hosts of one process form no group, and meet in no collective
        met = self.world_size > 1 and dist.is_initialized()
        failed = met and bool(self.all_reduce_max(torch.tensor([int(error is not None)])).item())
        if error is not None:
            raise error
        if failed:
            raise PeerFailed("this rank did not begin", "another rank of the stage could not")

    def exchange(
        self, sends: Sequence[tuple[int, Tensor]], receives: Sequence[tuple[int, Tensor]], weights: str = ""
    ) -> None:
        """Send tensors to ranks and fill tensors from ranks, all at the same time; all of them contiguous.

        Two ranks must list what goes between them in the same order. weights: what the tensors are, where they are
        weights: then the receiver records a transfer a tensor.
        """
        if not sends and not receives:
            return
        operations = [dist.P2POp(dist.isend, tensor, group=self._group, group_peer=rank) for rank, tensor in sends]
        operations += [dist.P2POp(dist.irecv, tensor, group=self._group, group_peer=rank) for rank, tensor in receives]
        with self._counted(sum(tensor.nbytes for _, tensor in sends)):
            start_s = self._recorder.now_s()
            works = dist.batch_isend_irecv(operations)
            for rank, tensor in sends:
                self.sent_bytes[rank] += tensor.nbytes
            ends_s = []
            # One for each operation, or one for all of them where the transport joins them (NCCL).
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
