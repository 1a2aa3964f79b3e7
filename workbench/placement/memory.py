"""The memory of one rank of a role, to the byte where engines leave no choice. Pure: nothing is loaded.

    rank_memory        the bytes of one rank, by use: `RankMemory`
    activation_bytes   what a pass needs beside weights and gradients
    engine_bytes       what a generation engine holds

`tests/placement/test_memory.py` compares it with live engines, `benchmarks/memory.py` with torch's allocators: the peak
within 10 %.
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
# Rows of logits that live at the same time (`workbench.models.heads.ROWS_PER_CALL`). In fp32 there are two copies of
# them, three with entropies, which updates and scoring report; of a bfloat16 model also what its head gave. A head that
# computes in fp32 has copies of its weights and of the hidden states in fp32, and gives one more copy of the logits.
LOGIT_ROWS = 512
# What generation engines round the vocabulary up to a multiple of.
VOCABULARY_MULTIPLE = {"transformers": 1, "vllm": 64}
# Tokens of vLLM's cache are kept in blocks of so many, of which one stays empty.
BLOCK_TOKENS = 16
# Most tokens that vLLM puts through the model at once on a GPU, beside rows that it decodes.
STEP_TOKENS = 8192
# Copies of logits, in fp32, that it samples from, and rows of a prompt that it scores at once.
LOGIT_COPIES, SCORED_ROWS = 3, 1024
# Its CUDA graphs.
GRAPHS_BYTES = GIB // 2

LASTING = ("parameters", "optimizer", "kept_gradients", "generation_weights", "generation_kv_cache", "sync_copy")
PASSING = ("gradients", "activations")


@dataclass(frozen=True, kw_only=True)
class RankMemory:
    """Bytes of one rank of a role.

    parameters, optimizer, kept_gradients: between updates, from the first one on. gradients: beside these, when those
    of an update are complete. generation_weights, generation_kv_cache: of a generation engine that keeps them; the
    cache at most. sync_copy: what weight syncs may keep of the last one, for patches; only where there is room.
    activations: a bound of what a pass needs beside all that, see `activation_bytes`, with gathered
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
    sync_copy: int = 0
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
        unsure = self.generation_kv_cache + self.may_be_mapped if on_cpu else 0
        return self.lasting - self.sync_copy - unsure

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
        rows = role.generation.rows_at_once(on_gpu=False)
        decoding = rows * role.generation.max_model_tokens * role.kv_bytes_per_token
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
        sync_copy=sync_copy_bytes(role, layout, rank, stage, on_cpu=cache_bytes is None),
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


def parameter_groups(
    held: Sequence[tuple[Weight, int]], training: Training
) -> dict[tuple[int, bool], list[tuple[Weight, int]]]:
    """The weights of each parameter group with their elements, in the optimizer's order."""
    found: dict[tuple[int, bool], list[tuple[Weight, int]]] = {}
    for weight, size in held:
        found.setdefault(training.group_of(weight.name, len(weight.shape)), []).append((weight, size))
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


def activation_bytes(role: RoleModel, layout: Layout, rank: int) -> int:
    """Bytes that a rank needs for a pass of `role.tokens_bound` tokens: what a forward pass keeps for the backward pass
    of a trained role and the largest step of that, else the largest step of a forward pass.

    For each token, a decoder layer of hidden size h, with q and k = v elements of queries and keys and f of its MLP,
    keeps the inputs of matrix products, attention and the MLP's gate (4 f + 3 q + 2 k), and for its two norms and what
    reads them 6 h in fp32; under autocast 4 h in fp32 and a bfloat16 copy for each of 5 products; of bfloat16 weights
    2 h in fp32 and 4 h in bfloat16. A tensor rank has 1/t of q, k and f; stage i of p pipeline stages has its layers'
    for the p - i micro-batches that are under way there. Recomputed activations are h for each layer and all of one.
    The step is the backward pass of an MLP, 2 f and 3 h, or that of the head; forward, 3 f and 4 h. Under autocast
    bfloat16 copies of the weights come on top.
    """
    tokens, hidden, inner, item = role.tokens_bound, role.hidden, role.inner, role.frozen_bytes
    _, stage, _ = layout.coordinates(rank)
    autocast = role.trained and role.stored_bytes > item
    stream = FP32 if autocast else item  # of an element that goes from layer to layer
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
            head += vocabulary * hidden * FP32  # one call's gradient of the table, before it is added
    if not role.trained:
        return int(max(tokens * (3 * inner / layout.t + 4 * hidden + 2 * role.head_dim) * item, head))
    step = tokens * (2 * inner / layout.t * item + 3 * hidden * stream)
    head += 3 * tokens * hidden * FP32  # the last norm, and the hidden states that are read
    if role.training.activation_checkpointing:
        kept, step = float(layers * tokens * hidden * stream * in_flight), step + layer
    else:
        kept = layers * layer * in_flight
    copies = role.weights.nbytes / (layout.p * layout.t) if autocast else 0.0
    return int(kept + max(step, head) + copies)


def engine_bytes(role: RoleModel, layout: Layout, stage: int, rank: int, cache_bytes: int | None) -> tuple[int, int]:
    """(weights, key-value cache) of the generation engine of a rank.

    stage: of ZeRO, which trains. cache_bytes: the cache of a GPU; None: on a CPU host the settings say it.
    """
    settings = role.generation
    if settings is None:
        return 0, 0
    if settings.engine == "transformers":
        # with whole weights it samples from the trainer's module
        own = role.samples_only or stage == 3 or layout.p * layout.t > 1
        return (role.weights.nbytes + role.adapter_bytes if own else 0), 0
    weights = vllm_weight_bytes(role, rank % settings.tensor_parallel_size, on_cpu=cache_bytes is None)
    return weights, int(settings.kv_cache_gib * GIB) if cache_bytes is None else cache_bytes


def sync_copy_bytes(role: RoleModel, layout: Layout, rank: int, stage: int, *, on_cpu: bool) -> int:
    """What a rank may keep of the last weight sync, for patches: an actor what it published, a rollout worker what its
    engine has in another form, ranks that cut the actor what went between them, at most. stage: of ZeRO."""
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
    """Most bytes of one sequence in vLLM's cache on a rank."""
    assert role.generation is not None
    ranks = min(role.generation.tensor_parallel_size, role.key_heads)
    return padded(role.generation.max_model_tokens + 1, BLOCK_TOKENS) * role.kv_bytes_per_token // ranks


def useful_cache_bytes(role: RoleModel) -> int:
    """A cache with room for all rows that vLLM decodes at the same time; 0 for an engine without one."""
    if role.generation is None or role.generation.engine != "vllm":
        return 0
    return (role.generation.rows_at_once(on_gpu=True) + 1) * row_bytes(role)


def working_bytes(role: RoleModel) -> int:
    """A bound of vLLM's memory on a GPU beside weights and cache: a step's activations, logits, the state of its
    sampler, CUDA graphs."""
    assert role.generation is not None
    ranks, rows = role.generation.tensor_parallel_size, role.generation.rows_at_once(on_gpu=True)
    step = STEP_TOKENS * (6 * role.hidden + 3 * role.inner // ranks) * role.frozen_bytes
    logits = (max(rows, SCORED_ROWS) * LOGIT_COPIES + rows) * role.vocabulary * FP32
    return step + logits + GRAPHS_BYTES


def padded(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple


def vllm_weight_bytes(role: RoleModel, j: int, *, on_cpu: bool) -> int:
    """Weights of tensor rank j of vLLM: slices, the vocabulary padded to equal ones. On a CPU embedding and head exist
    twice, also packed for products; where they are tied, each is packed."""
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
