"""Finds what updates changed in the weights that a rank trains, by a copy of the weights from the last time."""

from __future__ import annotations

import torch
from torch import Tensor

from workbench.engines.training import TrainingEngine
from workbench.models.spec import Model
from workbench.resharding.weights import Weight
from workbench.workers.weight_exchange import weights_of
from workbench.workers.worker import Context

PIECE = 2**24  # elements compared at once: the comparison needs little extra memory


class WatchedWeights:
    """A copy in host memory of the float32 weights that this rank trains, as they were after `since` optimizer steps.
    Ranks that hold the same weights each keep a part of them."""

    def __init__(self, engine: TrainingEngine, spec: Model, context: Context) -> None:
        assert spec.training is not None and spec.dtype is not None
        layout, zero = context.layout, spec.training.zero_stage if spec.training.engine == "deepspeed" else 0
        self._sharded = zero == 3 or (zero > 0 and spec.dtype == "bfloat16")  # the optimizer has sharded masters
        self._stretch = (0, 1) if self._sharded else (layout.coordinates(context.communicator.rank)[0], layout.d)
        self._engine, self._dtype, self.since = engine, getattr(torch, spec.dtype), engine.steps
        self._offloads = self._sharded and context.host.offloads
        config = engine.module.get_backbone().config
        several = layout.p * layout.t > 1  # several ranks hold some elements, such as those of a norm
        self._elements = {w.name: w.numel for w in weights_of(config, spec.dtype, layout)} if several else {}
        self._kept = {name: now.to("cpu", copy=True) for name, now in self._held()}
        self.nbytes = sum(kept.nbytes for kept in self._kept.values())

    def _held(self) -> list[tuple[str, Tensor]]:
        self._engine.load("parameters")
        if self._sharded:
            self._engine.load("optimizer")
        k, d = self._stretch
        held = ((name, tensor.flatten(), tensor.numel()) for name, tensor in self._engine.held_state("parameters"))
        return [(name, flat[n * k // d : n * (k + 1) // d]) for name, flat, n in held]

    @torch.no_grad()
    def changes(self) -> dict[str, tuple[str, int, int, int, int, float]]:
        """Return what has changed since the last time, see `OpenSync.changed`, and update the copy to this version."""
        found = {}
        for name, now in self._held():
            trained, visible, square = 0, 0, 0.0
            for new, kept in zip(now.split(PIECE), self._kept[name].split(PIECE), strict=True):
                old = kept.to(new.device)
                trained += _differing(new, old)
                visible += _differing(new.to(self._dtype), old.to(self._dtype))
                square += float(torch.linalg.vector_norm(new - old, dtype=torch.float64)) ** 2
                kept.copy_(new)
            layer = Weight(name=name, shape=(), item_bytes=4).group
            found[name] = layer, self._elements.get(name, 0), now.numel(), trained, visible, square
        if self._offloads:  # the device may next need room for the engine's weights
            self._engine.offload("optimizer")
        self.since = self._engine.steps
        return found


def _differing(a: Tensor, b: Tensor) -> int:
    bits = {2: torch.int16, 4: torch.int32}[a.element_size()]  # NaN is not equal to itself
    return int((a.view(bits) != b.view(bits)).sum())
