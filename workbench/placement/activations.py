"""A bound of what one pass of a model needs beside its weights, from the size of a micro-batch. Pure arithmetic."""

from __future__ import annotations

from workbench.placement.role_model import RoleModel
from workbench.settings.layout import Layout

# Rows of logits that live at the same time (`workbench.models.heads.ROWS_PER_CALL`), and their fp32 copies in a
# backward pass, which computes them anew.
LOGIT_ROWS = 512
LOGIT_COPIES = 4


def activation_bytes(role: RoleModel, layout: Layout, rank: int) -> int:
    """Bytes that a rank needs at most for a pass of `role.tokens_bound` tokens: what a forward pass keeps for the
    backward pass of a trained role, else the largest layer.

    For each token, a decoder layer of hidden size h, with q and k = v elements of queries and keys and f of its MLP,
    keeps two norms (8 h in fp32) and the inputs of matrix products, rotary embeddings, attention and the MLP's gate
    (2 h + 7 q + 2 k + 4 f, in the dtype that is computed in). A tensor rank has 1/t of q, k and f; stage i of p
    pipeline stages has its layers' for the p - i micro-batches that are under way there. Recomputed activations are h
    for each layer and all of one. Under autocast bfloat16 copies of the weights come on top.
    """
    text, tokens = role.config.get_text_config(), role.tokens_bound
    _, stage, _ = layout.coordinates(rank)
    hidden, heads = int(text.hidden_size), int(getattr(text, "num_attention_heads", None) or 1)
    head_dim = int(getattr(text, "head_dim", None) or hidden // heads)
    queries = heads * head_dim
    keys = int(getattr(text, "num_key_value_heads", None) or heads) * head_dim
    inner = int(getattr(text, "intermediate_size", None) or getattr(text, "n_inner", None) or 4 * hidden)
    item = role.frozen_bytes
    layer = tokens * (8 * hidden * 4 + (2 * hidden + (7 * queries + 2 * keys + 4 * inner) / layout.t) * item)
    layers = -(-int(text.num_hidden_layers) // layout.p)
    in_flight = layout.p - stage
    if not role.trained:
        kept = layer
    elif role.training.activation_checkpointing:
        kept = layer + layers * tokens * hidden * 4 * in_flight
    else:
        kept = layers * layer * in_flight
    logits = 0.0
    if role.head == "lm" and stage == layout.p - 1:
        logits = min(LOGIT_ROWS, tokens) * int(text.vocab_size) / layout.t * 4 * (LOGIT_COPIES if role.trained else 3)
    ends = 4 * tokens * hidden * 4  # embeddings, the last norm and the hidden states that are read
    autocast = role.trained and role.stored_bytes > item
    copies = role.weights.nbytes / (layout.p * layout.t) if autocast else 0
    return int(kept + logits + ends + copies)
