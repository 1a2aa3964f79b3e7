"""A worker that holds a model: what can be asked of its weights and its mode, whatever its role."""

from __future__ import annotations

import hashlib
import random
from typing import Any

import numpy as np
import torch
from torch import Tensor

from workbench.engines.training.base import TrainingEngine, transformers_names
from workbench.messages.operation import register
from workbench.messages.protocols import ONE_TO_ALL
from workbench.workers.token_budget import TokenBudget
from workbench.workers.worker import Worker


class ModelWorker(Worker):
    """Base of the roles that have a model in an engine; `engine` is None where a function stands in for it."""

    engine: TrainingEngine | None
    budget: TokenBudget

    def take_notes(self) -> tuple[str, ...]:
        if self.engine is None:
            return ()
        notes, self.budget.notes = tuple(self.budget.notes), []
        return notes

    @property
    def micro_batch_tokens(self) -> int:
        """The upper bound of the tokens in a micro-batch, see `Training`. All ranks ask first at the same time."""
        return self.budget.tokens

    @property
    def uses_device(self) -> bool:
        return self.engine is not None

    def memory_bytes(self) -> dict[str, int]:
        if self.engine is None:
            return {}
        offloaded = {"offloaded": self.engine.offloaded_bytes} if self.context.host.share_memory else {}
        return {**self.engine.memory_bytes(), **offloaded}

    def offload(self) -> None:
        if self.engine is not None:
            self.engine.offload()

    def load(self, *, generates: bool = False) -> None:
        if self.engine is not None:
            self.engine.load("parameters")  # gradients and optimizer come with the first step

    @register(ONE_TO_ALL)
    def weight_digests(self, *, frozen: bool = False) -> dict[str, str]:
        """For each weight a short text that is equal on ranks, and at times, at which it has the same bits.

        frozen: of those alone that require no gradient, such as the model under an adapter.
        """
        if self.engine is None:
            return {}
        names = transformers_names(self.engine.module)
        parameters = self.engine.module.named_parameters()
        trained = {names.get(name, name) for name, parameter in parameters if parameter.requires_grad}
        # every rank goes through all weights: one that is sharded is gathered by all
        weights = ((name, digest(w)) for name, w in self.engine.stored_weights() if not (frozen and name in trained))
        return dict(weights)

    @register(ONE_TO_ALL)
    def training_modules(self) -> list[str]:
        """The modules in training mode, in which dropout acts; there should be none.

        Left out are layers that recompute activations: the mode of such a layer itself turns that on, and its children,
        dropout among them, have modes of their own.
        """
        if self.engine is None:
            return []
        from transformers.modeling_layers import GradientCheckpointingLayer

        modules = self.engine.module.named_modules()
        return [name for name, m in modules if m.training and not isinstance(m, GradientCheckpointingLayer)]


def digest(tensor: Tensor) -> str:
    """A short text of a tensor's bits."""
    bits = tensor.detach().to("cpu").contiguous().flatten().view(torch.uint8)
    return hashlib.blake2b(bits.numpy().data, digest_size=8).hexdigest()


def random_state() -> dict[str, Any]:
    """Where the global generators of this process stand: those of Python, numpy and torch."""
    return {
        "python": random.getstate(),
        "numpy": np.random.get_state(),  # noqa: NPY002 (the state of the old generator, which users call)
        "cpu": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
    }


def set_random_state(state: dict[str, Any]) -> None:
    """Go back to what `random_state` gave."""
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])  # noqa: NPY002
    torch.set_rng_state(state["cpu"])
    if state["cuda"]:
        torch.cuda.set_rng_state_all(state["cuda"])
