"""Cuts rows of varying length into micro-batches without padding, alike for every stage, and collects their results.

Shape legend: B rows, T tokens of their prompts (each once) and responses end to end, R response tokens of the longest
row, N response tokens in all.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from workbench.batches.columns import Ragged
from workbench.batches.turns import contexts_of
from workbench.engines.communicator import Communicator
from workbench.messages.metrics import Max, Mean, Metric, Metrics
from workbench.messages.shards import Shard
from workbench.models.logits import TokenSets
from workbench.models.packing import to_device


def cut(
    lengths: Sequence[int], budget_tokens: int, *, padded: bool = False, prompts: Sequence[tuple[int, int]] = ()
) -> list[list[int]]:
    """Return the row numbers of each micro-batch, of at most `budget_tokens` tokens (a longer row is alone).

    The longest rows come first; each goes into the first micro-batch that has room for it. padded: for a model that
    cannot run packed sequences; a micro-batch counts as rows x longest, and its rows are neighbours in length. prompts:
    for each row the number of its prompt and the prompt's tokens: rows of one prompt follow each other, and a
    micro-batch that has the prompt needs room only for the rest of a row. Empty: each row has a prompt of its own.
    """
    order = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
    groups: list[list[int]] = []
    if padded:
        for i in order:
            if not groups or (len(groups[-1]) + 1) * lengths[groups[-1][0]] > budget_tokens:
                groups.append([])
            groups[-1].append(i)
        return groups
    of_prompt: dict[int, list[int]] = {}
    for i in order:
        of_prompt.setdefault(prompts[i][0] if prompts else i, []).append(i)
    rooms = np.full(len(order), budget_tokens)
    for rows in of_prompt.values():
        here = None
        for i in rows:
            rest = lengths[i] - (prompts[i][1] if prompts else 0)
            if here is None or rooms[here] < rest:
                here, rest = int(np.argmax(rooms[: len(groups) + 1] >= min(lengths[i], budget_tokens))), lengths[i]
                if here == len(groups):
                    groups.append([])
            groups[here].append(i)
            rooms[here] -= rest
    return groups


def split(groups: list[list[int]], least: int) -> list[list[int]]:
    """Halve the largest group, in its place, until there are `least` groups or no group has two rows: ranks that step
    together need equally many groups."""
    while groups and len(groups) < least:
        i = max(range(len(groups)), key=lambda i: len(groups[i]))
        rows = groups[i]
        if len(rows) == 1:
            break
        groups[i : i + 1] = [rows[: len(rows) // 2], rows[len(rows) // 2 :]]
    return groups


@dataclass(frozen=True, kw_only=True)
class MicroBatch:
    """One forward pass: `inputs` of the modules in `workbench.models.heads`, one target per response token.

    Rows of the same prompt share it: the prompt is one sequence, and each response continues it, up to its second
    context if it has one (see `CONTEXT_STARTS`). index: its rows in the shard. weight: 0.0 for a pass that only keeps
    in step with other ranks. last: [B], the position of each row's last token among the T. tokens: of all rows, each
    row with its prompt; 0 if `weight` is. response_rows, response_times [N]: the place of token n in a [B, R] tensor of
    the responses.
    """

    index: list[int]
    inputs: dict[str, Any]
    targets: Tensor
    last: Tensor
    tokens: int
    response_rows: Tensor
    response_times: Tensor
    longest: int
    weight: float

    def scored(
        self,
        temperature: float,
        with_entropy: bool = False,
        sets: Callable[[list[int]], TokenSets] | None = None,
        **asked: bool,
    ) -> dict[str, Any]:
        """Return the module's inputs that ask for the log-probabilities of the targets. sets: returns the token sets of
        some rows, see `SamplingMask`. asked: further outputs, see `TokenLogProbs.read`."""
        own: dict[str, Any] = {"targets": self.targets, "temperature": temperature, "with_entropy": with_entropy}
        if sets is not None:
            own["sets"] = sets(self.index)
        return {**self.inputs, **own, **asked}

    def to_BR(self, values_N: Tensor) -> Tensor:
        """Scatter response numbers [N, ...] into a right-padded [B, R, ...] tensor (differentiable)."""
        out_BR = values_N.new_zeros((len(self.index), self.longest, *values_N.shape[1:]))
        return out_BR.index_put((self.response_rows, self.response_times), values_N)

    def column_BR(self, column: Ragged) -> Tensor:
        """This micro-batch's rows of a response column, [B, R], on its device."""
        return self.to_BR(to_device(column.take(self.index).values, self.targets.device))

    def mask_BR(self, mask: Ragged) -> Tensor:
        """Return the response mask, [B, R]; all zero in a pass that only keeps in step with other ranks."""
        return self.column_BR(mask).float() * self.weight

    def mean_over(self, mask_BR: Tensor) -> Callable[[Tensor], OnDevice]:
        """Return a function that makes mask means as metrics. It selects: outside the mask a number may be infinite."""
        count = mask_BR.sum()
        return lambda x_BR: OnDevice(
            Mean, {"total": torch.where(mask_BR > 0, x_BR.detach(), 0.0).sum(), "count": count}
        )


def each_minibatch(
    shard: Shard,
    budget_tokens: int,
    data: Communicator,
    device: torch.device,
    *,
    padded: bool = False,
    skip: Collection[int] = (),
    unit_rows: int = 1,
) -> list[list[MicroBatch]]:
    """Cut each minibatch of a shard into micro-batches: at least one, and equally many on every data-parallel rank.

    skip: rows to leave out. unit_rows: how many consecutive rows stay side by side in one micro-batch, such as the 2
    answers of a pair. A rank with too few micro-batches repeats its shortest rows with weight 0.
    """
    prompts, responses = shard.ragged("prompt_ids").rows(), shard.ragged("response_ids").rows()
    contexts = contexts_of(shard.columns)
    minibatches = []
    for rows in minibatch_indices(shard.minibatch_sizes):
        numbers: dict[bytes, int] = {}  # numbers of prompts; padded rows share no prompt
        prompt_of = {
            row: row if padded else numbers.setdefault(prompts[row].numpy().tobytes(), len(numbers)) for row in rows
        }

        def length(unit: Sequence[int], prompt_of: Mapping[int, int] = prompt_of) -> int:
            if padded:
                return len(unit) * max(len(prompts[row]) + len(responses[row]) for row in unit)
            different = {prompt_of[row]: len(prompts[row]) for row in unit}
            return sum(different.values()) + sum(len(responses[row]) for row in unit)

        units = [rows[i : i + unit_rows] for i in range(0, len(rows), unit_rows)]
        kept = [unit for unit in units if any(row not in skip for row in unit)]
        first = [(prompt_of[unit[0]], len(prompts[unit[0]])) for unit in kept]
        groups = cut([length(unit) for unit in kept], budget_tokens, padded=padded, prompts=first)
        most = max(1, int(data.all_reduce_max(torch.tensor([len(groups)])).item()))
        groups = split(groups, most)
        build = partial(_build, prompts, responses, prompt_of, contexts, device)
        micros = [build([row for u in group for row in kept[u]], weight=1.0) for group in groups]
        if len(micros) < most:
            micros += [build(min(units, key=length), weight=0.0)] * (most - len(micros))
        minibatches.append(micros)
    return minibatches


def _build(
    prompts: list[Tensor],
    responses: list[Tensor],
    prompt_of: Mapping[int, int],
    contexts: Mapping[int, list[int]],
    device: torch.device,
    index: list[int],
    weight: float,
) -> MicroBatch:
    """Build the micro-batch of some rows. A prompt of several rows precedes the first of their responses; a further
    context of a response is a sequence of its own, see `contexts_of`."""
    rows_of = Counter(prompt_of[i] for i in index)
    sequences: list[Tensor] = []
    # for each sequence the sequence that it continues, or -1; for each row the positions of its prompt's last token and
    # of its response's first token
    after, ends, starts, tokens = [], [], [], 0
    known: dict[int, tuple[int, int]] = {}  # for a shared prompt: the numbers of its sequence and of its last token
    for i in index:
        prompt, whole = prompts[i], responses[i]
        response, *others = torch.tensor_split(whole, contexts.get(i, []))
        if rows_of[prompt_of[i]] == 1 or not len(prompt):
            sequences.append(torch.cat([prompt, response]))
            after.append(-1)
            end = tokens + len(prompt) - 1
            tokens += len(prompt)
        else:
            if prompt_of[i] not in known:
                known[prompt_of[i]] = len(sequences), tokens + len(prompt) - 1
                sequences.append(prompt)
                after.append(-1)
                tokens += len(prompt)
            number, end = known[prompt_of[i]]
            if len(response):
                sequences.append(response)
                after.append(number)
        sequences += others
        after += [-1] * len(others)
        ends.append(end)
        starts.append(tokens)
        tokens += len(whole)
    ends_B, starts_B = torch.tensor(ends), torch.tensor(starts)
    counts_B = torch.tensor([len(responses[i]) for i in index])
    rows_N = torch.repeat_interleave(torch.arange(len(index)), counts_B)
    times_N = torch.cat([torch.arange(int(n)) for n in counts_B])
    # the hidden state one token earlier predicts the token, and the critic values that state
    positions_N = torch.where(times_N > 0, starts_B[rows_N] + times_N - 1, ends_B[rows_N])
    inputs = {
        "input_ids": to_device(torch.cat(sequences).long(), device),
        "lengths": tuple(map(len, sequences)),
        "after": tuple(after) if known else (),
        "positions": to_device(positions_N, device),
    }
    return MicroBatch(
        index=index,
        inputs=inputs,
        targets=to_device(torch.cat([responses[i] for i in index]), device),
        last=to_device(torch.where(counts_B > 0, starts_B + counts_B - 1, ends_B), device),
        tokens=sum(len(prompts[i]) + len(responses[i]) for i in index) if weight else 0,
        response_rows=to_device(rows_N, device),
        response_times=to_device(times_N, device),
        longest=int(counts_B.max()),
        weight=weight,
    )


class Scatter:
    """Collects the numbers of micro-batches into one ragged column in the shard's row order.

    width: how many numbers per token; None: one, and the column's values are [tokens]. Numbers stay on their device
    until `column` reads them, so that the host queues the next pass while a GPU computes.
    """

    def __init__(self, like: Ragged, width: int | None = None) -> None:
        self._like, self._shape = like, (len(like.values), *(() if width is None else (width,)))
        self._found: list[tuple[MicroBatch, Tensor]] = []

    def put(self, batch: MicroBatch, values_N: Tensor) -> None:
        if batch.weight:
            self._found.append((batch, values_N.detach()))

    def column(self) -> Ragged:
        values, starts = torch.zeros(self._shape), torch.cumsum(self._like.lengths, 0) - self._like.lengths
        for batch, values_N in self._found:
            rows = torch.tensor(batch.index)[batch.response_rows.cpu()]
            values[starts[rows] + batch.response_times.cpu()] = values_N.float().cpu()
        return self._like.like(values)


def minibatch_indices(sizes: Sequence[int]) -> Iterator[list[int]]:
    start = 0
    for size in sizes:
        yield list(range(start, start + size))
        start += size


@dataclass(frozen=True)
class OnDevice:
    """A metric with numbers, by field, that are still on the device that computes them. Reading them one by one would
    wait for the device each time: `on_host` reads many at once."""

    kind: type[Mean] | type[Max]
    numbers: Mapping[str, Tensor | float]


DeviceMetrics = Mapping[str, Metric | OnDevice]


def on_host(reported: Sequence[DeviceMetrics]) -> list[Metrics]:
    """Bring all numbers of these metrics to the host in one transfer, and return the metrics."""
    waiting = [metric for metrics in reported for metric in metrics.values() if isinstance(metric, OnDevice)]
    tensors = [n.detach().double() for metric in waiting for n in metric.numbers.values() if isinstance(n, Tensor)]
    values = iter(torch.stack(tensors).tolist() if tensors else ())

    def brought(metric: Metric | OnDevice) -> Metric:
        if not isinstance(metric, OnDevice):
            return metric
        return metric.kind(**{k: next(values) if isinstance(n, Tensor) else n for k, n in metric.numbers.items()})

    return [{name: brought(metric) for name, metric in metrics.items()} for metrics in reported]


def largest(x: Tensor) -> OnDevice:
    """Return the largest of non-negative numbers as a metric; 0 if there are none, as in rows without a token."""
    return OnDevice(Max, {"value": x.max() if x.numel() else x.new_zeros(())})
