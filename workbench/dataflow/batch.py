"""The notebook's handle of a batch: what it is and where it lies, never its tensors."""

from __future__ import annotations

import copy
import itertools
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from html import escape
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from workbench.dataflow import files
from workbench.dataflow.balance import balanced_shares
from workbench.dataflow.columns import Ragged, Table
from workbench.dataflow.location import Location, ShardId
from workbench.engines.settings import at_least
from workbench.errors import BadInput, UnknownColumn
from workbench.workers.protocols import minibatch_rows

if TYPE_CHECKING:
    import pandas as pd

    from workbench.dataflow.run import Run


@dataclass(frozen=True, kw_only=True)
class Column:
    """dtype; shape of one row ("*": a length that varies); bytes of all rows; the role that made it; where it lies.

    made_with: a text that is equal for equal code and arguments of the stage that made it; empty for what was put.
    """

    dtype: str
    row_shape: tuple[int | str, ...]
    nbytes: int
    owner: str
    location: Location
    made_with: str = ""


class Source(Protocol):
    """What a batch asks of its workbench: rows brought here, lengths of ragged rows, and text for tokens."""

    def pull(self, columns: Mapping[str, Column], rows: np.ndarray) -> Table: ...

    def lengths(self, name: str, location: Location) -> np.ndarray: ...

    def decode(self, token_ids: Sequence[int]) -> str: ...


# what the stages that come with workbench write: numbers, all of them
NUMBER_COLUMNS = frozenset(
    (
        *("response_ids", "response_mask", "finished", "rollout_log_prob", "old_log_prob", "ref_log_prob"),
        *("values", "rewards", "baseline_rewards", "token_rewards", "advantages", "returns"),
        *("cost_values", "costs", "token_costs", "cost_returns", "pretrain_ids", "pretrain_loss"),
        *("chosen_rewards", "rejected_rewards", "chosen_costs", "rejected_costs"),
        *("chosen_log_prob", "rejected_log_prob", "ref_chosen_log_prob", "ref_rejected_log_prob"),
    )
)
# columns of token ids, which are shown as text
TOKEN_COLUMNS = ("prompt_ids", "response_ids", "chosen_ids", "rejected_ids")


class ShardCounts:
    """Counts the handles that refer to each shard; a shard that nobody refers to is due for release."""

    def __init__(self) -> None:
        self._counts: Counter[ShardId] = Counter()
        self._due: list[ShardId] = []
        self._lock = threading.RLock()

    def hold(self, location: Location) -> None:
        """Count `location` until it is garbage collected."""
        with self._lock:
            self._counts.update(location.shards)
        weakref.finalize(location, self._drop, location.shards).atexit = False

    def _drop(self, shards: tuple[ShardId, ...]) -> None:
        with self._lock:
            self._counts.subtract(shards)
            for shard in shards:
                if self._counts[shard] <= 0:
                    del self._counts[shard]
                    self._due.append(shard)

    def take_due(self) -> list[ShardId]:
        """The shards due for release, each given out once."""
        with self._lock:
            due, self._due = self._due, []
            return due


class Batch:
    """A named, versioned, immutable table whose columns lie on the hosts.

    Every stage returns a new version with more columns; the old one stays valid. Token columns are ragged (packed, no
    padding): `prompt_ids`, `response_ids`, and one number a response token in `response_mask`, `rollout_log_prob`,
    `old_log_prob`, `ref_log_prob`, `values`, `advantages`, `returns`. `rewards` is one number a row.

    meta: plain values that travel along: the iteration, the sampling temperature, the weights version of the rollout.
    """

    def __init__(
        self,
        name: str,
        columns: Mapping[str, Column],
        *,
        source: Source,
        counts: ShardCounts,
        version: int = 0,
        versions: Iterator[int] | None = None,
        meta: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        self._open: dict[str, Run] = {}  # columns that are still being made
        lengths = {len(column.location) for column in columns.values()}
        if len(lengths) > 1:
            raise BadInput(f"columns of {sorted(lengths)} rows in one batch", "all columns have equally many rows")
        self.name, self.version, self._meta = name, version, MappingProxyType(dict(meta))
        self._versions = versions if versions is not None else itertools.count(version + 1)
        self._columns: Mapping[str, Column] = MappingProxyType(dict(columns))
        self.rows = lengths.pop() if lengths else 0
        self._source, self._counts = source, counts
        for location in {id(c.location): c.location for c in columns.values()}.values():
            counts.hold(location)

    def after(self, run: Run, writes: Iterable[str], copies: int = 1) -> Batch:
        """The next version, some of whose columns `run` is making: it can be given to a stage, and waits when read."""
        batch = copy.copy(self if copies == 1 else self.repeat(copies))  # shares what is there
        promised = tuple(writes)
        batch._columns = MappingProxyType({n: c for n, c in batch._columns.items() if n not in promised})
        batch._open = {**batch._open, **dict.fromkeys(promised, run)}
        batch.version, batch.rows = next(self._versions), self.rows * copies
        return batch._waiting()

    def twin(self) -> Batch:
        """Another handle of the same: whether the notebook still holds this one can be told from it."""
        return copy.copy(self)._waiting()

    def _waiting(self) -> Batch:
        for run in set(self._open.values()):
            run.dependents.append(weakref.ref(self))
        return self

    @property
    def id(self) -> str:
        """Its name in the store, "name vversion": versions count up over all branches of one name."""
        return f"{self.name} v{self.version}"

    @property
    def pending(self) -> bool:
        """Whether some of its columns are still being made."""
        return bool(self._open)

    @property
    def columns(self) -> Mapping[str, Column]:
        """Its columns by name."""
        self.settle()
        return self._columns

    @property
    def meta(self) -> Mapping[str, Any]:
        """Plain values that travel along."""
        self.settle()
        return self._meta

    def makers(self, names: Iterable[str]) -> list[Run]:
        """The runs that make some of these columns; none where all are there."""
        being_made = self._open
        return list(dict.fromkeys(being_made[name] for name in names if name in being_made))

    def part(self, names: Iterable[str]) -> tuple[dict[str, Column], dict[str, Any]]:
        """Columns whose makers are done, and what travels along with them, while others may still be made."""
        being_made = self._open  # read first: what it names is in the columns once it is gone from here
        columns, meta = self._columns, dict(self._meta)
        for run in sorted(set(being_made.values()), key=lambda run: run.number):
            if run.state == "done":
                columns, meta = MappingProxyType({**columns, **run.made}), {**meta, **run.meta}
        return {name: columns[name] for name in names}, meta

    @property
    def names(self) -> tuple[str, ...]:
        """Its columns, as far as they are known without waiting."""
        return tuple(dict.fromkeys((*self._columns, *self._open)))

    @property
    def text_names(self) -> tuple[str, ...]:
        """Its columns of Python objects, as far as they are known without waiting."""
        being_made, there = self._open, dict(self._columns)
        for run in set(being_made.values()):
            there |= run.made if run.state == "done" else {}
        return tuple(name for name, column in there.items() if column.dtype == "object")

    @property
    def unknown_names(self) -> tuple[str, ...]:
        """Columns that are being made and might turn out to be text: those that no stage of ours writes."""
        return tuple(name for name in self._open if name not in NUMBER_COLUMNS)

    def settle(self, *, wait: bool = True) -> None:
        """Take over what its runs have made; not `wait`: only if all are done."""
        runs = sorted(set(self._open.values()), key=lambda run: run.number)
        if not runs:
            return
        if wait:
            for run in runs:
                run.result()
        if all(run.state == "done" for run in runs):
            columns, meta = dict(self._columns), dict(self._meta)
            for run in runs:
                columns, meta = {**columns, **run.made}, {**meta, **run.meta}
            self._columns, self._meta, self._open = MappingProxyType(columns), MappingProxyType(meta), {}

    def _derive(
        self, columns: Mapping[str, Column], meta: Mapping[str, Any] | None = None, version: int | None = None
    ) -> Batch:
        return Batch(
            self.name,
            columns,
            source=self._source,
            counts=self._counts,
            version=next(self._versions) if version is None else version,
            versions=self._versions,
            meta={**self.meta, **(meta or {})},
        )

    def with_columns(
        self, columns: Mapping[str, Column], meta: Mapping[str, Any] | None = None, version: int | None = None
    ) -> Batch:
        """The next version (or the one given), with these columns added or replaced."""
        return self._derive({**self.columns, **columns}, meta, version)

    def take(self, rows: Sequence[int] | np.ndarray) -> Batch:
        """A choice of rows, by number, in the order given; no tensor moves."""
        index = self._row_numbers(rows)
        moved: dict[int, Location] = {}
        columns = {}
        for name, c in self.columns.items():
            if id(c.location) not in moved:
                moved[id(c.location)] = c.location.take(index)
            share = round(c.nbytes * len(index) / self.rows)
            columns[name] = replace(c, nbytes=share, location=moved[id(c.location)])
        return self._derive(columns)

    def _row_numbers(self, rows: Sequence[int] | np.ndarray) -> np.ndarray:
        index = np.asarray(rows)
        right = index.ndim == 1 and len(index) and index.dtype.kind in "iu"
        if not right or index.min() < 0 or index.max() >= self.rows:
            raise BadInput(f"rows {rows!r} of {self!r}", f"must be one or more row numbers from 0 to {self.rows - 1}")
        return index.astype(np.int64)

    def repeat(self, n: int) -> Batch:
        """Every row n times, copies side by side; no tensor moves."""
        if n < 1:
            raise BadInput(f"repeat({n})", "must be at least 1")
        return self if n == 1 else self.take(np.repeat(np.arange(self.rows), n))

    def filter(
        self,
        keep: Sequence[bool] | np.ndarray | pd.Series | Callable[[pd.DataFrame], Any],
        columns: Iterable[str] = (),
    ) -> Batch:
        """The rows for which `keep` is true.

            batch.filter(lambda rows: rows.rewards > 0, columns=["rewards"])

        keep: one truth value a row (list, array, tensor, series); or a function that gives them for `df(columns)`:
        then these columns, and no others, are brought here.
        """
        if callable(keep):
            if not (names := list(columns)):
                raise BadInput("filter(function) without columns", "the function is given a frame of named columns",
                               'name those that it reads: columns=["rewards"]')  # fmt: skip
            keep = keep(self.df(names))
        mask = np.asarray(keep)
        if mask.dtype != bool or mask.shape != (self.rows,):
            raise BadInput(
                f"a filter of shape {list(mask.shape)} and dtype {mask.dtype} for {self!r}",
                f"one True or False a row, {self.rows} in all",
            )
        if not mask.any():
            raise BadInput(f"a filter that keeps none of {self!r}", "a batch has at least one row")
        return self.take(np.flatnonzero(mask))

    def split(self, n: int) -> list[Batch]:
        """n batches of consecutive rows, as equally many as can be."""
        at_least("n", n, 1)
        if n > self.rows:
            raise BadInput(f"split({n}) of {self.rows} rows", "a batch has at least one row")
        return [self.take(rows) for rows in np.array_split(np.arange(self.rows), n)]

    def split_by(self, column: str) -> dict[Any, Batch]:
        """For each value of a column, in order of appearance, the batch of its rows: `split_by("prompt_uid")`.

        Brings this one column here.
        """
        groups: dict[Any, list[int]] = {}
        try:
            for row, value in enumerate(self._values(column, "split_by")):
                groups.setdefault(value, []).append(row)
        except TypeError as error:
            raise BadInput(
                f"split_by({column!r}): {error}", "its values become keys: numbers or text", "choose another column"
            ) from error
        return {value: self.take(rows) for value, rows in groups.items()}

    def shuffle(self, seed: int) -> Batch:
        """The rows in an order that only the seed, and how many there are, decides."""
        at_least("seed", seed, 0)
        return self.take(np.random.default_rng(seed).permutation(self.rows))

    def sort_by(self, column: str, descending: bool = False) -> Batch:
        """The rows in order of a column of numbers or text; equal ones keep theirs, NaN come last. Brings this column
        here."""
        values = self._values(column, "sort_by")
        ordered = [row for row, value in enumerate(values) if value == value]
        unordered = [row for row, value in enumerate(values) if value != value]
        try:
            ordered.sort(key=values.__getitem__, reverse=descending)
            return self.take(ordered + unordered)
        except TypeError as error:
            raise BadInput(
                f"sort_by({column!r}): {error}", "its values have one order: all numbers or all text"
            ) from error

    def _values(self, column: str, reader: str) -> list[Any]:
        """A column of one value a row, brought here."""
        self.need([column], reader)
        if self.columns[column].row_shape != ():
            raise BadInput(
                f"{reader}({column!r})",
                f"reads one value a row; {column!r} has rows of shape {list(self.columns[column].row_shape)}",
                f"by length: batch.take(np.argsort(batch.lengths({column!r})))" if reader == "sort_by" else "",
            )
        values = self.fetch([column])[column]
        assert not isinstance(values, Ragged)
        return values if isinstance(values, list) else values.tolist()

    def lengths(self, column: str) -> np.ndarray:
        """Tokens of each row of a ragged column, [rows] int64; counted on the hosts, no token moves."""
        self.need([column], "lengths")
        if self.columns[column].row_shape != ("*",):
            raise BadInput(f"lengths({column!r})", "its rows are no token sequences", "choose a column of shape [*]")
        return self._source.lengths(column, self.columns[column].location)

    def balance(self, ranks: int, minibatches: int = 1) -> Batch:
        """The rows in an order in which ranks that step together get nearly equally many tokens.

        ranks: replicas that share a minibatch (d of the group's layout). minibatches: of the update that will read it.
        Each minibatch keeps its rows, so an update computes the same gradients; which rank has which of them changes.
        Tokens are those of prompt and response; the hosts count them.
        """
        at_least("ranks", ranks, 1)
        at_least("minibatches", minibatches, 1)
        cut = minibatch_rows(self.rows, minibatches)
        if len(cut[0]) < ranks:
            raise BadInput(
                f"balance of {self.rows} rows in {minibatches} minibatches over {ranks} ranks",
                "every rank has at least one row of a minibatch",
                f"use at least {ranks * minibatches} rows",
            )
        self.need(["prompt_ids"], "balance")
        counted = [name for name in ("prompt_ids", "response_ids") if name in self.columns]
        tokens = np.sum([self.lengths(name) for name in counted], axis=0)
        return self.take(np.concatenate([rows[s] for rows in cut for s in balanced_shares(tokens[rows], ranks)]))

    # --- columns ------------------------------------------------------------------------------------------------------

    def select(self, *columns: str) -> Batch:
        """Only these columns, in this order."""
        if not columns:
            raise BadInput("select() of no column", "a batch has at least one column")
        self.need(columns, "select")
        return self._derive({name: self.columns[name] for name in columns})

    def drop(self, *columns: str) -> Batch:
        """Without these columns."""
        self.need(columns, "drop")
        return self.select(*(name for name in self.columns if name not in columns))

    def rename(self, **names: str) -> Batch:
        """Columns under other names, `rename(old="new")`; no tensor moves."""
        self.need(names, "rename")
        columns: dict[str, Column] = {}
        for old, column in self.columns.items():
            new = names.get(old, old)
            if new in columns:
                raise BadInput(f"rename: two columns {new!r}", "a batch has one column of a name", "choose other names")
            columns[new] = replace(column, location=column.location.kept_as(old)) if new != old else column
        return self._derive(columns)

    def join(self, other: Batch) -> Batch:
        """This batch with the columns of another added, row by row; no tensor moves. Where meta differ, its own stay.

            batch.join(greedy.select("rewards").rename(rewards="baseline_rewards"))

        Raises `BadInput` for names that both have, and for another number of rows.
        """
        self._check_beside([other], "join")
        if self.rows != other.rows:
            raise BadInput(f"join of {self!r} and {other!r}", "both have equally many rows")
        if both := [name for name in other.columns if name in self.columns]:
            raise BadInput(
                f"join: both batches have {', '.join(map(repr, both))}",
                "a batch has one column of a name",
                f"drop them, or other.rename({both[0]}='other_{both[0]}')",
            )
        return self._derive({**self.columns, **other.columns}, {**other.meta, **self.meta})

    @staticmethod
    def concat(batches: Sequence[Batch]) -> Batch:
        """The rows of several batches, end to end, as the next version of the first, whose meta stay; no tensor moves.

        Raises `BadInput` unless all are of one workbench, have the same columns of the same dtypes and row shapes, and
        were sampled at one temperature.
        """
        if not batches:
            raise BadInput("concat of no batches", "give at least one")
        first, *others = batches
        first._check_beside(others, "concat")
        every = dict.fromkeys(name for batch in batches for name in batch.columns)
        for number, batch in enumerate(batches):
            if missing := [name for name in every if name not in batch.columns]:
                raise BadInput(
                    f"concat: batch {number} ({batch!r}) lacks {', '.join(map(repr, missing))}",
                    "all have the same columns",
                    "make them, or drop them from the others",
                )
        temperatures = {batch.meta["temperature"] for batch in batches if "temperature" in batch.meta}
        if len(temperatures) > 1:
            raise BadInput(
                f"concat of rows sampled at temperatures {', '.join(map(str, sorted(temperatures)))}",
                "log-probabilities of a batch are taken at one temperature",
                "keep them apart",
            )
        together: dict[tuple[Any, ...], Location] = {}
        columns = {}
        for name, column in first.columns.items():
            parts = [batch.columns[name] for batch in batches]
            for number, part in enumerate(parts):
                if (part.dtype, part.row_shape) != (column.dtype, column.row_shape):
                    raise BadInput(
                        f"concat: column {name!r} is {_kind(part)} in batch {number} and {_kind(column)} in batch 0",
                        "all have one dtype and one shape of a row",
                    )
            locations = [part.location for part in parts]
            renamed = any(location.names for location in locations)
            key = (name if renamed else "", *map(id, locations))
            if key not in together:
                if renamed:
                    locations = [location.kept_as(name) for location in locations]
                together[key] = Location.concat(locations)
            columns[name] = replace(
                column,
                nbytes=sum(part.nbytes for part in parts),
                owner=", ".join(dict.fromkeys(part.owner for part in parts)),
                location=together[key],
            )
        return first._derive(columns)

    def _check_beside(self, others: Iterable[Batch], reader: str) -> None:
        for other in others:
            if not isinstance(other, Batch):
                raise BadInput(f"{reader} with {other!r:.60}", "takes batches")
            if other._source is not self._source:
                raise BadInput(
                    f"{reader} of batches of two workbenches",
                    "the columns of a batch lie on the hosts of one",
                    "carry one over with batch.save(path) and lab.load(path)",
                )

    # --- looking, keeping ---------------------------------------------------------------------------------------------

    def need(self, columns: Iterable[str], reader: str) -> None:
        """Raise `UnknownColumn` unless all `columns` are here."""
        missing = [name for name in columns if name not in self.names and name not in self.columns]
        if missing:
            maker = {
                "response_ids": "actor.generate_sequences", "rollout_log_prob": "actor.generate_sequences",
                "response_mask": "actor.generate_sequences", "old_log_prob": "actor.compute_log_prob",
                "ref_log_prob": "reference.compute_ref_log_prob", "values": "critic.compute_values",
                "rewards": "reward.compute_reward", "advantages": "compute_advantages",
                "returns": "compute_advantages", "costs": "cost.compute_cost",
                "cost_values": "cost_critic.compute_cost_values",
                "cost_returns": "compute_advantages(multiplier=...)", "pretrain_ids": "actor.compute_loss",
                "ref_chosen_log_prob": "reference.compute_ref_pair_log_prob",
                "ref_rejected_log_prob": "reference.compute_ref_pair_log_prob",
            }.get(missing[0])  # fmt: skip
            raise UnknownColumn(
                f"{reader} reads column {missing[0]!r}, which {self.name} (version {self.version}) does not have",
                f"it has {', '.join(self.columns)}",
                f"run {maker} first" if maker else "",
            )

    @property
    def nbytes(self) -> int:
        """Bytes of all columns, on all hosts."""
        return sum(column.nbytes for column in self.columns.values())

    def fetch(self, columns: Iterable[str] | None = None, rows: Sequence[int] | None = None) -> Table:
        """Bring columns (default all) of some rows (default all) into this process."""
        names = list(self.columns if columns is None else columns)
        self.need(names, "fetch")
        index = np.arange(self.rows) if rows is None else self._row_numbers(rows)
        return self._source.pull({name: self.columns[name] for name in names}, index)

    def df(self, columns: Iterable[str] | None = None, rows: Sequence[int] | None = None) -> pd.DataFrame:
        """A pandas frame, one line a row; ragged columns as lists; `prompt_text` and `response_text` decoded."""
        import pandas as pd

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
        return pd.DataFrame(out)

    def save(self, path: str | Path) -> Path:
        """Write rows, columns and meta to one safetensors file, for `lab.load(path)` in this or another workbench.

        Columns pass through this process a chunk at a time. A file that is there is replaced, at the end and at once.
        Text and other objects are saved as JSON; `BadInput` where they are not plain values.
        """
        return files.write(path, self)

    def peek(self, n: int = 4) -> pd.DataFrame:
        """The first n rows to read: text, scalars, and the mean over tokens of the ragged numbers."""
        at_least("n", n, 1)
        frame = self.df(rows=range(min(n, self.rows)))
        drop = []
        for name in frame.columns:
            if name in TOKEN_COLUMNS:
                frame[name.replace("_ids", "_tokens")] = frame[name].map(len)
                drop.append(name)
            elif name in self.columns and self.columns[name].row_shape == ("*",):
                frame[f"{name}_mean"] = frame[name].map(lambda row: float(np.mean(row)) if len(row) else float("nan"))
                drop.append(name)
        return frame.drop(columns=drop)

    def __len__(self) -> int:
        return self.rows

    def __repr__(self) -> str:
        making = next((run for run in self._open.values() if run.state != "done"), None)
        if making is not None:
            return f"<Batch {self.name} v{self.version}: {self.rows} rows; {making.name} is {making.state}>"[:79]
        names = list(self.columns)
        shown = ", ".join(itertools.islice(names, 3)) + (f", +{len(names) - 3}" if len(names) > 3 else "")
        return f"<Batch {self.name} v{self.version}: {self.rows} rows; {shown}>"[:79]

    def _repr_html_(self) -> str:
        from workbench.display.html import bytes_text, table

        if self.pending:  # to look at it does not wait
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


def _kind(column: Column) -> str:
    return f"{column.dtype} [{', '.join(map(str, ('rows', *column.row_shape)))}]"
