"""Signatures by this user's key, for files that hold Python objects: loading such a file runs code of its writer."""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import secrets
import shlex
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from workbench.errors import BadInput, WriteFailed
from workbench.support import files
from workbench.support.home import home

SIGNATURE, SIGNER = "signature", "signed_by"  # fields of what is signed
_KEY_BYTES = 32


def signed(values: Mapping[str, Any]) -> dict[str, Any]:
    """The same values with a signature of this user, and which key made it."""
    values = {**values, SIGNER: _signer()}
    return {**values, SIGNATURE: _signature(values)}


def is_signed(values: Mapping[str, Any]) -> bool:
    """Whether this user has signed these values, as they are now."""
    given = values.get(SIGNATURE)
    return isinstance(given, str) and hmac.compare_digest(given.encode(), _signature(values).encode())


def why_unsigned(values: Mapping[str, Any]) -> str:
    """Of values that this user has not signed as they are now: what is known of their signature."""
    if SIGNATURE not in values:
        return "has no signature"
    return "was changed after this user signed it" if values.get(SIGNER) == _signer() else "is signed by another key"


def share_key(other_home: Path) -> None:
    """Let processes that have another home folder, for a time, trust and sign what this user does."""
    files.write_bytes(other_home / _file().name, _key())


def _signer() -> str:
    return hashlib.sha256(b"signer" + _key()).hexdigest()[:16]


def _signature(values: Mapping[str, Any]) -> str:
    text = json.dumps({name: value for name, value in values.items() if name != SIGNATURE}, sort_keys=True)
    return hmac.new(_key(), text.encode(), hashlib.sha256).hexdigest()


def _file() -> Path:
    return home() / "signing_key"


def _key() -> bytes:
    """`$WORKBENCH_HOME/signing_key`, made once; of two processes that make it at the same time, one succeeds."""
    path = _file()
    try:
        key = files.read_bytes(path, own=True, limit=_KEY_BYTES)
    except FileNotFoundError:
        _make_key(path)
        key = files.read_bytes(path, own=True, limit=_KEY_BYTES)
    if len(key) != _KEY_BYTES:
        raise BadInput(
            f"{str(path)!r} has {len(key)} bytes", f"a key has {_KEY_BYTES}, or anybody could sign with it",
            f"rm {shlex.quote(str(path))}: another one is made, and `wb trust FOLDER` signs a checkpoint with it",
        )  # fmt: skip
    return key


def _make_key(path: Path) -> None:
    new = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    key = secrets.token_bytes(_KEY_BYTES)
    try:
        files.write_bytes(new, key, flush=True)
        with suppress(FileExistsError):
            os.link(new, path)
    except OSError as error:
        if isinstance(error, WriteFailed):
            raise
        with suppress(FileExistsError), files.disk_errors(path, _KEY_BYTES):  # a disk without hard links: FUSE, FAT
            files.write_new(path, key)
    finally:
        new.unlink(missing_ok=True)
