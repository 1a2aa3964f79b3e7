"""Rows of varying length into micro-batches that compute little padding, the same way wherever a stage runs.

Shape legend: B rows, T positions of prompt + response, R response tokens of the longest row, N response tokens in all.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from workbench.dataflow.columns import Ragged, take
from workbench.models.heads import pad_right
from workbench.workers.calls import Shard
from workbench.workers.communicator import Communicator


def cut(lengths: Sequence[int], budget_tokens: int, least: int = 0) -> list[list[int]]:
    """Row numbers of each micro-batch: longest rows first, rows x longest <= budget (a longer single row goes alone).

    At least `least` micro-batches where there are rows enough, so that ranks that step together take equally many.
    """
    groups: list[list[int]] = []
    for i in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        if groups and (len(groups[-1]) + 1) * lengths[groups[-1][0]] <= budget_tokens:
            groups[-1].append(i)
        else:
            groups.append([i])
    while len(groups) < least:
        largest = max(range(len(groups)), key=lambda g: len(groups[g]), default=-1)
        if largest < 0 or len(groups[largest]) < 2:
            break
        rows = groups[largest]
        groups[largest : largest + 1] = [rows[: len(rows) // 2], rows[len(rows) // 2 :]]
    return groups


@dataclass(frozen=True, kw_only=True)
class MicroBatch:
    """One forward pass: `inputs` of the modules in `workbench.models.heads`, one target a response token.

    index: its rows in the shard. weight: 0.0 for a pass that only keeps step with the other ranks.
    response_rows, response_times [N]: where token n stands in a [B, R] picture of the responses.
    """

    index: list[int]
    inputs: dict[str, Tensor]
    targets: Tensor
    response_rows: Tensor
    response_times: Tensor
    longest: int
    weight: float

    def to_BR(self, values_N: Tensor) -> Tensor:
        """Response numbers as a right-padded [B, R] tensor (differentiable)."""
        out_BR = values_N.new_zeros((len(self.index), self.longest))
        return out_BR.index_put((self.response_rows, self.response_times), values_N)

    def column_BR(self, column: Ragged) -> Tensor:
        """This micro-batch's rows of a response column, [B, R], on its device."""
        return self.to_BR(self._rows(column).values.to(self.targets.device))

    def mask_BR(self, mask: Ragged) -> Tensor:
        """The response mask, [B, R], all zero in a pass that only keeps step."""
        return self.column_BR(mask).float() * self.weight

    def _rows(self, column: Ragged) -> Ragged:
        rows = take(column, np.asarray(self.index))
        assert isinstance(rows, Ragged)
        return rows


def micro_batches(
    shard: Shard,
    rows: Sequence[int],
    budget_tokens: int,
    communicator: Communicator,
    device: torch.device,
    together: int = 1,
) -> list[MicroBatch]:
    """The micro-batches of some rows of a shard (at least one), equally many on every rank of the group.

    together: consecutive rows that stay side by side in one micro-batch, such as the 2 answers of a pair.
    A rank that cannot cut its rows into as many goes through one again whose tokens count for nothing.
    """
    prompts, responses = shard.ragged("prompt_ids").rows(), shard.ragged("response_ids").rows()
    units = [rows[i : i + together] for i in range(0, len(rows), together)]
    lengths = [max(len(prompts[i]) + len(responses[i]) for i in unit) for unit in units]
    budget_tokens //= together
    most = int(communicator.all_reduce_max(torch.tensor([len(cut(lengths, budget_tokens))])).item())
    groups = [[row for u in group for row in units[u]] for group in cut(lengths, budget_tokens, most)]
    out = [_build(group, prompts, responses, device, 1.0) for group in groups]
    filler = _build(groups[-1][:together], prompts, responses, device, 0.0)
    return out + [filler] * (most - len(out))


def _build(
    index: list[int], prompts: list[Tensor], responses: list[Tensor], device: torch.device, weight: float
) -> MicroBatch:
    sequences = [torch.cat([prompts[i], responses[i]]) for i in index]
    input_ids, attention_mask, position_ids = pad_right(sequences, 0)
    counts = torch.tensor([len(responses[i]) for i in index])
    rows_N = torch.repeat_interleave(torch.arange(len(index)), counts)
    times_N = torch.cat([torch.arange(int(n)) for n in counts])
    starts = torch.tensor([len(prompts[i]) for i in index])
    inputs = {
        "input_ids": input_ids,
        "attention_mask": attention_mask,
        "position_ids": position_ids,
        "rows": rows_N,
        # the hidden state one position earlier predicts the token, and is the state that the critic values
        "times": starts[rows_N] + times_N - 1,
    }
    return MicroBatch(
        index=index,
        inputs={name: tensor.to(device) for name, tensor in inputs.items()},
        targets=torch.cat([responses[i] for i in index]).to(device),
        response_rows=rows_N.to(device),
        response_times=times_N.to(device),
        longest=int(counts.max()),
        weight=weight,
    )


class Scatter:
    """Collects the numbers of micro-batches back into one ragged column in the shard's row order."""

    def __init__(self, like: Ragged, dtype: torch.dtype = torch.float32) -> None:
        self._like = like
        self._values = torch.zeros(len(like.values), dtype=dtype)
        self._starts = torch.cumsum(like.lengths, 0) - like.lengths

    def put(self, batch: MicroBatch, values_N: Tensor) -> None:
        """Take the numbers of one micro-batch."""
        if batch.weight:
            rows = torch.tensor(batch.index)[batch.response_rows.cpu()]
            self._values[self._starts[rows] + batch.response_times.cpu()] = (
                values_N.detach().cpu().to(self._values.dtype)
            )

    def column(self) -> Ragged:
        """The finished column."""
        return self._like.like(self._values)


def minibatch_indices(sizes: Sequence[int]) -> Iterator[list[int]]:
    """Row numbers within the shard of each minibatch."""
    start = 0
    for size in sizes:
        yield list(range(start, start + size))
        start += size


def each_minibatch(
    shard: Shard, budget_tokens: int, communicator: Communicator, device: torch.device, together: int = 1
) -> list[list[MicroBatch]]:
    """The micro-batches of each minibatch of a shard, see `micro_batches`."""
    return [
        micro_batches(shard, rows, budget_tokens, communicator, device, together)
        for rows in minibatch_indices(shard.minibatch_sizes)
    ]


def tokens_of(micro: MicroBatch) -> int:
    """Real (unpadded) tokens of a micro-batch; 0 of one that only keeps step."""
    return int(micro.inputs["attention_mask"].sum()) if micro.weight else 0
