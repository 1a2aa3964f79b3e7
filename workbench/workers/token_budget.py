"""The number of tokens in a micro-batch of a role: as set, a fixed number on a CPU, or as many as fit on a GPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from workbench.engines.training import Pass, TrainingEngine
from workbench.models.heads import PackedModule, TokenLogProbs
from workbench.placement.role_model import AUTOMATIC_TOKENS
from workbench.placement.room import MOST_TOKENS, TOKENS_STEP
from workbench.support.machine import own_gpu_bytes
from workbench.telemetry import Recorder
from workbench.workers.worker import Context

# Tokens of the two trial passes, and of their rows; the share of memory that stays free for rows of other lengths and
# fragmentation.
TRIAL_TOKENS, TRIAL_ROW_TOKENS = (1024, 2048), 512
MARGIN = 0.1

Measure = Callable[[Callable[[], None]], int]
"""Runs a function, and gives its peak of bytes beside those that were allocated before."""


class TokenBudget:
    """The upper bound of the tokens in a micro-batch, for all operations of a role.

    given: `Training.micro_batch_tokens`. Where that is None, on a GPU two small passes (forward, and backward where the
    role is trained) measure the bytes of a token, by which the memory that the placement leaves is divided: so the same
    placement on the same device gives the same numbers on every run. All ranks of the pool ask first at the same time,
    and take the smallest answer.

    measure, device_bytes: of the GPU; None: asked of its allocator. padded: whether micro-batches are padded.
    """

    def __init__(
        self,
        given: int | None,
        context: Context,
        engine: TrainingEngine,
        module: PackedModule,
        *,
        trained: bool,
        measure: Measure | None = None,
        device_bytes: int | None = None,
    ) -> None:
        self._context, self._engine, self._module, self._trained = context, engine, module, trained
        self._measure, self._device_bytes = measure or _measured_on_gpu(context.recorder), device_bytes
        self.padded = module.padded_because is not None
        self.notes: list[str] = []
        self.automatic = given is None and context.room is not None
        self.known = None if self.automatic else given or AUTOMATIC_TOKENS["cpu"]
        if self.known is not None:
            module.expect(self.known)

    @property
    def tokens(self) -> int:
        """The bound; measured when it is first asked for."""
        if self.known is None:
            here = torch.tensor([-self._fitting()])
            self.known = -int(self._context.communicator.all_reduce_max(here).item())
            self._module.expect(self.known)
        return self.known

    def halve(self, error: torch.OutOfMemoryError) -> None:
        """Halve the bound after a pass ran out of memory, and add a note. Raises the error where the number was set, is
        at its minimum, or where other ranks wait for this one inside a collective."""
        if not self.automatic or self.known is None or self.known <= TOKENS_STEP:
            raise error
        if self._context.communicator.world_size > 1:
            raise error
        before, self.known = self.known, max(TOKENS_STEP, self.known // 2 // TOKENS_STEP * TOKENS_STEP)
        self._module.expect(self.known)
        self.notes.append(
            f"out of memory with micro-batches of {before:,} tokens: from here on they have {self.known:,}; "
            f"set Training(micro_batch_tokens={self.known}) to begin with that"
        )

    def _fitting(self) -> int:
        assert self._context.room is not None
        self._engine.load("parameters")
        small, large = TRIAL_TOKENS
        try:
            first, second = (self._measure(lambda n=tokens: self._trial(n)) for tokens in TRIAL_TOKENS)  # type: ignore[misc]
        except torch.OutOfMemoryError:
            return TOKENS_STEP
        each = max(1.0, (second - first) / (large - small))
        fixed = first - each * small  # gradients among it
        has = self._device_bytes if self._device_bytes is not None else own_gpu_bytes()
        left = self._context.room.pass_bytes(has) - fixed
        fitting = int((1 - MARGIN) * left / each) // TOKENS_STEP * TOKENS_STEP
        return min(MOST_TOKENS, max(TOKENS_STEP, fitting))

    def _trial(self, tokens: int) -> None:
        one = self._pass(tokens)
        if self._trained:
            # as many as a pipeline has under way; afterwards all is as before
            for _ in self._engine.gradients([one] * self._context.layout.p):
                pass
        else:
            with torch.no_grad():
                self._engine.forward(**one.inputs)

    def _pass(self, tokens: int) -> Pass:
        rows, device = tokens // TRIAL_ROW_TOKENS, self._context.device
        vocabulary = int(self._module.get_backbone().config.get_text_config().vocab_size)
        ids = torch.arange(tokens, device=device) % vocabulary
        ends = torch.arange(tokens, device=device) % TRIAL_ROW_TOKENS == TRIAL_ROW_TOKENS - 1
        positions = (~ends).nonzero()[:, 0]
        inputs: dict[str, Any] = {
            "input_ids": ids, "lengths": (TRIAL_ROW_TOKENS,) * rows, "positions": positions,
        }  # fmt: skip
        if isinstance(self._module, TokenLogProbs):
            inputs |= {"targets": ids[positions + 1], "temperature": 1.0, "with_entropy": True}

        def nothing(output: Any) -> torch.Tensor:
            parts = output if isinstance(output, tuple) else (output,)
            return torch.stack([part.float().sum() for part in parts]).sum() * 0.0

        return Pass(inputs=inputs, loss=nothing)

    def __repr__(self) -> str:
        return f"<TokenBudget: {self.known or 'as many as fit'}>"


def _measured_on_gpu(recorder: Recorder) -> Measure:
    """By torch's allocator; peaks of the recorder's spans stay correct."""

    def measure(work: Callable[[], None]) -> int:
        torch.cuda.synchronize()
        before, meter = torch.cuda.memory_allocated(), recorder.peak_meter()
        interval = meter.open()
        try:
            work()
            torch.cuda.synchronize()
        finally:
            peak = meter.close(interval)
        return peak - before

    return measure
