"""Signatures by this user's key, for files that hold Python objects: loading such a file runs code of its writer."""

from __future__ import annotations

import hashlib
import hmac
import json
import secrets
import shlex
from collections.abc import Mapping
from typing import Any

from workbench.errors import BadInput
from workbench.support import files
from workbench.support.home import home, locked

SIGNATURE = "signature"  # field of what is signed
KEY_FILE = "signing_key"
_KEY_BYTES = 32


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
                files.write_bytes(path, secrets.token_bytes(_KEY_BYTES), flush=True)
    key = files.read_bytes(path)
    if len(key) != _KEY_BYTES:
        raise BadInput(
            f"{str(path)!r} has {len(key)} bytes", f"a key has {_KEY_BYTES}, or anybody could sign with it",
            f"rm {shlex.quote(str(path))}: another one is made, and `wb trust FOLDER` signs a checkpoint with it",
        )  # fmt: skip
    return key


def _signature(values: Mapping[str, Any]) -> str:
    text = json.dumps({name: value for name, value in values.items() if name != SIGNATURE}, sort_keys=True)
    return hmac.new(signing_key(), text.encode(), hashlib.sha256).hexdigest()
