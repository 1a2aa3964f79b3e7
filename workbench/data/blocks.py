"""Sources that are larger than memory, in blocks that are read one by one: opening one reads next to nothing of it."""

from __future__ import annotations

import hashlib
import inspect
import itertools
import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from workbench.data.readers import JSON_RULE, READERS, arrow_library, unreadable
from workbench.data.rows import Row, Skipped
from workbench.errors import BadInput

BLOCK_BYTES = 4 * 2**20  # of a .jsonl file
BLOCK_ROWS = 65_536  # of a data set in memory-mapped files
READ_ROWS = 1024  # rows of a table that are turned into Python's at once
TOLD_BYTES = 65_536  # at each end of a file, by which it is known again


class Placed(NamedTuple):
    """A row; number: its place in the source, from 0 (in a .jsonl file the byte at which its line begins)."""

    number: int
    place: str
    row: Any


class Blocks(ABC):
    """identity: what tells the source from others, as plain values. rows: how many it has; None: it is not known."""

    identity: dict[str, Any]
    rows: int | None = None

    @abstractmethod
    def __len__(self) -> int:
        """How many blocks there are."""

    @abstractmethod
    def read(self, block: int, skipped: Skipped) -> Iterator[Placed]:
        """The rows of a block, in order; those that cannot be read are added to `skipped`."""


class _JsonLines(Blocks):
    """Ranges of bytes; a line is in the block in which it begins."""

    def __init__(self, path: Path) -> None:
        self._path, self._bytes = path, path.stat().st_size
        self.identity = _of_file(path)

    def __len__(self) -> int:
        return max(1, -(-self._bytes // BLOCK_BYTES))

    def read(self, block: int, skipped: Skipped) -> Iterator[Placed]:
        start, end = block * BLOCK_BYTES, (block + 1) * BLOCK_BYTES
        with self._path.open("rb") as file:
            if start:
                file.seek(start - 1)
                file.readline()  # the rest of a line of the block before
            while (at := file.tell()) < end and (line := file.readline()):
                if not line.strip():
                    continue
                place = f"the line at byte {at}"
                try:
                    row = json.loads(line.decode("utf-8-sig" if not at else "utf-8"))
                except ValueError as error:
                    value = f"{self._path}, {place}: {error}"
                    skipped.add(BadInput(value, JSON_RULE, "correct or delete the line"))
                    continue
                yield Placed(at, place, row)


class _Tables(Blocks):
    """Tables of arrow: row groups of a parquet file, record batches of an arrow file, ranges of a data set."""

    def __init__(
        self, sizes: list[int], tables: Callable[[int], Iterable[list[Row]]], identity: dict[str, Any]
    ) -> None:
        self._starts = [0, *itertools.accumulate(sizes)]
        self._tables, self.identity, self.rows = tables, identity, self._starts[-1]

    def __len__(self) -> int:
        return max(1, len(self._starts) - 1)

    def read(self, block: int, skipped: Skipped) -> Iterator[Placed]:
        if not self.rows:
            return
        numbers = itertools.count(self._starts[block])
        for rows in self._tables(block):
            for row in rows:
                number = next(numbers)
                yield Placed(number, f"row {number}", row)


class _Whole(Blocks):
    """One block, read from its beginning each time."""

    def __init__(
        self, make: Callable[[Skipped], Iterable[tuple[int, Any]]], identity: dict[str, Any], word: str
    ) -> None:
        self._make, self.identity, self._word = make, identity, word

    def __len__(self) -> int:
        return 1

    def read(self, block: int, skipped: Skipped) -> Iterator[Placed]:
        for number, row in self._make(skipped):
            yield Placed(number, f"{self._word} {number}", row)


def blocks_of(source: Any) -> Blocks:
    """The blocks of a source: a .jsonl, .csv, .tsv, .parquet, .arrow or .feather file, a split of the `datasets`
    library, or a function that gives a new generator of rows each time. Raises `BadInput` for others."""
    if isinstance(source, Path) or (isinstance(source, str) and source.endswith(tuple(READERS))):
        return _of_path(Path(source).expanduser())
    if inspect.isgeneratorfunction(source):
        return _Whole(lambda skipped: enumerate(source()), {"function": source.__qualname__}, "row")
    if type(source).__module__.partition(".")[0] == "datasets":
        if hasattr(source, "select"):
            starts = range(0, len(source), BLOCK_ROWS)
            sizes = [min(BLOCK_ROWS, len(source) - start) for start in starts]
            return _Tables(sizes, lambda block: _ranges(source, starts[block], sizes[block]), _of_split(source))
        if not hasattr(source, "items"):
            return _Whole(lambda skipped: enumerate(source), {"columns": source.column_names}, "row")
    raise BadInput(
        f"stream=True with a source of type {type(source).__name__}",
        "a stream reads a .jsonl, .csv, .tsv, .parquet, .arrow or .feather file, a split of the datasets library, or "
        "calls a generator function",
        "leave stream= out: what is in memory already needs none",
    )


def _of_path(path: Path) -> Blocks:
    if path.suffix == ".json" or path.suffix not in READERS:
        rule = "a .json file is read whole, and other endings are not known"
        raise BadInput(f"stream=True with {str(path)!r}", rule, "write an object on each line of a .jsonl file")
    if not path.is_file():
        raise BadInput(f"no file {str(path)!r}", f"paths start from {str(Path.cwd())!r}", "correct the path")
    if path.suffix == ".jsonl":
        return _JsonLines(path)
    if path.suffix in (".csv", ".tsv"):
        return _Whole(lambda skipped: READERS[path.suffix](path, skipped), _of_file(path), "line")
    try:
        return _of_parquet(path) if path.suffix == ".parquet" else _of_arrow(path)
    except (OSError, ValueError) as error:
        raise unreadable(path, error) from error


def _of_parquet(path: Path) -> Blocks:
    file = arrow_library(path, "pyarrow.parquet").ParquetFile(path, memory_map=True)
    sizes = [file.metadata.row_group(group).num_rows for group in range(file.num_row_groups)]

    def tables(block: int) -> Iterator[list[Row]]:
        for batch in file.iter_batches(batch_size=READ_ROWS, row_groups=[block]):
            yield batch.to_pylist()

    return _Tables(sizes, tables, _of_file(path))


def _of_arrow(path: Path) -> Blocks:
    ipc = arrow_library(path, "pyarrow.ipc")
    mapped = arrow_library(path, "pyarrow").memory_map(str(path))
    if mapped.read(6) != b"ARROW1":
        mapped.close()

        def rows(skipped: Skipped) -> Iterator[tuple[int, Row]]:
            with path.open("rb") as file:
                yield from enumerate(row for batch in ipc.open_stream(file) for row in batch.to_pylist())

        return _Whole(rows, _of_file(path), "row")
    file = ipc.open_file(mapped)
    batches = range(file.num_record_batches)

    def tables(block: int) -> Iterator[list[Row]]:
        batch = file.get_batch(block)
        for start in range(0, batch.num_rows, READ_ROWS):
            yield batch.slice(start, READ_ROWS).to_pylist()

    return _Tables([file.get_batch(n).num_rows for n in batches], tables, _of_file(path))


def _ranges(source: Any, start: int, count: int) -> Iterator[list[Row]]:
    for first in range(start, start + count, READ_ROWS):
        columns = source[first : min(first + READ_ROWS, start + count)]
        yield [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]


def _of_split(source: Any) -> dict[str, Any]:
    return {"rows": len(source), "columns": list(source.column_names)}


def _of_file(path: Path) -> dict[str, Any]:
    """Its size, and a digest of both ends."""
    size = path.stat().st_size
    with path.open("rb") as file:
        digest = hashlib.sha256(file.read(TOLD_BYTES))
        file.seek(max(0, size - TOLD_BYTES))
        digest.update(file.read())
    return {"bytes": size, "ends": digest.hexdigest()}
