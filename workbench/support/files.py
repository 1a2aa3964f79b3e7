"""Reads and writes files for the whole package. It reads only regular files, and replaces a file by a complete new one
or leaves the old one unchanged.

A file that cannot be read raises `BadInput`, a missing one `FileNotFoundError`. A file that cannot be written raises
`WriteFailed`, with its path, the bytes that it takes, and the free bytes.

The module also has workbench's home folder (prepared models, run records, addresses of live workbenches), and
signatures with this user's key for files with Python objects, because loading such a file runs code of its writer.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import hashlib
import hmac
import io
import json
import os
import re
import secrets
import shlex
import shutil
import stat
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from filelock import FileLock, Timeout

from workbench.errors import BadInput, WriteFailed
from workbench.errors.plain_text import shown

PRIVATE = 0o600
SHARED = 0o666  # for files that the user has named; the user's umask applies
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def path_of(value: object, what: str) -> Path:
    """Return a path that the user gave as `what`, with `~` expanded. Raises `BadInput` for an impossible path."""
    rule = "a path is a text or a pathlib.Path, and not empty"
    if isinstance(value, str | os.PathLike) and isinstance(text := os.fspath(value), str) and text:
        try:
            path = Path(text).expanduser()
            path.lstat()
            return path
        except (ValueError, RuntimeError) as error:  # a null character, a surrogate; no such user
            rule = str(error)
        except OSError as error:
            if error.errno != errno.ENAMETOOLONG:  # opening it will show whether it exists and can be read
                return path
            rule = "a name has at most 255 bytes, and a path 4095"
    raise BadInput(f"{what}={shown(value, 80)}", rule, "give another path")


def real_path(value: object, what: str) -> Path:
    """Return the path as `path_of` does, but absolute and without links."""
    return Path(os.path.realpath(path_of(value, what)))


# --- reading ----------------------------------------------------------------------------------------------------------


def opened(path: Path) -> io.BufferedReader:
    """Open a regular file for reading. Raises `FileNotFoundError`, or `BadInput` for anything that is not such a
    file."""
    try:
        # without O_NONBLOCK, opening a pipe waits for a writer
        file = open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK))  # noqa: SIM115
    except FileNotFoundError:
        raise
    except (OSError, ValueError) as error:
        raise _unreadable(path, f"cannot be read: {getattr(error, 'strerror', None) or error}") from None
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise _unreadable(path, "is not a file")
    return file


def read_bytes(path: Path) -> bytes:
    """Return the content of a file; see `opened`."""
    with opened(path) as file:
        return file.read()


def read_json(path: Path, *, format: int | None = None) -> Any:
    """Return the value in a JSON file; see `opened`. format: the number that it must have as "format"; None: none."""
    data = read_bytes(path)
    try:
        found = json.loads(data)
    except (ValueError, RecursionError) as error:  # also bytes that are no text
        raise _unreadable(path, f"is not JSON: {error}") from None
    if format is not None and (wrote := found.get("format") if isinstance(found, dict) else None) != format:
        what = f"{str(path)!r} has format {shown(wrote, 80)}"
        raise BadInput(what, f"this version reads {format}", "use the version of workbench that wrote it")
    return found


@functools.cache
def tell_once(problem: str) -> None:
    """Warn of a skipped file, once in a process."""
    warnings.warn(f"skipped: {problem}", stacklevel=3)


def _unreadable(path: Path, what: str) -> BadInput:
    return BadInput(f"{str(path)!r} {what}", "it must be a regular file that can be read", "give another file")


# --- writing ----------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def replacing(path: Path, *, needed: int = 0, mode: int = PRIVATE, flush: bool = False) -> Iterator[IO[bytes]]:
    """Yield a new file that replaces `path` at the end; after an error the old file stays. A link stays a link, and the
    file that it names is replaced.

    needed: its bytes, for the error. flush: write it to the disk (fsync) before it replaces the old one. Libraries that
    open files themselves may write to its `name`. Raises `BadInput` where something other than a file has this path,
    `WriteFailed` where it cannot be written.
    """
    with disk_errors(path, needed):
        place = Path(os.path.realpath(path))
        if place.exists() and not place.is_file():
            raise BadInput(f"{str(path)!r} is not a file", "only a file can be replaced", "choose another path")
        new = _temporary(place)
        mode = stat.S_IMODE(place.stat().st_mode) if mode == SHARED and place.exists() else mode
        try:
            with open(new, "xb", opener=lambda name, flags: os.open(name, flags, mode)) as file:
                yield file
            if flush:
                to_disk(new)
            os.replace(new, place)
            if flush:
                to_disk(place.parent)
        except BaseException:
            with contextlib.suppress(OSError):
                new.unlink()
            raise


def write_bytes(path: Path, data: bytes, *, mode: int = PRIVATE, flush: bool = False) -> None:
    """Replace `path` by a file with this content; see `replacing`."""
    with replacing(path, needed=len(data), mode=mode, flush=flush) as file:
        file.write(data)


def write_json(path: Path, value: Any, *, flush: bool = False) -> None:
    """Replace `path` by a JSON file with this value; see `replacing`."""
    write_bytes(path, json.dumps(value, indent=1).encode(), flush=flush)


def open_to_append(path: Path) -> int:
    """Return a descriptor whose writes append to a file. A missing file is created, for this user alone."""
    return os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, PRIVATE)


@contextlib.contextmanager
def new_folder(path: Path, *, needed: int = 0) -> Iterator[Path]:
    """Yield a new folder that becomes `path` at the end, or is deleted on error. An old `path` must be empty."""
    with disk_errors(path, needed):
        path.parent.mkdir(parents=True, exist_ok=True)
        new = _temporary(path)
        new.mkdir(mode=0o700)
        try:
            yield new
            os.replace(new, path)
            to_disk(path.parent)
        except BaseException:
            shutil.rmtree(new, ignore_errors=True)
            raise


def _temporary(path: Path) -> Path:
    return path.with_name(f".{path.name[:50]}.{secrets.token_hex(4)}")  # a character has up to 4 bytes, a name 255


def new_or_empty(path: Path) -> Path:
    """Return the absolute path of a folder to save to. Raises `BadInput` where the folder is not empty."""
    folder = Path(os.path.realpath(path))
    with disk_errors(path):
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise BadInput(f"{str(folder)!r} is not empty", "the folder must be new or empty", "choose another")
    return folder


def private_folder(path: Path) -> Path:
    """Make a folder that only its owner can enter; an existing folder stays as it is. Its parents get the modes of the
    user's umask. Raises `WriteFailed`."""
    with disk_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.mkdir(mode=0o700, exist_ok=True)
    return path


def check_room(folder: Path, nbytes: int) -> None:
    """Raise `WriteFailed` if a file of `nbytes` bytes cannot be written to a folder now."""
    probe = folder / f".room.{secrets.token_hex(4)}"
    write_bytes(probe, bytes(nbytes))
    probe.unlink()


@contextlib.contextmanager
def disk_errors(path: Path, needed: int = 0) -> Iterator[None]:
    """Raise errors of the disk inside as `WriteFailed`, which names `path`, and the needed bytes if they are known."""
    try:
        yield
    except (BadInput, WriteFailed):
        raise
    except OSError as error:
        raise failed_write(error, path, needed) from error
    except Exception as error:  # safetensors and torch raise other classes, with the number of the OS error in the text
        number = re.search(r"\bos error (\d+)", str(error))
        if number is None:
            raise
        raise failed_write(OSError(int(number[1]), os.strerror(int(number[1]))), path, needed) from error


def failed_write(error: OSError, path: Path, needed: int = 0) -> WriteFailed:
    """Return the error for a file or folder that cannot be written."""
    what = f"{str(path)!r} cannot be written: {error.strerror or error}"
    if error.errno not in FULL:
        return WriteFailed(what, "this user must be able to write to its folder", "choose another path")
    takes = f"it needs {needed:,} bytes, and " if needed else ""
    there = next(folder for folder in path.absolute().parents if os.path.exists(folder))
    rule = f"{takes}{shutil.disk_usage(there).free:,} bytes are free there"
    return WriteFailed(what, rule, "free some space, or choose another disk")


def to_disk(path: Path) -> None:
    """Flush a file, or the names in a folder, to the disk (fsync)."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


LOCK_POLL_S = 0.25
SIGNATURE = "signature"  # field of signed values
KEY_FILE = "signing_key"
_KEY_BYTES = 32


def home() -> Path:
    """Return `$WORKBENCH_HOME`, or `~/.cache/workbench`; make it if it is missing. Raises `BadInput` for a folder of
    another user, who could replace our files. Root may use one, because in a container the folder may belong to the
    user outside."""
    folder = path_of(os.environ.get("WORKBENCH_HOME") or "~/.cache/workbench", "WORKBENCH_HOME")
    if not folder.is_dir():
        private_folder(folder)
    owner, user = folder.stat().st_uid, os.geteuid()
    if owner not in (user, 0) and user != 0:
        raise BadInput(
            f"WORKBENCH_HOME={str(folder)!r} belongs to user {owner}",
            f"files that are loaded from there must belong to this user, {user}",
            "set WORKBENCH_HOME to a folder of your own",
        )
    return folder


@contextmanager
def locked(name: str, waiting: Callable[[], None] = lambda: None) -> Iterator[None]:
    """Hold the lock `name` inside: only one process of this user has it at a time. While waiting, `waiting` is called.

    The lock ends with the process that holds it, even if that is killed. Not reentrant.
    """
    lock = FileLock(home() / f"{name}.lock")
    while True:
        try:
            held = lock.acquire(timeout=LOCK_POLL_S)
            break
        except Timeout:
            waiting()
    with held:
        yield


def signed(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the same values with a signature of this user."""
    return {**values, SIGNATURE: _signature(values)}


def is_signed(values: Mapping[str, Any]) -> bool:
    """Whether this user has signed these values as they are now."""
    given = values.get(SIGNATURE)
    return isinstance(given, str) and hmac.compare_digest(given.encode(), _signature(values).encode())


def signing_key() -> bytes:
    """Return the key in `$WORKBENCH_HOME/signing_key`; make it once."""
    path = home() / KEY_FILE
    if not path.exists():
        with locked(KEY_FILE):  # of two processes that make it at the same time, one succeeds
            if not path.exists():
                write_bytes(path, secrets.token_bytes(_KEY_BYTES), flush=True)
    key = read_bytes(path)
    if len(key) != _KEY_BYTES:
        raise BadInput(
            f"{str(path)!r} has {len(key)} bytes", f"a key must have {_KEY_BYTES}, or anybody could sign with it",
            f"rm {shlex.quote(str(path))}: a new one will be made, and `wb trust FOLDER` signs a checkpoint with it",
        )  # fmt: skip
    return key


def _signature(values: Mapping[str, Any]) -> str:
    text = json.dumps({name: value for name, value in values.items() if name != SIGNATURE}, sort_keys=True)
    return hmac.new(signing_key(), text.encode(), hashlib.sha256).hexdigest()
