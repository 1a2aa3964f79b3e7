"""The collectives of a pool: the one place where tensors are handed to torch.distributed, counted and timed."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from workbench.telemetry import Recorder


class Communicator:
    """Collectives over the ranks of one pool (its default process group). With one rank nothing is sent."""

    def __init__(self, rank: int, world_size: int, recorder: Recorder) -> None:
        self.rank, self.world_size, self._recorder = rank, world_size, recorder

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """Sum over the ranks, in place."""
        return self._reduce(tensor, dist.ReduceOp.SUM)

    def all_reduce_max(self, tensor: Tensor) -> Tensor:
        """Maximum over the ranks, in place."""
        return self._reduce(tensor, dist.ReduceOp.MAX)

    def _reduce(self, tensor: Tensor, how: Any) -> Tensor:
        if self.world_size > 1:
            with self._recorder.span("communication", bytes=tensor.nbytes):
                dist.all_reduce(tensor, op=how)
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
        with self._recorder.span("communication", bytes=padded.nbytes):
            dist.all_gather(gathered, padded)
        return [part[: int(n)] for part, n in zip(gathered, lengths, strict=True)]

    def barrier(self) -> None:
        """Wait for every rank."""
        if self.world_size > 1:
            with self._recorder.span("communication"):
                dist.barrier()
