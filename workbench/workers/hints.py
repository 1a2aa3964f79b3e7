"""A host's explanations of what went wrong, and remedies: failed rows, numbers that are not finite, too little memory.

A row's `failure` has a line for each function that failed for it, "STAGE NAME: what it did"; empty if none failed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from workbench.batches.columns import ColumnValues, Ragged, Table, rows_at
from workbench.batches.schema import SCHEMA
from workbench.batches.schema_check import first_of
from workbench.data.reward_function import NOT_ASKED, first_failure
from workbench.display.html import bytes_text
from workbench.errors import StageError
from workbench.errors.plain_text import said
from workbench.messages.calls import Call, FailedRows, Failure, Output
from workbench.messages.metrics import Mean, Metrics
from workbench.messages.shards import Shard
from workbench.support.machine import available_bytes, own_gpu_bytes, own_gpu_free_bytes
from workbench.workers.worker import Worker

if TYPE_CHECKING:
    from workbench.workers.host import Host

NO_MEMORY = ("can't allocate memory", "out of memory", "not enough memory")
MOST_SHOWN = 6
Lines = dict[str, list[str]]  # by stage


# --- rows for which a function of the user failed ---------------------------------------------------------------------


class RowFailures:
    def __init__(self, batch: Shard) -> None:
        self._valid = batch.valid.tolist()
        texts = batch.columns.get("failure", [""] * len(batch))
        assert isinstance(texts, list)  # the schema has text
        self._lines: list[Lines] = [{} for _ in texts]
        for lines, text in zip(self._lines, texts, strict=True):
            for line in filter(None, text.splitlines()):
                lines.setdefault(line.partition(" ")[0], []).append(line)
        self._failed_before = [bool(lines) for lines in self._lines]

    def failed_in(self, stage: str) -> list[bool]:
        return [stage in lines for lines in self._lines]

    def note(self, stage: str, row: int, failures: Mapping[str, StageError]) -> None:
        """Replace a stage's failures of a row. failures: by the function's name, its error."""
        self._lines[row].pop(stage, None)
        if failures:
            said = (
                f"{stage} {name}: {error.what}{error.remedy and f'; {error.remedy}'}"
                for name, error in failures.items()
            )
            self._lines[row][stage] = [" ".join(line.split()) for line in said]

    def columns(self) -> Table:
        """Return the columns `valid` and `failure`. A row is valid again if none of its failures is left."""
        valid = [
            not lines and (was_valid or had_failed)
            for lines, was_valid, had_failed in zip(self._lines, self._valid, self._failed_before, strict=True)
        ]
        texts = ["\n".join(line for stage in lines.values() for line in stage) for lines in self._lines]
        return {"valid": torch.tensor(valid, dtype=torch.bool), "failure": texts}


def failed_rows(
    errors: Mapping[int, StageError], numbers: Sequence[int], most: float
) -> tuple[Metrics, FailedRows | None]:
    """Return the metric of a stage's errors by row, and the controller's report. numbers: of rows in the batch."""
    metrics: Metrics = {"failed/fraction": Mean(total=len(errors), count=len(numbers))}
    if not errors:
        return metrics, None
    first = first_failure(errors)
    row = next(numbers[i] for i, error in errors.items() if error is first)
    not_asked = sum(error.what == NOT_ASKED for error in errors.values())
    told = FailedRows(count=len(errors), not_asked=not_asked, row=int(row), most=most, first=Failure.of(first))
    return metrics, told


# --- NaN and infinity -------------------------------------------------------------------------------------------------


def require_finite(output: Output, call: Call, shard: Shard | None, worker: Worker) -> None:
    """Raise `StageError` if a number column of one of our stages holds NaN or infinity. It names the first such row of
    the batch, and the cause: a column that was read, a weight, or neither.

    Columns of a user's own stages may hold any number.
    """
    for name, column in output.columns.items():
        found = first_not_finite(column) if name in SCHEMA else None
        if found is None:
            continue
        row, token, value = found
        number = row if call.rows is None else int(call.rows[row])
        place = f"row {number}" + ("" if token is None else f", response token {token}")
        why, remedy = _cause(call, shard, worker, row)
        rows = sum(bool(not_finite_in({name: column}, row)) for row in range(len(column)))
        more = f", the first of {rows} such rows" if rows > 1 else ""
        raise StageError(f"column {name!r} holds {value} in {place}{more}", why, remedy)


def first_not_finite(column: ColumnValues) -> tuple[int, int | None, str] | None:
    """Return (row, place in a row of tokens, value) of a column's first number that is NaN or infinite, or None."""
    values = column.values if isinstance(column, Ragged) else column
    if not isinstance(values, Tensor) or not values.is_floating_point() or values.sum().isfinite():
        return None
    bad = ~torch.isfinite(values)  # the sum, which is much faster, may also overflow
    return first_of(column, bad) if bad.any() else None


def not_finite_in(table: Mapping[str, ColumnValues], row: int) -> str:
    """Say which columns of a table hold NaN or infinity in a row; "" if none does."""
    named = [name for name, one in rows_at(table, np.array([row])).items() if first_not_finite(one) is not None]
    return ", ".join(map(repr, named))


def _cause(call: Call, shard: Shard | None, worker: Worker, row: int) -> tuple[str, str]:
    read = "" if shard is None else not_finite_in(shard.columns, row)
    if read:
        return f"the stage read such numbers in that row: {read}", "correct the stage that made that column"
    engine: Any = getattr(worker, "engine", None)
    if engine is None:
        return "the numbers that the stage read there are finite", "correct the code that computes it"
    weight = next((name for name, tensor in engine.local_weights() if not torch.isfinite(tensor).all()), "")
    if weight:
        return (
            f"the {call.role}'s weight {weight} is not finite",
            "go back to earlier weights; a lower learning_rate, max_grad_norm or warmup_steps help to keep them finite",
        )
    remedy = "run it here with lab.debug(); if only bfloat16 overflows, use dtype='float32'; or leave the row out"
    return "the numbers that the stage read there and all weights are finite", remedy


# --- too little memory ------------------------------------------------------------------------------------------------


def memory_remedy(error: BaseException, host: Host, call: Call) -> str:
    """Return a remedy for an error of a stage, or "" if none is known."""
    if not is_out_of_memory(error):
        return ""
    try:
        return f"{_memory_use(host)}; use {', or '.join(_memory_remedies(host, call))}"
    except Exception:  # an error in here must not hide the stage's error
        return ""


def is_out_of_memory(error: BaseException | None) -> bool:
    """Return whether an error, or one of its causes, is a lack of memory, on a GPU or on this machine."""
    while error is not None:
        if isinstance(error, torch.OutOfMemoryError | MemoryError):
            return True
        if isinstance(error, RuntimeError) and any(text in said(error) for text in NO_MEMORY):
            return True
        error = error.__cause__
    return False


def _memory_use(host: Host) -> str:
    """Say how many bytes each use holds on a host's device, the largest first."""
    items = [(n, f"{role} {use}") for role, w in host.workers.items() for use, n in w.memory_bytes().items() if n]
    on_gpu = host.info.device.startswith("cuda")
    if not on_gpu and host.shard_bytes:
        items.append((host.shard_bytes, "batches"))
    shown = ", ".join(f"{what} {bytes_text(n)}" for n, what in sorted(items, reverse=True)[:MOST_SHOWN]) or "no model"
    if on_gpu:
        room = f"{bytes_text(own_gpu_bytes())} in all, {bytes_text(own_gpu_free_bytes())} free"
    else:
        room = f"{bytes_text(available_bytes())} left on the machine"
    return f"{host.info.name} ({host.info.device}) holds {shown}; {room}"


def _memory_remedies(host: Host, call: Call) -> Iterator[str]:
    """Yield the changes by which a stage needs less memory, the most direct first."""
    worker = host.workers[call.role]
    operation: Any = getattr(getattr(worker, call.method, None), "__operation__", None)
    training, generation = worker.spec.training, worker.spec.generation
    on_gpu = host.info.device.startswith("cuda")
    if operation is not None and operation.generates and generation is not None:
        fraction = generation.gpu_memory_fraction
        share = f"gpu_memory_fraction (now {'automatic' if fraction is None else f'{fraction:g}'})"
        cache = share if on_gpu else f"kv_cache_gib (now {generation.kv_cache_gib:g})"
        if generation.engine == "vllm":
            yield f"a smaller Generation.{cache}"
        yield f"a smaller Generation.max_rows (now {generation.rows_at_once(on_gpu=on_gpu)})"
    elif worker.spec.name is not None and training is not None:
        tokens = worker.describe().get("micro_batch_tokens") or training.micro_batch_tokens
        yield "a smaller Training.micro_batch_tokens" + (f" (now {tokens:,})" if tokens else "")
        if operation is not None and operation.updates and not training.activation_checkpointing:
            yield "Training(activation_checkpointing=True)"
    elif call.rows is not None:
        yield "fewer rows"
    if on_gpu and not host.info.share_memory and sum(w.uses_device for w in host.workers.values()) > 1:
        yield "wb.open(share_memory=True), so that roles take turns"
    yield f"more devices: lab.{call.role}.move(pool, devices), lab.resize(pool, devices)"
