"""The file of a journal: a sequence of entries, each after a mark, its length and its checksum.

A full disk, or a killed kernel, may leave half an entry anywhere. A reader skips bytes without a right checksum, and
continues at the next mark. An entry has only texts, numbers and bytes: reading it runs no code.
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
    """Add an entry. If the write fails, truncate the file to its old length, if the disk allows that, and raise
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
    """Replace all entries by one; a reader sees the old file or the new one. Raises `WriteFailed`."""
    files.write_bytes(path, _framed(entry))


def stamp(path: Path) -> Stamp | None:
    """Return a value (inode, length) that changes when another process has written the file. None: there is no file."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_ino, found.st_size


def entries(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the entries whose checksum is right, oldest first."""
    try:
        data = files.read_bytes(path)
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
    """Unpickles values without classes, because a class runs code."""

    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"an entry of a journal names {module}.{name}")


def _unpickled(payload: memoryview) -> dict[str, Any] | None:
    try:
        found = _PlainValues(io.BytesIO(payload)).load()
    except Exception:  # zeros have a right checksum, too
        return None
    return found if isinstance(found, dict) else None
