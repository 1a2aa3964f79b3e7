"""How the package opens files. Reading takes regular files of a bounded size and, where their content is trusted, of
this user; nothing follows a link, or waits at a pipe. Writing puts a whole file in the place of the old one, or leaves
that as it was.

What cannot be read is `BadInput`; only a file that is not there is `FileNotFoundError`. What cannot be written is
`WriteFailed`, with its path, the bytes that it takes, and those that are free.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import grp
import io
import json
import os
import pwd
import re
import secrets
import shlex
import shutil
import stat
import warnings
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO

from workbench.errors import BadInput, WriteFailed
from workbench.errors.plain_text import shown

PRIVATE = 0o600
SHARED = 0o666  # less what the user's umask takes away: of files that the user has named
LIMIT_BYTES = 2**30
NAME_BYTES, PATH_BYTES = 255, 4095  # of a file's name, and of a path, on Linux and macOS
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_READ = os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
_CREATE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_KINDS = {stat.S_IFDIR: "a folder", stat.S_IFLNK: "a link", stat.S_IFIFO: "a pipe", stat.S_IFSOCK: "a socket"}


def path_of(value: object, what: str) -> Path:
    """A path that the user gave as `what`, with `~` expanded. Raises `BadInput` for one that no file can have."""
    rule, remedy = "a path is a text or a pathlib.Path", f"give {what} such a path"
    if not isinstance(value, str | os.PathLike):
        raise BadInput(f"{what}={shown(value, 80)}", rule, remedy)
    text = os.fspath(value)
    if not isinstance(text, str) or not text:
        raise BadInput(f"{what}={shown(text, 80)}", f"{rule}, and not empty", remedy)
    try:
        path = Path(text).expanduser()
        size, name = len(os.fsencode(path)), max((len(os.fsencode(part)) for part in path.parts), default=0)
    except (UnicodeEncodeError, RuntimeError) as error:  # a surrogate; no such user
        raise BadInput(f"{what}={shown(text, 80)}", str(error), remedy) from None
    if "\0" in text:
        raise BadInput(f"{what}={shown(text, 80)}", "no path has a null character", remedy)
    if size > PATH_BYTES or name > NAME_BYTES:
        too_long = f"with a name of {name} bytes" if name > NAME_BYTES else f"of {size} bytes"
        rule = f"a name has at most {NAME_BYTES} bytes, and a path {PATH_BYTES}"
        raise BadInput(f"{what}={shown(text, 80)}, {too_long}", rule, "choose a shorter one")
    return path


def real_path(value: object, what: str) -> Path:
    """The same, absolute and without links."""
    return Path(os.path.realpath(path_of(value, what)))


# --- reading ----------------------------------------------------------------------------------------------------------


def opened(
    path: Path, *, within: Path | None = None, own: bool = False, follow: bool = False, limit: int | None = LIMIT_BYTES
) -> io.BufferedReader:
    """A regular file, open for reading. Raises `FileNotFoundError`, or `BadInput` for all that is not such a file.

    within: a folder that `path` is relative to, and does not leave, by ".." or by a link on the way. own: the file must
    belong to this user (or to root; for root, to the owner of its folder), and no other may write to it. follow: a link
    is followed, as for files that the user names. limit: of its bytes.
    """
    shown = path if within is None else within / path
    try:
        if within is None:
            descriptor = os.open(path, _READ | (0 if follow else os.O_NOFOLLOW))
        else:
            descriptor = _open_beneath(within, path)
    except (FileNotFoundError, BadInput):
        raise
    except (OSError, ValueError) as error:
        is_link = shown.is_symlink() if "\0" not in str(shown) else False
        said = "it is a link" if is_link and not follow else getattr(error, "strerror", None) or str(error)
        raise _unreadable(shown, f"cannot be read: {said}") from None
    try:
        _check_kind(descriptor, shown, own, limit)
    except BaseException:
        os.close(descriptor)
        raise
    return os.fdopen(descriptor, "rb")


def read_bytes(path: Path, **checks: Any) -> bytes:
    """The content of a file; see `opened`."""
    limit = checks.get("limit", LIMIT_BYTES)
    with opened(path, **checks) as file:
        data = file.read() if limit is None else file.read(limit + 1)
    if limit is not None and len(data) > limit:  # such as those of /proc, which say that they are empty
        raise _unreadable(path, f"has more than {limit:,} bytes")
    return data


def read_text(path: Path, **checks: Any) -> str:
    """The content of a text file in UTF-8; see `opened`."""
    try:
        return read_bytes(path, **checks).decode()
    except UnicodeDecodeError as error:
        raise _unreadable(path, f"is no text: {error}") from None


def read_json(path: Path, **checks: Any) -> Any:
    """The value in a file of JSON; see `opened`."""
    try:
        return json.loads(read_text(path, **checks))
    except (json.JSONDecodeError, RecursionError) as error:
        raise _unreadable(path, f"is no JSON: {error}") from None


def _open_beneath(folder: Path, path: Path) -> int:
    """Folder by folder, none of them a link."""
    parts = PurePosixPath(path).parts
    if not parts or path.is_absolute() or ".." in parts:
        raise BadInput(f"{str(path)!r} leaves {str(folder)!r}", "a file of a folder lies in it", "use another folder")
    here = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        for part in parts[:-1]:
            deeper = os.open(part, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=here)
            os.close(here)
            here = deeper
        return os.open(parts[-1], _READ | os.O_NOFOLLOW, dir_fd=here)
    finally:
        os.close(here)


def _check_kind(descriptor: int, path: Path, own: bool, limit: int | None) -> None:
    found = os.fstat(descriptor)
    if not stat.S_ISREG(found.st_mode):
        raise _unreadable(path, f"is {_KINDS.get(stat.S_IFMT(found.st_mode), 'a device')}")
    if own:
        _check_owner(descriptor, found, path)
    if limit is not None and found.st_size > limit:
        raise _unreadable(path, f"has {found.st_size:,} bytes, and {limit:,} are the most")


def _check_owner(descriptor: int, found: os.stat_result, path: Path) -> None:
    """A mode that lets others write, as older versions gave it by the umask, is made private where none of them could
    have written."""
    ours = {os.geteuid(), 0}
    if os.geteuid() == 0:  # a home that is mounted into a container belongs to a user outside
        ours.add(path.parent.stat().st_uid)
    if found.st_uid not in ours:
        raise _unreadable(path, f"belongs to user {found.st_uid}, not to this one, {os.geteuid()}")
    if found.st_mode & 0o022:
        if not (_only_enter(path, ours) or _of_own_group(found)):
            mode = stat.S_IMODE(found.st_mode)
            rule, remedy = "such a file may be of them", f"if it is yours: chmod 600 {shlex.quote(str(path))}"
            raise BadInput(f"{str(path)!r} can be written by other users (mode {mode:o})", rule, remedy)
        with contextlib.suppress(OSError):  # such as of a FAT disk, which has no modes
            os.fchmod(descriptor, PRIVATE)


def _only_enter(path: Path, users: set[int]) -> bool:
    """Whether a folder on the way to a file is one that only these users can enter."""
    folders = (folder.stat() for folder in path.absolute().parents)
    return any(not folder.st_mode & 0o077 and folder.st_uid in users for folder in folders)


def _of_own_group(found: os.stat_result) -> bool:
    """Whether only the group of a file may write to it, and that is its owner's own: systems that give each user such a
    group, of the same name, have 002 as umask."""
    try:
        owner, group = pwd.getpwuid(found.st_uid).pw_name, grp.getgrgid(found.st_gid)
    except KeyError:
        return False
    return not found.st_mode & 0o002 and group.gr_name == owner and set(group.gr_mem) <= {owner}


@functools.cache
def tell_once(problem: str) -> None:
    """Warn of a file that is left out, once in a process."""
    warnings.warn(f"left out: {problem}", stacklevel=3)


def _unreadable(path: Path, what: str) -> BadInput:
    return BadInput(f"{str(path)!r} {what}", "a regular file is read, and no link in its place", "name another file")


# --- writing ----------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def replacing(path: Path, *, needed: int = 0, mode: int = PRIVATE, flush: bool = False) -> Iterator[BinaryIO]:
    """A new file, which takes the place of `path` when all is well; after an error there is what was there.

    needed: its bytes, for the error. flush: it is on the disk (fsync) before it takes the place. Raises `BadInput`
    where a folder, link, device, pipe or socket is there, `WriteFailed` where it cannot be written.
    """
    with beside(path, needed=needed, mode=mode, flush=flush) as (_, file):
        yield file


@contextlib.contextmanager
def beside(path: Path, *, needed: int = 0, mode: int = PRIVATE, flush: bool = False) -> Iterator[tuple[Path, BinaryIO]]:
    """As `replacing`, with the path of the new file as well, for libraries that write files by themselves."""
    with disk_errors(path, needed):
        check_place(path)
        new = path.with_name(f".{_cut(path.name)}.{secrets.token_hex(4)}")
        try:
            mode = stat.S_IMODE(path.stat().st_mode) if mode == SHARED and path.exists() else mode
            with os.fdopen(os.open(new, _CREATE, mode), "wb") as file:
                yield new, file
                file.flush()
            if flush:
                to_disk(new)
            os.replace(new, path)
            if flush:
                to_disk(path.parent)
        except BaseException:
            with contextlib.suppress(OSError):
                new.unlink()
            raise


def write_bytes(path: Path, data: bytes, *, mode: int = PRIVATE, flush: bool = False) -> None:
    """Put a file of this content in the place of `path`; see `replacing`."""
    with replacing(path, needed=len(data), mode=mode, flush=flush) as file:
        file.write(data)


def write_new(path: Path, data: bytes) -> None:
    """A file where none is; `FileExistsError` otherwise. Who reads it at the same time may see a part of it."""
    descriptor = os.open(path, _CREATE, PRIVATE)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
    except BaseException:
        path.unlink()
        raise


def write_json(path: Path, value: Any, *, flush: bool = False) -> None:
    """Put a file with this value in the place of `path`; see `replacing`."""
    write_bytes(path, json.dumps(value, indent=1).encode(), flush=flush)


def open_to_append(path: Path) -> int:
    """The descriptor of a regular file, whose writes go to its end; it is made, for this user alone, where there is
    none."""
    flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
    descriptor = os.open(path, flags, PRIVATE)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise _occupied(path, "a device")
    return descriptor


@contextlib.contextmanager
def new_folder(path: Path, *, needed: int = 0) -> Iterator[Path]:
    """A folder that becomes `path` when all is well, and vanishes otherwise. One that is there must be empty."""
    with disk_errors(path, needed):
        path.parent.mkdir(parents=True, exist_ok=True)
        new = path.with_name(f".{_cut(path.name)}.{secrets.token_hex(4)}")
        new.mkdir(mode=0o700)
        try:
            yield new
            os.replace(new, path)
            to_disk(path.parent)
        except BaseException:
            shutil.rmtree(new, ignore_errors=True)
            raise


def new_or_empty(path: Path) -> Path:
    """A folder to save to, absolute. Raises `BadInput` where something is there, or a link to nothing."""
    with disk_errors(path):
        if path.is_symlink() and not path.exists():
            raise BadInput(f"{str(path)!r} is a link to nothing", "it is saved where it is named", "choose another")
        folder = Path(os.path.realpath(path))
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise BadInput(f"{str(folder)!r} holds something", "it is saved to a new or empty folder", "choose another")
    return folder


def make_folder(path: Path, mode: int = 0o777) -> Path:
    """Make a folder, where it is not there; one that is there stays as it is. Its parents get the modes that the user's
    umask gives. Raises `WriteFailed`."""
    with disk_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.mkdir(mode=mode, exist_ok=True)
    return path


def check_room(folder: Path, nbytes: int) -> None:
    """Raise `WriteFailed` where a file of so many bytes cannot be written to a folder now."""
    probe = folder / f".room.{secrets.token_hex(4)}"
    write_bytes(probe, bytes(nbytes))
    probe.unlink()


def check_place(path: Path) -> None:
    """Raise `BadInput` where something other than a regular file has this path."""
    try:
        found = path.lstat()
    except FileNotFoundError:
        return
    if not stat.S_ISREG(found.st_mode):
        raise _occupied(path, _KINDS.get(stat.S_IFMT(found.st_mode), "a device"))


def _occupied(path: Path, what: str) -> BadInput:
    return BadInput(f"{str(path)!r} is {what}", "a file is written in the place of a file only", "choose another path")


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
    rule = f"{takes}{free_bytes(path):,} bytes are free there"
    return WriteFailed(what, rule, "free some room, or choose another disk")


def free_bytes(path: Path) -> int:
    """Of the file system where `path` is, or would be."""
    for folder in (path, *path.absolute().parents):
        with contextlib.suppress(OSError, ValueError):
            return shutil.disk_usage(folder).free
    return 0


def _cut(name: str) -> str:
    """The beginning of a name, to which a few letters can be added."""
    return os.fsdecode(os.fsencode(name)[: NAME_BYTES - 10]) if len(os.fsencode(name)) > NAME_BYTES - 10 else name


def to_disk(path: Path) -> None:
    """Have a file, or the names in a folder, on the disk."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
