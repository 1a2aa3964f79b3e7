"""The file of a journal: entries one after the other, each behind a mark, its length and its checksum.

A disk that is full, or a kernel that is killed, may leave half an entry anywhere. A reader skips what does not check,
and goes on at the next mark. An entry has texts, numbers and bytes: reading it runs no code.
"""

from __future__ import annotations

import io
import os
import pickle
import struct
import zlib
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from workbench.errors import BadInput
from workbench.support import files

MARK = b"\xf5entry\r\n\x00"
HEAD = struct.Struct("<QI")  # of the pickled entry: length, crc32

Stamp = tuple[int, int]


def append(path: Path, entry: Mapping[str, Any]) -> None:
    """Add an entry. A write that fails leaves the file as it was, where the disk allows that, and raises
    `WriteFailed`."""
    left = memoryview(_framed(entry))
    with files.disk_errors(path, len(left)):
        descriptor = files.open_to_append(path)
        size = os.fstat(descriptor).st_size
        try:
            while left:
                left = left[os.write(descriptor, left) :]
        except BaseException:
            with suppress(OSError):
                os.ftruncate(descriptor, size)
            raise
        finally:
            os.close(descriptor)


def start(path: Path, entry: Mapping[str, Any]) -> None:
    """Put one entry in the place of all; a reader sees the old file or the new. Raises `WriteFailed`."""
    files.write_bytes(path, _framed(entry))


def stamp(path: Path) -> Stamp | None:
    """Which file it is, and its length: another value where somebody else has written it. None: there is none."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_ino, found.st_size


def entries(path: Path) -> Iterator[dict[str, Any]]:
    """The entries that check, oldest first."""
    try:
        data = files.read_bytes(path, limit=None)
    except BadInput as error:
        files.tell_once(str(error))
        return
    except OSError:
        return
    at = data.find(MARK)
    while at >= 0:
        begin = at + len(MARK) + HEAD.size
        length, checksum = HEAD.unpack_from(data, at + len(MARK)) if begin <= len(data) else (len(data), 0)
        payload = memoryview(data)[begin : begin + length]
        whole = len(payload) == length and zlib.crc32(payload) == checksum
        entry = _unpickled(payload) if whole else None
        if entry is not None:
            yield entry
        at = data.find(MARK, begin + length if whole else at + 1)


def _framed(entry: Mapping[str, Any]) -> bytes:
    payload = pickle.dumps(entry)
    return MARK + HEAD.pack(len(payload), zlib.crc32(payload)) + payload


class _PlainValues(pickle.Unpickler):
    """Of values that need no class: a class runs code."""

    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"an entry of a journal names {module}.{name}")


def _unpickled(payload: memoryview) -> dict[str, Any] | None:
    try:
        found = _PlainValues(io.BytesIO(payload)).load()
    except Exception:  # zeros check too
        return None
    return found if isinstance(found, dict) else None
