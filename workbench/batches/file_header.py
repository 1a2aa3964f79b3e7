"""What a batch file says of itself: checked before anything of it is read, as anybody may have written it.

A safetensors file has texts beside its tensors. A batch has two: "workbench", the header as JSON, and "sha256", the
digest of that text. In the header stands the digest of each tensor: of its dtype, its shape and its bytes.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import PositiveInt
from torch import Tensor

from workbench.errors import BadInput
from workbench.support.validation import settings

FORMAT: Literal[2] = 2
OLDEST = 1  # the same without digests
# what both safetensors and columns have, by the names of the format
STORED = ("F64", "F32", "F16", "BF16", "I64", "I32", "I16", "I8", "U8", "BOOL")
CHUNK_BYTES = 64 * 2**20
Kind = Literal["tensor", "ragged", "list"]


@settings(called="header.vocabulary.")
class Identity:
    """Whose the token ids are: see `Vocabulary`."""

    name: str
    size: int
    digest: str


@settings(called="header.")
class Header:
    """What there is to know of a batch beside its tensors.

    columns: the kind of each, in order. digests: by tensor; an old file has none.
    """

    format: Literal[1, 2] = FORMAT
    rows: PositiveInt
    columns: dict[str, Kind]
    meta: dict[str, Any]
    vocabulary: Identity | None = None
    digests: dict[str, str] | None = None

    def texts(self) -> dict[str, str]:
        """The texts of a file."""
        text = json.dumps({name: value for name, value in asdict(self).items() if value is not None})
        return {"workbench": text, "sha256": hashlib.sha256(text.encode()).hexdigest()}

    @classmethod
    def read(cls, texts: Mapping[str, str], source: Path) -> Header:
        """The header of a file; `BadInput` where it has none, or not the one that was written."""
        text = texts.get("workbench")
        if text is None:
            raise not_ours(source, "is a safetensors file, but no batch")
        try:
            found = json.loads(text)
            written = found["format"]
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            raise not_ours(
                source, f"is damaged: its header is no JSON with a format ({type(error).__name__})"
            ) from error
        if isinstance(written, int) and written > FORMAT:
            what = f"{str(source)!r} is a batch of format {written}"
            raise BadInput(what, f"this version reads format {FORMAT}", "use the version of workbench that saved it")
        if written != OLDEST and texts.get("sha256") != hashlib.sha256(text.encode()).hexdigest():
            raise not_ours(source, "is damaged: its header is not the one that was written")
        try:
            if "vocabulary" in found:
                found["vocabulary"] = Identity(**found["vocabulary"])
            header = cls(**found)
        except (BadInput, TypeError) as error:
            raise not_ours(source, f"is damaged: {str(error).rstrip('.')}") from error
        if (header.digests is None) != (header.format == OLDEST):
            raise not_ours(source, "is damaged: its header has no digests")
        return header


def digest(tensor: Tensor) -> str:
    """The digest of a tensor that lies in memory, or is mapped there."""
    return _digest(str(tensor.dtype), tuple(tensor.shape), [tensor])


def check_tensors(file: Any, header: Header, source: Path) -> None:
    """Raise `BadInput` unless an open file holds the tensors that its header names, with the bytes that were written.

    It reads the file once, a part at a time.
    """
    kinds = header.columns
    expected = {f"{name}.values" for name in kinds} | {f"{n}.lengths" for n, kind in kinds.items() if kind != "tensor"}
    if not kinds or set(file.keys()) != expected:
        raise not_ours(source, "is damaged: its tensors are not those of its columns")
    for name in sorted(expected):
        column, _, part = name.rpartition(".")
        tensor = file.get_slice(name)
        if not _right_shape(tensor, kinds[column] if part == "values" else "lengths", header.rows):
            what = f"{tensor.get_dtype()} {tensor.get_shape()}"
            raise not_ours(source, f"is damaged: the tensor {name!r} is {what} in a batch of {header.rows} rows")
        if header.digests is not None and _digest_of_slice(tensor) != header.digests.get(name):
            raise not_ours(source, f"is damaged: the bytes of {name!r} are not those that were written")
    if header.digests is None:
        print(f"{str(source)!r} was saved without digests: damage to its numbers goes unseen; save it again")


def _right_shape(tensor: Any, kind: Kind | Literal["lengths"], rows: int) -> bool:
    shape, dtype = tensor.get_shape(), tensor.get_dtype()
    if kind == "lengths":
        return dtype == "I64" and shape == [rows]
    if kind == "list":
        return dtype == "U8" and len(shape) == 1
    return dtype in STORED and len(shape) > 0 and (kind == "ragged" or shape[0] == rows)


def _digest(dtype: str, shape: tuple[int, ...], parts: Iterable[Tensor]) -> str:
    found = hashlib.sha256(f"{dtype} {list(shape)} ".encode())
    for part in parts:
        if part.numel():  # torch gives no view of nothing
            found.update(part.contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return found.hexdigest()


def _digest_of_slice(tensor: Any) -> str:
    """The digest of a tensor of a file, which is read about CHUNK_BYTES at a time."""
    shape, row = tuple(tensor.get_shape()), tensor[:1]
    step = max(1, CHUNK_BYTES // max(1, row.nbytes))
    parts = (tensor[start : start + step] for start in range(0, shape[0], step))
    return _digest(str(row.dtype), shape, parts)


def not_ours(source: Path, what: str) -> BadInput:
    """The error for a file that `batch.save` did not write, or not like this."""
    return BadInput(f"{str(source)!r} {what}", "lab.load reads what batch.save wrote", "name such a file")
