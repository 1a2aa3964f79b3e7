"""Sequences of unequal length end to end in one row, without padding, none of which sees another.

transformers' models look up their attention function by name and hand it what their `forward` was given beside its own
arguments (https://huggingface.co/docs/transformers/attention_interface). Ours is one more name: given a `Pack` it
computes attention inside each sequence, so nothing is quadratic in the pack's length; without one, as when the same
model generates from padded prompts, it is transformers' SDPA.

Shapes: T tokens of all sequences together, S sequences, H heads, K key-value heads, D head size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Result = TypeVar("Result")
NAME = "packed_sequences"
# Layers whose mixing of tokens we are told of: "chunked_attention" shows in the mask alone, others are recurrent.
LAYER_TYPES = {"full_attention", "sliding_attention"}
# What some families add to the scores, which attention inside each sequence would lose.
UNKNOWN_TO_US = ("softcap", "s_aux", "position_bias")


@dataclass(frozen=True)
class Pack:
    """Where the sequences of a packed row lie. lengths: S. boundaries: int32 [S + 1], 0 first and T last."""

    lengths: tuple[int, ...]
    boundaries: Tensor

    @classmethod
    def of(cls, lengths: Sequence[int], device: torch.device) -> Pack:
        """From the lengths alone."""
        boundaries = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)
        return cls(tuple(lengths), boundaries.to(device))

    def position_ids(self) -> Tensor:
        """Positions that start anew in each sequence, int64 [1, T]."""
        return torch.cat([torch.arange(n, device=self.boundaries.device) for n in self.lengths])[None]


def run_packed(backbone: nn.Module, input_ids: Tensor, pack: Pack, received: Tensor | None = None) -> Tensor:
    """The last hidden states [T, hidden] of packed token ids [T], from a backbone that `use_packing` prepared.

    received: hidden states [T, hidden] that take the place of the embeddings.
    """
    # A mask of four axes is taken as it is: otherwise one of [T, T] would be made, for an attention that needs none.
    no_mask = torch.empty((1, 1, 1, 0), dtype=torch.bool, device=input_ids.device)
    start = {"input_ids": input_ids[None]} if received is None else {"inputs_embeds": received[None]}
    output = backbone(
        **start,
        attention_mask=no_mask,
        position_ids=pack.position_ids(),
        use_cache=False,
        pack=pack,
    )
    hidden: Tensor = output.last_hidden_state[0]
    return hidden


def use_packing(model: PreTrainedModel) -> str | None:
    """Let a model run packed sequences from now on: None; or why it cannot, and then it stays as it was.

    Decided by its configuration and by trying: two short sequences in a pack must give what the second gives alone.
    """
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask

    family, before = type(model).__name__, model.config._attn_implementation
    config = model.config.get_text_config()
    unlike = set(getattr(config, "layer_types", None) or ()) - LAYER_TYPES
    if unlike or getattr(config, "attention_chunk_size", None):
        return f"{family} has layers of {', '.join(sorted(unlike)) or 'chunked_attention'}"
    if not model._can_set_attn_implementation():
        return f"the attention of {family} cannot be replaced"
    AttentionInterface.register(NAME, packed_attention)
    AttentionMaskInterface.register(NAME, sdpa_mask)  # for calls without a pack
    model.set_attn_implementation(NAME)
    why = tried_once("packing", model, _why_no_packs)
    if why is not None:
        model.set_attn_implementation(before)
    return why


_tried: dict[tuple[Any, ...], Any] = {}


def tried_once(what: str, model: PreTrainedModel, attempt: Callable[[PreTrainedModel], Result]) -> Result:
    """What `attempt(model)` gives, which depends on the model's code, configuration, dtype and kind of device alone:
    models that are alike, such as the roles of a host, are tried once a process."""
    code = frozenset(type(module).forward for module in model.modules())
    alike = (what, code, model.dtype, model.device.type, model.config.to_json_string(use_diff=False))
    if alike not in _tried:
        _tried[alike] = attempt(model)
    result: Result = _tried[alike]
    return result


def _why_no_packs(model: PreTrainedModel) -> str | None:
    """Try it: None, or why the model cannot run packs."""
    family = type(model).__name__
    try:
        errors = {dtype: _error_of_a_pack(model, dtype) for dtype in _dtypes_of_runs(model)}
    except Exception as refusal:
        return f"{family} takes no packs: {refusal}"
    # rounding; one sequence seen by another makes 1
    if all(error <= (1e-3 if dtype == torch.float32 else 0.15) for dtype, error in errors.items()):
        return None
    return f"{family} computes something else in a pack"


def _dtypes_of_runs(model: PreTrainedModel) -> tuple[torch.dtype, ...]:
    """The dtypes in which it may be run: engines run fp32 weights in bf16 too, under autocast. On a GPU that is another
    attention kernel, which refuses some head sizes."""
    also_bf16 = model.dtype == torch.float32 and model.device.type == "cuda"
    return (torch.float32, torch.bfloat16) if also_bf16 else (model.dtype,)


@torch.no_grad()
def _error_of_a_pack(model: PreTrainedModel, dtype: torch.dtype) -> float:
    """How far the second of two packed sequences is from the same sequence alone, relative to its size, where the model
    is run in `dtype`."""
    tokens = torch.arange(12, device=model.device) % model.config.get_text_config().vocab_size
    backbone = model.base_model
    with torch.autocast(model.device.type, dtype, enabled=dtype != model.dtype, cache_enabled=False):
        packed = run_packed(backbone, tokens, Pack.of((7, 5), tokens.device))[7:].float()
        alone = backbone(input_ids=tokens[None, 7:], use_cache=False).last_hidden_state[0].float()
    return float((packed - alone).norm() / alone.norm())


def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    sliding_window: int | None = None,
    pack: Pack | None = None,
    **more: Any,
) -> tuple[Tensor, None]:
    """Causal attention inside each sequence of a pack: [1, T, H, D].

    query: [1, H, T, D]. key, value: [1, K, T, D].
    sliding_window: how many positions back, its own among them, a token sees. Without a `pack`, transformers' SDPA.
    """
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    if pack is None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **more)
    if unknown := [name for name in UNKNOWN_TO_US if more.get(name) is not None]:
        raise NotImplementedError(f"attention with {', '.join(unknown)}")
    # rotary embeddings may have brought query and key to fp32 under autocast
    if value.is_cuda and value.dtype in (torch.bfloat16, torch.float16):
        return _flash(query.to(value.dtype), key.to(value.dtype), value, scaling, sliding_window, pack), None
    of_each = zip(*(x.split(pack.lengths, dim=2) for x in (query, key, value)), strict=True)
    parts = [
        sdpa_attention_forward(module, q, k, v, _window(q, sliding_window), scaling=scaling)[0] for q, k, v in of_each
    ]
    return torch.cat(parts, dim=1), None


def _window(query: Tensor, sliding_window: int | None) -> Tensor | None:
    """The mask [1, 1, n, n] of a sequence longer than its window; None, which is plain causal, where it is not."""
    n = query.shape[2]
    if sliding_window is None or n <= sliding_window:
        return None
    seen = torch.ones(n, n, dtype=torch.bool, device=query.device)
    return seen.tril().triu(1 - sliding_window)[None, None]


def _flash(
    query: Tensor, key: Tensor, value: Tensor, scaling: float | None, sliding_window: int | None, pack: Pack
) -> Tensor:
    """The same by torch's flash attention for sequences of varying length, all of them in one kernel."""
    from torch.nn.attention.varlen import varlen_attn

    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    out = varlen_attn(
        q, k, v, pack.boundaries, pack.boundaries, max(pack.lengths), max(pack.lengths),
        scale=scaling,
        window_size=(-1 if sliding_window is None else sliding_window - 1, 0),
        enable_gqa=query.shape[1] != key.shape[1],
    )  # fmt: skip
    assert isinstance(out, Tensor)
    return out[None]
