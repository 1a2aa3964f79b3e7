"""Files of rows: .jsonl, .json, .csv, .tsv, .parquet, .arrow, .feather."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from workbench.data.rows import Row, Rows, Skipped
from workbench.errors import BadInput, MissingDependency

LONGEST_FIELD = 2**31 - 1  # characters of a field of a .csv file
JSON_RULE = "each line is one JSON object in UTF-8"
Reader = Callable[[Path, Skipped], Iterator[tuple[int, Row]]]  # (line from 1, or row from 0; the row)


def read_file(path: Path, skipped: Skipped) -> Rows:
    """The rows of a file, read as the ending of its name says."""
    if path.suffix not in READERS:
        raise BadInput(
            f"{str(path)!r} is no file of rows",
            f"files that are read end in {', '.join(READERS)}",
            "write it in one of these formats, or give the rows as a list",
        )
    if not path.is_file():
        raise BadInput(f"no file {str(path)!r}", f"paths start from {str(Path.cwd())!r}", "correct the path")
    found = list(READERS[path.suffix](path, skipped))
    places = [place for place, _ in found]
    lined = path.suffix in LINED
    return Rows([row for _, row in found], str(path), places if lined else None, None if lined else places, skipped)


def _json_lines(path: Path, skipped: Skipped) -> Iterator[tuple[int, Row]]:
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            where = f"{path}, line {number}"
            try:
                row = json.loads(line.decode("utf-8-sig"))
            except ValueError as error:  # bad JSON as well as bad UTF-8
                skipped.add(BadInput(f"{where}: {error}", JSON_RULE, "correct or delete the line"))
                continue
            if not isinstance(row, dict):
                skipped.add(BadInput(f"{where} is of type {type(row).__name__}", JSON_RULE, 'write {"prompt": ...}'))
                continue
            yield number, row


def _json(path: Path, skipped: Skipped) -> Iterator[tuple[int, Row]]:
    rule = "the file is a JSON list of objects"
    try:
        rows = json.loads(path.read_bytes().decode("utf-8-sig"))
    except ValueError as error:
        remedy = "correct it; a file with an object on each line ends in .jsonl"
        raise BadInput(f"{path}: {error}", rule, remedy) from error
    if not isinstance(rows, list):
        raise BadInput(f"{path} is of type {type(rows).__name__}", rule, 'write [{"prompt": ...}, ...]')
    for number, row in enumerate(rows):
        if isinstance(row, dict):
            yield number, row
        else:
            skipped.add(BadInput(f"row {number} of {path} is of type {type(row).__name__}", rule, "correct the row"))


def _csv(path: Path, skipped: Skipped, delimiter: str = ",") -> Iterator[tuple[int, Row]]:
    csv.field_size_limit(LONGEST_FIELD)
    with path.open(encoding="utf-8-sig", newline="") as lines:
        reader = csv.DictReader(lines, delimiter=delimiter, strict=True)
        while True:
            try:
                row = next(reader, None)
            except (csv.Error, UnicodeDecodeError) as error:  # where the next row begins is not known any more
                remedy = "correct the line; a text with quotes or line breaks stands in quotes"
                raise BadInput(f"{path}, line {reader.line_num}: {error}", "it is a table in UTF-8", remedy) from error
            if row is None:
                return
            if None in row or None in row.values():
                count = sum(value is not None for name, value in row.items() if name is not None)
                count += len(row.get(None) or ())
                value = f"{path}, line {reader.line_num} has {count} fields"
                rule = f"the first line names {len(reader.fieldnames or ())} columns"
                skipped.add(BadInput(value, rule, "put a field with a separator in quotes"))
                continue
            yield reader.line_num, dict(row)


def _tsv(path: Path, skipped: Skipped) -> Iterator[tuple[int, Row]]:
    return _csv(path, skipped, "\t")


def _parquet(path: Path, skipped: Skipped) -> Iterator[tuple[int, Row]]:
    parquet = arrow_library(path, "pyarrow.parquet")
    try:
        with parquet.ParquetFile(path) as file:
            batches = [batch.to_pylist() for batch in file.iter_batches()]
    except OSError as error:  # of a cut or foreign file pyarrow's own errors are OSError or ValueError
        raise unreadable(path, error) from error
    except ValueError as error:
        raise unreadable(path, error) from error
    return enumerate(row for rows in batches for row in rows)


def _arrow(path: Path, skipped: Skipped) -> Iterator[tuple[int, Row]]:
    ipc = arrow_library(path, "pyarrow.ipc")
    try:
        with path.open("rb") as file:
            opened = ipc.open_file if file.read(6) == b"ARROW1" else ipc.open_stream
        with path.open("rb") as file:
            rows: list[Row] = opened(file).read_all().to_pylist()
    except (OSError, ValueError) as error:
        raise unreadable(path, error) from error
    return enumerate(rows)


def arrow_library(path: Path, module: str) -> Any:
    """A module of pyarrow, which reads a file."""
    import importlib

    try:
        return importlib.import_module(module)
    except ImportError:
        raise MissingDependency(
            f"{str(path)!r} is read by pyarrow",
            "which is not installed",
            "run `pip install pyarrow` and restart the kernel",
        ) from None


def unreadable(path: Path, error: Exception) -> BadInput:
    """The error for a file that is not what its name says."""
    said = (str(error).strip().splitlines() or ["no message"])[0]
    return BadInput(f"{str(path)!r}: {said}", f"a file that ends in {path.suffix} has that format", "write it again")


READERS: dict[str, Reader] = {
    ".jsonl": _json_lines, ".json": _json, ".csv": _csv, ".tsv": _tsv, ".parquet": _parquet, ".arrow": _arrow,
    ".feather": _arrow,
}  # fmt: skip
LINED = (".jsonl", ".csv", ".tsv")
