"""Runs sequences of unequal length packed end to end in one row, without padding; they do not attend to each other.

A sequence may continue another sequence of the pack, such as the responses to one prompt: it also attends to that
sequence, and the prompt is computed once for all responses.

transformers' models look up their attention function by name and pass on unknown arguments of their `forward`
(https://huggingface.co/docs/transformers/attention_interface). We register one more function: given a `Pack`, it
computes attention inside each sequence, so nothing is quadratic in the pack's length; without a pack, such as when the
same model generates from padded prompts, it calls transformers' SDPA.

Shapes: T tokens of all sequences together, S sequences, H heads, K key-value heads, D head size.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor, nn

from workbench.errors import MissingDependency
from workbench.models.loading import longest_sequence
from workbench.support.files import home

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Result = TypeVar("Result")
NAME = "packed_sequences"
# Layers that tell our function how tokens attend: "chunked_attention" shows only in the mask, others are recurrent.
LAYER_TYPES = {"full_attention", "sliding_attention"}
# Arguments by which some families change attention scores; our function does not support them.
UNKNOWN_TO_US = ("softcap", "s_aux", "position_bias")


@dataclass(frozen=True)
class Pack:
    """The sequences of a packed row, and the tokens that each attends to.

    lengths: S numbers. boundaries: int32 [S + 1], from 0 to T. position_ids: int64 [1, T], from 0 in each sequence, or
    from the end of the sequence that it continues. key_lengths, key_boundaries: the same for the keys of each
    sequence: first the tokens of the sequence that it continues, then its own. key_indices: int64 [sum of key_lengths],
    the index of each key among the T tokens; None: each sequence attends only to itself. windows: the sliding windows
    with which layers have run the pack; None for layers without one.
    """

    lengths: tuple[int, ...]
    boundaries: Tensor
    position_ids: Tensor
    key_lengths: tuple[int, ...]
    key_boundaries: Tensor
    key_indices: Tensor | None
    windows: set[int | None] = field(default_factory=set, compare=False)

    @classmethod
    def of(cls, lengths: Sequence[int], device: torch.device, after: Sequence[int] = ()) -> Pack:
        """Return the pack of sequences with these lengths. after: for each sequence the index of the sequence that it
        continues (which must not continue another), or -1; empty: all -1."""
        ends = [0, *accumulate(lengths)]
        tokens = [torch.arange(start, end) for start, end in pairwise(ends)]
        starts = [0 if number < 0 else lengths[number] for number in after or [-1] * len(lengths)]
        position_ids = torch.cat([torch.arange(s, s + n) for s, n in zip(starts, lengths, strict=True)])[None]
        key_lengths = tuple(s + n for s, n in zip(starts, lengths, strict=True))
        boundaries = torch.tensor(ends, dtype=torch.int32)
        if not any(starts):
            here = to_device(boundaries, device)
            return cls(tuple(lengths), here, to_device(position_ids, device), key_lengths, here, None)
        key_indices = torch.cat(
            [tokens[i] for own, number in enumerate(after) for i in ((own,) if number < 0 else (number, own))]
        )
        key_boundaries = torch.tensor([0, *accumulate(key_lengths)], dtype=torch.int32)
        parts = (to_device(part, device) for part in (boundaries, position_ids, key_boundaries, key_indices))
        boundaries, position_ids, key_boundaries, key_indices = parts
        return cls(tuple(lengths), boundaries, position_ids, key_lengths, key_boundaries, key_indices)


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy a host tensor to `device`, without waiting for the GPU's queued work."""
    if device.type != "cuda":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


def run_packed(backbone: nn.Module, input_ids: Tensor, pack: Pack, received: Tensor | None = None) -> Tensor:
    """Return the last hidden states [T, hidden] of packed token ids [T], from a backbone prepared by `use_packing`.

    received: hidden states [T, hidden] that replace the embeddings.
    """
    # transformers passes on a mask with four axes. Without it, it would build a mask [T, T] that we do not need.
    no_mask = torch.empty((1, 1, 1, 0), dtype=torch.bool, device=input_ids.device)
    start = {"input_ids": input_ids[None]} if received is None else {"inputs_embeds": received[None]}
    output = backbone(**start, attention_mask=no_mask, position_ids=pack.position_ids, use_cache=False, pack=pack)
    return output.last_hidden_state[0]


def use_packing(model: PreTrainedModel) -> str | None:
    """Make a model run packed sequences and return None; or return why it cannot, and leave the model unchanged.

    Checks the configuration, then runs a trial: in a pack of three short sequences, the second, and the third, which
    continues the first, must give the same results as alone.
    """
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    family, before = type(model).__name__, model.config._attn_implementation
    config = model.config.get_text_config()
    unlike = set(getattr(config, "layer_types", None) or ()) - LAYER_TYPES
    if unlike or getattr(config, "attention_chunk_size", None):
        return f"{family} has layers of {', '.join(sorted(unlike)) or 'chunked_attention'}"
    if not model._can_set_attn_implementation():
        return f"the attention of {family} cannot be replaced"
    if NAME not in ALL_ATTENTION_FUNCTIONS:  # `compile_layers` registers it in another form
        AttentionInterface.register(NAME, packed_attention)
    AttentionMaskInterface.register(NAME, sdpa_mask)  # for calls without a pack
    model.set_attn_implementation(NAME)
    why = tried_once("packing", model, _why_no_packs)
    if why is not None:
        model.set_attn_implementation(before)
    return why


_tried: dict[tuple[Any, ...], Any] = {}


def tried_once(what: str, model: PreTrainedModel, attempt: Callable[[PreTrainedModel], Result]) -> Result:
    """Return `attempt(model)`, whose result must depend only on the model's code, configuration, dtype and device type.
    Models that are equal in these, such as the roles of a host, are tried once per process."""
    code = frozenset(type(module).forward for module in model.modules())
    alike = (what, code, model.dtype, model.device.type, model.config.to_json_string(use_diff=False))
    if alike not in _tried:
        _tried[alike] = attempt(model)
    return _tried[alike]


def _why_no_packs(model: PreTrainedModel) -> str | None:
    family, pack = type(model).__name__, Pack.of((7, 5, 4), model.device, (-1, -1, 0))
    # engines also run fp32 weights in bf16, under autocast; the GPU kernel for bf16 refuses some head sizes
    also_bf16 = model.dtype == torch.float32 and model.device.type == "cuda"
    try:
        dtypes = (torch.float32, torch.bfloat16) if also_bf16 else (model.dtype,)
        errors = {dtype: _error_of_a_pack(model, pack, dtype) for dtype in dtypes}
    except Exception as refusal:
        return f"{family} cannot run packs: {refusal}"
    if _has_windows(model.config.get_text_config()) and not any(pack.windows):
        return f"{family} has its sliding window only in the mask"
    # these bounds allow for rounding; a sequence that attends to another has an error of about 1
    if all(error <= (1e-3 if dtype == torch.float32 else 0.15) for dtype, error in errors.items()):
        return None
    return f"{family} gives other results in a pack"


def _has_windows(config: Any) -> bool:
    """Whether some layers have a sliding window that is shorter than the model's longest sequence."""
    layers = getattr(config, "layer_types", None) or ["sliding_attention"]
    window, longest = getattr(config, "sliding_window", None), longest_sequence(config)
    return bool(window and "sliding_attention" in layers and (longest is None or window < longest))


@torch.no_grad()
def _error_of_a_pack(model: PreTrainedModel, pack: Pack, dtype: torch.dtype) -> float:
    """Return the relative error of packed sequences against the same sequences alone, with the model run in `dtype`.
    pack: the trial's, see `_why_no_packs`."""
    tokens = torch.arange(16, device=model.device) % model.config.get_text_config().vocab_size
    backbone = model.base_model

    def error(packed: Tensor, alone: Tensor) -> float:
        given = backbone(input_ids=alone[None], use_cache=False).last_hidden_state[0, -len(packed) :].float()
        return float((packed - given).norm() / given.norm())

    with torch.autocast(model.device.type, dtype, enabled=dtype != model.dtype, cache_enabled=False):
        packed = run_packed(backbone, tokens, pack).float()
        continued = torch.cat([tokens[:7], tokens[12:]])
        return max(error(packed[7:12], tokens[7:12]), error(packed[12:], continued))


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
    """Compute causal attention inside each sequence of a pack, [1, T, H, D]; without a pack, transformers' SDPA.

    query: [1, H, T, D]. key, value: [1, K, T, D].
    sliding_window: the number of positions that a token attends to, including its own.
    """
    if pack is None:
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **more)
    if unknown := [name for name in UNKNOWN_TO_US if more.get(name) is not None]:
        raise NotImplementedError(f"attention with {', '.join(unknown)}")
    pack.windows.add(sliding_window)
    # T as the first axis, because sequences are slices along it
    query, key, value = (x[0].transpose(0, 1) for x in (query, key, value))
    if pack.key_indices is not None:
        key, value = (x.index_select(0, pack.key_indices) for x in (key, value))
    # rotary embeddings may have brought query and key to fp32 under autocast
    if value.is_cuda and value.dtype in (torch.bfloat16, torch.float16):
        return _flash(query.to(value.dtype), key.to(value.dtype), value, scaling, sliding_window, pack)[None], None
    return _each(query, key, value, scaling, sliding_window, pack)[None], None


def _each(
    query: Tensor, key: Tensor, value: Tensor, scaling: float | None, sliding_window: int | None, pack: Pack
) -> Tensor:
    """Compute attention one sequence after the other, [T, H, D]. Computes in fp32: torch's bf16 on a CPU takes twice as
    long, mostly in the backward pass, and is less exact."""
    of_each = zip(
        *(x.float().split(n) for x, n in ((query, pack.lengths), (key, pack.key_lengths), (value, pack.key_lengths))),
        strict=True,
    )
    parts = []
    with torch.autocast(query.device.type, enabled=False):
        for q, k, v in of_each:
            mask = _mask(len(q), len(k), sliding_window, q.device)
            out = nn.functional.scaled_dot_product_attention(
                q.transpose(0, 1)[None],
                k.transpose(0, 1)[None],
                v.transpose(0, 1)[None],
                attn_mask=mask,
                is_causal=mask is None,
                scale=scaling,
                enable_gqa=q.shape[1] != k.shape[1],
            )
            parts.append(out[0].transpose(0, 1))
    return torch.cat(parts).to(value.dtype)


def _mask(queries: int, keys: int, sliding_window: int | None, device: torch.device) -> Tensor | None:
    """Return the mask of the last `queries` of `keys` tokens, [queries, keys]; None if it is plain causal."""
    if queries == keys and (sliding_window is None or keys <= sliding_window):
        return None
    visible = torch.ones(queries, keys, dtype=torch.bool, device=device).tril(keys - queries)
    return visible if sliding_window is None else visible.triu(keys - queries + 1 - sliding_window)


def _flash(
    query: Tensor, key: Tensor, value: Tensor, scaling: float | None, sliding_window: int | None, pack: Pack
) -> Tensor:
    """Like `_each`, by torch's flash attention for sequences of varying length, in one kernel. Its causal mask is
    aligned at the ends of queries and keys, like ours."""
    from torch.nn.attention.varlen import varlen_attn

    out = varlen_attn(
        query, key, value,
        pack.boundaries, pack.key_boundaries, max(pack.lengths), max(pack.key_lengths),
        scale=scaling,
        window_size=(-1 if sliding_window is None else sliding_window - 1, 0),
        enable_gqa=query.shape[1] != key.shape[1],
    )  # fmt: skip
    assert isinstance(out, Tensor)
    return out


def compile_layers(module: nn.Module) -> None:
    """Let the layers of a transformers model be compiled at their first run, into `$WORKBENCH_HOME/compiled`:
    operations between two matrix products become one kernel. Attention is not compiled: it is a kernel already, and
    would be compiled again for each pack's lengths. So a layer has three or four graphs, for any number of tokens.

    Raises `MissingDependency` without a C++ compiler.
    """
    from transformers import AttentionInterface
    from transformers.modeling_layers import GradientCheckpointingLayer

    if not (os.environ.get("CXX") or shutil.which("g++") or shutil.which("clang++")):
        raise MissingDependency(
            "there is no C++ compiler", "Training(compile=True) writes C++ and compiles it", "install g++"
        )
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(home() / "compiled"))
    AttentionInterface.register(NAME, torch.compiler.disable(packed_attention))
    for layer in module.modules():
        if isinstance(layer, GradientCheckpointingLayer):
            layer.compile(dynamic=True)
