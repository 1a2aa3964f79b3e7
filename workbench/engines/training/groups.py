"""The ranks that a training engine computes with: of all replicas, of its tensor group, of its pipeline."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from torch import Tensor

from workbench.models.tensor_parallel import TensorGroup
from workbench.settings.layout import Layout

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


class Collectives(TensorGroup, Protocol):
    """The collectives that an engine needs over data-parallel ranks; the hosts' `Communicator` has them."""

    rank: int
    world_size: int


class ModelCollectives(Collectives, Protocol):
    """Also what ranks need to compute one model together. moved_bytes: sent so far."""

    moved_bytes: int

    @property
    def process_group(self) -> ProcessGroup | None:
        """torch's group of these ranks; None for a whole pool, and for a single rank."""

    def all_gather(self, tensor: Tensor) -> list[Tensor]:
        """The tensors of all ranks, in rank order; their first axis may differ."""

    def all_or_none(self) -> AbstractContextManager[None]:
        """Inside, a rank may raise alone: then all ranks raise at the end."""

    def broadcast(self, tensor: Tensor, source: int) -> Tensor:
        """The tensor of rank `source`, in place."""

    def exchange(self, sends: Sequence[tuple[int, Tensor]], receives: Sequence[tuple[int, Tensor]]) -> None:
        """Send tensors to ranks and fill tensors from ranks, all at the same time."""


@dataclass(frozen=True, kw_only=True)
class ParallelGroups:
    """The groups of one rank in a layout, each along one axis; the rank's number in a group is its coordinate.

    data: ranks with the same part of the model and other rows: sums over the batch are theirs. tensor: ranks with
    slices of the same layers. pipeline: ranks with the layers before and after.
    """

    layout: Layout
    data: ModelCollectives
    tensor: ModelCollectives
    pipeline: ModelCollectives

    @property
    def model_parallel(self) -> bool:
        return self.layout.p * self.layout.t > 1

    @property
    def moved_bytes(self) -> int:
        """Bytes sent so far inside layers, to the other tensor ranks."""
        return self.tensor.moved_bytes

    @property
    def counts(self) -> bool:
        """Whether this rank's outputs and metrics count for its replica: it is the first tensor rank of the last stage.
        The others see the same rows."""
        return self.tensor.rank == 0 and self.last

    @property
    def first(self) -> bool:
        """Whether this is the first pipeline stage: it has the embeddings."""
        return self.pipeline.rank == 0

    @property
    def last(self) -> bool:
        """Whether this is the last pipeline stage: it has the head, and so outputs and losses."""
        return self.pipeline.rank == self.pipeline.world_size - 1
