"""Checks a batch against the schema of its columns, once when it enters a stage, before any work, without a device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from workbench.batches.columns import REPEAT_IT, ColumnValues, Ragged, kind_of
from workbench.batches.schema import FINITE, SCHEMA, ColumnSchema
from workbench.batches.turns import contexts_of, longest_contexts
from workbench.errors import BadInput
from workbench.models.loading import Limits

Rows = Sequence[int] | np.ndarray  # the numbers of a shard's rows in the batch
ROWS = {
    "one": "one number a row, a Tensor [rows]",
    "tokens": "one number a token of each row, a Ragged",
    "either": "one number a row, a Tensor [rows], or one a response token, a Ragged",
}
UNITS = {"response": "tokens", "turn": "turns"}  # of `ColumnSchema.along`


def check_columns(columns: Mapping[str, ColumnValues], rows: Rows, limits: Limits, *, all_valid: bool = False) -> None:
    """Raise `BadInput` naming column, row and value if a known column breaks its schema, if columns of one response
    have different lengths, or if a sequence is longer than the model's context.

    limits: the limits of the model that reads the columns. all_valid: also refuse rows that are not valid.
    """
    known = {name: schema for name in columns if (schema := SCHEMA.get(name)) is not None}
    for name in known:
        check_column(name, columns[name], rows, limits)
    valid = columns.get("valid")
    if all_valid and isinstance(valid, Tensor) and not valid.all():
        raise BadInput(
            f"row {rows[int((valid == 0).nonzero()[0])]} is not valid",
            "this update trains on every row, and a failed row has nothing to train on",
            "take the others: batch.take(numpy.flatnonzero(batch.fetch(['valid'])['valid']))",
        )
    ragged = {name: column for name in known if isinstance(column := columns[name], Ragged)}
    for along in UNITS:
        _check_lengths({name: column for name, column in ragged.items() if known[name].along == along}, along, rows)
    for name in ragged:
        if known[name].holds == "token ids":
            _check_sequences(name, ragged, rows, limits)


def check_column(name: str, column: ColumnValues, rows: Rows, limits: Limits, where: str = "") -> None:
    """Raise `BadInput` if a single known column breaks its schema. where: the beginning of the message."""
    schema = SCHEMA[name]
    if schema.holds == "text":
        if not (isinstance(column, list) and all(isinstance(value, str) for value in column)):
            raise BadInput(f"{where}column {name!r} is {kind_of(column)}", "it must be a list with one text a row")
        return
    values = column.values if isinstance(column, Ragged) else column
    kinds = {"one": (Tensor,), "tokens": (Ragged,), "either": (Tensor, Ragged)}[schema.row]
    if not isinstance(values, Tensor) or not isinstance(column, kinds) or values.ndim != 1:
        raise _wrong_kind(name, column, schema, where)
    if not _right_dtype(schema, values.dtype):
        dtype = str(values.dtype).removeprefix("torch.")
        wanted = "int64" if schema.holds == "token ids" else f"an {'integer' if _whole(schema) else 'real'} dtype"
        raise BadInput(
            f"{where}column {name!r} is {dtype}",
            f"it holds {schema.holds}, of {wanted}",
            "make it int64, or give lists of whole numbers" if _whole(schema) else "make it a tensor of float32",
        )
    most = schema.most
    if schema.holds == "token ids" and limits.vocabulary is not None:
        most = limits.vocabulary - 1
    if not values.numel() or values.dtype == torch.bool:
        return
    if (schema.least, most) == (-FINITE, FINITE) and values.is_floating_point() and torch.isfinite(values.sum()):
        return  # a sum keeps a NaN or an infinity, and is five times as fast as the smallest and largest
    low, high = map(float, torch.aminmax(values.detach()))  # both are NaN if there is one
    between = (values != 0) & (values != 1) if schema.holds == "zeros and ones" else None
    if schema.least <= low and high <= most and (between is None or not between.any()):
        return
    bad = ~(torch.isfinite(values) & (values >= schema.least) & (values <= most))
    if between is not None:
        bad |= between
    row, token, value = first_of(column, bad)
    raise _wrong_value(name, schema, most, rows[row], token, value, where)


def first_of(column: ColumnValues, bad: Tensor) -> tuple[int, int | None, str]:
    """Return (row, position in a row of tokens or None, value) of the first number that is marked in `bad`.

    bad: a truth value for each number of the column (for a Ragged: of its `values`).
    """
    values = column.values if isinstance(column, Ragged) else column
    assert isinstance(values, Tensor)
    at = int(bad.flatten().nonzero()[0])
    value, row = f"{values.flatten()[at].item()}", at // max(1, values[0].numel())
    if not isinstance(column, Ragged):
        return row, None, value
    ends, at = column.lengths.cumsum(0), row
    row = int(torch.searchsorted(ends, at, right=True))
    return row, at - int(ends[row] - column.lengths[row]), value


def _check_lengths(columns: Mapping[str, Ragged], along: str, rows: Rows) -> None:
    first = "response_ids" if "response_ids" in columns else next(iter(columns), "")
    for name, column in columns.items():
        expected = columns[first].lengths
        if torch.equal(column.lengths, expected):
            continue
        row = int((column.lengths != expected).nonzero()[0])
        raise BadInput(
            f"column {name!r} has {int(column.lengths[row])} numbers in row {rows[row]}, where {first!r} has "
            f"{int(expected[row])}",
            f"columns of one response have one number for each of its {UNITS[along]}",
            f"make it with the lengths of that column: batch.fetch([{first!r}])[{first!r}].like(values)",
        )


def _check_sequences(name: str, columns: Mapping[str, Ragged], rows: Rows, limits: Limits) -> None:
    column = columns[name]
    if not SCHEMA[name].empty and len(column) and int(column.lengths.min()) == 0:
        row = rows[int((column.lengths == 0).nonzero()[0])]
        raise BadInput(
            f"column {name!r} has no token in row {row}",
            "a prompt needs at least its BOS, an answer its EOS",
            f"leave such rows out: batch.take(numpy.flatnonzero(batch.lengths({name!r})))",
        )
    if limits.context is None or not len(column):
        return
    before = next((other for other in SCHEMA[name].follows if other in columns), None)
    contexts = contexts_of(columns) if name == "response_ids" else {}
    lengths = longest_contexts(None if before is None else columns[before].lengths, column.lengths, contexts)
    if int(lengths.max()) > limits.context:
        row = int(lengths.argmax())
        what = repr(name) if before is None else f"{before!r} and {name!r}"
        raise BadInput(
            f"row {rows[row]} has {int(lengths[row])} tokens in {what}",
            f"the model reads at most {limits.context} tokens: its outputs after these mean nothing",
            "cut the row, leave it out, or use a model with a longer context",
        )


def _whole(schema: ColumnSchema) -> bool:
    return schema.holds in ("token ids", "whole numbers")


def _right_dtype(schema: ColumnSchema, dtype: torch.dtype) -> bool:
    if schema.holds == "token ids":
        return dtype == torch.int64
    return not (dtype.is_complex or (_whole(schema) and (dtype.is_floating_point or dtype == torch.bool)))


def _wrong_kind(name: str, column: ColumnValues, schema: ColumnSchema, where: str) -> BadInput:
    remedy = ""
    if isinstance(column, list):
        remedy = f"put numbers: lab.put({{**batch.fetch(), {name!r}: [...]}}, meta=batch.meta)"
    elif isinstance(column, Tensor) and column.ndim == 2 and column.shape[1] == 1:
        remedy = "give x[:, 0] instead of a tensor x [rows, 1]"
    elif isinstance(column, Tensor) and schema.holds == "token ids":
        remedy = f"put a list of token ids for each row, without padding: lab.put({{{name!r}: [[1, 5], [1, 7, 2]]}})"
    elif isinstance(column, Tensor):
        remedy = REPEAT_IT
    return BadInput(f"{where}column {name!r} is {kind_of(column)}", f"it must be {ROWS[schema.row]}", remedy)


def _wrong_value(
    name: str, schema: ColumnSchema, most: float, row: int, token: int | None, value: str, where: str
) -> BadInput:
    place = f"row {row}" + ("" if token is None else f", token {token}")
    if schema.holds == "token ids":
        return BadInput(
            f"{where}column {name!r} has token id {value} in {place}",
            f"the model has ids 0 to {most:.0f}",
            "make the ids with this workbench's tokenizer; a Ragged has rows without padding",
        )
    if schema.holds == "zeros and ones":
        rule = "its values must be 0 or 1, or False or True"
    else:
        least = f", at least {schema.least:g}" if schema.least != -FINITE else ""
        rule = f"its numbers must be finite{least}" + (f", at most {most:g}" if most != FINITE else "")
    return BadInput(
        f"{where}column {name!r} holds {value} in {place}",
        rule,
        f"look at batch.df([{name!r}], rows=[{row}]); put another column with "
        f"lab.put({{**batch.fetch(), {name!r}: ...}}), or leave that row out",
    )
