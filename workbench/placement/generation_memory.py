"""The memory of a generation engine on one rank: weights, key-value cache, and activations. Pure."""

from __future__ import annotations

import math

from workbench.placement.role_model import RoleModel
from workbench.settings.layout import Layout

GIB = 2**30
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
        return (role.weights.nbytes if own else 0), 0
    weights = vllm_weight_bytes(role, rank % settings.tensor_parallel_size, on_cpu=cache_bytes is None)
    return weights, int(settings.kv_cache_gib * GIB) if cache_bytes is None else cache_bytes


def row_bytes(role: RoleModel) -> int:
    """Most bytes of one sequence in vLLM's cache on a rank."""
    assert role.generation is not None
    blocks = -(-(role.generation.max_model_tokens + 1) // BLOCK_TOKENS)
    ranks = min(role.generation.tensor_parallel_size, key_value_heads(role))
    return blocks * BLOCK_TOKENS * kv_elements_per_token(role) * role.frozen_bytes // ranks


def useful_cache_bytes(role: RoleModel) -> int:
    """A cache with room for all rows that vLLM decodes at the same time; 0 for an engine without one."""
    if role.generation is None or role.generation.engine != "vllm":
        return 0
    return (role.generation.rows_at_once(on_gpu=True) + 1) * row_bytes(role)


def working_bytes(role: RoleModel) -> int:
    """A bound of vLLM's memory on a GPU beside weights and cache: a step's activations, logits, the state of its
    sampler, CUDA graphs."""
    assert role.generation is not None
    text, ranks = role.config.get_text_config(), role.generation.tensor_parallel_size
    hidden, vocabulary = int(text.hidden_size), int(text.vocab_size)
    inner = int(getattr(text, "intermediate_size", None) or 4 * hidden)
    step = STEP_TOKENS * (6 * hidden + 3 * inner // ranks) * role.frozen_bytes
    logits = max(role.generation.rows_at_once(on_gpu=True), SCORED_ROWS) * vocabulary * 4 * LOGIT_COPIES
    return step + logits + role.generation.rows_at_once(on_gpu=True) * vocabulary * 4 + GRAPHS_BYTES


def padded(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple


def key_value_heads(role: RoleModel) -> int:
    text = role.config.get_text_config()
    return int(getattr(text, "num_key_value_heads", None) or getattr(text, "num_attention_heads", None) or 1)


def kv_elements_per_token(role: RoleModel) -> int:
    """Elements of keys and values of one token, all layers together."""
    text = role.config.get_text_config()
    heads = int(getattr(text, "num_attention_heads", None) or 1)
    head_dim = getattr(text, "head_dim", None) or int(text.hidden_size) // heads
    return 2 * int(text.num_hidden_layers) * key_value_heads(role) * int(head_dim)


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
