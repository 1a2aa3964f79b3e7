"""`Batch`: select, order, split and join rows, and select, rename and join columns, without moving a tensor."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
from pydantic import Field

from workbench.batches.handle import BatchHandle, as_array, rows_of
from workbench.batches.location import Column, Location, balanced_shares, minibatch_rows
from workbench.errors import BadInput
from workbench.support.checked_calls import checks_calls
from workbench.support.validation import NonNegativeInt, Number, PositiveInt

if TYPE_CHECKING:
    import pandas as pd

    from workbench.batches.disagreements import Disagreements

    RowNumbers = Sequence[int] | np.ndarray | slice  # checked by `row_numbers`

ColumnName = Annotated[str, Field(min_length=1)]


@checks_calls(
    "batch",
    internal="check_beside copies derive finished_columns is_of known_as makers need settle twin wait_for_columns "
    "with_pending with_results",
)
class Batch(BatchHandle):
    """A named, versioned, immutable table whose columns lie on the hosts.

    Every stage returns a new version with more columns; the old one stays valid. Token columns are ragged (packed, no
    padding): `prompt_ids`, `response_ids`, and one number per response token in `response_mask`, `rollout_log_prob`,
    `old_log_prob`, `ref_log_prob`, `values`, `advantages`, `returns`. `rewards` is one number per row.

    meta: plain values that stages pass on: the iteration, temperature and weights version of the rollout, and the
    temperature of `old_log_prob` (`log_prob_temperature`).
    """

    # --- rows ---------------------------------------------------------------------------------------------------------

    def take(self, rows: RowNumbers) -> Batch:
        """Return the rows with these numbers, in the given order; of a slice; or where a mask of truth values is true.

        batch.take([3, 0]), batch.take(slice(8)), batch.take(rewards > 0)
        """
        return self.derive("take", rows_of(self.columns, self._row_numbers(rows)))

    def repeat(self, n: PositiveInt) -> Batch:
        """Return every row n times, with the copies of a row next to each other."""
        return self if n == 1 else self.take(np.repeat(np.arange(self.rows), n))

    def filter(
        self, keep: Sequence[bool] | np.ndarray | pd.Series | Callable[[pd.DataFrame], Any], columns: Iterable[str] = ()
    ) -> Batch:
        """Return the rows for which `keep` is true.

            batch.filter(lambda rows: rows.rewards > 0, columns=["rewards"])

        keep: one truth value per row (list, array, tensor, series); or a function that returns them for `df(columns)`:
        then only these columns are fetched.
        """
        if callable(keep):
            if not (names := list(columns)):
                raise BadInput("filter(function) without columns", "the function takes a frame of the named columns",
                               'name those that it reads: columns=["rewards"]')  # fmt: skip
            keep = keep(self.df(names))
        mask = as_array(keep)
        if mask.dtype != bool or mask.shape != (self.rows,):
            raise BadInput(
                f"a filter of shape {list(mask.shape)} and dtype {mask.dtype} for {self!r}",
                f"must be one True or False a row, {self.rows} in all",
                "give a list or an array of them, such as the frame's own `rows.rewards > 0`",
            )
        return self.take(mask)

    def split(self, n: PositiveInt) -> list[Batch]:
        """Return n batches of consecutive rows, of nearly equal size."""
        if n > self.rows:
            raise BadInput(f"split({n}) of {self.rows} rows", "a batch has at least one row")
        return [self.take(rows) for rows in np.array_split(np.arange(self.rows), n)]

    def shuffle(self, seed: NonNegativeInt) -> Batch:
        """Return the rows in a random order, which depends only on the seed and the number of rows."""
        return self.take(np.random.default_rng(seed).permutation(self.rows))

    def lengths(self, column: str) -> np.ndarray:
        """Return the number of tokens of each row of a ragged column, int64 [rows]. The hosts count; no token moves."""
        self.need([column], "lengths")
        if self.columns[column].row_shape != ("*",):
            raise BadInput(f"lengths({column!r})", "its rows are not token sequences", "choose a column of shape [*]")
        return self._source.lengths(column, self.columns[column].location)

    def balance(self, ranks: PositiveInt, minibatches: PositiveInt = 1) -> Batch:
        """Return the rows in an order that gives nearly equal numbers of tokens to ranks which step together.

        ranks: replicas that share a minibatch (d of the group's layout). minibatches: their number in the next update.
        Each minibatch keeps its rows, so an update computes the same gradients; only the rank of a row changes. Counts
        the tokens of prompt and response, on the hosts.
        """
        cut = minibatch_rows(self.rows, minibatches)
        if len(cut[0]) < ranks:
            raise BadInput(
                f"balance of {self.rows} rows in {minibatches} minibatches over {ranks} ranks",
                "every rank needs at least one row of each minibatch",
                f"use at least {ranks * minibatches} rows",
            )
        self.need(["prompt_ids"], "balance")
        counted = [name for name in ("prompt_ids", "response_ids") if name in self.columns]
        tokens = np.sum([self.lengths(name) for name in counted], axis=0)
        return self.take(np.concatenate([rows[s] for rows in cut for s in balanced_shares(tokens[rows], ranks)]))

    # --- columns ------------------------------------------------------------------------------------------------------

    def select(self, *columns: str) -> Batch:
        """Return the batch with only these columns, in this order."""
        if not columns:
            raise BadInput("select() of no column", "a batch has at least one column")
        self.need(columns, "select")
        return self.derive("select", *self.wait_for_columns(columns))

    def drop(self, *columns: str) -> Batch:
        """Return the batch without these columns."""
        self.need(columns, "drop")
        return self.select(*(name for name in self.names if name not in columns))

    def rename(self, **names: ColumnName) -> Batch:
        """Return the batch with columns under other names: `rename(old="new")`."""
        self.need(names, "rename")
        columns: dict[str, Column] = {}
        for old, column in self.columns.items():
            new = names.get(old, old)
            if new in columns:
                raise BadInput(f"rename: two columns {new!r}", "a batch has one column of a name", "choose other names")
            columns[new] = replace(column, location=column.location.stored_as(old)) if new != old else column
        return self.derive("rename", columns)

    def join(self, other: Batch) -> Batch:
        """Return this batch with the columns of another added, row by row. Where meta differ, keep this batch's.

            batch.join(greedy.select("rewards").rename(rewards="baseline_rewards"))

        Raises `BadInput` if both have a column of the same name, or different numbers of rows.
        """
        self.check_beside([other], "join")
        if self.rows != other.rows:
            raise BadInput(f"join of {self!r} and {other!r}", "both must have equally many rows")
        if both := [name for name in other.columns if name in self.columns]:
            raise BadInput(
                f"join: both batches have {', '.join(map(repr, both))}",
                "a batch has one column of a name",
                f"drop them, or use other.rename({both[0]}='other_{both[0]}')",
            )
        return self.derive("join", {**self.columns, **other.columns}, {**other.meta, **self.meta}, [other])

    @staticmethod
    def concat(batches: Sequence[Batch]) -> Batch:
        """Return the rows of several batches, end to end, as the next version of the first batch, with its meta.

        Raises `BadInput` unless all batches belong to one workbench, have the same columns with the same dtypes and row
        shapes, and were sampled, and scored by `compute_log_prob`, at one temperature.
        """
        if not batches:
            raise BadInput("concat([])", "takes at least one batch, in a list", "write concat([a, b])")
        first, *others = batches
        first.check_beside(others, "concat")
        every = dict.fromkeys(name for batch in batches for name in batch.columns)
        for number, batch in enumerate(batches):
            if missing := [name for name in every if name not in batch.columns]:
                raise BadInput(
                    f"concat: batch {number} ({batch!r}) lacks {', '.join(map(repr, missing))}",
                    "all batches must have the same columns",
                    "add them, or drop them from the others",
                )
        _check_temperatures(batches)
        together: dict[tuple[Any, ...], Location] = {}
        columns = {}
        for name, column in first.columns.items():
            parts = [batch.columns[name] for batch in batches]
            for number, part in enumerate(parts):
                if (part.dtype, part.row_shape) != (column.dtype, column.row_shape):
                    raise BadInput(
                        f"concat: column {name!r} is {_kind(part)} in batch {number} and {_kind(column)} in batch 0",
                        "a column must have the same dtype and row shape in all batches",
                    )
            locations = [part.location for part in parts]
            renamed = any(location.names for location in locations)
            key = (name if renamed else "", *map(id, locations))
            if key not in together:
                if renamed:
                    locations = [location.stored_as(name) for location in locations]
                together[key] = Location.concat(locations)
            columns[name] = replace(
                column,
                nbytes=sum(part.nbytes for part in parts),
                owner=", ".join(dict.fromkeys(part.owner for part in parts)),
                location=together[key],
            )
        cut = {name: value for batch in batches[::-1] for name, value in batch.meta.get("truncation", {}).items()}
        meta = {**first.meta, "truncation": cut} if cut else None
        return first.derive("concat", columns, meta, others=others)

    def disagreements(
        self, one: ColumnName, two: ColumnName, threshold: Number | tuple[Number, Number] | None = None
    ) -> Disagreements:
        """Compare the scores of two verifiers: a frame of the rows with both scores, the largest gap first, the share
        of rows on which they agree, and Cohen's kappa.

            batch.disagreements("math", "judge").df

        one, two: names of components of the reward (else of the cost), or any columns of numbers; a column of numbers
            per token is summed. threshold: a score above it counts as yes; one for both, or one for each; default: the
            middle of the range, 0.5 for scores in [0, 1]. Leaves out rows that are not `valid`.
        """
        from workbench.batches.disagreements import disagreements

        columns = [next((n for n in (f"rewards/{x}", f"costs/{x}") if n in self.names), x) for x in (one, two)]
        self.need(columns, "disagreements")
        for name in columns:
            if name in self.text_names:
                raise BadInput(f"disagreements of column {name!r}", "it holds text", "name columns of numbers")
        return disagreements(self, (columns[0], columns[1]), threshold)

    def check_beside(self, others: Iterable[Batch], reader: str) -> None:
        """Raise `BadInput` unless all batches belong to this batch's workbench."""
        for other in others:
            if not other.is_of(self._source):
                raise BadInput(
                    f"{reader} of batches of two workbenches",
                    "all columns of a batch are on the hosts of one workbench",
                    "copy one over with batch.save(path) and lab.load(path)",
                )


def _check_temperatures(batches: Sequence[Batch]) -> None:
    kinds = {
        "temperature": "sampled", "log_prob_temperature": "scored", "teacher_temperature": "scored by a teacher"
    }  # fmt: skip
    for travelling, what in kinds.items():
        temperatures = {batch.meta[travelling] for batch in batches if travelling in batch.meta}
        if len(temperatures) > 1:
            raise BadInput(
                f"concat of rows {what} at temperatures {', '.join(map(str, sorted(temperatures)))}",
                "all log-probabilities of a batch must be at the same temperature",
                "keep these batches separate; lab.buffer.clear() throws rollouts that wait in the buffer away",
            )


def _kind(column: Column) -> str:
    return f"{column.dtype} [{', '.join(map(str, ('rows', *column.row_shape)))}]"
