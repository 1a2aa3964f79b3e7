"""The notebook's handle of a batch: its columns' descriptions and locations, and methods to look at its rows."""

from __future__ import annotations

import difflib
import itertools
import re
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from html import escape
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import pandas as pd

from workbench.batches import files
from workbench.batches.columns import Ragged, Table
from workbench.batches.location import Column, Location, Maker, RowProvider, ShardCounts
from workbench.batches.schema import MADE_BY, PUT, SCHEMA, TOKEN_COLUMNS
from workbench.batches.turns import TURN_COLUMNS, chosen_mean, frame_of_turns, marked
from workbench.batches.vocabulary import Vocabulary
from workbench.display.html import bytes_text, table
from workbench.display.interrupts import stoppable
from workbench.errors import BadInput, UnknownColumn
from workbench.errors.plain_text import shown
from workbench.support.checked_calls import checked_call
from workbench.support.files import SHARED
from workbench.support.named_fields import NamedAttributes, remedy_for
from workbench.support.validation import PositiveInt

if TYPE_CHECKING:
    RowNumbers = Sequence[int] | np.ndarray | slice  # checked by `row_numbers`


class BatchHandle(NamedAttributes):
    """The base of `Batch`, without the methods that make another batch of its rows and columns.

    versions: yields the numbers of future versions, over all branches of its name. While a run still makes a column,
    `_columns` has the run in the column's place.
    """

    def __init__(
        self,
        name: str,
        columns: Mapping[str, Column | Maker],
        *,
        rows: int = 0,
        source: RowProvider,
        counts: ShardCounts,
        version: int = 0,
        versions: Iterator[int] | None = None,
        meta: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        locations = {id(c.location): c.location for c in columns.values() if isinstance(c, Column)}
        self.name, self.version, self._meta = name, version, dict(meta)
        self.versions = versions if versions is not None else itertools.count(version + 1)
        self.rows = len(next(iter(locations.values()))) if locations else rows
        self._columns = dict(columns)  # from now on, `__setattr__` refuses the names of columns
        self._source, self._counts = source, counts
        for location in locations.values():
            counts.hold(location)
        for run in self.makers(columns):
            run.dependents.append(weakref.ref(self))

    # --- versions, and columns that are being made --------------------------------------------------------------------

    def _instead_of(self, name: str) -> str:
        columns = self.__dict__.get("_columns", ())
        close = difflib.get_close_matches(name, columns, n=1, cutoff=0.8)
        held = next((one for one in (name, f"{name}_ids", *close) if one in columns), "")
        return f"write .df([{held!r}])" if held else ""

    if not TYPE_CHECKING:  # a type checker that sees `__setattr__` allows any attribute

        def __setattr__(self, name: str, value: Any) -> None:
            if name in self.__dict__.get("_columns", ()):
                remedy = f"write batch = batch.drop({name!r}).join(lab.put({{{name!r}: values}}))"
                raise BadInput(f"batch.{name} = {shown(value)}", "a batch does not change: make another", remedy)
            object.__setattr__(self, name, value)

    def with_pending(self, run: Maker, writes: Iterable[str], without: Collection[str] = ()) -> Self:
        """Return the next version, for a run that is still making the columns `writes`. Stages accept this batch;
        reading it waits for the run. without: columns to leave out."""
        promised = dict.fromkeys(writes, run)
        kept = {name: column for name, column in self._columns.items() if name not in {*without, *promised}}
        return self._next({**kept, **promised}, self._meta)

    def with_results(self, run: Maker, without: Collection[str]) -> Self:
        """Return the next version, with the result of a finished run. without: columns to leave out. Does not wait."""
        kept = {name: column for name, column in self._columns.items() if name not in without}
        return self._next({**kept, **run.made_columns}, {**self._meta, **run.meta})

    def _next(self, columns: Mapping[str, Column | Maker], meta: Mapping[str, Any], version: int | None = None) -> Self:
        return type(self)(
            self.name, columns, rows=self.rows, source=self._source, counts=self._counts,
            version=next(self.versions) if version is None else version, versions=self.versions, meta=meta,
        )  # fmt: skip

    def twin(self) -> Self:
        """Return another handle of the same batch, for the store: so it can see whether the notebook holds this one."""
        return self._next(self._columns, self._meta, self.version)

    def is_of(self, source: RowProvider) -> bool:
        """Whether the batch belongs to the workbench `source`."""
        return self._source is source

    @property
    def id(self) -> str:
        """The batch's name in the store, "name vversion". Versions count up over all branches of one name."""
        return f"{self.name} v{self.version}"

    @property
    def pending(self) -> bool:
        """Whether a run is still making some of the columns, or its result was not yet taken over."""
        return bool(self.makers(self._columns))

    @property
    def columns(self) -> Mapping[str, Column]:
        """The columns by name. Waits for the runs that make them."""
        self.settle()
        return MappingProxyType(self._columns)  # type: ignore[arg-type]  # none is being made any more

    @property
    def meta(self) -> Mapping[str, Any]:
        """Plain values that stages pass on with the columns. Waits for the runs that make columns."""
        self.settle()
        return MappingProxyType(self._meta)

    def makers(self, names: Iterable[str]) -> list[Maker]:
        """Return the runs that make some of these columns, in the order of their numbers; [] if all are there."""
        columns = self._columns
        runs = {run for name in names if not isinstance(run := columns.get(name), Column | None)}
        return sorted(runs, key=lambda run: run.number)

    def _made(self, counts: Callable[[Maker], bool]) -> tuple[dict[str, Column], dict[str, Any]]:
        """Return the existing columns and the meta, plus those of finished runs for which `counts` is true."""
        columns, meta = self._columns, self._meta  # in this order, because `settle` writes them in the opposite order
        there = {name: column for name, column in columns.items() if isinstance(column, Column)}
        runs = {column for column in columns.values() if not isinstance(column, Column)}
        for run in sorted(runs, key=lambda run: run.number):
            if run.state == "done" and counts(run):
                made = {
                    n: c for n, c in run.made_columns.items() if columns.get(n) is run or n not in run.writes
                }  # not dropped
                there, meta = {**there, **made}, {**meta, **run.meta}
        return there, dict(meta)

    def finished_columns(self, names: Iterable[str]) -> tuple[dict[str, Column], dict[str, Any]]:
        """Return these columns, whose runs are done, and their meta, while runs may still make other columns.

        The meta has entries only of the runs that made these columns, not of other runs whose results were not yet
        taken over: whether another run has ended depends on placement and speed. So a stage that reads an entry of the
        meta must also read a column of the same run.
        """
        asked = tuple(names)
        columns, meta = self._made(lambda run: any(name in run.made_columns for name in asked))
        return {name: columns[name] for name in asked}, meta

    def wait_for_columns(self, names: Iterable[str]) -> tuple[dict[str, Column], dict[str, Any]]:
        """Wait for the runs that make these columns, and return `finished_columns`. Other runs may fail."""
        asked = tuple(names)
        for run in self.makers(asked):
            run.result()
        return self.finished_columns(asked)

    def settle(self, *, wait: bool = True) -> None:
        """Take over the columns and meta of the runs. wait: wait for them; without it, do so only if all are done."""
        runs = self.makers(self._columns)
        for run in runs if wait else ():
            run.result()
        if runs and all(run.state == "done" for run in runs):
            columns, self._meta = self._made(lambda run: True)
            self._columns = dict(columns)

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the columns, as far as they are known without waiting."""
        return tuple(self._columns)

    @property
    def text_names(self) -> tuple[str, ...]:
        """The columns of Python objects, except those of `SCHEMA`, as far as they are known without waiting."""
        there, _ = self._made(lambda run: True)
        return tuple(name for name, column in there.items() if column.dtype == "object" and name not in SCHEMA)

    @property
    def unknown_names(self) -> tuple[str, ...]:
        """The columns that are being made and may turn out to be text: those that are not in `SCHEMA`."""
        return tuple(n for n, c in self._columns.items() if not isinstance(c, Column) and n not in SCHEMA)

    def derive(
        self,
        tool: str,
        columns: Mapping[str, Column],
        meta: Mapping[str, Any] | None = None,
        others: Sequence[BatchHandle] = (),
    ) -> Self:
        """Return the next version, made by `tool` from this batch and `others`."""
        batch = self._next(columns, {**self._meta, **(meta or {})})
        self._source.derived(batch, tool, [self, *others])
        return batch

    def copies(self, n: int) -> Self:
        """Return every row n times, like `repeat`, for one call: the batch is not recorded as derived."""
        if n == 1:
            return self
        return self._next(rows_of(self.columns, np.repeat(np.arange(self.rows), n)), self._meta)

    def known_as(
        self, name: str, version: int, versions: Iterator[int], columns: Iterable[str], meta: Mapping[str, Any]
    ) -> Self:
        """Return some columns under the name and version of a batch that the store had moved to a file; later versions
        continue its numbers."""
        return type(self)(
            name, {column: self.columns[column] for column in columns}, source=self._source, counts=self._counts,
            version=version, versions=versions, meta=meta,
        )  # fmt: skip

    @property
    def vocabulary(self) -> Vocabulary:
        """The vocabulary of the batch's token ids."""
        return self._source.vocabulary

    # --- looking, keeping ---------------------------------------------------------------------------------------------

    def need(self, columns: Iterable[str], reader: str) -> None:
        """Raise `UnknownColumn` unless the batch has all `columns`. reader: names the caller in the message."""
        missing = [name for name in columns if name not in self.names and name not in self.columns]
        if missing:
            maker = MADE_BY.get(missing[0])
            raise UnknownColumn(
                f"{reader} reads column {missing[0]!r}, which {self.name} (version {self.version}) does not have",
                f"it has {', '.join(self.names)}",
                f"run {maker} first" if maker else PUT.get(missing[0]) or remedy_for(missing[0], self.names, repr),
            )

    def _row_numbers(self, rows: RowNumbers) -> np.ndarray:
        index = np.arange(self.rows)[rows] if isinstance(rows, slice) else as_array(rows)
        if index.dtype == bool and index.shape == (self.rows,):
            index = np.flatnonzero(index)
        if index.shape == (0,):
            raise BadInput(f"rows {shown(rows)}, which are none of {self!r}", "a batch has at least one row")
        right = index.ndim == 1 and index.dtype.kind in "iu"
        if not right or index.min() < 0 or index.max() >= self.rows:
            rule = f"must be one or more row numbers from 0 to {self.rows - 1}, a slice, or one truth value per row"
            raise BadInput(f"rows {shown(rows)} of {self!r}", rule, "write rows=[0]")
        return index.astype(np.int64)

    @property
    def nbytes(self) -> int:
        """The size of all columns on all hosts, in bytes."""
        return sum(column.nbytes for column in self.columns.values())

    @checked_call("batch.fetch")
    def fetch(self, columns: Iterable[str] | None = None, rows: RowNumbers | None = None) -> Table:
        """Fetch columns (default all) of some rows (default all) into this process."""
        names = list(self.names if columns is None else columns)
        self.need(names, "fetch")
        index = np.arange(self.rows) if rows is None else self._row_numbers(rows)
        return self._source.pull(self.wait_for_columns(names)[0], index)

    @checked_call("batch.df")
    def df(self, columns: Iterable[str] | None = None, rows: RowNumbers | None = None) -> pd.DataFrame:
        """Return a pandas frame, one line per row; ragged columns as lists; `prompt_text`, `response_text` decoded.

        columns: names; rows: row numbers; None: all. With `response_mask` among the columns, ⟦ ⟧ enclose the text of an
        environment in a response.
        """
        table = self.fetch(columns, rows)
        out: dict[str, list[Any]] = {}
        for name, column in table.items():
            if isinstance(column, Ragged):
                out[name] = [row.tolist() for row in column.rows()]
            else:
                out[name] = list(column) if isinstance(column, list) else column.tolist()
        for ids in TOKEN_COLUMNS:
            if ids in out:
                out[ids.replace("_ids", "_text")] = [self._source.decode(row) for row in out[ids]]
        if {"response_ids", "response_mask"} <= set(out):
            turns = zip(out["response_ids"], out["response_mask"], strict=True)
            out["response_text"] = [marked(ids, mask, self._source.decode) for ids, mask in turns]
        return pd.DataFrame(out)

    @checked_call("batch.turns")
    def turns(self, rows: RowNumbers | None = None) -> pd.DataFrame:
        """Return a frame with one line per turn: `conversation`, the row's number; `turn`, from 0; `tokens` and `text`
        of the policy; `observation`, the environment's text before it; `trained`, whether some of its tokens are inside
        `response_mask`; `reward`.

        reward: from the column `rewards`, with the reward of a whole response on its last turn; else from
        `turn_rewards`. With `values` also `value`, of the conversation before the turn; with `advantages` also
        `advantage`, the mean over the turn's tokens inside the mask; with `returns` also `return`, their mean likewise.
        Raises `UnknownColumn` without `turn_starts`, `turn_ends`, which `generate_sequences(environment=...)` writes.
        """
        self.need(["turn_starts", "turn_ends", "response_ids", "response_mask"], "turns")
        numbers = list(range(self.rows)) if rows is None else self._row_numbers(rows).tolist()
        table = self.fetch([name for name in TURN_COLUMNS if name in self.names], numbers)
        return frame_of_turns(table, numbers, self._source.decode)

    @checked_call("batch.save")
    @stoppable("batch.save()", ("the file is complete, or as it was before", "run the same call again"))
    def save(self, path: str | Path) -> Path:
        """Write rows, columns and meta to one safetensors file, for `lab.load(path)` in this or another workbench.

        Columns pass through this process in chunks. An existing file is replaced atomically, when all is written. Text
        and other objects are saved as JSON; raises `BadInput` if they are not plain values.
        """
        return files.write(path, self, mode=SHARED)

    @checked_call("batch.failed")
    def failed(self) -> pd.DataFrame:
        """Return the rows for which a function of yours failed, one line per row: `row`, its number; `prompt`; `stage`
        and `function` that failed; `error`. To score them again, call `compute_reward(..., only=batch.failed())`.
        """
        names = ["row", "prompt", "stage", "function", "error"]
        texts = self.df(["failure"])["failure"].tolist() if "failure" in self.names else []
        rows = [row for row, text in enumerate(texts) if text]
        if not rows:
            return pd.DataFrame(columns=names).astype({"row": "int64"})
        prompt = "prompt" if "prompt" in self.names else "prompt_ids"
        prompts = self.df([prompt], rows=rows)["prompt" if prompt == "prompt" else "prompt_text"]
        lines = []
        for row, asked in zip(rows, prompts, strict=True):
            found = [(line, re.fullmatch(r"(\S+) (.*?): (.*)", line)) for line in texts[row].splitlines()]
            said = [("", "", line) if match is None else match.groups() for line, match in found]
            stages, functions, errors = (", ".join(dict.fromkeys(column)) for column in zip(*said, strict=True))
            lines.append((row, asked, stages, functions, errors))
        return pd.DataFrame(lines, columns=names)

    @checked_call("batch.peek")
    def peek(self, n: PositiveInt = 4) -> pd.DataFrame:
        """Return the first n rows for reading: text, scalars, ragged numbers as means over the policy's tokens."""
        frame = self.df(rows=range(min(n, self.rows)))
        drop = []
        for name in frame.columns:
            if name in TOKEN_COLUMNS:
                frame[name.replace("_ids", "_tokens")] = frame[name].map(len)
                drop.append(name)
            elif name in self.columns and self.columns[name].row_shape == ("*",):
                masks = frame["response_mask"] if name != "response_mask" and "response_mask" in frame else [None] * n
                means = [chosen_mean(row, mask) for row, mask in zip(frame[name], masks, strict=False)]
                frame[f"{name}_mean"] = means
                drop.append(name)
        return frame.drop(columns=drop)

    def __len__(self) -> int:
        return self.rows

    def __repr__(self) -> str:
        making = next((run for run in self.makers(self._columns) if run.state != "done"), None)
        if making is not None:
            return f"<Batch {self.name} v{self.version}: {self.rows} rows; {making.name} is {making.state}>"[:79]
        names = list(self.columns)
        shown = ", ".join(itertools.islice(names, 3)) + (f", +{len(names) - 3}" if len(names) > 3 else "")
        return f"<Batch {self.name} v{self.version}: {self.rows} rows; {shown}>"[:79]

    def _repr_html_(self) -> str:
        if self.pending:  # displaying a batch does not wait
            return escape(repr(self))
        rows = [
            {
                "column": name,
                "dtype": c.dtype,
                "shape": f"[{', '.join(map(str, (self.rows, *c.row_shape)))}]",
                "made by": c.owner,
                "lies on": ", ".join(sorted({shard.host for shard in c.location.shards})),
                "size": bytes_text(c.nbytes),
            }
            for name, c in self.columns.items()
        ]
        meta = ", ".join(f"{key}={value}" for key, value in self.meta.items())
        caption = f"Batch {self.name}, version {self.version}: {self.rows} rows, {bytes_text(self.nbytes)}"
        return table(rows, caption=caption) + (f"<small>{escape(meta)}</small>" if meta else "")


def rows_of(columns: Mapping[str, Column], index: np.ndarray) -> dict[str, Column]:
    """Return the columns with the rows at `index`; columns that share a location still share one."""
    moved: dict[int, Location] = {}
    chosen = {}
    for name, column in columns.items():
        location = column.location
        if id(location) not in moved:
            moved[id(location)] = location.take(index)
        share = round(column.nbytes * len(index) / len(location))
        chosen[name] = replace(column, nbytes=share, location=moved[id(location)])
    return chosen


def as_array(value: Any) -> np.ndarray:
    """Return a value as an array; an array without axes if that fails, such as for lists of unequal lengths."""
    try:
        return np.asarray(value)
    except Exception:  # an object may raise anything when NumPy reads its items
        return np.asarray(None)
