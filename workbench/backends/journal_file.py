"""The file of a journal: entries one after the other, each behind a mark, its length and its checksum.

A disk that is full, or a kernel that is killed, may leave half an entry anywhere. A reader skips what does not check,
and goes on at the next mark.
"""

from __future__ import annotations

import pickle
import secrets
import struct
import zlib
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

MARK = b"\xf5entry\r\n\x00"
HEAD = struct.Struct("<QI")  # of the pickled entry: length, crc32

Stamp = tuple[int, int]


def append(path: Path, entry: Mapping[str, Any]) -> None:
    """Add an entry. A write that fails leaves the file as it was, where the disk allows that, and raises `OSError`."""
    with path.open("ab", buffering=0) as file:
        size = file.seek(0, 2)
        left = memoryview(_framed(entry))
        try:
            while left:
                left = left[file.write(left) :]
        except BaseException:
            with suppress(OSError):
                file.truncate(size)
            raise


def start(path: Path, entry: Mapping[str, Any]) -> None:
    """Put one entry in the place of all; a reader sees the old file or the new."""
    new = path.with_suffix(f".{secrets.token_hex(4)}")  # two kernels may do this at once
    try:
        new.write_bytes(_framed(entry))
        new.replace(path)
    except BaseException:
        with suppress(OSError):
            new.unlink()
        raise


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
        data = path.read_bytes()
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


def _unpickled(payload: memoryview) -> dict[str, Any] | None:
    try:
        found = pickle.loads(payload)
    except Exception:  # zeros check too
        return None
    return found if isinstance(found, dict) else None
