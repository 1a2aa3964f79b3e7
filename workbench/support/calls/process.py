"""A process for calls of a user's functions, as its host sees it: it can be killed, with all that it started.

It is no sandbox: a function runs as the user who started the host, and can read and write what that user can; it is
enough against mistakes. For programs that a model wrote: `workbench.data.sandbox`. A process that the function has put
into a session of its own outlives it where the host is killed with SIGKILL, or the function crashes.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import select
import signal
import socket
import subprocess
import sys
import warnings
import weakref
from collections.abc import Sequence
from typing import Any

import psutil

from workbench.support.calls.limits import Limits
from workbench.support.calls.pickling import packed_rows
from workbench.support.calls.server import HEAD, Work

SEND_TIMEOUT_S = 30.0
END_TIMEOUT_S = 5.0


class ProcessEnded(Exception):
    """The process of the calls is gone; the message says how it ended."""


class CallProcess:
    """One process. It starts at once, in the background; `send` waits for nothing. The messages: see `server`."""

    def __init__(self, limits: Limits, *, threads: int) -> None:
        self._socket, theirs = socket.socketpair()
        self._socket.settimeout(SEND_TIMEOUT_S)
        lifeline, ours = os.pipe()
        self._received = bytearray()
        self._stuck = ""
        arguments = f"{theirs.fileno()}, {lifeline}, {limits.most_bytes}"
        folders = [folder for folder in sys.path if isinstance(folder, str)]  # Python leaves out others, such as Paths
        code = f"import sys; sys.path[:] = {folders!r}; from workbench.support.calls.server import serve; "
        try:
            self._popen = subprocess.Popen(
                [sys.executable, "-c", f"{code}serve({arguments})"],
                pass_fds=(theirs.fileno(), lifeline), stdin=subprocess.DEVNULL, start_new_session=True,
                env={**os.environ, "OMP_NUM_THREADS": str(threads)},
            )  # fmt: skip
        finally:
            theirs.close()
            os.close(lifeline)
        self.end = weakref.finalize(self, _end, os.getpid(), self._popen, ours, self._socket)

    @property
    def alive(self) -> bool:
        return bool(self.end.alive) and self._popen.poll() is None

    def send(self, *message: Any) -> None:
        """Where the process takes no message, it is killed; `receive` then says how it ended."""
        packed = pickle.dumps(message)
        try:
            self._socket.sendall(HEAD.pack(len(packed)) + packed)
        except TimeoutError:
            self._stuck = f"took no message for {SEND_TIMEOUT_S:.0f} s"
            self._popen.kill()
        except OSError:  # `receive` finds the end behind the messages that came before it
            pass
        except BaseException:  # an interrupt: half a message may be on its way
            self._popen.kill()
            raise

    def add(self, work: Sequence[Work], concurrency: int | None, name: str) -> None:
        """Send calls of a function of this name. `BadInput`, which names the column, for what cannot be sent."""
        packed = packed_rows([arguments for *_, arguments in work], name)
        self.send("add", [(*how, row) for (*how, _), row in zip(work, packed, strict=True)], concurrency)

    def receive(self, wait_s: float) -> tuple[Any, ...] | None:
        """The next message; None where none has come in this time. Raises `ProcessEnded`."""
        while (message := self._message()) is None:
            if not select.select([self._socket], [], [], wait_s)[0]:
                if self._popen.poll() is not None:  # children of it may hold the connection open
                    raise ProcessEnded(self._how_it_ended())
                return None
            try:
                part = self._socket.recv(2**20)
            except OSError:
                part = b""
            if not part:
                raise ProcessEnded(self._how_it_ended())
            self._received += part
            wait_s = 0.0
        return message

    def _message(self) -> tuple[Any, ...] | None:
        if len(self._received) < HEAD.size:
            return None
        end = HEAD.size + HEAD.unpack_from(self._received)[0]
        if len(self._received) < end:
            return None
        packed = bytes(self._received[HEAD.size : end])
        del self._received[:end]
        return tuple(pickle.loads(packed))

    def _how_it_ended(self) -> str:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._popen.wait(1.0)
        code = self._popen.returncode
        if self._stuck or code is None:
            return self._stuck or "closed its connection to the host"
        if code >= 0:
            return f"ended its process with exit code {code}"
        name = signal.Signals(-code).name
        killed = " (the system kills a process where memory runs out)" if name == "SIGKILL" else ""
        return f"crashed its process with {name}{killed}"


def _end(host: int, popen: subprocess.Popen[bytes], lifeline: int, connection: socket.socket) -> None:
    """Kill a process with all that it started: also those that left its group, and those whose parents have ended."""
    if os.getpid() != host:  # a fork of the host ends
        return
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(popen.pid, signal.SIGSTOP)  # all of the group at once: none of them starts another
    with contextlib.suppress(psutil.Error):
        for child in psutil.Process(popen.pid).children(recursive=True):
            with contextlib.suppress(psutil.Error):
                child.kill()
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(popen.pid, signal.SIGKILL)
    try:
        popen.wait(END_TIMEOUT_S)
    except subprocess.TimeoutExpired:  # it waits on a device or a network disk
        warnings.warn(f"process {popen.pid} of user functions does not end; the system ends it later", stacklevel=2)
    os.close(lifeline)
    connection.close()
