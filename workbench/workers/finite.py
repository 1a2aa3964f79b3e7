"""NaN and infinity: where a stage's output first holds one, and where it came from."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from workbench.batches.columns import ColumnValues, Ragged, Table
from workbench.batches.schema import SCHEMA
from workbench.batches.schema_check import first_of, is_plainly_right
from workbench.errors import StageError
from workbench.messages.calls import Call
from workbench.messages.replies import Output
from workbench.messages.shards import Shard
from workbench.workers.worker import Worker


def require_finite(output: Output, call: Call, shard: Shard | None, worker: Worker) -> frozenset[str]:
    """Raise `StageError` where a column of numbers of a stage of ours holds NaN or infinity. It names the first such
    row of the batch, and what is not finite before it: a column that was read, a weight, or the output of a module.

    Columns of a user's own stages may hold any number. Returns the columns that by this look hold what their schema
    says.
    """
    right = set()
    for name, column in output.columns.items():
        schema = SCHEMA.get(name)
        if schema is not None and is_plainly_right(column, schema):
            right.add(name)
            continue
        found = None if schema is None else first_not_finite(column)
        if found is None:
            continue
        row, token, value = found
        number = row if call.rows is None else int(call.rows[row])
        place = f"row {number}" + ("" if token is None else f", response token {token}")
        why, remedy = _cause(call, shard, worker, row)
        rows = _bad_rows(column)
        more = f", the first of {rows} such rows" if rows > 1 else ""
        raise StageError(f"column {name!r} holds {value} in {place}{more}", why, remedy)
    return frozenset(right)


def first_not_finite(column: ColumnValues) -> tuple[int, int | None, str] | None:
    """(row, place in a row of tokens, value) of the first number of a column that is NaN or infinite."""
    values = column.values if isinstance(column, Ragged) else column
    if not isinstance(values, Tensor) or not values.is_floating_point():
        return None
    if not values.numel() or all(map(math.isfinite, torch.aminmax(values.detach()))):
        return None
    return first_of(column, ~torch.isfinite(values))


def not_finite_in(table: Mapping[str, ColumnValues], row: int) -> str:
    """The columns of a table that hold NaN or infinity in a row, in words; empty where none does."""
    named = [name for name, column in table.items() if first_not_finite(_row(column, row)) is not None]
    return ", ".join(map(repr, named))


def first_weight(weights: Iterator[tuple[str, Tensor]]) -> str:
    """The name of the first tensor that holds NaN or infinity; empty where none does."""
    return next((name for name, tensor in weights if not torch.isfinite(tensor).all()), "")


def _row(column: ColumnValues, row: int) -> ColumnValues:
    if isinstance(column, Ragged):
        return column.take([row])
    return column[row : row + 1]


def _bad_rows(column: ColumnValues) -> int:
    return sum(first_not_finite(_row(column, row)) is not None for row in range(len(column)))


def _cause(call: Call, shard: Shard | None, worker: Worker, row: int) -> tuple[str, str]:
    read = "" if shard is None else not_finite_in(shard.columns, row)
    if read:
        return f"so does what it read there: {read}", "mend the stage that made that column"
    engine: Any = getattr(worker, "engine", None)
    if engine is None:
        return "what it read there is finite", "mend what computes it"
    weight = first_weight(engine.local_weights())
    if weight:
        return (
            f"so does the {call.role}'s weight {weight}",
            "go back to weights from before; a lower learning_rate, a max_grad_norm or warmup_steps keep them finite",
        )
    module = "" if shard is None else _first_module(call, shard, worker, row)
    remedy = "where only bfloat16 overflows, dtype='float32'; else leave the row out"
    if module:
        return (
            f"what it read there and all weights are finite; the first output that is not is that of {module}",
            remedy,
        )
    return "what it read there and all weights are finite", f"lab.debug() names the module; {remedy}"


def _first_module(call: Call, shard: Shard, worker: Worker, row: int) -> str:
    """The first module whose output is not finite when the stage runs on that row alone; empty where other ranks would
    have to compute with this one."""
    operation: Any = getattr(getattr(worker, call.method, None), "__operation__", None)
    if worker.context.communicator.world_size > 1 or operation is None or operation.updates or operation.generates:
        return ""
    alone: Table = {name: _row(column, row) for name, column in shard.columns.items()}
    one = replace(
        shard, columns=alone, rows=shard.rows[row : row + 1], minibatch_sizes=(1,),
        sample=None if shard.sample is None else shard.sample[row : row + 1],
    )  # fmt: skip
    with _watched() as found:
        getattr(worker, call.method)(one, *call.args, **call.kwargs)
    if not found:
        return ""
    module: Any = worker.engine.module  # type: ignore[attr-defined]
    names = {part: name for name, part in module.named_modules()}
    return f"{names.get(found[0]) or 'the model'} ({type(found[0]).__name__})"


@contextmanager
def _watched() -> Iterator[list[nn.Module]]:
    """Inside, the modules whose output is not finite are collected, in the order in which they finish."""
    found: list[nn.Module] = []

    def look(module: nn.Module, inputs: Any, output: Any) -> None:
        tensors = (leaf for leaf in torch.utils._pytree.tree_leaves(output) if isinstance(leaf, Tensor))
        if any(tensor.is_floating_point() and not torch.isfinite(tensor).all() for tensor in tensors):
            found.append(module)

    handle = nn.modules.module.register_module_forward_hook(look)
    try:
        yield found
    finally:
        handle.remove()
