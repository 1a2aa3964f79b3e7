"""What a role asks of a training engine, and nothing else."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn


@dataclass(frozen=True, kw_only=True)
class StepReport:
    """What one optimizer step did: global gradient norm before clipping, learning rate used, steps taken so far."""

    grad_norm: float
    learning_rate: float
    steps: int


class TrainingEngine(ABC):
    """Holds one module with its gradients, optimizer and schedule on one rank of a data-parallel group.

    `module` stays in eval mode (dropout off) always: in RL dropout makes ratios lie.
    """

    module: nn.Module
    steps: int

    @abstractmethod
    def forward(self, **inputs: Any) -> Any:
        """Run the module on one micro-batch. Under `torch.no_grad()` nothing is kept for a backward pass."""

    @abstractmethod
    def step(self, losses: Sequence[Callable[[], Tensor]]) -> StepReport:
        """One optimizer step. Each callable runs `forward` and returns the loss of one micro-batch, a scalar already
        divided by the global denominator: gradients are *summed* over micro-batches and over data-parallel ranks,
        then clipped by the global norm. Every rank must pass equally many callables."""

    @abstractmethod
    def named_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Full weights by transformers' names, one at a time (gathered where sharded; every rank must iterate)."""

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """Weights, optimizer, schedule and step count of this rank, as CPU copies."""

    @abstractmethod
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Put back what `state_dict` gave, on the same rank of the same layout."""

    @abstractmethod
    def memory_bytes(self) -> dict[str, int]:
        """Bytes that live on this rank: {"parameters": .., "gradients": .., "optimizer": ..}."""


@torch.no_grad()
def release_gradients(module: nn.Module) -> None:
    """Drop gradient buffers between updates."""
    for parameter in module.parameters():
        parameter.grad = None
