"""The Ray cluster of this user's workbenches: joins a running one, or starts a head outside the kernel.

One head serves all workbenches of a user on a machine. It outlives the kernel, and is stopped by process id when the
last workbench closes. `ray_access` controls who can reach it.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from workbench.backends import registry
from workbench.backends.ray_access import (
    LOOPBACK_ALONE,
    no_answer,
    others_access,
    own_access,
    reached_at,
    session_folder,
)
from workbench.errors import BadInput, HostDied, MissingDependency, NotFound, WorkbenchError
from workbench.support import files
from workbench.support.files import home, locked
from workbench.support.machine import Process
from workbench.support.process_environment import with_variables

NAMESPACE = "workbench"
START_TIMEOUT_S = 150
KEEP = "WORKBENCH_KEEP_RAY"
PATIENCE = "RAY_gcs_rpc_server_reconnect_timeout_s"
ATTEMPTS = 3
Note = Callable[[str], None]


@dataclass(frozen=True)
class _Joined:
    """A cluster that `connect` joined: the address asked for, Ray's address of it, whether it is this user's own."""

    asked: str | None
    address: str
    own: bool


_joined: _Joined | None = None
_started: list[subprocess.Popen[bytes]] = []  # heads that this process started, to be reaped after they are stopped


def _head_file() -> Path:
    return home() / "head.json"


def _set_up_ray() -> None:
    """Set defaults of Ray for this process and its children, where the user has set nothing."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    # by default Ray lowers the priority of its workers, which makes them very slow beside other programs
    os.environ.setdefault("RAY_worker_niceness", "0")


def running_head() -> dict[str, Any] | None:
    """Return {"address": .., "pid": .., "hosts": ..} of the head that this user's workbenches share, or None. hosts:
    where its server of hosts listens, see `host_server`."""
    try:
        head = files.read_json(_head_file())
        return head if _process(head["pid"], head["created"]).alive else None
    except BadInput as error:
        files.tell_once(str(error))
    except (OSError, ValueError, KeyError):
        pass
    return None


def _process(pid: int, created_s: float) -> Process:
    return Process(machine=socket.gethostname(), pid=pid, created_s=created_s)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _start_head(note: Note) -> dict[str, Any]:
    for _ in range(ATTEMPTS - 1):  # Ray gives its processes 30 s to start, which is too little on a busy machine
        with contextlib.suppress(HostDied):
            return _try_start_head(note)
    return _try_start_head(note)


_start_thread: threading.Thread | None = None  # starts this user's head in the background
_start_cancelled = threading.Event()  # makes that thread give up


def start_ahead() -> None:
    """Begin to start this user's head if none runs, and return at once; `connect` waits for it. If no process joins it,
    `stop_idle_head` ends it."""
    global _start_thread
    ray = sys.modules.get("ray")
    joined = ray is not None and ray.is_initialized()
    if joined or _start_thread is not None or running_head() is not None or importlib.util.find_spec("ray") is None:
        return
    _set_up_ray()
    _start_cancelled.clear()
    _start_thread = threading.Thread(target=_start_in_background, name="start of Ray", daemon=True)
    _start_thread.start()


def _start_in_background() -> None:
    def go_on(text: str = "") -> None:
        if _start_cancelled.is_set():
            raise WorkbenchError("the start of Ray", "it was cancelled")

    # `connect` tries again, and raises the error
    with contextlib.suppress(WorkbenchError), locked("head", go_on):
        if running_head() is None:
            _start_head(go_on)


def _remove_old_sessions() -> None:
    """Delete folders of old Ray heads (20 MB each), and host sockets of heads that were killed, if no process names
    them. They are kept for an hour, because a head that another process starts may not have started its own processes
    yet."""
    named = "\n".join(" ".join(process.info["cmdline"] or ()) for process in psutil.process_iter(["cmdline"]))
    for left in (*session_folder().glob("session_2*"), *session_folder().glob("hosts-*")):
        with contextlib.suppress(OSError):  # another process has removed it
            if left.name not in named and time.time() - left.stat().st_mtime > 3600:
                shutil.rmtree(left) if left.is_dir() else left.unlink()


def _try_start_head(note: Note) -> dict[str, Any]:
    _remove_old_sessions()
    port = _free_port()
    hosts = str(session_folder() / f"hosts-{port}")
    log = home() / "head.log"
    command = [
        # -P: do not import from the folder of that file, which has a ray.py
        *(sys.executable, "-P", str(Path(__file__).with_name("ray_head.py")), hosts, "start", "--head", "--block"),
        *("--node-ip-address=127.0.0.1", f"--port={port}", "--include-dashboard=false", "--disable-usage-stats"),
        f"--temp-dir={session_folder()}",
        *("--include-log-monitor=false", "--no-monitor"),  # no autoscaler: there is only one machine
        f"--object-store-memory={min(4 * 2**30, psutil.virtual_memory().total // 6)}",
    ]
    with_token = {**os.environ, **own_access(), **LOOPBACK_ALONE}
    # Its own session: neither the kernel's end nor an interrupt of the kernel reaches the head.
    log.unlink(missing_ok=True)
    with open(files.open_to_append(log), "w") as out:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=out, stderr=out, start_new_session=True, env=with_token
        )
    _started.append(process)
    deadline = time.monotonic() + START_TIMEOUT_S
    try:
        while "Ray runtime started" not in log.read_text():
            if process.poll() is not None or time.monotonic() > deadline:
                said = log.read_text()[-600:].strip()
                raise HostDied(f"the Ray head did not start (see {log})", said, "run `wb doctor`")
            note("starting Ray")
            time.sleep(0.1)
        created = psutil.Process(process.pid).create_time()
        head = {"address": f"127.0.0.1:{port}", "pid": process.pid, "created": created, "hosts": hosts}
        files.write_json(_head_file(), head)
    except BaseException:  # after an interrupt, too: a head that is not on record would never be stopped
        _end_family(process.pid)
        process.wait()
        raise
    return head


def connect(address: str | None = None, *, start: bool = True, note: Note = lambda text: None) -> Any:
    """Join the cluster at `address`, or this user's own head (started if needed), and return the `ray` module.

    A cluster that the user joined with `ray.init()` is used, and never changed. Raises `BadInput` where this process is
    joined to another cluster than `address`. note: called with a text about what is waited for.
    """
    global _joined, _start_thread
    os.environ.setdefault("RAY_ENABLE_AUTO_CONNECT", "0")  # a late call must not join any cluster
    try:
        import ray
    except ImportError:
        raise MissingDependency.of("Ray", "backend='ray' needs it", "ray", "backend='inline'") from None
    while _start_thread is not None and _start_thread.is_alive():
        note("starting Ray")
        _start_thread.join(0.1)
    _start_thread = None
    with locked("head", lambda: note("waiting for another process that starts or stops Ray")):
        head = running_head()
        if ray.is_initialized():
            if _is_requested(ray, address, head):
                return ray
            ray.shutdown()
            _joined = None
        own_head = address is None or (head is not None and head["address"] == address)
        _set_up_ray()
        if address is None:
            if head is None and not start:
                raise NotFound("no Ray head of this user runs", "its workbenches ended with it", "open them again")
            head = head or _start_head(note)
        target = str(address or (head and head["address"]))
        note("joining Ray")
        # Ray would end this process a minute after its head is gone; `head_is_gone` is checked before each call instead
        access = {PATIENCE: os.environ.get(PATIENCE, str(10**9)), **own_access()} if own_head else others_access(target)
        try:
            # these variables are set only while joining: a program that this process starts later must not read them as
            # the user's settings, and start an open head
            with _keeps_handler(), with_variables(access), reached_at(ray, target):
                # Ray read its settings at its import, which may have been before they were set
                ray._raylet.Config.initialize("")
                ray._raylet.AuthenticationTokenLoader.instance().reset_cache()
                ray.init(address=target, namespace=NAMESPACE, log_to_driver=False, logging_level="ERROR")
        except (ConnectionError, RuntimeError, ValueError, ray.exceptions.AuthenticationError) as error:
            raise no_answer(target, str(error).splitlines()[0]) from error
        _joined = _Joined(asked=address, address=_address(ray), own=own_head)
        if own_head:
            _note_client()
    return ray


@contextlib.contextmanager
def _keeps_handler() -> Iterator[None]:
    """Restore the caller's SIGTERM handler after Ray is joined: one of Ray's handlers aborts the process three seconds
    later, in the middle of closing."""
    before = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        if callable(before) and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, before)


def joined_head() -> str | None:
    """Return the address of this user's head, if this process is joined to it; None: to another cluster, or none."""
    return _joined.address if _joined is not None and _joined.own else None


def head_is_gone(address: str) -> bool:
    """Whether this user's head that was joined at that address no longer runs, or was left since."""
    head = running_head()
    return joined_head() != address or head is None or head["address"] != address


def _is_requested(ray: Any, address: str | None, head: dict[str, Any] | None) -> bool:
    """Whether the cluster that this process is joined to is the right one; False: it was our own head, which is gone.

    Raises `BadInput` for another cluster: Ray allows one per process, and leaving it would end what runs through it.
    """
    here, ours = _address(ray), _ours(ray)
    if ours is not None and ours.own and not _own(ray, head):
        return False
    if address in (here, None if ours is None or ours.own else ours.asked):
        return True
    raise BadInput(
        f"address={address!r}",
        f"this process is joined to the Ray cluster at {here}, and Ray allows one cluster per process",
        f"restart the kernel, or use address={here!r} for all workbenches of this kernel",
    )


def _ours(ray: Any) -> _Joined | None:
    """Return what `connect` joined; None: the user has joined another cluster since, with `ray.init()`."""
    return _joined if _joined is not None and _joined.address == _address(ray) else None


def _address(ray: Any) -> str:
    return str(ray.get_runtime_context().gcs_address)


def _own(ray: Any, head: dict[str, Any] | None) -> bool:
    """Whether the cluster that this process is joined to is this user's head, and the head runs."""
    return head is not None and head["address"] == _address(ray)


def joined_address(ray: Any) -> str | None:
    """Return the address at which another process finds this process's cluster; None: it is this user's own head."""
    return None if _own(ray, running_head()) else _address(ray)


def _note_client() -> None:
    """Record that this process is joined to the head, so that other processes do not stop the head."""
    folder = home() / "clients"
    files.private_folder(folder)
    files.write_bytes(folder / str(os.getpid()), repr(psutil.Process().create_time()).encode())


def other_clients() -> list[int]:
    """Return the process ids of other notebooks and commands that are joined to this user's head."""
    alive = []
    for note in (home() / "clients").glob("[0-9]*"):
        with contextlib.suppress(OSError, ValueError):
            if _process(int(note.name), float(note.read_text())).alive:
                alive.append(int(note.name))
                continue
        note.unlink(missing_ok=True)
    return [pid for pid in alive if pid != os.getpid()]


def stop_idle_head() -> None:
    """Stop the head if no workbench lives on it and no other process is joined to it, because Ray would end such a
    process. With the variable WORKBENCH_KEEP_RAY the head stays, and the next opening is some seconds faster."""
    global _start_thread
    if _start_thread is not None:
        _start_cancelled.set()
        _start_thread.join()
        _start_thread = None
    if running_head() is None or os.environ.get(KEEP):
        return
    with locked("head"):
        in_use = any(record.address is None for record in registry.records())
        if not in_use and not other_clients() and not _users_own(running_head()):
            _end_head()


def stop_head() -> None:
    """End this user's head and every process under it, by process id."""
    with locked("head"):
        _end_head()


def _users_own(head: dict[str, Any] | None) -> bool:
    """Whether the user of this process joined `head` with ray.init(): then it must not be stopped here."""
    ray = sys.modules.get("ray")
    return ray is not None and ray.is_initialized() and _own(ray, head) and _ours(ray) is None


def _end_head() -> None:
    global _joined
    head = running_head()
    if _joined is not None and _joined.own:
        ray = sys.modules["ray"]
        if ray.is_initialized() and _ours(ray):
            ray.shutdown()
        _joined = None
    if head is not None:
        _end_family(head["pid"])
        Path(head["hosts"]).unlink(missing_ok=True)
    for process in [p for p in _started if p.poll() is not None]:
        _started.remove(process)
    _head_file().unlink(missing_ok=True)


def _end_family(pid: int) -> None:
    with contextlib.suppress(psutil.NoSuchProcess):
        top = psutil.Process(pid)
        family = [*top.children(recursive=True), top]
        top.send_signal(signal.SIGTERM)
        _, alive = psutil.wait_procs(family, timeout=15)
        for process in alive:
            process.kill()
        psutil.wait_procs(alive, timeout=5)
