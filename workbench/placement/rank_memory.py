"""The memory of one rank of a role, to the byte where engines leave no choice. Pure: nothing is loaded.

`tests/placement/test_memory.py` compares it with live engines.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from workbench.placement.activations import activation_bytes
from workbench.placement.generation_memory import engine_bytes, kv_elements_per_token, padded, working_bytes
from workbench.placement.role_model import RoleModel, local_sizes
from workbench.resharding.weights import Weight
from workbench.settings.engines import Training
from workbench.settings.layout import Layout

# DeepSpeed flattens the weights of a parameter group, and pads the run to a multiple of this for each rank.
ALIGNMENT = 2
# ZeRO-3 keeps a weight of at most so many elements whole on every rank, once it has run.
PERSISTENT_ELEMENTS = 100_000
# ZeRO-3 gathers at most so many elements of weights ahead.
LIVE_ELEMENTS = 1_000_000_000
# DeepSpeed's and torch's buckets of gradients that are summed over the ranks in one call, elements.
BUCKET_ELEMENTS = {"torch": 25_000_000, "zero": 50_000_000}
# An Adam optimizer keeps its step count as an fp32 number for each tensor that it is given.
STEP_BYTES = 4

# Beside the weights, while Muon makes the step of a matrix: it in fp32, and four times in bf16.
MUON_BYTES = 4 + 4 * 2

# bitsandbytes: elements of a block, both tables of 256 fp32 values; on a CPU a step has both moments, the gradient and
# the weight once more in fp32, and what they are quantized from.
BLOCK_8BIT, TABLES_8BIT_BYTES, EXTRA_8BIT_BYTES = 256, 2 * 256 * 4, 6 * 4

LASTING = ("parameters", "optimizer", "kept_gradients", "generation_weights", "generation_kv_cache")
PASSING = ("gradients", "activations")


@dataclass(frozen=True, kw_only=True)
class RankMemory:
    """Bytes of one rank of a role.

    parameters, optimizer, kept_gradients: between updates, from the first one on. gradients: beside these, when those
    of an update are complete. generation_weights, generation_kv_cache: of a generation engine that keeps them; the
    cache at most. activations: a bound of what a pass needs beside all that, see `activation_bytes`, with gathered
    weights, the buckets in which gradients are summed, and a cache that exists only while the engine decodes. decoding:
    of them, those of the generation engine. may_be_mapped: of the parameters, those that a CPU host may map from the
    file, without memory of their own.
    """

    parameters: int = 0
    optimizer: int = 0
    kept_gradients: int = 0
    gradients: int = 0
    generation_weights: int = 0
    generation_kv_cache: int = 0
    activations: int = 0
    decoding: int = 0
    may_be_mapped: int = 0

    @property
    def lasting(self) -> int:
        """Held while other roles of the device compute."""
        return sum(getattr(self, use) for use in LASTING)

    @property
    def generating(self) -> int:
        """Held by the generation engine between rollouts."""
        return self.generation_weights + self.generation_kv_cache

    @property
    def turn(self) -> int:
        """The peak where roles of a device take turns: the generation engine sleeps while its role is trained, and the
        trainer is offloaded after a sync."""
        trained, synced = self.lasting - self.generating + self.passing, self.parameters + self.generation_weights
        return max(trained, synced, self.generating + self.decoding)

    def certain(self, *, on_cpu: bool) -> int:
        """The least of what lasts: a CPU allocates memory when it is written, so that a cache may stay small, and
        weights that are mapped from a file may be shared."""
        return self.lasting - (self.generation_kv_cache + self.may_be_mapped if on_cpu else 0)

    @property
    def passing(self) -> int:
        """Held, at most, only while this role computes."""
        return self.gradients + self.activations


def rank_memory(role: RoleModel, layout: Layout, rank: int, *, cache_bytes: int | None = None) -> RankMemory:
    """The memory of rank `rank` of a role. cache_bytes: of vLLM's key-value cache on a GPU, see `Room`; None: a CPU
    host.

    Raises `BadInput` where the layout does not cut the model.
    """
    frozen = local_sizes(role.frozen_weights, layout, rank)
    trained = local_sizes(role.trained_weights, layout, rank)
    kept = sum(size for _, size in frozen)
    total = sum(size for _, size in trained)
    stage = int(role.engine[-1]) if role.engine.startswith("zero") else 0
    replicas, (k, _, _) = layout.d, layout.coordinates(rank)
    parameters = kept * role.frozen_bytes + total * role.stored_bytes
    optimizer, kept_gradients, gradients, extra = 0, 0, 0, 0
    if role.trained and stage == 0:
        muon = [size for weight, size in trained if role.training.is_for_muon(weight.name, len(weight.shape))]
        optimizer, gradients = total * 8 - sum(muon) * 4 + (len(trained) - len(muon)) * STEP_BYTES, total * 4
        extra = max(muon, default=0) * MUON_BYTES
        if role.training.optimizer == "adamw_8bit":
            optimizer, extra = _moments_8bit([size for _, size in trained], role.training, on_cpu=cache_bytes is None)
    elif stage in (1, 2):
        groups = list(parameter_groups(trained, role.training).values())
        flats = [padded(sum(group), ALIGNMENT * replicas) for group in groups if group]
        parameters = kept * role.frozen_bytes + sum(flats) * role.stored_bytes
        optimizer = sum(flats) // replicas * 12 + len(flats) * STEP_BYTES
        if role.stored_bytes == 4:
            gradients = sum(_overlapping(group, k, replicas) for group in groups if group) * 4
        elif stage == 1:  # fp32 sums beside the bf16 gradients of a pass
            kept_gradients, gradients = sum(flats) * 4, total * 2
        else:
            gradients = sum(flats) // replicas * 4
    elif stage == 3:
        own, own_trained = _shards(frozen, replicas), _shards(trained, replicas)
        live = [(size, item) for held, item in ((frozen, role.frozen_bytes), (trained, role.stored_bytes))
                for _, size in held]  # fmt: skip
        small = [(size, item) for size, item in live if size <= PERSISTENT_ELEMENTS]
        # gathered with the padding of its shards; alone on its rank a weight is its shard
        persistent = sum(padded(size, replicas) * item for size, item in small) if replicas > 1 else 0
        parameters = own * role.frozen_bytes + own_trained * role.stored_bytes + persistent
        groups_3 = len(parameter_groups(trained, role.training))
        optimizer, kept_gradients = own_trained * 12 + groups_3 * STEP_BYTES, own_trained * 4
        if replicas > 1:
            gathered = sum(size for size, _ in live if size > PERSISTENT_ELEMENTS)
            extra = min(gathered, LIVE_ELEMENTS) * role.stored_bytes
    extra += _bucket_bytes(role, total, replicas)
    generation_weights, generation_kv_cache = engine_bytes(role, layout, stage, rank, cache_bytes)
    decoding = 0
    if role.generation is not None and role.generation.engine == "transformers":  # its cache lives while it decodes
        rows = role.generation.rows_at_once(on_gpu=False) * role.generation.max_model_tokens
        decoding = rows * kv_elements_per_token(role) * role.frozen_bytes
    elif role.generation is not None and cache_bytes is not None:
        decoding = working_bytes(role)
    unmapped = total and not (stage or role.adapter)  # what is trained is written to; ZeRO copies what it shards
    return RankMemory(
        parameters=parameters,
        optimizer=optimizer,
        kept_gradients=kept_gradients,
        gradients=gradients,
        generation_weights=generation_weights,
        generation_kv_cache=generation_kv_cache,
        activations=max(activation_bytes(role, layout, rank) + extra, decoding),
        decoding=decoding,
        may_be_mapped=0 if unmapped or stage == 3 else kept * role.frozen_bytes,
    )


def blocks_8bit(elements: int) -> int:
    """Blocks of a tensor, each with a scale of its own."""
    return -(-elements // BLOCK_8BIT)


def _moments_8bit(sizes: Sequence[int], training: Training, *, on_cpu: bool) -> tuple[int, int]:
    """Bytes of the moments of tensors of so many elements, and of what a step needs beside them."""
    large = [size for size in sizes if training.is_8bit(size)]
    codes = sum(size + blocks_8bit(size) * 4 for size in large) * 2
    tables = TABLES_8BIT_BYTES if large else 0
    extra = max(large, default=0) * EXTRA_8BIT_BYTES if on_cpu else 0
    return (sum(sizes) - sum(large)) * 8 + codes + tables, extra


def parameter_groups(held: Sequence[tuple[Weight, int]], training: Training) -> dict[tuple[int, bool], list[int]]:
    """The elements of the weights of each parameter group, in the optimizer's order."""
    found: dict[tuple[int, bool], list[int]] = {}
    for weight, size in held:
        found.setdefault(training.group_of(weight.name, len(weight.shape)), []).append(size)
    return {key: found[key] for key in sorted(found)}


def _bucket_bytes(role: RoleModel, elements: int, replicas: int) -> int:
    """The buffers in which gradients are summed over the ranks; ZeRO 2 and 3, and in fp32 ZeRO 1, have them on a single
    rank too."""
    if not role.trained:
        return 0
    if not role.engine.startswith("zero"):
        return min(elements, BUCKET_ELEMENTS["torch"]) * 4 if replicas > 1 else 0
    bucket = min(elements, BUCKET_ELEMENTS["zero"])
    if role.engine in ("zero2", "zero3") or (role.engine == "zero1" and role.stored_bytes == 4):
        return bucket * role.stored_bytes
    return bucket * 4 if replicas > 1 else 0


def _shards(held: Sequence[tuple[Weight, int]], replicas: int) -> int:
    """Elements of ZeRO-3's equal shards of each weight, padding included."""
    return sum(-(-size // replicas) for _, size in held)


def _overlapping(sizes: Sequence[int], k: int, replicas: int) -> int:
    """Elements of the tensors, laid end to end, that reach into the k-th of equal partitions, and its padding: in fp32
    ZeRO-1 and 2 keep the gradient of a tensor that two ranks share whole on both."""
    each, total = padded(sum(sizes), ALIGNMENT * replicas) // replicas, sum(sizes)
    found = (k + 1) * each - min(max(total, k * each), (k + 1) * each)  # padding
    start = 0
    for size in sizes:
        if start < (k + 1) * each and start + size > k * each:
            found += size
        start += size
    return found
