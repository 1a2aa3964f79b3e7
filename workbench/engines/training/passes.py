"""One micro-batch of an optimizer step."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor


def _nothing() -> None:
    pass


@dataclass(frozen=True, kw_only=True)
class Pass:
    """A micro-batch of an optimizer step.

    inputs: keyword arguments of the module's `forward`. loss: from its output to a scalar already divided by the
    minibatch's denominator; called where the output is, on a pipeline on the last stage. tokens: for the record. begin:
    called on every rank before its forward pass.
    """

    inputs: Mapping[str, Any]
    loss: Callable[[Any], Tensor]
    tokens: int = 0
    begin: Callable[[], None] = _nothing
