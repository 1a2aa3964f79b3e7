"""Where workbench keeps what it may need again: prepared models, run records, addresses of live workbenches."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

LOCK_POLL_S = 0.25


def home() -> Path:
    """`$WORKBENCH_HOME`, or `~/.cache/workbench`; made where it is missing."""
    folder = Path(os.environ.get("WORKBENCH_HOME") or "~/.cache/workbench").expanduser()
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def private_folder(folder: Path) -> Path:
    """Make a folder that only its owner can enter, whatever the modes of the files in it; one that is there stays as it
    is. Its parents get the modes that the user's umask gives."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    folder.mkdir(mode=0o700, exist_ok=True)
    return folder


@contextmanager
def locked(name: str, waiting: Callable[[], None] = lambda: None) -> Iterator[None]:
    """Only one process of this user at a time is in here for `name`; `waiting` is called again and again until then.

    The lock goes with the process that holds it, also when that is killed. Not reentrant.
    """
    lock = FileLock(home() / f"{name}.lock")
    while True:
        try:
            lock.acquire(timeout=LOCK_POLL_S)
            break
        except Timeout:
            waiting()
    try:
        yield
    finally:
        lock.release()
