"""Saves a batch to one file of the safetensors format, which other tools can open as well, and reads it.

A column c of a batch is one or two tensors of the file:
    Tensor   c.values  [rows, ...]
    Ragged   c.values  the rows end to end              c.lengths  [rows] int64
    list     c.values  each row as JSON, end to end     c.lengths  [rows] int64, in bytes of UTF-8
The file's metadata has two texts: "workbench", the `Header` as JSON, and "sha256", the digest of the file with 64 zeros
in the place of that digest.

Writer and reader hold a group of about CHUNK_BYTES of a column's rows in memory. The writer collects each column in a
temporary file, which it maps into memory.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import stat
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from pydantic import BaseModel, PositiveInt, ValidationError
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from workbench.batches.columns import Ragged, Table
from workbench.batches.schema import TOKEN_COLUMNS
from workbench.batches.vocabulary import Identity, Vocabulary
from workbench.errors import BadInput
from workbench.errors.plain_text import shown
from workbench.support import files

if TYPE_CHECKING:
    from workbench.batches.handle import BatchHandle
    from workbench.batches.location import Column

FORMAT: Literal[3] = 3
CHUNK_BYTES = 64 * 2**20
ZEROS = "0" * 64  # stand for the digest while it is computed
DIGEST = b'"sha256":"'  # the bytes before the digest; quotes in other texts are escaped
# the dtypes that both safetensors and columns have
DTYPES = ("float64", "float32", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8", "bool")
Kind = Literal["tensor", "ragged", "list"]


class Header(BaseModel, strict=True, extra="forbid"):
    """The description of a saved batch, kept beside its tensors.

    columns: the kind of each column, in order. vocabulary: the vocabulary of its token ids; None if it has none.
    """

    format: Literal[3] = FORMAT
    rows: PositiveInt
    columns: dict[str, Kind]
    meta: dict[str, Any]
    vocabulary: Identity | None


def write(path: str | os.PathLike[str], batch: BatchHandle, *, mode: int = files.PRIVATE) -> Path:
    """Write a batch to a file, for `Batch.save`. If writing fails, the old file stays as it was."""
    target = files.path_of(path, "path")
    if target.is_dir() or not target.parent.is_dir():
        what = "is a folder" if target.is_dir() else "is in a folder that does not exist"
        raise BadInput(f"{str(target)!r} {what}", "a batch is saved as one file", "name a file in a folder that exists")
    for name, column in batch.columns.items():
        if column.dtype not in (*DTYPES, "object"):
            rule = f"safetensors has {', '.join(DTYPES)}"
            raise BadInput(f"column {name!r} of {column.dtype}", rule, f"leave it out: batch.drop({name!r})")
    header = Header(
        rows=batch.rows,
        columns={name: _kind(column) for name, column in batch.columns.items()},
        meta={key: json.loads(_json(value, f"meta {key!r}", "")) for key, value in batch.meta.items()},
        vocabulary=batch.vocabulary.identity if set(TOKEN_COLUMNS) & set(batch.columns) else None,
    )
    needed = sum(column.nbytes for column in batch.columns.values())
    with (
        files.replacing(target, needed=needed, mode=mode, flush=True) as file,
        tempfile.TemporaryDirectory(dir=target.parent, prefix=".batch.") as folder,
    ):
        tensors: dict[str, Tensor] = {}
        for number, (name, column) in enumerate(batch.columns.items()):
            tensors |= _spool(batch, name, column, Path(folder) / str(number))
        permissions = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
        save_file(tensors, file.name, metadata={"workbench": json.dumps(header.model_dump()), "sha256": ZEROS})
        os.chmod(file.name, permissions)  # safetensors makes the file accessible only to its owner
        with open(file.name, "r+b") as written:
            place, _, digest = _digests(written)
            written.seek(place)
            written.write(digest.encode())
    return target


def _kind(column: Column) -> Kind:
    if column.dtype == "object":
        return "list"
    return "ragged" if column.row_shape == ("*",) else "tensor"


def _spool(batch: BatchHandle, name: str, column: Column, file: Path) -> dict[str, Tensor]:
    """Return the tensors of a column. Fetches the column in chunks, and maps the values from `file`."""
    dtype = torch.uint8 if column.dtype == "object" else getattr(torch, column.dtype)
    lengths, shape = [], (0,)
    with file.open("wb") as out:
        for rows in _chunks(batch.rows, column.nbytes):
            part = batch.fetch([name], rows=rows)[name]
            if isinstance(part, list):
                part = _as_json(part, name, rows)
            if isinstance(part, Ragged):
                lengths.append(part.lengths)
                part = part.values
            shape = (shape[0] + len(part), *part.shape[1:])
            if part.numel():  # torch cannot view an empty tensor as bytes
                out.write(part.contiguous().reshape(-1).view(torch.uint8).numpy().data)
    size = math.prod(shape)  # an empty file cannot be mapped
    values = torch.from_file(str(file), size=size, dtype=dtype) if size else torch.empty(0, dtype=dtype)
    made = {f"{name}.values": values.reshape(shape)}
    return made | ({f"{name}.lengths": torch.cat(lengths)} if lengths else {})


def _chunks(rows: int, nbytes: int) -> Iterator[range]:
    """Return ranges of consecutive rows, of about CHUNK_BYTES each."""
    step = max(1, math.floor(rows * min(1.0, CHUNK_BYTES / max(1, nbytes))))
    return (range(start, min(start + step, rows)) for start in range(0, rows, step))


def _as_json(values: list[Any], name: str, rows: range) -> Ragged:
    texts = [
        _json(value, f"column {name!r}, row {row}", f"leave it out: batch.drop({name!r})").encode()
        for row, value in zip(rows, values, strict=True)
    ]
    packed = torch.from_numpy(np.frombuffer(b"".join(texts), dtype=np.uint8).copy())
    return Ragged(packed, torch.tensor([len(text) for text in texts], dtype=torch.int64))


def _json(value: Any, where: str, remedy: str) -> str:
    """Return a value as JSON text; raise `BadInput` if the text does not give the same value back."""

    text = ""
    with suppress(TypeError, ValueError, RecursionError):
        text = json.dumps(value)
    if not text or repr(json.loads(text)) != repr(value):
        rule = "is saved as JSON: text, numbers, True, False, None, and lists and dicts of these, whose keys are text"
        raise BadInput(f"{where} holds {shown(value)}", f"what is not a tensor {rule}", remedy)
    return text


def read(path: str | os.PathLike[str], vocabulary: Vocabulary) -> tuple[dict[str, Any], Iterator[Table]]:
    """Return the meta of a saved batch, and an iterator over groups of its rows.

    Raises `BadInput` for a damaged file, and for token ids of another vocabulary than `vocabulary`.
    """
    source = files.path_of(path, "path")
    try:
        files.opened(source).close()
    except FileNotFoundError:
        raise BadInput(
            f"no file {str(source)!r}", f"relative paths start at {str(Path.cwd())!r}", "correct the path"
        ) from None
    try:
        file = safe_open(source, framework="pt")
    except SafetensorError as error:
        raise _not_ours(source, f"is not a complete safetensors file: {error}") from error
    header = _header(file.metadata() or {}, source)
    if header.vocabulary is not None:
        vocabulary.check_identity(header.vocabulary, repr(str(source)))
    rows, columns = header.rows, header.columns
    lengths = {name: file.get_tensor(f"{name}.lengths") for name, kind in columns.items() if kind != "tensor"}
    starts = {name: np.concatenate([[0], np.cumsum(counts.numpy())]).tolist() for name, counts in lengths.items()}

    def table(chunk: range) -> Table:
        first, last = chunk.start, chunk.stop
        out: Table = {}
        for name, kind in columns.items():
            values = file.get_slice(f"{name}.values")
            if kind == "tensor":
                out[name] = values[first:last]
                continue
            ragged = Ragged(values[starts[name][first] : starts[name][last]], lengths[name][first:last])
            out[name] = [json.loads(row.numpy().tobytes()) for row in ragged.rows()] if kind == "list" else ragged
        return out

    return header.meta, map(table, _chunks(rows, source.stat().st_size))


def _header(texts: Mapping[str, str], source: Path) -> Header:
    """Return the header of a file. Raises `BadInput` if the file's digest or header is wrong."""
    if not {"workbench", "sha256"} <= texts.keys():
        raise _not_ours(source, "is a safetensors file, but not a batch")
    try:
        found = json.loads(texts["workbench"])
        written = found["format"]
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise _not_ours(source, f"is damaged: its header is not JSON with a format ({type(error).__name__})") from error
    if written != FORMAT:
        what = f"{str(source)!r} is a batch of format {shown(written, 80)}"
        raise BadInput(what, f"this version reads format {FORMAT}", "use the version of workbench that saved it")
    with source.open("rb") as file:
        _, there, digest = _digests(file)
    if there != digest:
        raise _not_ours(source, "is damaged: its bytes have changed since they were written")
    try:
        return Header.model_validate(found)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise _not_ours(source, f"has a wrong header: {where}: {first['msg']}") from error


def _digests(file: IO[bytes]) -> tuple[int, str, str]:
    """Return the position of an open file's digest, the digest written there, and the right digest."""
    size = file.read(8)
    head = file.read(int.from_bytes(size, "little"))
    at = head.find(DIGEST) + len(DIGEST)
    found = hashlib.sha256(size + head[:at] + ZEROS.encode() + head[at + len(ZEROS) :])
    while part := file.read(CHUNK_BYTES):
        found.update(part)
    return len(size) + at, head[at : at + len(ZEROS)].decode(errors="replace"), found.hexdigest()


def _not_ours(source: Path, what: str) -> BadInput:
    """Return the error for a file that `batch.save` did not write, or that changed since. what: what is wrong."""
    return BadInput(f"{str(source)!r} {what}", "lab.load reads files that batch.save wrote", "give such a file")
