"""The notebook's handle of a batch: what it is and where it lies, never its tensors."""

from __future__ import annotations

import copy
import itertools
import threading
import weakref
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from workbench.dataflow.columns import Ragged, Table
from workbench.dataflow.location import Location, ShardId
from workbench.engines.settings import at_least
from workbench.errors import BadInput, UnknownColumn

if TYPE_CHECKING:
    import pandas as pd

    from workbench.dataflow.run import Run


@dataclass(frozen=True, kw_only=True)
class Column:
    """dtype; shape of one row ("*": a length that varies); bytes of all rows; the role that made it; where it lies."""

    dtype: str
    row_shape: tuple[int | str, ...]
    nbytes: int
    owner: str
    location: Location


class Source(Protocol):
    """What a batch asks of its workbench: rows brought here, and text for tokens."""

    def pull(self, columns: Mapping[str, Column], rows: np.ndarray) -> Table: ...

    def decode(self, token_ids: Sequence[int]) -> str: ...


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
        meta: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        self._run: Run | None = None
        self._promised: tuple[str, ...] = ()
        lengths = {len(column.location) for column in columns.values()}
        if len(lengths) > 1:
            raise BadInput(f"columns of {sorted(lengths)} rows in one batch", "all columns have equally many rows")
        self.name, self.version, self._meta = name, version, MappingProxyType(dict(meta))
        self._columns: Mapping[str, Column] = MappingProxyType(dict(columns))
        self.rows = lengths.pop() if lengths else 0
        self._source, self._counts = source, counts
        for location in {id(c.location): c.location for c in columns.values()}.values():
            counts.hold(location)

    def after(self, run: Run, writes: Iterable[str], copies: int = 1) -> Batch:
        """The next version, whose columns `run` is making: it can be given to a stage, and waits when it is read."""
        batch = copy.copy(self)
        batch._run, batch._promised = run, (*self._names, *writes)
        batch._columns, batch._meta = MappingProxyType({}), MappingProxyType({})
        batch.version, batch.rows = self.version + 1, self.rows * copies
        return batch

    @property
    def run(self) -> Run | None:
        """The run that is still making its columns; None for a batch that is there."""
        return self._run

    @property
    def columns(self) -> Mapping[str, Column]:
        """Its columns by name."""
        self._settle()
        return self._columns

    @property
    def meta(self) -> Mapping[str, Any]:
        """Plain values that travel along."""
        self._settle()
        return self._meta

    @property
    def _names(self) -> tuple[str, ...]:
        """Its columns, as far as they are known without waiting."""
        return self._promised if self._run is not None else tuple(self._columns)

    def fill(self, made: Batch) -> None:
        """Take over what its run has made."""
        self._columns, self._meta, self._run = made._columns, made._meta, None

    def _settle(self) -> None:
        if self._run is not None:
            self._run.result()

    def _derive(self, columns: Mapping[str, Column], meta: Mapping[str, Any] | None = None) -> Batch:
        return Batch(
            self.name,
            columns,
            source=self._source,
            counts=self._counts,
            version=self.version + 1,
            meta={**self.meta, **(meta or {})},
        )

    def with_columns(self, columns: Mapping[str, Column], meta: Mapping[str, Any] | None = None) -> Batch:
        """The next version, with these columns added or replaced."""
        return self._derive({**self.columns, **columns}, meta)

    def take(self, rows: Sequence[int] | np.ndarray) -> Batch:
        """A choice of rows, by number, in the order given; no tensor moves."""
        index = self._row_numbers(rows)
        moved: dict[int, Location] = {}
        columns = {}
        for name, c in self.columns.items():
            location = moved.setdefault(id(c.location), c.location.take(index))
            share = round(c.nbytes * len(index) / self.rows)
            columns[name] = Column(dtype=c.dtype, row_shape=c.row_shape, nbytes=share, owner=c.owner, location=location)
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

    def need(self, columns: Iterable[str], reader: str) -> None:
        """Raise `UnknownColumn` unless all `columns` are here."""
        missing = [name for name in columns if name not in self._names and name not in self.columns]
        if missing:
            maker = {
                "response_ids": "actor.generate_sequences", "rollout_log_prob": "actor.generate_sequences",
                "response_mask": "actor.generate_sequences", "old_log_prob": "actor.compute_log_prob",
                "ref_log_prob": "reference.compute_ref_log_prob", "values": "critic.compute_values",
                "rewards": "reward.compute_reward", "advantages": "compute_advantages",
                "returns": "compute_advantages", "costs": "cost.compute_cost",
                "cost_values": "cost_critic.compute_cost_values",
                "cost_returns": "compute_advantages(multiplier=...)", "pretrain_ids": "actor.compute_loss",
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
        for ids, text in (("prompt_ids", "prompt_text"), ("response_ids", "response_text")):
            if ids in out:
                out[text] = [self._source.decode(row) for row in out[ids]]
        return pd.DataFrame(out)

    def peek(self, n: int = 4) -> pd.DataFrame:
        """The first n rows to read: text, scalars, and the mean over tokens of the ragged numbers."""
        at_least("n", n, 1)
        frame = self.df(rows=range(min(n, self.rows)))
        drop = []
        for name in frame.columns:
            if name in ("prompt_ids", "response_ids"):
                frame[name.replace("_ids", "_tokens")] = frame[name].map(len)
                drop.append(name)
            elif name in self.columns and self.columns[name].row_shape == ("*",):
                frame[f"{name}_mean"] = frame[name].map(lambda row: float(np.mean(row)) if len(row) else float("nan"))
                drop.append(name)
        return frame.drop(columns=drop)

    def __len__(self) -> int:
        return self.rows

    def __repr__(self) -> str:
        if self._run is not None:
            return f"<Batch {self.name} v{self.version}: {self.rows} rows; {self._run.name} is {self._run.state}>"[:79]
        names = list(self.columns)
        shown = ", ".join(itertools.islice(names, 3)) + (f", +{len(names) - 3}" if len(names) > 3 else "")
        return f"<Batch {self.name} v{self.version}: {self.rows} rows; {shown}>"[:79]

    def _repr_html_(self) -> str:
        from workbench.display.html import bytes_text, table

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

    def select(self, *names: str) -> Batch:
        """These columns only; no tensor moves."""
        self.need(names, "select")
        return self._derive({name: self.columns[name] for name in names})

    def rename(self, **new: str) -> Batch:
        """Columns under other names, `rename(rewards="baseline_rewards")`."""
        self.need(new, "rename")
        table = {new.get(name, name): column for name, column in self.fetch().items()}
        made: Batch = self._source.put(table, meta=self.meta)  # type: ignore[attr-defined]
        return made

    def join(self, other: Batch) -> Batch:
        """The columns of `other`, row by row, beside these; no tensor moves."""
        return self.with_columns(other.columns)
