"""The memory of one rank of a role, exact to the byte if the engine determines it. Pure: nothing is loaded.

    rank_memory        the bytes of one rank, by use: `RankMemory`
    activation_bytes   the bytes of a pass, in addition to weights and gradients
    engine_bytes       the bytes of a generation engine

`tests/placement/test_memory.py` compares these with live engines, `benchmarks/memory.py` with torch's allocators: the
peak is within 10 %.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from workbench.placement.role_model import RoleModel, local_sizes
from workbench.resharding.weights import Weight
from workbench.settings.layout import Layout
from workbench.settings.training import Training

GIB, FP32 = 2**30, 4
# DeepSpeed flattens the weights of a parameter group and pads them to a multiple of this for each rank.
ALIGNMENT = 2
# After its first run, ZeRO-3 keeps weights of at most this many elements whole on every rank.
PERSISTENT_ELEMENTS = 100_000
# ZeRO-3 gathers at most this many elements of weights ahead.
LIVE_ELEMENTS = 1_000_000_000
# The elements of a bucket of gradients, which torch and DeepSpeed all-reduce in one call.
BUCKET_ELEMENTS = {"torch": 25_000_000, "zero": 50_000_000}
# Adam keeps a step count for each tensor, as an fp32 number.
STEP_BYTES = 4

# Additional bytes per element while Muon computes the step of a matrix: one copy in fp32, four in bf16.
MUON_BYTES = 4 + 4 * 2

# bitsandbytes: elements of a block; two tables of 256 fp32 values; on a CPU, a step has further fp32 copies of both
# moments, the gradient and the weight, and of the values before quantization.
BLOCK_8BIT, TABLES_8BIT_BYTES, EXTRA_8BIT_BYTES = 256, 2 * 256 * 4, 6 * 4
# Rows of logits that exist at the same time (`workbench.models.heads.ROWS_PER_CALL`). There are two fp32 copies of
# them, three with entropies, which updates and scoring report; a bfloat16 model also has its head's output. A head that
# computes in fp32 has fp32 copies of its weights and of the hidden states, and one more copy of the logits.
LOGIT_ROWS = 512
# Generation engines round the vocabulary up to a multiple of this.
VOCABULARY_MULTIPLE = {"transformers": 1, "vllm": 64}
# The tokens of a block of vLLM's cache; one block stays empty.
BLOCK_TOKENS = 16
# The most tokens per step that vLLM puts through the model on a GPU, in addition to decoded rows.
STEP_TOKENS = 8192
# The fp32 copies of logits in vLLM's sampler, and the rows of a prompt that vLLM scores at once.
LOGIT_COPIES, SCORED_ROWS = 3, 1024
# vLLM's CUDA graphs.
GRAPHS_BYTES = GIB // 2

LASTING = ("parameters", "optimizer", "kept_gradients", "generation_weights", "generation_kv_cache", "sync_copy")
PASSING = ("gradients", "activations")


@dataclass(frozen=True, kw_only=True)
class RankMemory:
    """Bytes of one rank of a role.

    parameters, optimizer, kept_gradients: held between updates, from the first update on. gradients: in addition, when
    an update's gradients are complete. generation_weights, generation_kv_cache: of a generation engine that keeps them;
    the cache is an upper bound. sync_copy: the copy of the last weight sync, for patches; kept only if there is room.
    activations: a bound of a pass's additional bytes, see `activation_bytes`, including gathered weights, the buckets
    for all-reduces of gradients, and a cache that exists only while the engine decodes. decoding: the part of
    activations that belongs to the generation engine. may_be_mapped: the part of parameters that a CPU host may map
    from the file, without using memory.
    """

    parameters: int = 0
    optimizer: int = 0
    kept_gradients: int = 0
    gradients: int = 0
    generation_weights: int = 0
    generation_kv_cache: int = 0
    sync_copy: int = 0
    activations: int = 0
    decoding: int = 0
    may_be_mapped: int = 0

    @property
    def lasting(self) -> int:
        """Bytes held while other roles of the device compute."""
        return sum(getattr(self, use) for use in LASTING)

    @property
    def generating(self) -> int:
        """Bytes held by the generation engine between rollouts."""
        return self.generation_weights + self.generation_kv_cache

    @property
    def turn_peak(self) -> int:
        """The peak bytes if roles of a device take turns: the generation engine sleeps while its role is trained, and
        the trainer is offloaded after a sync."""
        trained, synced = self.lasting - self.generating + self.passing, self.parameters + self.generation_weights
        return max(trained, synced, self.generating + self.decoding)

    def least_bytes(self, *, on_cpu: bool) -> int:
        """Return the least lasting bytes. on_cpu: memory is allocated when written, so a cache may stay small, and
        weights mapped from a file may be shared."""
        unsure = self.generation_kv_cache + self.may_be_mapped if on_cpu else 0
        return self.lasting - self.sync_copy - unsure

    @property
    def passing(self) -> int:
        """A bound of the bytes held only while this role computes."""
        return self.gradients + self.activations


def rank_memory(role: RoleModel, layout: Layout, rank: int, *, cache_bytes: int | None = None) -> RankMemory:
    """Return the memory of a rank of a role. cache_bytes: of vLLM's key-value cache on a GPU, see `Room`; None: the
    rank is on a CPU host.

    Raises `BadInput` if the layout cannot divide the model.
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
        grouped = parameter_groups(trained, role.training).values()
        groups = [[size for _, size in group] for group in grouped]
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
        # a gathered weight has the padding of its shards; with one replica, the shard is the weight
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
    if role.generation is not None and role.generation.engine == "transformers":  # has a cache only while it decodes
        rows = role.generation.rows_at_once(on_gpu=False)
        decoding = rows * role.generation.max_model_tokens * role.kv_bytes_per_token
    elif role.generation is not None and cache_bytes is not None:
        decoding = working_bytes(role)
    unmapped = total and not (stage or role.adapter)  # trained weights are written, and ZeRO copies those it shards
    return RankMemory(
        parameters=parameters,
        optimizer=optimizer,
        kept_gradients=kept_gradients,
        gradients=gradients,
        generation_weights=generation_weights,
        generation_kv_cache=generation_kv_cache,
        sync_copy=sync_copy_bytes(role, layout, rank, stage, on_cpu=cache_bytes is None),
        activations=max(activation_bytes(role, layout, rank) + extra, decoding),
        decoding=decoding,
        may_be_mapped=0 if unmapped or stage == 3 else kept * role.frozen_bytes,
    )


def blocks_8bit(elements: int) -> int:
    """Return the number of a tensor's blocks; each block has its own scale."""
    return -(-elements // BLOCK_8BIT)


def _moments_8bit(sizes: Sequence[int], training: Training, *, on_cpu: bool) -> tuple[int, int]:
    """Return the bytes of the moments of tensors with `sizes` elements, and the additional bytes of a step."""
    large = [size for size in sizes if training.is_8bit(size)]
    codes = sum(size + blocks_8bit(size) * 4 for size in large) * 2
    tables = TABLES_8BIT_BYTES if large else 0
    extra = max(large, default=0) * EXTRA_8BIT_BYTES if on_cpu else 0
    return (sum(sizes) - sum(large)) * 8 + codes + tables, extra


def parameter_groups(
    held: Sequence[tuple[Weight, int]], training: Training
) -> dict[tuple[int, bool], list[tuple[Weight, int]]]:
    """Return the weights of each parameter group with their elements, in the optimizer's order."""
    found: dict[tuple[int, bool], list[tuple[Weight, int]]] = {}
    for weight, size in held:
        found.setdefault(training.group_of(weight.name, len(weight.shape)), []).append((weight, size))
    return {key: found[key] for key in sorted(found)}


def _bucket_bytes(role: RoleModel, elements: int, replicas: int) -> int:
    """Return the bytes of the buffers for all-reduces of gradients. ZeRO-2 and 3, and ZeRO-1 in fp32, have them on a
    single rank too."""
    if not role.trained:
        return 0
    if not role.engine.startswith("zero"):
        return min(elements, BUCKET_ELEMENTS["torch"]) * 4 if replicas > 1 else 0
    bucket = min(elements, BUCKET_ELEMENTS["zero"])
    if role.engine in ("zero2", "zero3") or (role.engine == "zero1" and role.stored_bytes == 4):
        return bucket * role.stored_bytes
    return bucket * 4 if replicas > 1 else 0


def _shards(held: Sequence[tuple[Weight, int]], replicas: int) -> int:
    """Return the elements of a rank's ZeRO-3 shards: an equal part of each weight, including padding."""
    return sum(-(-size // replicas) for _, size in held)


def _overlapping(sizes: Sequence[int], k: int, replicas: int) -> int:
    """Concatenate tensors and split them into equal partitions: return the elements of all tensors that overlap the
    k-th partition, plus its padding. In fp32, ZeRO-1 and 2 keep the whole gradient of a shared tensor on both ranks."""
    each, total = padded(sum(sizes), ALIGNMENT * replicas) // replicas, sum(sizes)
    found = (k + 1) * each - min(max(total, k * each), (k + 1) * each)  # padding
    start = 0
    for size in sizes:
        if start < (k + 1) * each and start + size > k * each:
            found += size
        start += size
    return found


def activation_bytes(role: RoleModel, layout: Layout, rank: int) -> int:
    """Return the bytes of a rank's pass of `role.tokens_bound` tokens. Trained role: activations that the forward pass
    keeps, plus the largest step of the backward pass. Other roles: the largest step of a forward pass.

    A decoder layer has hidden size h, q elements of queries, k of keys and as many of values, and f of its MLP. Per
    token it keeps the inputs of matrix products, attention and the MLP's gate (4 f + 3 q + 2 k), and for its two norms
    and their outputs: in fp32, 6 h; under autocast, 4 h in fp32 and a bfloat16 copy for each of 5 products; with
    bfloat16 weights, 2 h in fp32 and 4 h in bfloat16. A tensor rank has 1/t of q, k and f; stage i of p pipeline stages
    keeps its layers' activations for p - i micro-batches. With recomputation, h per layer, and all of one layer, are
    kept. The largest step is the backward pass of an MLP, 2 f and 3 h, or of the head; in a forward pass, 3 f and 4 h.
    Under autocast, bfloat16 copies of the weights are added.
    """
    tokens, hidden, inner, item = role.tokens_bound, role.hidden, role.inner, role.frozen_bytes
    _, stage, _ = layout.coordinates(rank)
    autocast = role.trained and role.stored_bytes > item
    stream = FP32 if autocast else item  # bytes of an element of the residual stream
    if autocast:
        norms = 4 * FP32 + 5 * item
    else:
        norms = 6 * FP32 if item == FP32 else 2 * FP32 + 4 * item
    layer = tokens * (norms * hidden + (4 * inner + 3 * role.queries + 2 * role.keys) / layout.t * item)
    layers = -(-role.layers // layout.p)
    in_flight = layout.p - stage
    head = 0.0
    if role.head == "lm" and stage == layout.p - 1:
        vocabulary = role.vocabulary / layout.t
        rows, in_fp32 = min(LOGIT_ROWS, tokens), role.training.head_dtype == "float32"
        of_head = 0 if item == FP32 else FP32 if in_fp32 else item
        head = rows * vocabulary * (FP32 * (3 if role.trained else 2) + of_head)
        if in_fp32 and (role.stored_bytes if role.trained and role.adapter is None else item) < FP32:
            head += vocabulary * hidden * FP32
        if role.trained and role.adapter is None:
            head += vocabulary * hidden * FP32  # one call's gradient of the head's weights, before accumulation
    if not role.trained:
        return int(max(tokens * (3 * inner / layout.t + 4 * hidden + 2 * role.head_dim) * item, head))
    step = tokens * (2 * inner / layout.t * item + 3 * hidden * stream)
    head += 3 * tokens * hidden * FP32  # the last norm, and the hidden states that the head reads
    if role.training.activation_checkpointing:
        kept, step = float(layers * tokens * hidden * stream * in_flight), step + layer
    else:
        kept = layers * layer * in_flight
    copies = role.weights.nbytes / (layout.p * layout.t) if autocast else 0.0
    return int(kept + max(step, head) + copies)


def engine_bytes(role: RoleModel, layout: Layout, stage: int, rank: int, cache_bytes: int | None) -> tuple[int, int]:
    """Return the bytes (weights, key-value cache) of a rank's generation engine.

    stage: the ZeRO stage of training. cache_bytes: the cache on a GPU; None: a CPU host, with the settings' cache.
    """
    settings = role.generation
    if settings is None:
        return 0, 0
    if settings.engine == "transformers":
        # a trainer with whole weights needs no copy: the engine samples from its module
        own = role.samples_only or stage == 3 or layout.p * layout.t > 1
        return (role.weights.nbytes + role.adapter_bytes if own else 0), 0
    weights = vllm_weight_bytes(role, rank % settings.tensor_parallel_size, on_cpu=cache_bytes is None)
    return weights, int(settings.kv_cache_gib * GIB) if cache_bytes is None else cache_bytes


def sync_copy_bytes(role: RoleModel, layout: Layout, rank: int, stage: int, *, on_cpu: bool) -> int:
    """Return the most bytes that a rank keeps of the last weight sync, for patches: of what an actor published, of what
    a rollout worker's engine has in another form, of what ranks of one actor sent each other. stage: of ZeRO."""
    settings = role.generation
    if role.publishes:
        return sum(size for _, size in local_sizes(role.weights, layout, rank)) * role.frozen_bytes // layout.d
    if settings is None or settings.sync == "whole" or role.adapter is not None:
        return 0
    if role.samples_only:
        return role.weights.nbytes if settings.engine == "vllm" and on_cpu else 0
    slices = layout.size if stage == 3 else layout.p * layout.t
    shared = settings.tensor_parallel_size if settings.strategy == "hybridflow" else 1
    return role.weights.nbytes // shared if slices > shared else 0


def row_bytes(role: RoleModel) -> int:
    """Return the most bytes of one sequence in vLLM's cache on a rank."""
    assert role.generation is not None
    ranks = min(role.generation.tensor_parallel_size, role.key_heads)
    return padded(role.generation.max_model_tokens + 1, BLOCK_TOKENS) * role.kv_bytes_per_token // ranks


def useful_cache_bytes(role: RoleModel) -> int:
    """Return the bytes of a cache for all rows that vLLM decodes at the same time; 0 for an engine without a cache."""
    if role.generation is None or role.generation.engine != "vllm":
        return 0
    return (role.generation.rows_at_once(on_gpu=True) + 1) * row_bytes(role)


def working_bytes(role: RoleModel) -> int:
    """Return a bound of vLLM's memory on a GPU in addition to weights and cache: a step's activations, logits, the
    sampler's state, CUDA graphs."""
    assert role.generation is not None
    ranks, rows = role.generation.tensor_parallel_size, role.generation.rows_at_once(on_gpu=True)
    step = STEP_TOKENS * (6 * role.hidden + 3 * role.inner // ranks) * role.frozen_bytes
    logits = (max(rows, SCORED_ROWS) * LOGIT_COPIES + rows) * role.vocabulary * FP32
    return step + logits + GRAPHS_BYTES


def padded(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple


def vllm_weight_bytes(role: RoleModel, j: int, *, on_cpu: bool) -> int:
    """Return the bytes of the weights of vLLM's tensor rank j: slices, with the vocabulary padded to equal slices. On a
    CPU, embedding and head exist twice, once packed for products; if they are tied, each of both is packed."""
    assert role.generation is not None
    t, multiple, total = role.generation.tensor_parallel_size, VOCABULARY_MULTIPLE["vllm"], 0
    tied = not any(weight.name.startswith("lm_head.") for weight in role.weights)
    for weight in role.weights:
        if weight.name.rpartition(".")[0].rpartition(".")[2] in ("embed_tokens", "lm_head"):
            rows = padded(padded(weight.shape[0], multiple), t) // t
            copies = (3 if tied else 2) if on_cpu else 1
            total += rows * (weight.numel // weight.shape[0]) * copies
        else:
            total += math.prod(weight.local_shape(j, t))
    return total * role.frozen_bytes
