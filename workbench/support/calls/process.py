"""A process for calls of a user's functions, as its host sees it: it can be killed, with all that it started.

    host -> process                                    process -> host
    texts {module: (file, text)}                       unloadable class, message, frames, no memory
    load key, function      forget key                 begun i, thread, thread's id in a dump
    begin key, random states                           ready (for calls)        done i, value
    calls [i, invoke, finish], rows, concurrency       wrong i, message      raised i, class, message, frames, no memory
    find_unreadable [i, column, value]                 unreadable [i, column, class, message, frames, no memory]
    stop                                               print stream, text
    end                                                ended random states

It is no sandbox: a function runs as the user who started the host, and can read and write what that user can; it is
enough against mistakes. For programs that a model wrote: `workbench.data.sandbox`. Where a host is killed with SIGKILL,
a process that the function has put into a session of its own outlives it.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import re
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
import warnings
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import psutil

from workbench.support.calls.server import HEAD

if TYPE_CHECKING:
    from workbench.support.calls.limits import Limits

MOST_MESSAGE_BYTES = 2**28
SEND_TIMEOUT_S = 30.0
END_TIMEOUT_S = 5.0
WATCH_SHARE = 0.05  # of the host's time, which looking after the limits may take
KILL_ROUNDS = 100
COMPUTES_S = 0.02  # of a tenth of a second: a thread that computes has at least this much, also on a busy machine


class ProcessEnded(Exception):
    """The process of the calls is gone; the message says how it ended."""


class LimitPassed(Exception):
    """The process of the calls has more than it may have. The message says of what; `rule` is the limit."""

    def __init__(self, what: str, rule: str) -> None:
        super().__init__(what, rule)
        self.what, self.rule = what, rule


class CallProcess:
    """One process. It starts at once, in the background; `send` waits for nothing."""

    def __init__(self, limits: Limits, *, threads: int, texts: Mapping[str, tuple[str, str]]) -> None:
        self.limits = limits
        self.ended_calls = 0  # what they left behind counts against the limits
        self._socket, theirs = socket.socketpair()
        lifeline, self._lifeline = os.pipe()
        self._crash = tempfile.TemporaryFile()  # noqa: SIM115 (as long as the process)
        self._received = bytearray()
        self._tree: list[psutil.Process] = []
        self._next_watch_s, self._others_tasks = 0.0, tasks_of_machine()
        descriptors = theirs.fileno(), lifeline, self._crash.fileno()
        arguments = ", ".join(map(str, (*descriptors, limits.most_bytes)))
        folders = [folder for folder in sys.path if isinstance(folder, str)]  # Python leaves out others, such as Paths
        code = f"import sys; sys.path[:] = {folders!r}; from workbench.support.calls.server import serve; "
        try:
            self._popen = subprocess.Popen(
                [sys.executable, "-c", f"{code}serve({arguments})"],
                pass_fds=descriptors, stdin=subprocess.DEVNULL, start_new_session=True,
                env={**os.environ, "OMP_NUM_THREADS": str(threads)},
            )  # fmt: skip
        finally:
            theirs.close()
            os.close(lifeline)
        self.end = weakref.finalize(
            self, _end, os.getpid(), self._popen, self._tree, self._lifeline, self._socket, self._crash
        )
        if texts:
            self.send("texts", dict(texts))

    @property
    def alive(self) -> bool:
        return bool(self.end.alive) and self._runs()

    def _runs(self) -> bool:
        """Whether it runs. It is not reaped here: until `end`, its number is that of its group."""
        return self._exit_code() is None

    def _exit_code(self) -> int | None:
        """As of `Popen.poll`, which reaps it where the system cannot look without that (macOS)."""
        if not hasattr(os, "waitid"):
            return self._popen.poll()
        found = os.waitid(os.P_PID, self._popen.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if found is None:
            return None
        return found.si_status if found.si_code == os.CLD_EXITED else -found.si_status

    def send(self, *message: Any) -> None:
        """Raises `ProcessEnded` where the process takes no message, and what pickle raises."""
        packed = pickle.dumps(message)
        self._socket.settimeout(SEND_TIMEOUT_S)
        try:
            self._socket.sendall(HEAD.pack(len(packed)) + packed)
        except TimeoutError:
            raise ProcessEnded(f"took no message for {SEND_TIMEOUT_S:.0f} s") from None
        except OSError:
            raise ProcessEnded(self._how_it_ended()) from None

    def receive(self, timeout_s: float) -> list[tuple[Any, ...]]:
        """The messages that have come, once one has or after the time. Raises `ProcessEnded`, and `LimitPassed`."""
        if not select.select([self._socket], [], [], timeout_s)[0]:
            if not self._runs():
                raise ProcessEnded(self._how_it_ended())
        else:
            try:
                part = self._socket.recv(2**20, socket.MSG_DONTWAIT)
            except BlockingIOError:
                return []
            except OSError:
                part = b""
            if not part:
                raise ProcessEnded(self._how_it_ended())
            self._received += part
        return list(self._messages())

    def _messages(self) -> Any:
        while len(self._received) >= HEAD.size:
            size = HEAD.unpack_from(self._received)[0]
            if size > MOST_MESSAGE_BYTES:
                raise LimitPassed(f"returned {size:,} bytes", f"a call returns at most {MOST_MESSAGE_BYTES:,}")
            if len(self._received) < HEAD.size + size:
                return
            packed = bytes(self._received[HEAD.size : HEAD.size + size])
            del self._received[: HEAD.size + size]
            yield pickle.loads(packed)

    def _how_it_ended(self) -> str:
        deadline_s = time.monotonic() + 1.0
        while (code := self._exit_code()) is None and time.monotonic() < deadline_s:
            time.sleep(0.01)
        if code is None:
            return "closed its connection to the host"
        if code >= 0:
            return f"ended its process with exit code {code}"
        name = signal.Signals(-code).name
        killed = " (the system kills a process where memory runs out)" if name == "SIGKILL" else ""
        return f"crashed its process with {name}{killed}"

    def crashed_in(self) -> tuple[int | None, str]:
        """The thread that a crash was in, and its frames, as far as the process could still write them."""
        self._crash.seek(0)
        dump = self._crash.read(2**20).decode(errors="replace")
        found = re.search(r"Current thread 0x([0-9a-f]+).*?(?=\n\n|\Z)", dump, re.DOTALL)
        return (int(found[1], 16), found[0]) if found else (None, dump)

    # --- limits -------------------------------------------------------------------------------------------------------

    def watch(self) -> None:
        """Raise `LimitPassed` where it has too many processes and threads, or they too much memory together."""
        began_s = time.monotonic()
        if began_s < self._next_watch_s:
            return
        most_tasks, everybodys = self.limits.most_tasks, tasks_of_machine()
        frozen = everybodys - self._others_tasks > most_tasks
        if frozen:  # against one that forks without end, only who looks at a group that stands still can win
            os.killpg(self._popen.pid, signal.SIGSTOP)
        self._tree[:], tasks, used_bytes = use_of(self._popen.pid, most_tasks, self.limits.most_bytes)
        self._others_tasks = everybodys - tasks
        if tasks > most_tasks:
            raise LimitPassed(f"has {tasks} processes and threads", f"it may have {most_tasks} (wb.limits(tasks=...))")
        if used_bytes > self.limits.most_bytes:  # the system's own limit does not count what is shared
            raise LimitPassed(f"takes {used_bytes:,} bytes in {len(self._tree)} processes", self.memory_rule)
        if frozen:
            os.killpg(self._popen.pid, signal.SIGCONT)
        now_s = time.monotonic()
        self._next_watch_s = now_s + max(0.05, (now_s - began_s) / WATCH_SHARE)

    @property
    def memory_rule(self) -> str:
        return f"its process may take {self.limits.most_bytes:,} bytes (wb.limits(memory_bytes=...))"

    def computing(self, threads: Mapping[int, int]) -> dict[int, int]:
        """Those of some calls that compute, by their threads: {call: thread}. Looks for longer where other processes
        leave them little of the processor."""
        began: dict[int, float] | None = None
        for look in range(11):
            now: dict[int, float] = {}
            with contextlib.suppress(psutil.Error):
                now = {t.id: t.user_time + t.system_time for t in psutil.Process(self._popen.pid).threads()}
            if began is None:
                began = now
            took_s = {i: now.get(thread, 0.0) - began.get(thread, 0.0) for i, thread in threads.items()}
            most_s = max(took_s.values())
            if most_s >= COMPUTES_S:
                return {i: threads[i] for i, s in took_s.items() if s >= max(most_s / 2, COMPUTES_S)}
            if look >= 3 and most_s <= 0:  # none has had the processor at all: they wait
                break
            time.sleep(0.1)
        return {}


def tasks_of_machine() -> int:
    """The processes and threads of this machine, or container; the cost does not grow with them."""
    try:
        return int(Path("/proc/loadavg").read_text().split()[3].partition("/")[2])
    except (OSError, IndexError, ValueError):
        return 0


def use_of(pid: int, most_tasks: int, most_bytes: int) -> tuple[list[psutil.Process], int, int]:
    """A process with all below it, their processes and threads, and the bytes that they hold, files that they have
    mapped left out: where they are more than `most_tasks`, not looked at; where they hold more than `most_bytes`, pages
    of several processes counted once."""
    tree: list[psutil.Process] = []
    with contextlib.suppress(psutil.Error):
        leader = psutil.Process(pid)
        tree = [leader, *leader.children(recursive=True)]
    if len(tree) > most_tasks:
        return tree, len(tree), 0
    tasks = resident = shared = 0
    for process in tree:
        with contextlib.suppress(psutil.Error):
            tasks += process.num_threads()
            resident += _held_bytes(process)
    if resident <= most_bytes or len(tree) == 1:
        return tree, tasks, resident
    for process in tree:
        with contextlib.suppress(psutil.Error):
            found = process.memory_full_info()
            shared += getattr(found, "pss", found.rss)  # Linux has pss
    return tree, tasks, shared


def _held_bytes(process: psutil.Process) -> int:
    """The memory of a process, its own and what it shares, without the pages of files."""
    try:
        text = Path(f"/proc/{process.pid}/status").read_text()
        return 1024 * sum(int(kib) for kib in re.findall(r"^Rss(?:Anon|Shmem):\s*(\d+) kB$", text, re.MULTILINE))
    except OSError:
        return int(process.memory_info().rss)


def _end(
    host: int,
    popen: subprocess.Popen[bytes],
    tree: list[psutil.Process],
    lifeline: int,
    connection: socket.socket,
    crash: BinaryIO,
) -> None:
    """Kill a process with all that it started: also those that left its group, and those whose parents have ended."""
    if os.getpid() != host:  # a fork of the host ends
        return
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(popen.pid, signal.SIGSTOP)  # all of the group at once: none of them forks any more
    for _ in range(KILL_ROUNDS):
        with contextlib.suppress(psutil.Error):
            tree += psutil.Process(popen.pid).children(recursive=True)
        left = [process for process in dict.fromkeys(tree) if process.pid != popen.pid and _runs(process)]
        if not left:
            break
        for process in left:
            with contextlib.suppress(psutil.Error):
                process.kill()
        tree.clear()
        time.sleep(0.002)
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(popen.pid, signal.SIGKILL)
    try:
        popen.wait(END_TIMEOUT_S)
    except subprocess.TimeoutExpired:  # it waits on a device or a network disk
        warnings.warn(f"process {popen.pid} of user functions does not end; the system ends it later", stacklevel=2)
    os.close(lifeline)
    connection.close()
    crash.close()


def _runs(process: psutil.Process) -> bool:
    try:
        return bool(process.is_running()) and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False
