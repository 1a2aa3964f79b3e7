"""How the package opens files. It reads regular files of a bounded size, and writes a whole file in the place of the
old one or leaves that as it was.

A file that cannot be read is `BadInput`; only one that is not there is `FileNotFoundError`. One that cannot be written
is `WriteFailed`, with its path, the bytes that it takes, and those that are free.

Where workbench keeps what it may need again: prepared models, run records, addresses of live workbenches; and
signatures by this user's key, for files that hold Python objects: loading such a file runs code of its writer.
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
SHARED = 0o666  # less what the user's umask takes away: of files that the user has named
LIMIT_BYTES = 2**30
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def path_of(value: object, what: str) -> Path:
    """A path that the user gave as `what`, with `~` expanded. Raises `BadInput` for one that no file can have."""
    rule = "a path is a text or a pathlib.Path, and not empty"
    if isinstance(value, str | os.PathLike) and isinstance(text := os.fspath(value), str) and text:
        try:
            path = Path(text).expanduser()
            path.lstat()
            return path
        except (ValueError, RuntimeError) as error:  # a null character, a surrogate; no such user
            rule = str(error)
        except OSError as error:
            if error.errno != errno.ENAMETOOLONG:  # whether it is there, and can be read, is found when it is opened
                return path
            rule = "a name has at most 255 bytes, and a path 4095"
    raise BadInput(f"{what}={shown(value, 80)}", rule, "give another path")


def real_path(value: object, what: str) -> Path:
    """The same, absolute and without links."""
    return Path(os.path.realpath(path_of(value, what)))


# --- reading ----------------------------------------------------------------------------------------------------------


def opened(path: Path, *, limit: int | None = LIMIT_BYTES) -> io.BufferedReader:
    """A regular file of at most `limit` bytes, open for reading. Raises `FileNotFoundError`, or `BadInput` for all that
    is not such a file."""
    try:
        # without O_NONBLOCK a pipe waits for a writer
        file = open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK))  # noqa: SIM115
    except FileNotFoundError:
        raise
    except (OSError, ValueError) as error:
        raise _unreadable(path, f"cannot be read: {getattr(error, 'strerror', None) or error}") from None
    found = os.fstat(file.fileno())
    if stat.S_ISREG(found.st_mode) and (limit is None or found.st_size <= limit):
        return file
    file.close()
    is_file = stat.S_ISREG(found.st_mode)
    raise _unreadable(path, f"has {found.st_size:,} bytes, and {limit:,} are the most" if is_file else "is no file")


def read_bytes(path: Path, *, limit: int | None = LIMIT_BYTES) -> bytes:
    """The content of a file; see `opened`."""
    with opened(path, limit=limit) as file:
        return file.read()


def read_text(path: Path, *, limit: int = LIMIT_BYTES) -> str:
    """The content of a text file in UTF-8; see `opened`."""
    try:
        return read_bytes(path, limit=limit).decode()
    except UnicodeDecodeError as error:
        raise _unreadable(path, f"is no text: {error}") from None


def read_json(path: Path, *, limit: int = LIMIT_BYTES) -> Any:
    """The value in a file of JSON; see `opened`."""
    try:
        return json.loads(read_text(path, limit=limit))
    except (json.JSONDecodeError, RecursionError) as error:
        raise _unreadable(path, f"is no JSON: {error}") from None


@functools.cache
def tell_once(problem: str) -> None:
    """Warn of a file that is left out, once in a process."""
    warnings.warn(f"left out: {problem}", stacklevel=3)


def _unreadable(path: Path, what: str) -> BadInput:
    return BadInput(f"{str(path)!r} {what}", "a regular file is read", "name another file")


# --- writing ----------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def replacing(path: Path, *, needed: int = 0, mode: int = PRIVATE, flush: bool = False) -> Iterator[IO[bytes]]:
    """A new file, which takes the place of `path` when all is well; after an error there is what was there. A link
    stays, and the file that it names is replaced.

    needed: its bytes, for the error. flush: it is on the disk (fsync) before it takes the place. Libraries that write
    files by themselves may write to its `name`. Raises `BadInput` where something other than a file has this path,
    `WriteFailed` where it cannot be written.
    """
    with disk_errors(path, needed):
        place = Path(os.path.realpath(path))
        if place.exists() and not place.is_file():
            raise BadInput(f"{str(path)!r} is no file", "only a file is replaced", "choose another path")
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
    """Put a file of this content in the place of `path`; see `replacing`."""
    with replacing(path, needed=len(data), mode=mode, flush=flush) as file:
        file.write(data)


def write_json(path: Path, value: Any, *, flush: bool = False) -> None:
    """Put a file with this value in the place of `path`; see `replacing`."""
    write_bytes(path, json.dumps(value, indent=1).encode(), flush=flush)


def open_to_append(path: Path) -> int:
    """The descriptor of a file, whose writes go to its end; it is made, for this user alone, where there is none."""
    return os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, PRIVATE)


@contextlib.contextmanager
def new_folder(path: Path, *, needed: int = 0) -> Iterator[Path]:
    """A folder that becomes `path` when all is well, and vanishes otherwise. One that is there must be empty."""
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
    """A folder to save to, absolute. Raises `BadInput` where something is there."""
    folder = Path(os.path.realpath(path))
    with disk_errors(path):
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise BadInput(f"{str(folder)!r} holds something", "it is saved to a new or empty folder", "choose another")
    return folder


def private_folder(path: Path) -> Path:
    """Make a folder that only its owner can enter; one that is there stays as it is. Its parents get the modes that the
    user's umask gives. Raises `WriteFailed`."""
    with disk_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.mkdir(mode=0o700, exist_ok=True)
    return path


def check_room(folder: Path, nbytes: int) -> None:
    """Raise `WriteFailed` where a file of so many bytes cannot be written to a folder now."""
    probe = folder / f".room.{secrets.token_hex(4)}"
    write_bytes(probe, bytes(nbytes))
    probe.unlink()


@contextlib.contextmanager
def disk_errors(path: Path, needed: int = 0) -> Iterator[None]:
    """What fails inside because of the disk is raised as `WriteFailed`, which names `path`, and the bytes that were
    needed where they are known."""
    try:
        yield
    except (BadInput, WriteFailed):
        raise
    except OSError as error:
        raise failed_write(error, path, needed) from error
    except Exception as error:  # safetensors has an error of its own, and torch says it in words
        number = re.search(r"\bos error (\d+)", str(error))
        if number is None:
            raise
        raise failed_write(OSError(int(number[1]), os.strerror(int(number[1]))), path, needed) from error


def failed_write(error: OSError, path: Path, needed: int = 0) -> WriteFailed:
    """The error for a file or folder that cannot be written."""
    what = f"{str(path)!r} cannot be written: {error.strerror or error}"
    if error.errno not in FULL:
        return WriteFailed(what, "it takes a folder that this user can write", "choose another path")
    takes = f"it takes {needed:,} bytes, and " if needed else ""
    there = next(folder for folder in path.absolute().parents if os.path.exists(folder))
    rule = f"{takes}{shutil.disk_usage(there).free:,} bytes are free there"
    return WriteFailed(what, rule, "free some room, or choose another disk")


def to_disk(path: Path) -> None:
    """Have a file, or the names in a folder, on the disk."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


LOCK_POLL_S = 0.25
SIGNATURE = "signature"  # field of what is signed
KEY_FILE = "signing_key"
_KEY_BYTES = 32


def home() -> Path:
    """`$WORKBENCH_HOME`, or `~/.cache/workbench`; made where it is missing. Raises `BadInput` for a folder of another
    user, who could put other files in the place of ours; not for root, to whom a container gives a folder of the user
    outside."""
    folder = path_of(os.environ.get("WORKBENCH_HOME") or "~/.cache/workbench", "WORKBENCH_HOME")
    if not folder.is_dir():
        private_folder(folder)
    owner, user = folder.stat().st_uid, os.geteuid()
    if owner not in (user, 0) and user != 0:
        raise BadInput(
            f"WORKBENCH_HOME={str(folder)!r} belongs to user {owner}",
            f"what is loaded from there has to be of this user, {user}",
            "set WORKBENCH_HOME to a folder of your own",
        )
    return folder


@contextmanager
def locked(name: str, waiting: Callable[[], None] = lambda: None) -> Iterator[None]:
    """Only one process of this user at a time is in here for `name`; `waiting` is called again and again until then.

    The lock goes with the process that holds it, also when that is killed. Not reentrant.
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
    """The same values with a signature of this user."""
    return {**values, SIGNATURE: _signature(values)}


def is_signed(values: Mapping[str, Any]) -> bool:
    """Whether this user has signed these values, as they are now."""
    given = values.get(SIGNATURE)
    return isinstance(given, str) and hmac.compare_digest(given.encode(), _signature(values).encode())


def signing_key() -> bytes:
    """`$WORKBENCH_HOME/signing_key`, made once."""
    path = home() / KEY_FILE
    if not path.exists():
        with locked(KEY_FILE):  # of two processes that make it at the same time, one succeeds
            if not path.exists():
                write_bytes(path, secrets.token_bytes(_KEY_BYTES), flush=True)
    key = read_bytes(path)
    if len(key) != _KEY_BYTES:
        raise BadInput(
            f"{str(path)!r} has {len(key)} bytes", f"a key has {_KEY_BYTES}, or anybody could sign with it",
            f"rm {shlex.quote(str(path))}: another one is made, and `wb trust FOLDER` signs a checkpoint with it",
        )  # fmt: skip
    return key


def _signature(values: Mapping[str, Any]) -> str:
    text = json.dumps({name: value for name, value in values.items() if name != SIGNATURE}, sort_keys=True)
    return hmac.new(signing_key(), text.encode(), hashlib.sha256).hexdigest()
