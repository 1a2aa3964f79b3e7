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
    """What the module is given, and the loss of what it gives.

    inputs: keyword arguments of the module's `forward`. loss: from its output to a scalar already divided by the
    minibatch's denominator; called where the output is, which on a pipeline is the last stage alone.
    tokens: that it is said to process. begin: called on every rank before its forward pass.
    """

    inputs: Mapping[str, Any]
    loss: Callable[[Any], Tensor]
    tokens: int = 0
    begin: Callable[[], None] = _nothing
