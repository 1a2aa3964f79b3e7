"""A policy that computes in another precision for a moment, and has the bits that it had afterwards."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from workbench.models.heads import TokenLogProbs
from workbench.models.logits import Float32Head
from workbench.models.lora import ADAPTER, adapted_layers, merged_weight
from workbench.settings.precision import Precision


@contextmanager
def computing_in(module: TokenLogProbs, precision: Precision) -> Iterator[None]:
    """Inside, the module computes in that precision, from copies of its weights: as many bytes more as these have."""
    dtype = getattr(torch, precision.dtype)
    before = {parameter: parameter.data for parameter in module.parameters()}
    device = next(iter(before)).device
    with ExitStack() as inside:
        inside.callback(_put_back, before)
        if precision.adapter == "merged":
            _merge(module)
        head: Any = module.model.get_output_embeddings()
        inside.enter_context(_in_float32(head) if precision.head == "float32" else _as_the_rest(head))
        held = dtype if precision.weights == "same" else torch.float32
        for parameter in before:
            parameter.data = parameter.data.to(held)
        autocast = held != dtype
        inside.enter_context(torch.autocast(device.type, dtype if autocast else None, enabled=autocast))
        yield


def _put_back(before: dict[nn.Parameter, Tensor]) -> None:
    for parameter, data in before.items():
        parameter.data = data


@torch.no_grad()
def _merge(module: nn.Module) -> None:
    for layer in adapted_layers(module).values():
        merged, up = merged_weight(layer), layer.lora_B[ADAPTER].weight
        layer.get_base_layer().weight.data = merged
        up.data = torch.zeros_like(up.data)


@contextmanager
def _as_the_rest(head: Any) -> Iterator[None]:
    """Inside, the output head computes in the dtype of the model, also one that `Training.head_dtype` has in fp32."""
    kind = type(head)
    if kind is Float32Head:
        head.__class__ = nn.Linear
    try:
        yield
    finally:
        head.__class__ = kind


@contextmanager
def _in_float32(head: Any) -> Iterator[None]:
    """Inside, the output head computes in fp32, from its weights as they are now."""
    weight, bias = head.weight.data.float(), None if head.bias is None else head.bias.data.float()

    def forward(hidden: Tensor) -> Tensor:
        with torch.autocast(hidden.device.type, enabled=False):
            return nn.functional.linear(hidden.float(), weight, bias)

    head.forward = forward
    try:
        yield
    finally:
        del head.forward
