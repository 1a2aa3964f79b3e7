"""The Ray cluster under this user's workbenches: joined where there is one, else a head started outside the kernel.

One head serves all workbenches of a user on a machine. It outlives the kernel, and is stopped by process id when the
last workbench closes. Ray's control store listens on every interface whatever it is told, so a token is the lock.
"""

from __future__ import annotations

import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil

from workbench import registry
from workbench.errors import BadInput, HostDied, MissingDependency, NotFound, WorkbenchError
from workbench.home import home

NAMESPACE = "workbench"
START_TIMEOUT_S = 150
_joined: str | None = None  # the cluster that this process joined through `connect`
_started: list[subprocess.Popen[bytes]] = []  # heads that this process started, to be reaped when they are stopped


def _head_file() -> Path:
    return home() / "head.json"


def _use_token(own_head: bool) -> None:
    """Make this process, and what it starts, show a token to Ray: this user's own, or for a cluster that somebody else
    started the one that Ray is set up with (RAY_AUTH_TOKEN, RAY_AUTH_TOKEN_PATH, or Ray's file in the home folder)."""
    os.environ.setdefault("RAY_AUTH_MODE", "token")
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    # by default Ray lowers the priority of its workers: beside anything else on the machine they would crawl
    os.environ.setdefault("RAY_worker_niceness", "0")
    if not own_head or "RAY_AUTH_TOKEN" in os.environ or "RAY_AUTH_TOKEN_PATH" in os.environ:
        return
    token = home() / "ray_token"
    if not token.exists():
        home().mkdir(parents=True, exist_ok=True)
        token.touch(mode=0o600)
        token.write_text(secrets.token_hex(32))
    os.environ["RAY_AUTH_TOKEN_PATH"] = str(token)


def running_head() -> dict[str, Any] | None:
    """{"address": .., "pid": ..} of the head that this user's workbenches share, or None."""
    try:
        head = json.loads(_head_file().read_text())
        process = psutil.Process(head["pid"])
        alive = process.create_time() == head["created"] and process.status() != psutil.STATUS_ZOMBIE
    except (OSError, ValueError, KeyError, psutil.Error):
        return None
    return head if alive else None


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _start_head() -> dict[str, Any]:
    home().mkdir(parents=True, exist_ok=True)
    try:
        return _try_start_head()
    except HostDied:
        return _try_start_head()  # Ray gives its processes 30 s, too little on a machine that is busy just then


def _try_start_head() -> dict[str, Any]:
    port = _free_port()
    log = home() / "head.log"
    command = [
        *(sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--block"),
        *("--node-ip-address=127.0.0.1", f"--port={port}", "--include-dashboard=false", "--disable-usage-stats"),
        *(f"--ray-client-server-port={_free_port()}", "--include-log-monitor=false"),
        f"--object-store-memory={min(4 * 2**30, psutil.virtual_memory().total // 6)}",
    ]
    # Its own session: the kernel's end, or an interrupt typed at it, does not reach the head.
    with log.open("w") as out:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=out, stderr=out, start_new_session=True, env=dict(os.environ)
        )
    _started.append(process)
    deadline = time.monotonic() + START_TIMEOUT_S
    while "Ray runtime started" not in log.read_text():
        if process.poll() is not None or time.monotonic() > deadline:
            process.terminate()
            raise HostDied(f"the Ray head did not start (see {log})", log.read_text()[-600:].strip(), "run `wb doctor`")
        time.sleep(0.1)
    head = {"address": f"127.0.0.1:{port}", "pid": process.pid, "created": psutil.Process(process.pid).create_time()}
    _head_file().write_text(json.dumps(head))
    return head


def connect(address: str | None = None, *, start: bool = True) -> Any:
    """Join the cluster at `address`, or this user's own head (started if need be), and return the `ray` module."""
    global _joined
    _use_token(own_head=address is None)
    try:
        import ray
    except ImportError:
        raise MissingDependency(
            "Ray is not installed", "backend='ray' needs it", "pip install 'workbench[ray]', or use backend='inline'"
        ) from None
    head = None if address else running_head()
    if not ray.is_initialized():
        # Ray reads its settings when it is imported; it may have been imported before they were made
        ray._raylet.Config.initialize("")
        ray._raylet.AuthenticationTokenLoader.instance().reset_cache()
    else:
        if _joined is None or _joined == (address or (head and head["address"])):
            return ray  # also a cluster that the user joined with ray.init() before us
        if address is not None:
            raise BadInput(
                f"address={address!r}", f"this process has joined {_joined}, and Ray allows one", "restart the kernel"
            )
        ray.shutdown()  # the head that it knew is gone
    if address is None:
        if head is None and not start:
            raise NotFound("no Ray head of this user runs", "its workbenches ended with it", "open them anew")
        address = (head or _start_head())["address"]
    options: dict[str, Any] = {"namespace": NAMESPACE, "log_to_driver": False, "logging_level": "ERROR"}
    try:
        ray.init(address=address, **options)
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise WorkbenchError(
            f"no Ray cluster answers at {address!r} ({str(error).splitlines()[0]})",
            "address= must name a running head as host:port, and its token must be known here",
            "start one with `ray start --head`, or leave address= out",
        ) from error
    _joined = address
    if head is not None or running_head() is not None:
        _note_client()
    return ray


def _note_client() -> None:
    """Leave word that this process is joined to the head: Ray ends a process whose head goes away."""
    folder = home() / "clients"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / str(os.getpid())).write_text(repr(psutil.Process().create_time()))


def other_clients() -> list[int]:
    """Process ids of notebooks and commands, other than this one, that are joined to this user's head."""
    alive = []
    for note in (home() / "clients").glob("*"):
        try:
            same = psutil.Process(int(note.name)).create_time() == float(note.read_text())
        except (psutil.Error, OSError, ValueError):
            same = False
        if not same:
            note.unlink(missing_ok=True)
        elif int(note.name) != os.getpid():
            alive.append(int(note.name))
    return alive


def stop_idle_head() -> None:
    """Stop the head when no workbench lives on it and no other process is joined to it: Ray would end that one."""
    if running_head() is not None and not registry.names() and not other_clients():
        stop_head()


def stop_head() -> None:
    """End this user's head and every process under it, by process id."""
    global _joined
    head = running_head()
    if "ray" in sys.modules and sys.modules["ray"].is_initialized():
        sys.modules["ray"].shutdown()
        _joined = None
    if head is not None:
        top = psutil.Process(head["pid"])
        family = [*top.children(recursive=True), top]
        top.send_signal(signal.SIGTERM)
        _, alive = psutil.wait_procs(family, timeout=15)
        for process in alive:
            process.kill()
        psutil.wait_procs(alive, timeout=5)
    for process in [p for p in _started if p.poll() is not None]:
        _started.remove(process)
    _head_file().unlink(missing_ok=True)
