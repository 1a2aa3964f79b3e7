"""A model whose layers are on several ranks in sequence: hidden states go forward, their gradients back.

The schedule of an optimizer step is 1F1B (Narayanan et al. 2021, https://arxiv.org/abs/2104.04473, section 2.2): stage
i of p has at most p - i micro-batches in flight. torch.distributed.pipelining plans buffers of one shape for all
micro-batches of all steps; packed micro-batches differ in length, which every rank of a replica knows.

Shapes: T tokens of a micro-batch end to end, H hidden size.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from workbench.engines.communicator import ParallelGroups
from workbench.engines.training.steps import Pass
from workbench.models.heads import PackedModule

OF_BACKBONE = ("input_ids", "lengths", "after")


class Pipeline:
    """This rank's stage of a pipeline.

    module: reduced to the stage. hidden_size, dtype: of the hidden states that are sent. autocast, span: make the
    contexts for computing in the module, and for one forward or backward pass of some number of tokens.
    """

    def __init__(
        self,
        module: PackedModule,
        groups: ParallelGroups,
        hidden_size: int,
        dtype: torch.dtype,
        *,
        autocast: Callable[[], AbstractContextManager[Any]] = nullcontext,
        span: Callable[[str, int], AbstractContextManager[Any]] = lambda kind, tokens: nullcontext(),
    ) -> None:
        self._module, self._ranks, self._hidden_size, self._dtype = module, groups.pipeline, hidden_size, dtype
        self._first, self._last = groups.first, groups.last
        self._autocast, self._span = autocast, span

    @torch.no_grad()
    def forward(self, inputs: Mapping[str, Any]) -> Any:
        """Return the module's output on the last stage, and zeros of its shape on the others, which are free for the
        next pass as soon as they have sent their hidden states."""
        hidden = self.hidden_states(inputs)
        read = {name: value for name, value in inputs.items() if name not in OF_BACKBONE}
        if hidden is None:
            return self._module.unread(**read)
        with self._autocast():
            return self._module.read(hidden, **read)

    @torch.no_grad()
    def hidden_states(self, inputs: Mapping[str, Any]) -> Tensor | None:
        """Return the whole backbone's hidden states [T, H] on the last stage, None on the others."""
        output = self._stage(inputs, self._with_previous(None, inputs))
        self._with_next(output, None)
        return output if self._last else None

    def step(self, passes: Sequence[Pass]) -> None:
        """Run forward and backward passes of all micro-batches; gradients stay in the parameters."""
        ahead = min(self._ranks.world_size - 1 - self._ranks.rank, len(passes))
        in_flight: deque[tuple[Tensor | None, Tensor]] = deque()

        def forward(micro: Pass, received: Tensor | None) -> Tensor:
            output = self._forward(micro, received)
            in_flight.append((received, output))
            return output.detach()

        for micro in passes[:ahead]:
            self._with_next(forward(micro, self._with_previous(None, micro.inputs)), None)
        received = self._with_previous(None, passes[ahead].inputs) if ahead < len(passes) else None
        for n in range(ahead, len(passes)):
            output = forward(passes[n], received)
            gradient = self._backward(*in_flight[0], self._with_next(output, in_flight[0][1]))
            in_flight.popleft()
            received = self._with_previous(gradient, passes[n + 1].inputs if n + 1 < len(passes) else None)
        for sent in in_flight:
            self._with_previous(self._backward(*sent, self._with_next(None, sent[1])), None)

    def _forward(self, micro: Pass, received: Tensor | None) -> Tensor:
        """Return this stage's hidden states [T, H], or on the last stage the loss."""
        micro.begin()
        with self._span("forward", micro.tokens):
            hidden = self._stage(micro.inputs, received)
            if not self._last:
                return hidden
            with self._autocast():
                read = {name: value for name, value in micro.inputs.items() if name not in OF_BACKBONE}
                output = self._module.read(hidden, **read)
            return micro.loss(output)

    def _backward(self, received: Tensor | None, output: Tensor, gradient: Tensor | None) -> Tensor | None:
        """Return the gradient [T, H] of the received hidden states; None on the first stage."""
        with self._span("backward", 0):
            torch.autograd.backward(output, gradient)
        if received is None:
            return None
        return torch.zeros_like(received) if received.grad is None else received.grad

    def _stage(self, inputs: Mapping[str, Any], received: Tensor | None) -> Tensor:
        with self._autocast():
            hidden = self._module.hidden_states(
                inputs["input_ids"], inputs["lengths"], inputs.get("after", ()), received
            )
        return hidden if self._last else hidden.to(self._dtype).contiguous()

    def _with_previous(self, gradient: Tensor | None, inputs: Mapping[str, Any] | None) -> Tensor | None:
        """Send `gradient`, if given, to the previous stage, and receive a micro-batch's hidden states from it, if
        `inputs` are given."""
        if self._first or (gradient is None and inputs is None):
            return None
        before, received = self._ranks.rank - 1, None
        if inputs is not None:
            ids = inputs["input_ids"]
            received = torch.empty((len(ids), self._hidden_size), dtype=self._dtype, device=ids.device)
        self._ranks.exchange(
            [] if gradient is None else [(before, gradient.contiguous())],
            [] if received is None else [(before, received)],
        )
        return None if received is None else received.requires_grad_(torch.is_grad_enabled())

    def _with_next(self, output: Tensor | None, awaited: Tensor | None) -> Tensor | None:
        """Send `output` (hidden states), if given, to the next stage, and receive the gradient of `awaited` from it, if
        given."""
        if self._last:
            return None
        after = self._ranks.rank + 1
        gradient = None if awaited is None else torch.empty_like(awaited, requires_grad=False)
        self._ranks.exchange(
            [] if output is None else [(after, output)], [] if gradient is None else [(after, gradient)]
        )
        return gradient
