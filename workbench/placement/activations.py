"""What one pass of a model needs beside its weights and gradients, from the size of a micro-batch. Pure arithmetic.

`benchmarks/memory.py` compares it with torch's allocators: within 10 % of the peak.
"""

from __future__ import annotations

from workbench.placement.role_model import RoleModel
from workbench.settings.layout import Layout

# Rows of logits that live at the same time (`workbench.models.heads.ROWS_PER_CALL`). In fp32 there are two copies of
# them, three with entropies, which updates and scoring report; of a bfloat16 model also what its head gave. A head that
# computes in fp32 has copies of its weights and of the hidden states in fp32, and gives one more copy of the logits.
LOGIT_ROWS = 512
FP32 = 4


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
    text, tokens = role.config.get_text_config(), role.tokens_bound
    _, stage, _ = layout.coordinates(rank)
    hidden, heads = int(text.hidden_size), int(getattr(text, "num_attention_heads", None) or 1)
    head_dim = int(getattr(text, "head_dim", None) or hidden // heads)
    queries = heads * head_dim
    keys = int(getattr(text, "num_key_value_heads", None) or heads) * head_dim
    inner = int(getattr(text, "intermediate_size", None) or getattr(text, "n_inner", None) or 4 * hidden)
    item = role.frozen_bytes
    autocast = role.trained and role.stored_bytes > item
    stream = FP32 if autocast else item  # of an element that goes from layer to layer
    if autocast:
        norms = 4 * FP32 + 5 * item
    else:
        norms = 6 * FP32 if item == FP32 else 2 * FP32 + 4 * item
    layer = tokens * (norms * hidden + (4 * inner + 3 * queries + 2 * keys) / layout.t * item)
    layers = -(-int(text.num_hidden_layers) // layout.p)
    in_flight = layout.p - stage
    head = 0.0
    if role.head == "lm" and stage == layout.p - 1:
        vocabulary = int(text.vocab_size) / layout.t
        rows, in_fp32 = min(LOGIT_ROWS, tokens), role.training.head_dtype == "float32"
        of_head = 0 if item == FP32 else FP32 if in_fp32 else item
        head = rows * vocabulary * (FP32 * (3 if role.trained else 2) + of_head)
        if in_fp32 and (role.stored_bytes if role.trained and role.adapter is None else item) < FP32:
            head += vocabulary * hidden * FP32
        if role.trained and role.adapter is None:
            head += vocabulary * hidden * FP32  # one call's gradient of the table, before it is added
    if not role.trained:
        return int(max(tokens * (3 * inner / layout.t + 4 * hidden + 2 * head_dim) * item, head))
    step = tokens * (2 * inner / layout.t * item + 3 * hidden * stream)
    head += 3 * tokens * hidden * FP32  # the last norm, and the hidden states that are read
    if role.training.activation_checkpointing:
        kept, step = float(layers * tokens * hidden * stream * in_flight), step + layer
    else:
        kept = layers * layer * in_flight
    copies = role.weights.nbytes / (layout.p * layout.t) if autocast else 0.0
    return int(kept + max(step, head) + copies)
