"""Reads files of rows (.jsonl, .json, .csv, .tsv, .parquet, .arrow, .feather) block by block, so that a file can be
larger than memory, and opening it reads very little."""

from __future__ import annotations

import contextlib
import csv
import hashlib
import importlib
import itertools
import json
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

from workbench.errors import BadInput, MissingDependency
from workbench.errors.plain_text import first_line

Row = dict[str, Any]
MOST_TOLD = 1000
BadRows = Literal["error", "skip"]
Overlong = Literal["filter", "cut", "error"]


class Placed(NamedTuple):
    """A row as it was read: a dict or a text; a `BadInput` for an unreadable row.

    number: the row's number in the source, from 0; in a streamed .jsonl file its line's first byte. place: in words.
    """

    number: int
    place: str
    row: Any


class Skipped(list[str]):
    """The place and the reason of the first `MOST_TOLD` unusable rows. total: the number of all unusable rows.
    bad_rows: "error": an unusable row raises instead."""

    def __init__(self, bad_rows: BadRows) -> None:
        super().__init__()
        self.bad_rows, self.total = bad_rows, 0

    def add(self, error: BadInput, place: str = "") -> None:
        """Count an unusable row; raise `error` if rows may not be skipped. place: of the row, for errors without it."""
        if place not in error.value:  # an error of the chat template
            error.value = f"{place}: {error.value}"
        if self.bad_rows == "error":
            raise error
        self.total += 1
        if len(self) < MOST_TOLD:
            self.append(f"{error.value}: {error.rule}" if error.rule else str(error.value))


def counts(over: str, cut: int, dropped: int, skipped: Skipped, as_text: int) -> list[str]:
    """Return the numbers of cut, dropped and skipped rows in words, for a summary. over: names the limit, such as "over
    512 tokens". as_text: the number of rows with control tokens read as text."""
    told = [f"{number} {over} {word}" for number, word in ((cut, "cut"), (dropped, "dropped")) if number]
    told = [*(told or [f"none {over}"]), *[f"{skipped.total} bad skipped"] * bool(skipped)]
    return [*told, *[f"{as_text} with control tokens as text (control_tokens=True keeps them)"] * bool(as_text)]


class Rows(list[Row]):
    """Rows of a source.

    numbers, places: each row's number and place in the source; skipped rows count. read_as: the convention of its
    columns; "" if they have our names. skipped: see `Skipped`.
    """

    def __init__(self, name: str, skipped: Skipped) -> None:
        super().__init__()
        self.name, self.skipped, self.read_as = name, skipped, ""
        self.numbers, self.places = list[int](), list[str]()

    def where(self, index: int) -> str:
        """Return the place of row `index` for an error message, such as "pairs.jsonl, line 7"."""
        return named(self.places[index], self.name)


def named(place: str, source: str) -> str:
    """Return a place with its source: "pairs.jsonl, line 7", "row 7 of a list"."""
    return f"{place} of {source}" if place.startswith("row") else f"{source}, {place}"


BLOCK_BYTES = 4 * 2**20  # the size of a block of a .jsonl file
READ_ROWS = 1024  # rows of a table that are converted to Python objects at once
TOLD_BYTES = 65_536  # bytes at each end of a file that identify the file
LONGEST_FIELD = 2**31 - 1  # characters in a field of a .csv file
JSON_RULE = "each line must be one JSON object in UTF-8"
LIST_RULE = "the file must be a JSON list of objects"


@dataclass(frozen=True)
class Blocks:
    """A source in blocks. read: returns the rows of a block, in order. identity: plain values that identify the source.
    count, rows: its number of blocks and of rows; None: unknown."""

    read: Callable[[int], Iterable[Placed]]
    identity: dict[str, Any]
    count: int = 1
    rows: int | None = None


def file_blocks(path: Path, *, whole: bool) -> Blocks:
    """Return the blocks of a file, whose format the ending of its name decides. whole: read it as one sequence, so that
    rows are named by line. Raises `BadInput` for an unknown format, `MissingDependency` without pyarrow."""
    if path.suffix not in READERS:
        raise BadInput(
            f"{str(path)!r} is not a file of rows",
            f"its name must end in {', '.join(READERS)}",
            "write it in one of these formats, or give the rows as a list",
        )
    if not path.is_file():
        raise BadInput(f"no file {str(path)!r}", f"relative paths start at {str(Path.cwd())!r}", "correct the path")
    return READERS[path.suffix](path, whole)


def _json_lines(path: Path, whole: bool) -> Blocks:
    """Return byte ranges as blocks; a line belongs to the block in which it begins."""

    def read(block: int) -> Iterator[Placed]:
        at, end = (0, math.inf) if whole else (block * BLOCK_BYTES, (block + 1) * BLOCK_BYTES)
        numbers = itertools.count()
        with path.open("rb") as file:
            if at:
                file.seek(at - 1)
                at += len(file.readline()) - 1  # skips the rest of the previous block's last line
            for line_number, line in enumerate(file, 1):
                if at >= end:
                    return
                if line.strip():
                    place = f"line {line_number}" if whole else f"the line at byte {at}"
                    yield Placed(next(numbers) if whole else at, place, _json_row(line, f"{path}, {place}"))
                at += len(line)

    count = 1 if whole else max(1, math.ceil(path.stat().st_size / BLOCK_BYTES))
    return Blocks(read, _identity(path), count)


def _json_row(line: bytes, where: str) -> Row | BadInput:
    try:
        row = json.loads(line.decode("utf-8-sig"))
    except ValueError as error:  # bad JSON as well as bad UTF-8
        return BadInput(f"{where}: {error}", JSON_RULE, "correct or delete the line")
    if isinstance(row, dict):
        return row
    remedy = 'write {"prompt": ...}, or {"text": ...} in a corpus'
    return BadInput(f"{where} is of type {type(row).__name__}", JSON_RULE, remedy)


def _json(path: Path, whole: bool) -> Blocks:
    if not whole:
        rule = "a .json file cannot be streamed"
        raise BadInput(f"stream=True with {str(path)!r}", rule, "write an object on each line of a .jsonl file")
    try:
        rows = json.loads(path.read_bytes().decode("utf-8-sig"))
    except ValueError as error:
        remedy = "correct it; a file with an object on each line must end in .jsonl"
        raise BadInput(f"{path}: {error}", LIST_RULE, remedy) from error
    if not isinstance(rows, list):
        raise BadInput(f"{path} is of type {type(rows).__name__}", LIST_RULE, 'write [{"prompt": ...}, ...]')
    return Blocks(lambda block: numbered(rows), {})


def _csv(path: Path, whole: bool) -> Blocks:
    def read(block: int) -> Iterator[Placed]:
        csv.field_size_limit(LONGEST_FIELD)
        with path.open(encoding="utf-8-sig", newline="") as lines:
            reader = csv.DictReader(lines, delimiter="\t" if path.suffix == ".tsv" else ",", strict=True)
            for number in itertools.count():
                try:
                    row = next(reader, None)
                except (csv.Error, UnicodeDecodeError) as error:  # the beginning of the next row is unknown now
                    remedy = "correct the line; put a text with quotes or line breaks in quotes"
                    raise BadInput(
                        f"{path}, line {reader.line_num}: {error}", "it must be a table in UTF-8", remedy
                    ) from error
                if row is None:
                    return
                place = f"line {reader.line_num}"
                columns = reader.fieldnames or ()
                given = [value for value in row.values() if isinstance(value, str)]
                if len(given) == len(columns) and None not in row:
                    yield Placed(number, place, row)
                    continue
                value = f"{path}, {place} has {len(given) + len(row.get(None) or ())} fields"
                rule = f"the first line names {len(columns)} columns"
                yield Placed(number, place, BadInput(value, rule, "put a field with a separator in quotes"))

    return Blocks(read, _identity(path))


def _parquet(path: Path, whole: bool) -> Blocks:
    library = arrow_library(path, "pyarrow.parquet")
    with _readable(path):
        file = library.ParquetFile(path, memory_map=True)
    sizes = [file.metadata.row_group(group).num_rows for group in range(file.num_row_groups)]

    def tables(block: int) -> Iterator[list[Row]]:
        with _readable(path):
            for batch in file.iter_batches(batch_size=READ_ROWS, row_groups=[block]):
                yield batch.to_pylist()

    return table_blocks(sizes, tables, _identity(path))


def _arrow(path: Path, whole: bool) -> Blocks:
    ipc = arrow_library(path, "pyarrow.ipc")
    with _readable(path):
        mapped = arrow_library(path, "pyarrow").memory_map(str(path))
        if mapped.read(6) != b"ARROW1":
            mapped.close()
            return Blocks(lambda block: numbered(_arrow_stream(path, ipc)), _identity(path))
        file = ipc.open_file(mapped)
        sizes = [file.get_batch(n).num_rows for n in range(file.num_record_batches)]

    def tables(block: int) -> Iterator[list[Row]]:
        batch = file.get_batch(block)
        for start in range(0, batch.num_rows, READ_ROWS):
            yield batch.slice(start, READ_ROWS).to_pylist()

    return table_blocks(sizes, tables, _identity(path))


def _arrow_stream(path: Path, ipc: Any) -> Iterator[Row]:
    with _readable(path), path.open("rb") as file:
        for batch in ipc.open_stream(file):
            yield from batch.to_pylist()


READERS: dict[str, Callable[[Path, bool], Blocks]] = {
    ".jsonl": _json_lines, ".json": _json, ".csv": _csv, ".tsv": _csv, ".parquet": _parquet, ".arrow": _arrow,
    ".feather": _arrow,
}  # fmt: skip


def numbered(items: Iterable[Any]) -> Iterator[Placed]:
    for number, item in enumerate(items):
        yield Placed(number, f"row {number}", item)


def table_blocks(
    sizes: Sequence[int], tables: Callable[[int], Iterable[list[Row]]], identity: dict[str, Any]
) -> Blocks:
    """Return Arrow tables as blocks: row groups of a parquet file, record batches of an Arrow file, ranges of a data
    set. sizes: the number of rows of each block. tables: yields a block's rows, some at a time."""
    starts = [0, *itertools.accumulate(sizes)]

    def read(block: int) -> Iterator[Placed]:
        if sizes:
            rows = (row for table in tables(block) for row in table)
            for number, row in enumerate(rows, starts[block]):
                yield Placed(number, f"row {number}", row)

    return Blocks(read, identity, max(1, len(sizes)), starts[-1])


def arrow_library(path: Path, module: str) -> Any:
    """Import a module of pyarrow. path: the file to read, for the error."""
    try:
        return importlib.import_module(module)
    except ImportError:
        raise MissingDependency.of("pyarrow", f"it reads {str(path)!r}", "data", "`pip install pyarrow`") from None


@contextlib.contextmanager
def _readable(path: Path) -> Iterator[None]:
    """Inside the block, turn pyarrow's errors for a truncated or foreign file into `BadInput`."""
    try:
        yield
    except (OSError, ValueError) as error:  # pyarrow's own errors are subclasses of these
        rule = f"a file that ends in {path.suffix} must have that format"
        raise BadInput(f"{str(path)!r}: {first_line(error)}", rule, "write it again") from error


def _identity(path: Path) -> dict[str, Any]:
    """Return a file's size, and a digest of both its ends."""
    size = path.stat().st_size
    with path.open("rb") as file:
        digest = hashlib.sha256(file.read(TOLD_BYTES))
        file.seek(max(0, size - TOLD_BYTES))
        digest.update(file.read())
    return {"bytes": size, "ends": digest.hexdigest()}
