"""From a stage's call to one call a rank: which rows it gets, and from whom it pulls them. No tensor is touched."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from workbench.batches.balance import Chunks, minibatch_rows
from workbench.batches.batch import Batch
from workbench.batches.location import Location, Pull
from workbench.batches.references import Column
from workbench.errors import BadInput
from workbench.errors.plain_text import shown
from workbench.messages.calls import Call
from workbench.messages.operation import Operation
from workbench.stages.group import WorkerGroup


def calls_without_batch(
    group: WorkerGroup, operation: Operation, common: Mapping[str, Any], args: tuple[Any, ...]
) -> list[Call]:
    """One call a rank of an operation that takes no batch: the same arguments for all, or a list with one for each."""
    size = len(group.hosts)
    if not operation.protocol.values_per_rank:
        return [Call(**common, args=args) for _ in range(size)]
    for value in args:
        if not isinstance(value, Sequence) or len(value) != size:
            raise BadInput(
                f"{operation.name}: {shown(value)}", f"ALL_TO_ALL takes one input a rank, as lists of {size}"
            )
    per_rank = list(zip(*args, strict=True)) if args else [()] * size
    return [Call(**common, args=tuple(values)) for values in per_rank]


def calls_on_batch(
    group: WorkerGroup,
    operation: Operation,
    common: Mapping[str, Any],
    args: tuple[Any, ...],
    batch: Batch,
    samples: int,
    travels: tuple[str, ...],
    meta: Mapping[str, Any],
    shard_successors: Mapping[str, str],
) -> list[Call]:
    """One call a rank: the protocol deals out the rows, and the call says in which shards they are.

    travels: the columns that go to the ranks. samples: copies of each row, side by side. meta: what travels along.
    shard_successors: see `ShardId.now`.
    """
    columns, _ = batch.copies(samples).part(travels)
    rows = batch.rows * samples
    dealt, collected = deal_rows(group, operation, rows)
    sample = columns["prompt_uid"].location.occurrences() if operation.samples else None
    calls = []
    for rank, chunks in enumerate(dealt):
        mine = np.concatenate(chunks)
        calls.append(
            Call(
                **common,
                args=args,
                keep=operation.protocol.joins and rank in collected,
                batch=batch.id,
                pulls=tuple(group_pulls(columns, travels, mine, shard_successors)),
                rows=mine,
                minibatch_sizes=tuple(len(chunk) for chunk in chunks),
                sample=None if sample is None else sample[mine],
                meta=dict(meta),
                all_valid=operation.counts_all_rows,
            )
        )
    return calls


def deal_rows(group: WorkerGroup, operation: Operation, rows: int) -> tuple[list[Chunks], list[int]]:
    """The row numbers of each rank, one array a minibatch, and the ranks whose outputs make the result.

    Raises `BadInput` where the rows cannot be dealt out: minibatches that do not divide them, a rank without any.
    """
    minibatches = _minibatches(group, operation, rows)
    where = f"{group.role}.{operation.name}"
    dealt = operation.protocol.deal(group.layout, minibatches, where)
    collected = operation.protocol.gather(group.layout, dealt, rows, where)
    for rank, chunks in enumerate(dealt):
        if not all(map(len, chunks)):
            raise BadInput(
                f"{rows} rows for {where} on {len(group.hosts)} ranks",
                f"rank {rank} would have none",
                f"use at least {len(collected) * len(minibatches)} rows",
            )
    return dealt, collected


def _minibatches(group: WorkerGroup, operation: Operation, rows: int) -> list[np.ndarray]:
    wanted = group.spec.training.minibatches if operation.minibatched and group.spec.training else 1
    # only updates need equal minibatches; inference follows their cut where there is one, see Training
    parts = len(operation.protocol.collect(group.layout))
    follows = rows % wanted == 0 and rows // wanted >= parts
    return minibatch_rows(rows, wanted if operation.updates or follows else 1)


def group_pulls(
    columns: Mapping[str, Column], names: tuple[str, ...], rows: np.ndarray, shard_successors: Mapping[str, str]
) -> list[tuple[tuple[str, ...], tuple[Pull, ...]]]:
    """What has to be pulled for these rows: columns that lie together are pulled together."""
    together: dict[int, tuple[Location, list[str]]] = {}
    for name in names:
        location = columns[name].location
        together.setdefault(id(location), (location, []))[1].append(name)
    return [
        (tuple(group), tuple(pull._replace(shard=pull.shard.now(shard_successors)) for pull in location.pulls(rows)))
        for location, group in together.values()
    ]
