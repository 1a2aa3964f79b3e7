"""Where workbench keeps what it may need again: prepared models, run records, addresses of live workbenches; and
signatures by this user's key, for files that hold Python objects: loading such a file runs code of its writer."""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import secrets
import shlex
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from workbench.errors import BadInput
from workbench.support.files import path_of, private_folder, read_bytes, write_bytes

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
            lock.acquire(timeout=LOCK_POLL_S)
            break
        except Timeout:
            waiting()
    try:
        yield
    finally:
        lock.release()


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
