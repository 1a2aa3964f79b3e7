"""The notebook's handle of a batch: what it is and where it lies, never its tensors."""

from __future__ import annotations

import copy
import itertools
import re
import weakref
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from html import escape
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np

from workbench.batches import files
from workbench.batches.batch_tools import BatchTools, rows_of
from workbench.batches.columns import Ragged, Table
from workbench.batches.references import Column, Maker, RowProvider, ShardCounts
from workbench.batches.schema import SCHEMA, TOKEN_COLUMNS
from workbench.batches.turns import chosen_mean, marked
from workbench.batches.vocabulary import Vocabulary
from workbench.display.interrupts import stoppable
from workbench.errors import BadInput, UnknownColumn
from workbench.support.checked_calls import checked_call
from workbench.support.files import SHARED
from workbench.support.named_fields import meant
from workbench.support.validation import PositiveInt

if TYPE_CHECKING:
    import pandas as pd
    from tensordict import TensorDict

    from workbench.batches.batch_tools import RowNumbers


class Batch(BatchTools):
    """A named, versioned, immutable table whose columns lie on the hosts.

    Every stage returns a new version with more columns; the old one stays valid. Token columns are ragged (packed, no
    padding): `prompt_ids`, `response_ids`, and one number a response token in `response_mask`, `rollout_log_prob`,
    `old_log_prob`, `ref_log_prob`, `values`, `advantages`, `returns`. `rewards` is one number a row.

    meta: plain values that travel along: the iteration, temperature and weights version of the rollout, and the
    temperature of `old_log_prob` (`log_prob_temperature`).
    """

    def __init__(
        self,
        name: str,
        columns: Mapping[str, Column],
        *,
        source: RowProvider,
        counts: ShardCounts,
        version: int = 0,
        versions: Iterator[int] | None = None,
        meta: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        self._open: dict[str, Maker] = {}  # columns that are still being made
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

    def after(self, run: Maker, writes: Iterable[str], copies: int = 1, without: Collection[str] = ()) -> Batch:
        """The next version, some of whose columns `run` is making: it can be given to a stage, and waits when read.
        without: columns that it lacks."""
        batch = copy.copy(self.copies(copies))  # shares what is there
        batch.leave_out(without)
        batch.promise(run, tuple(writes), next(self._versions))
        return batch

    def with_made(self, run: Maker, copies: int = 1, without: Collection[str] = ()) -> Batch:
        """The next version, with the columns that a run has made which fails all the same. It waits for no other."""
        batch = copy.copy(self.copies(copies))
        batch.leave_out(without)
        batch.take_over(run, next(self._versions))
        return batch

    def take_over(self, run: Maker, version: int) -> None:
        """Become a version with the columns that a run has made; of a handle that nobody has seen yet."""
        self._columns = MappingProxyType({**self._columns, **run.made})
        self._open = {name: maker for name, maker in self._open.items() if name not in run.made}
        self._meta, self.version = MappingProxyType({**self._meta, **run.meta}), version
        self.wait_for_makers()

    def is_of(self, source: RowProvider) -> bool:
        """Whether it is a workbench's."""
        return self._source is source

    def twin(self) -> Batch:
        """Another handle of the same batch: the store keeps it, and sees whether the notebook still holds this one."""
        twin = copy.copy(self)
        twin.wait_for_makers()
        return twin

    def leave_out(self, names: Collection[str]) -> None:
        """Become a version without these columns; of a handle that nobody has seen yet."""
        self._columns = MappingProxyType({n: c for n, c in self._columns.items() if n not in names})
        self._open = {n: maker for n, maker in self._open.items() if n not in names}

    def promise(self, run: Maker, writes: tuple[str, ...], version: int) -> None:
        """Become a version of which a run is making some columns; of a handle that nobody has seen yet."""
        self._columns = MappingProxyType({n: c for n, c in self._columns.items() if n not in writes})
        self._open = {**self._open, **dict.fromkeys(writes, run)}
        self.version = version
        self.wait_for_makers()

    def wait_for_makers(self) -> None:
        """Have the runs that make its columns settle it when they end."""
        for run in set(self._open.values()):
            run.dependents.append(weakref.ref(self))

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

    def makers(self, names: Iterable[str]) -> list[Maker]:
        """The runs that make some of these columns; none where all are there."""
        being_made = self._open
        return list(dict.fromkeys(being_made[name] for name in names if name in being_made))

    def part(self, names: Iterable[str]) -> tuple[dict[str, Column], dict[str, Any]]:
        """Columns whose makers are done, and what travels along with them, while others may still be made.

        Of the runs under way only the makers of these columns add to the meta: which of the others are done by now is
        a matter of placement and of speed. So a stage that reads something of the meta also reads the column it came
        with.
        """
        asked = tuple(names)
        being_made = self._open  # read first: what it names is in the columns once it is gone from here
        columns, meta = dict(self._columns), dict(self._meta)
        for run in sorted(set(being_made.values()), key=lambda run: run.number):
            if run.state == "done" and any(name in run.made for name in asked):
                columns, meta = {**columns, **run.made}, {**meta, **run.meta}
        return {name: columns[name] for name in asked}, meta

    def ready(self, names: Iterable[str]) -> tuple[dict[str, Column], dict[str, Any]]:
        """As `part`, waiting for the makers of these columns, and of no others: one that failed takes nothing along."""
        asked = tuple(names)
        for run in self.makers(asked):
            run.result()
        return self.part(asked)

    @property
    def names(self) -> tuple[str, ...]:
        """Its columns, as far as they are known without waiting."""
        return tuple(dict.fromkeys((*self._columns, *self._open)))

    @property
    def text_names(self) -> tuple[str, ...]:
        """Its columns of Python objects that are no status of rows, as far as they are known without waiting."""
        being_made, there = self._open, dict(self._columns)
        for run in set(being_made.values()):
            there |= run.made if run.state == "done" else {}
        return tuple(name for name, column in there.items() if column.dtype == "object" and name not in SCHEMA)

    @property
    def unknown_names(self) -> tuple[str, ...]:
        """Columns that are being made and might turn out to be text: those that no stage of ours writes."""
        return tuple(name for name in self._open if name not in SCHEMA)

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

    def _next(self, columns: Mapping[str, Column], meta: Mapping[str, Any]) -> Batch:
        return Batch(
            self.name,
            columns,
            source=self._source,
            counts=self._counts,
            version=next(self._versions),
            versions=self._versions,
            meta={**self._meta, **meta},
        )

    def derive(
        self,
        tool: str,
        columns: Mapping[str, Column],
        meta: Mapping[str, Any] | None = None,
        others: Sequence[Batch] = (),
    ) -> Batch:
        batch = self._next(columns, meta or {})
        self._source.derived(batch, tool, [self, *others])
        return batch

    def with_columns(self, columns: Mapping[str, Column], meta: Mapping[str, Any]) -> Batch:
        """The next version, with these columns added or replaced."""
        return self._next({**self.columns, **columns}, meta)

    def copies(self, n: int) -> Batch:
        """Every row n times, copies side by side: `repeat` for a call that is about to be made."""
        return self if n == 1 else self._next(rows_of(self.columns, np.repeat(np.arange(self.rows), n)), {})

    def known_as(
        self, name: str, version: int, versions: Iterator[int], columns: Iterable[str], meta: Mapping[str, Any]
    ) -> Batch:
        """Some of its columns under the name and version of a batch that was pushed out of memory, whose they are;
        later versions count on."""
        return Batch(
            name,
            {column: self.columns[column] for column in columns},
            source=self._source,
            counts=self._counts,
            version=version,
            versions=versions,
            meta=meta,
        )

    @property
    def vocabulary(self) -> Vocabulary:
        """Whose tokens its ids are."""
        return self._source.vocabulary

    @property
    def versions(self) -> Iterator[int]:
        """The numbers of its versions to come, over all branches of its name."""
        return self._versions

    # --- looking, keeping ---------------------------------------------------------------------------------------------

    def need(self, columns: Iterable[str], reader: str) -> None:
        """Raise `UnknownColumn` unless all `columns` are here."""
        missing = [name for name in columns if name not in self.names and name not in self.columns]
        if missing:
            maker = {
                "response_ids": "actor.generate_sequences", "rollout_log_prob": "actor.generate_sequences",
                "environment_rewards": "actor.generate_sequences(environment=...)",
                "turn_starts": "actor.generate_sequences(environment=...)",
                "turn_ends": "actor.generate_sequences(environment=...)",
                "response_mask": "actor.generate_sequences", "old_log_prob": "actor.compute_log_prob",
                "gradient_norm": "actor.compute_gradient_norm",
                "final_values": "critic.compute_values(final=True)",
                "ref_log_prob": "reference.compute_ref_log_prob", "values": "critic.compute_values",
                "rewards": "reward.compute_reward", "advantages": "compute_advantages",
                "returns": "compute_advantages", "costs": "cost.compute_cost",
                "cost_values": "cost_critic.compute_cost_values",
                "cost_returns": "compute_advantages(multiplier=...)", "pretrain_ids": "actor.compute_loss",
                "ref_chosen_log_prob": "reference.compute_ref_pair_log_prob",
                "ref_rejected_log_prob": "reference.compute_ref_pair_log_prob",
                "ref_response_log_prob": "reference.compute_ref_feedback_log_prob",
                "ref_mismatched_log_prob": "reference.compute_ref_feedback_log_prob",
                "teacher_ids": "teacher.compute_teacher_log_prob",
                "teacher_log_prob": "teacher.compute_teacher_log_prob",
                "teacher_tail_log_prob": "teacher.compute_teacher_log_prob",
            }.get(missing[0])  # fmt: skip
            raise UnknownColumn(
                f"{reader} reads column {missing[0]!r}, which {self.name} (version {self.version}) does not have",
                f"it has {', '.join(self.names)}",
                f"run {maker} first" if maker else meant(missing[0], self.names, repr),
            )

    @property
    def nbytes(self) -> int:
        """Bytes of all columns, on all hosts."""
        return sum(column.nbytes for column in self.columns.values())

    @checked_call("batch.fetch")
    def fetch(self, columns: Iterable[str] | None = None, rows: RowNumbers | None = None) -> Table:
        """Bring columns (default all) of some rows (default all) into this process."""
        names = list(self.names if columns is None else columns)
        self.need(names, "fetch")
        index = np.arange(self.rows) if rows is None else self._row_numbers(rows)
        return self._source.pull(self.ready(names)[0], index)

    @checked_call("batch.tensordict")
    def tensordict(self, columns: Iterable[str] | None = None, rows: RowNumbers | None = None) -> TensorDict:
        """What `fetch` brings, as a tensordict: ragged columns are nested tensors of jagged layout, text is non-tensor
        data."""
        from workbench.batches.tensordicts import to_tensordict

        return to_tensordict(self.fetch(columns, rows), self.rows if rows is None else len(rows))

    @checked_call("batch.df")
    def df(self, columns: Iterable[str] | None = None, rows: RowNumbers | None = None) -> pd.DataFrame:
        """A pandas frame, one line a row; ragged columns as lists; `prompt_text` and `response_text` decoded.

        With `response_mask` there, what an environment wrote in a response stands in ⟦ ⟧.
        """
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
        if {"response_ids", "response_mask"} <= set(out):
            turns = zip(out["response_ids"], out["response_mask"], strict=True)
            out["response_text"] = [marked(ids, mask, self._source.decode) for ids, mask in turns]
        return pd.DataFrame(out)

    @checked_call("batch.turns")
    def turns(self, rows: RowNumbers | None = None) -> pd.DataFrame:
        """The turns of conversations, one line a turn: `conversation`, the row's number; `turn`, from 0; `tokens` and
        `text` that the policy wrote; `observation`, what the environment wrote before it; `trained`, whether its tokens
        are inside `response_mask`; `reward`.

        reward: from the column `rewards`, that of a whole response on its last turn; without it from `turn_rewards`.
        With `values` also `value`, that of the conversation before the turn; with `advantages` also `advantage`, the
        mean over the turn's tokens inside the mask; with `returns` also `return`, in the same way.
        Raises `UnknownColumn` without `turn_starts`, `turn_ends`, which `generate_sequences(environment=...)` writes.
        """
        from workbench.batches.turns import TURN_COLUMNS, frame_of_turns

        self.need(["turn_starts", "turn_ends", "response_ids", "response_mask"], "turns")
        numbers = list(range(self.rows)) if rows is None else self._row_numbers(rows).tolist()
        table = self.fetch([name for name in TURN_COLUMNS if name in self.names], numbers)
        return frame_of_turns(table, numbers, self._source.decode)

    @checked_call("batch.save")
    @stoppable("batch.save()", ("the file is written as a whole, or not at all", "the same call again writes it"))
    def save(self, path: str | Path) -> Path:
        """Write rows, columns and meta to one safetensors file, for `lab.load(path)` in this or another workbench.

        Columns pass through this process a chunk at a time. A file that is there is replaced, at the end and at once.
        Text and other objects are saved as JSON; `BadInput` where they are not plain values.
        """
        return files.write(path, self, mode=SHARED)

    @checked_call("batch.failed")
    def failed(self) -> pd.DataFrame:
        """The rows for which a function of yours failed, one line a row: `row`, its number; `prompt`; `stage` and
        `function`, which failed; `error`, what it did. Give it to `compute_reward(..., only=batch.failed())`.
        """
        import pandas as pd

        names = ["row", "prompt", "stage", "function", "error"]
        if "failure" not in self.names:
            return pd.DataFrame(columns=names).astype({"row": "int64"})
        texts = list(map(str, self._values("failure", "failed")))
        rows = [row for row, text in enumerate(texts) if text]
        if not rows:
            return pd.DataFrame(columns=names).astype({"row": "int64"})
        prompt = "prompt" if "prompt" in self.names else "prompt_ids"
        prompts = self.df([prompt], rows=rows)["prompt" if prompt == "prompt" else "prompt_text"]
        lines = []
        for row, asked in zip(rows, prompts, strict=True):
            parts = [re.fullmatch(r"(\S+) (.*?): (.*)", line) or line for line in texts[row].splitlines()]
            said = [(part[1], part[2], part[3]) if isinstance(part, re.Match) else ("", "", part) for part in parts]
            stages, functions, errors = (", ".join(dict.fromkeys(column)) for column in zip(*said, strict=True))
            lines.append((row, asked, stages, functions, errors))
        return pd.DataFrame(lines, columns=names)

    @checked_call("batch.peek")
    def peek(self, n: PositiveInt = 4) -> pd.DataFrame:
        """The first n rows to read: text, scalars, means of ragged numbers over the tokens that the policy chose."""
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
