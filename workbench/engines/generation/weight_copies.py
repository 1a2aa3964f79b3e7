"""Copies new weights directly into the live parameters of a vLLM model.

If vLLM multiplies by its parameters as they were loaded, as on a GPU, a sync need not load the model again: it copies
each weight into its own parameter, or into its slice of a fused parameter such as qkv_proj. vLLM's own loaders show
which slice: they run once on weights without data, and their copies are recorded instead of made. Nothing is allocated
and no parameter is moved, so CUDA graphs, which keep addresses, stay valid.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from workbench.errors import SyncError

# Weights are copied in groups of about this size: a gathered weight need not live until the last one has arrived.
BUCKET_BYTES = 256 * 2**20


@dataclass(frozen=True)
class _Slice:
    """A part of a parameter. region: its source in a weight as size, stride and offset; None: the whole weight."""

    target: Tensor
    region: tuple[tuple[int, ...], tuple[int, ...], int] | None

    def of(self, weight: Tensor) -> Tensor:
        if self.region is None:
            return weight.reshape(self.target.shape)
        whole, (size, stride, offset) = weight.contiguous(), self.region
        return whole.as_strided(size, stride, whole.storage_offset() + offset)


class WeightCopies:
    """The copies that write weights of these names and shapes into a model, made again at every sync."""

    def __init__(self, slices: Mapping[str, list[_Slice]], shapes: Mapping[str, torch.Size]) -> None:
        self._slices, self._shapes = slices, shapes

    @classmethod
    def recorded(cls, model: nn.Module, shapes: Mapping[str, torch.Size]) -> WeightCopies | None:
        """Record the copies by which `model.load_weights` loads such shapes; None if it does more than copy."""
        stand_ins = {name: torch.empty(shape, device="meta") for name, shape in shapes.items()}
        names = {_storage(tensor): name for name, tensor in stand_ins.items()}
        recorder = _Recorder(names)
        loads: Any = model
        try:
            with torch.no_grad(), recorder:
                loads.load_weights(iter(stand_ins.items()))
        except Exception:  # a loader that reads the data, which the stand-ins lack
            return None
        if recorder.asks_for_more or not _covers(model, recorder.slices):
            return None
        return cls({name: recorder.slices.get(name, []) for name in shapes}, shapes)

    @torch.no_grad()
    def run(self, named_weights: Iterable[tuple[str, Tensor]], partial: bool = False) -> None:
        """Copy and cast weights. Raises `SyncError` unless exactly the known weights arrive; partial: some suffice."""
        targets: list[Tensor] = []
        sources: list[Tensor] = []
        waiting, missing = 0, set(self._shapes)
        for name, weight in named_weights:
            if weight.shape != self._shapes.get(name):
                raise SyncError(
                    f"weight {name!r} of shape {tuple(weight.shape)}",
                    "each sync must send weights of the same names and shapes",
                    "for another model, close the engine and create a new one",
                )
            missing.discard(name)
            for part in self._slices[name]:
                targets.append(part.target)
                sources.append(part.of(weight))
                waiting += part.target.nbytes
            if waiting >= BUCKET_BYTES:
                torch._foreach_copy_(targets, sources, non_blocking=True)
                targets, sources, waiting = [], [], 0
        if targets:
            torch._foreach_copy_(targets, sources, non_blocking=True)
        if missing and not partial:
            raise SyncError(
                f"{len(missing)} weights did not arrive, {min(missing)!r} among them",
                "a sync must send every weight of the model",
                "pass all of the trainer's weights",
            )

    def holds(self, bit_sums: Mapping[str, Tensor]) -> bool:
        """Return whether the model has weights with these `bit_sum`s where the copies would put them."""
        placed = {name: parts for name, parts in self._slices.items() if parts}
        if not placed:
            return False
        mine = torch.stack([sum((bit_sum(p.target) for p in parts), torch.tensor(0)) for parts in placed.values()])
        return torch.equal(mine, torch.stack([bit_sums[name].to(mine.device) for name in placed]))

    def places(self) -> dict[str, Tensor]:
        """Return the weights that are one whole tensor in the model, live, by transformers' names."""
        alone = {name: parts[0] for name, parts in self._slices.items() if len(parts) == 1}
        return {name: part.target for name, part in alone.items() if part.region is None}

    def live(self) -> dict[str, Tensor]:
        """Return `places()` if these are all weights; else an empty dict."""
        return places if (places := self.places()).keys() == self._shapes.keys() else {}


class _Recorder(TorchDispatchMode):
    """Records copies from weights without data into real tensors, and leaves these unchanged. asks_for_more: whether
    the loader wrote anything else but zeros, which are padding."""

    def __init__(self, names: Mapping[int, str]) -> None:
        super().__init__()
        self._names, self.slices, self.asks_for_more = names, dict[str, list[_Slice]](), False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not func._schema.is_mutable or args[0].is_meta:
            return func(*args, **(kwargs or {}))
        target = args[0]
        if func is torch.ops.aten.copy_.default and args[1].shape == target.shape:
            source = args[1]
            name = self._names.get(_storage(source)) if source.is_meta else None
            if name is not None:
                self.slices.setdefault(name, []).append(_Slice(target, _region(source)))
                return target
        self.asks_for_more |= func not in (torch.ops.aten.fill_.Scalar, torch.ops.aten.zero_.default)
        return target


def keeps_weights_as_loaded(model: nn.Module) -> bool:
    """Return whether vLLM computes with a model's parameters as loaded: plain linear layers, embeddings and norms.

    On a CPU it packs a copy of them; quantized layers, experts, and attention with compressed keys are prepared after
    loading, which a plain copy would leave outdated.
    """
    from vllm.model_executor.layers.layernorm import GemmaRMSNorm, LayerNorm, RMSNorm
    from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod
    from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod, VocabParallelEmbedding

    known = (LinearBase, VocabParallelEmbedding, RMSNorm, GemmaRMSNorm, LayerNorm, nn.LayerNorm)
    plain = (UnquantizedLinearMethod, UnquantizedEmbeddingMethod, type(None))
    for layer in model.modules():
        if not list(layer.parameters(recurse=False)) and not hasattr(layer, "kv_b_proj"):
            continue
        packed = getattr(layer, "cpu_linear", nn.functional.linear) is not nn.functional.linear
        if packed or not isinstance(layer, known) or type(getattr(layer, "quant_method", None)) not in plain:
            return False
    return True


def bit_sum(tensor: Tensor) -> Tensor:
    """Return the sum of a tensor's elements, their bits read as integers: sums of parts add up to the whole's sum."""
    bits = {1: torch.int8, 2: torch.int16, 4: torch.int32}[tensor.element_size()]
    return tensor.detach().contiguous().view(bits).sum(dtype=torch.int64)


def _covers(model: nn.Module, slices: Mapping[str, list[_Slice]]) -> bool:
    """Return whether copies fill every parameter; of a vocabulary, all rows except padding."""
    from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

    filled: dict[int, int] = {}
    for parts in slices.values():
        for part in parts:
            filled[_storage(part.target)] = filled.get(_storage(part.target), 0) + part.target.numel()
    for layer in model.modules():
        for parameter in layer.parameters(recurse=False):
            rows = layer.org_vocab_size if isinstance(layer, VocabParallelEmbedding) else len(parameter)
            if filled.get(_storage(parameter)) != parameter[:rows].numel():
                return False
    return True


def _region(source: Tensor) -> tuple[tuple[int, ...], tuple[int, ...], int] | None:
    """Return the region of its storage that a view covers; None: all of it, in order."""
    whole = source.is_contiguous() and source.numel() * source.element_size() == source.untyped_storage().nbytes()
    return None if whole else (tuple(source.shape), source.stride(), int(source.storage_offset()))


def _storage(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)
