"""Where workbench keeps what it may need again: prepared models, run records, addresses of live workbenches."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

from workbench.errors import BadInput
from workbench.support.files import path_of, private_folder

LOCK_POLL_S = 0.25


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
            lock.acquire(timeout=LOCK_POLL_S)
            break
        except Timeout:
            waiting()
    try:
        yield
    finally:
        lock.release()
