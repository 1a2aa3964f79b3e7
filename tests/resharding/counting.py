"""An independent count of what moves: masks over the elements of real arrays, cut with torch's own functions.

Nothing here uses the code under test but `Layout`'s sizes. Slow and plain on purpose.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor


def shapes_of(config: Any) -> dict[str, tuple[int, ...]]:
    from transformers import AutoModelForCausalLM  # here: ranks that import this module need none of it

    with torch.device("meta"):
        model: Any = AutoModelForCausalLM.from_config(config)
    return {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}


def stages_of(name: str, p: int, config: Any) -> set[int]:
    parts = name.split(".")
    if "layers" in parts:
        return {int(parts[parts.index("layers") + 1]) // (config.num_hidden_layers // p)}
    if "embed_tokens" in name:
        return {0, p - 1} if config.tie_word_embeddings else {0}
    return {p - 1}


def cut_of(name: str, tensor: Tensor, j: int, t: int, config: Any) -> Tensor:
    """What tensor rank j of t holds of a whole tensor."""
    module, kind = name.split(".")[-2:]
    heads, key_value = config.num_attention_heads, config.num_key_value_heads
    if module in ("embed_tokens", "lm_head"):
        chunks = tensor.chunk(t)
        return chunks[j] if j < len(chunks) else tensor[:0]
    if module in ("k_proj", "v_proj"):
        by_head = tensor.reshape(key_value, -1, *tensor.shape[1:])
        if t >= key_value:
            return by_head[j * key_value // t]
        return by_head.tensor_split(t)[j].flatten(0, 1)
    if module == "q_proj":
        return tensor.reshape(heads, -1, *tensor.shape[1:]).tensor_split(t)[j].flatten(0, 1)
    if module in ("gate_proj", "up_proj"):
        return tensor.tensor_split(t)[j]
    if module == "o_proj" and kind == "weight":
        return tensor.reshape(tensor.shape[0], heads, -1).tensor_split(t, 1)[j].flatten(1, 2)
    if module == "down_proj" and kind == "weight":
        return tensor.tensor_split(t, 1)[j]
    return tensor


@dataclass
class Held:
    """A layout (p, t, d) on ranks; `of` gives the ids of the elements that a rank holds, in their local shape."""

    config: Any
    sizes: tuple[int, int, int]
    ranks: list[int]
    sharding: str = "replicas"

    def of(self, name: str, shape: tuple[int, ...], rank: int) -> Tensor | None:
        if rank not in self.ranks:
            return None
        p, t, d = self.sizes
        k, rest = divmod(self.ranks.index(rank), p * t)
        i, j = divmod(rest, t)
        if i not in stages_of(name, p, self.config):
            return None
        whole = torch.arange(int(np.prod(shape))).reshape(shape)
        local = cut_of(name, whole, j, t, self.config)
        if self.sharding == "replicas":
            return local
        chunks = (local if self.sharding == "fsdp" else local.flatten()).chunk(d)
        empty = local[:0] if self.sharding == "fsdp" else local.flatten()[:0]
        return chunks[k] if k < len(chunks) else empty

    def mask(self, name: str, shape: tuple[int, ...], rank: int) -> np.ndarray:
        found = np.zeros(int(np.prod(shape)), dtype=bool)
        if (ids := self.of(name, shape, rank)) is not None:
            found[ids.flatten().numpy()] = True
        return found


def generation_ranks(p: int, t: int, d: int, p_g: int, t_g: int, strided: bool) -> list[int]:
    """The training ranks in generation order, from the paper's section 5.3 (strided) or consecutive."""
    if not strided:
        return list(range(p * t * d))
    u, v = t // t_g, p // p_g
    found: dict[tuple[int, ...], int] = {}
    for k in range(d):
        for i in range(p):
            for j in range(t):
                found[k, (i % v) * u + j % u, i // v, j // u] = k * p * t + i * t + j
    return [found[key] for key in sorted(found)]


@dataclass
class Count:
    matrix: np.ndarray
    peak: np.ndarray
    kept: np.ndarray


def count(
    config: Any, before: Held, after: Held, ranks: list[int], item_bytes: int, *, everything: bool, nearest: Any
) -> Count:
    """Move every element one by one (a mask at a time). `nearest(rank)`: groups of ranks to ask, in this order."""
    n = len(ranks)
    result = Count(np.zeros((n, n), dtype=np.int64), np.zeros(n, dtype=np.int64), np.zeros(n, dtype=np.int64))
    for name, shape in shapes_of(config).items():
        held = {rank: before.mask(name, shape, rank) for rank in ranks}
        needed = {rank: after.mask(name, shape, rank) for rank in ranks}
        for index, rank in enumerate(ranks):
            wanted = np.ones_like(needed[rank]) if everything else needed[rank]
            missing = wanted & ~held[rank]
            for group in nearest(rank):
                for other in sorted(group):
                    taken = missing & held[other]
                    result.matrix[ranks.index(other), index] += int(taken.sum()) * item_bytes
                    missing = missing & ~taken
            assert not missing.any()
            result.peak[index] += int((wanted | held[rank]).sum()) * item_bytes
            twice = held[rank] if before.sharding == "zero" else held[rank] & ~needed[rank]
            result.kept[index] += int(twice.sum()) * item_bytes
    return result
