"""Controls access to Ray: addresses, token, certificates.

By default each of Ray's processes listens on all interfaces. This user's own head, and all that it starts, listens only
on the loopback, with a setting that Ray has for macOS and Windows. A token protects it from other local users.
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
import secrets
import socket
import stat
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from workbench.errors import BadInput, WorkbenchError
from workbench.support import files
from workbench.support.files import home
from workbench.support.replaced import replaced

RAYS_TOKEN = Path("~/.ray/auth_token").expanduser()
CERTIFICATES = ("RAY_TLS_SERVER_CERT", "RAY_TLS_SERVER_KEY", "RAY_TLS_CA_CERT")
LOOPBACK_ALONE = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}  # for a process that starts a head
ANSWER_S = 5.0
SOCKET = "ray/session_2026-11-23_12-16-10_016272_1234567/sockets/plasma_store"  # the longest socket path of a session
SOCKET_BYTES = 107  # the system's limit of a socket's path


def own_access() -> dict[str, str]:
    """Return the environment to start or join a head of this user: always with a token, whatever RAY_AUTH_MODE says.
    Makes the token if there is none. Raises `BadInput` for missing certificates."""
    _check_certificates()
    access = {"RAY_AUTH_MODE": "token"}
    if "RAY_AUTH_TOKEN" in os.environ or "RAY_AUTH_TOKEN_PATH" in os.environ:
        return access
    token = home() / "ray_token"
    if not token.exists():
        files.write_bytes(token, secrets.token_hex(32).encode())
    return access | {"RAY_AUTH_TOKEN_PATH": str(token)}


def others_access(address: str) -> dict[str, str]:
    """Return the environment to join a cluster that somebody else started: with the token that Ray is configured with
    (RAY_AUTH_TOKEN, RAY_AUTH_TOKEN_PATH, or Ray's file in the home folder). Warns if there is none."""
    _check_certificates()
    found = any(os.environ.get(name) for name in ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH")) or RAYS_TOKEN.exists()
    mode = os.environ.get("RAY_AUTH_MODE") or ("token" if found else "disabled")
    if mode == "disabled":
        warnings.warn(
            f"the Ray cluster at {address} is joined without a token: if it asks for none, everyone who reaches its "
            "ports can run code as its user. Start it with RAY_AUTH_MODE=token and RAY_AUTH_TOKEN, see SECURITY.md",
            stacklevel=2,
        )
    return {"RAY_AUTH_MODE": mode}


def _check_certificates() -> None:
    if os.environ.get("RAY_USE_TLS", "0").lower() not in ("1", "true"):
        return
    for name in CERTIFICATES:
        if not os.access(os.environ.get(name, ""), os.R_OK):
            raise BadInput(
                f"{name}={os.environ.get(name)!r}",
                "RAY_USE_TLS=1 needs three files: " + ", ".join(CERTIFICATES),
                "set it to a file that this user can read, or unset RAY_USE_TLS",
            )


def session_folder() -> Path:
    """Return the folder of sockets and logs of this user's head. Ray opens its folder to all users, who could replace a
    socket by their own, so it lies in a folder that only this user can enter. It is in /tmp if the path of a socket
    would be too long otherwise, as in the TMPDIR of a batch system's job. Raises `BadInput`."""
    name = f"wb-{os.getuid()}"
    folder = Path(tempfile.gettempdir(), name)
    if len(os.fsencode(folder / SOCKET)) > SOCKET_BYTES:
        folder = Path("/tmp", name)
    remedy = "remove it, or set TMPDIR to a folder of your own with a short path"
    try:
        with contextlib.suppress(FileExistsError):
            folder.mkdir(mode=0o700)
        found = folder.lstat()
    except OSError as error:
        raise BadInput(f"{folder} cannot be made: {error.strerror}", "Ray's sockets need it", remedy) from None
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise BadInput(
            f"{folder} (mode {found.st_mode & 0o777:o}, owner {found.st_uid})",
            "Ray's sockets need a folder that only this user can enter",
            remedy,
        )
    return folder / "ray"


@contextlib.contextmanager
def reached_at(ray: Any, target: str) -> Iterator[None]:
    """Make Ray use the loopback for `target` if its head listens only there; otherwise Ray would replace 127.0.0.1 by
    the machine's own address. Raises `WorkbenchError` if nothing listens: Ray would try for minutes, and an interrupt
    would not end it."""
    host, colon, port = target.rpartition(":")
    if not colon or not port.isdigit() or "//" in host:
        yield
        return
    host = host.strip("[]")
    if reason := silent(host, port):
        raise no_answer(target, reason)
    alone = _is_loopback(host) and silent(ray.util.get_node_ip_address(), port)
    with replaced(ray._private.ray_constants, "ENABLE_RAY_CLUSTER", False) if alone else contextlib.nullcontext():
        yield


def _is_loopback(host: str) -> bool:
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(host).is_loopback
    return host == "localhost"


def silent(host: str, port: str | int) -> str:
    """Return why nothing answers at an address; "" if something does."""
    try:
        socket.create_connection((host, int(port)), timeout=ANSWER_S).close()
    except (OSError, OverflowError) as error:
        return str(error)
    return ""


def no_answer(target: str, reason: str) -> WorkbenchError:
    """Return the error for a cluster that cannot be joined."""
    return WorkbenchError(
        f"no Ray cluster answers at {target!r} ({reason})",
        "address= must be the host:port of a running head, and this process must have its token: RAY_AUTH_TOKEN, "
        "RAY_AUTH_TOKEN_PATH or ~/.ray/auth_token",
        "start one with `ray start --head`, or leave address= out",
    )
