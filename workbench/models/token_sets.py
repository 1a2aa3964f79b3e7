"""The tokens that could be drawn at each position, where sampling left the others out (top-p, top-k, min-p)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from workbench.models.packing import to_device

# The logit of a token that could not be drawn: its probability is exactly 0, and its products are finite.
IMPOSSIBLE = -1e9


@dataclass(frozen=True, eq=False)
class TokenSets:
    """The sets of N positions, on the CPU. sizes [N]: tokens of each, 0: all tokens. ids: theirs, end to end."""

    ids: Tensor
    sizes: Tensor

    def tensor_split(self, parts: int) -> list[TokenSets]:
        """The sets of `x.tensor_split(parts)`, for x [N, ...]."""
        sizes = self.sizes.tensor_split(parts)
        ids = self.ids.split([int(part.sum()) for part in sizes])
        return [TokenSets(*pair) for pair in zip(ids, sizes, strict=True)]

    def take(self, numbers: Tensor) -> TokenSets:
        """The sets of `x[numbers]`, for x [N, ...]."""
        sizes, starts = self.sizes.long(), self.sizes.long().cumsum(0) - self.sizes.long()
        counts = sizes[numbers]
        firsts = torch.repeat_interleave(starts[numbers] - (counts.cumsum(0) - counts), counts)
        return TokenSets(self.ids[firsts + torch.arange(len(firsts))], self.sizes[numbers])

    def masked(self, logits: Tensor, start: int = 0) -> Tensor:
        """Logits [N, count], of tokens [start, start + count), with `IMPOSSIBLE` in place of those outside the sets."""
        count = logits.shape[-1]
        row = torch.repeat_interleave(torch.arange(len(self.sizes)), self.sizes.long())
        column = self.ids.long() - start
        here = (column >= 0) & (column < count)
        outside = torch.ones(logits.shape, dtype=torch.bool, device=logits.device)
        outside.view(-1)[to_device((row * count + column)[here], logits.device)] = False
        outside &= to_device(self.sizes > 0, logits.device)[:, None]
        return logits.masked_fill(outside, IMPOSSIBLE)
